//! `ubcache group replace`: a new cache device takes the place of another one.

use clap::Args;
use serde_json::json;

use super::change;
use crate::commands::control::Waiting;
use crate::commands::make::for_group::Options;
use crate::failure::Failure;

/// Replace a cache device of a group, or the only one of a set
///
/// NEW joins as by `group add`, and when all dirty data is on two devices OLD leaves as by `group remove`; clients do not notice it. If
/// the group has another cache device, the data of one volume after the other has one copy while it is copied to NEW; the command
/// says so. Ending the command does not end the job: `cancel` does, and NEW leaves the group again.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache group replace fast /dev/nvme0n1p2 /dev/nvme2n1p2")]
pub(crate) struct Replace {
    /// A set of the group (UUID, label or cache device)
    set: String,
    /// The cache device that leaves, or the UUID or label of its set
    old: String,
    /// The new cache device
    new: String,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    waiting: Waiting,
}

impl Replace {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let mut body = change::of_new(&self.new, "new", self.options)?;
        body["old"] = json!(self.waiting.control.device_name(&self.old)?);
        change::begin(&self.waiting, "replacing", (&self.set, "replace"), &body)
    }
}
