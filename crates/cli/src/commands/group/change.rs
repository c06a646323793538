//! Changes of a group by the daemon: the request of each, and the answer of a dry run.
//!
//! Must not know the steps.

use std::path::Path;

use serde_json::{Value, json};

use crate::client::{absolute, segment};
use crate::commands::control::{Waiting, answer, text};
use crate::commands::make::for_group::Options;
use crate::failure::Failure;

/// The request for a new device, which has this key in it.
pub(super) fn of_new(new: &str, key: &str, options: Options) -> Result<Value, Failure> {
    let Options { wipe, force, dry_run } = options;
    Ok(json!({key: absolute(Path::new(new))?, "wipe": wipe, "force": force, "dry_run": dry_run}))
}

/// Sends a request about the group of a set, and waits for its job.
pub(super) fn begin(
    waiting: &Waiting,
    doing: &'static str,
    (set, verb): (&str, &str),
    body: &Value,
) -> Result<(), Failure> {
    let control = &waiting.control;
    let path = format!("/v1/sets/{}/group/{verb}", segment(&control.device_name(set)?));
    if body["dry_run"] != true {
        return waiting.begin_with(doing, &path, body);
    }
    let body = control.post(&path, body)?;
    answer(control, &body, || {
        body["lines"].as_array().into_iter().flatten().map(|line| format!("{}\n", text(line))).collect()
    })
}
