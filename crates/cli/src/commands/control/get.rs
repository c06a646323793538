//! `get`: the tunables of a volume or a set.

use clap::Args;
use serde_json::Value;

use super::{TunablesOf, answer, is_unlimited, text};
use crate::client::{Control, segment};
use crate::failure::Failure;

/// Show tunables of a volume or a set
#[derive(Args, Debug)]
pub(crate) struct Get {
    #[command(flatten)]
    of: TunablesOf,
    /// Names of tunables; all of them if none is given
    keys: Vec<String>,
    #[command(flatten)]
    control: Control,
}

impl Get {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = self.of.path(&self.control)?;
        let one = |key: &String| self.control.get(&format!("{path}/{}", segment(key)));
        if let [key] = self.keys.as_slice() {
            let body = one(key)?;
            return answer(&self.control, &body, || format!("{}\n", text(&body["tunable"]["value"])));
        }
        let mut body = self.control.get(&path)?;
        if !self.keys.is_empty() {
            let all = body["tunables"].as_array().map(Vec::as_slice).unwrap_or_default();
            // The daemon says what is wrong with a name that is not in the list.
            let wanted = self.keys.iter().map(|key| match all.iter().find(|t| t["key"] == **key) {
                Some(tunable) => Ok(tunable.clone()),
                None => Ok(one(key)?["tunable"].take()),
            });
            body["tunables"] = wanted.collect::<Result<Vec<Value>, Failure>>()?.into();
        }
        answer(&self.control, &body, || {
            body["tunables"].as_array().into_iter().flatten().map(tunable_line).collect()
        })
    }
}

/// A tunable with its value and unit, and its default if the value is another.
fn tunable_line(tunable: &Value) -> String {
    let (unit, value) = (text(&tunable["unit"]), text(&tunable["value"]));
    let changed = if tunable["value"] == tunable["default"] || tunable["in_superblock"] == true {
        String::new()
    } else {
        format!(" (default {})", text(&tunable["default"]))
    };
    let blank = if unit.is_empty() { "" } else { " " };
    let limit = if is_unlimited(tunable) { " (not limited)" } else { "" };
    format!("{} = {value}{blank}{unit}{limit}{changed}\n", text(&tunable["key"]))
}
