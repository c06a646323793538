//! `list-names`: names for the completion of commands by shells.

use std::collections::BTreeSet;

use clap::{Args, ValueEnum};
use serde_json::Value;
use serve::tunables::{names, owners};

use super::status::each;
use super::text;
use crate::client::Control;
use crate::failure::Failure;
use crate::out;

/// The kind of names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum NamesOf {
    Volumes,
    Sets,
    Tunables,
    Jobs,
}

/// List names for the completion of commands by shells, one a line
///
/// Without a daemon there are none but those of tunables, and no error.
#[derive(Args, Debug)]
pub(crate) struct ListNames {
    /// Kinds of names
    #[arg(value_enum, required = true)]
    of: Vec<NamesOf>,
    #[command(flatten)]
    control: Control,
}

/// Whether a shell can take a name as it is. Labels come from disks of any origin, and shells expand what they complete.
fn is_plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/');
    !name.is_empty() && !name.starts_with('-') && name.bytes().all(plain)
}

/// The names in a status of the daemon.
fn named(status: &Value, of: NamesOf) -> Vec<&str> {
    match of {
        NamesOf::Volumes => {
            let volumes = each(&status["sets"]).flat_map(|s| each(&s["volumes"]));
            volumes.flat_map(|v| [text(&v["name"]), text(&v["label"])]).collect()
        }
        NamesOf::Sets => {
            let sets = each(&status["sets"]).filter(|s| s["has_cache"] == true);
            sets.flat_map(|s| [text(&s["id"]), text(&s["set"]["label"]), text(&s["set"]["device"])]).collect()
        }
        NamesOf::Tunables | NamesOf::Jobs => Vec::new(),
    }
}

impl ListNames {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let asks = self.of.iter().any(|of| *of != NamesOf::Tunables);
        // A shell shows nothing where there is no daemon.
        let status = if asks { self.control.get("/v1/status").unwrap_or_default() } else { Value::Null };
        let mut all: BTreeSet<String> = BTreeSet::new();
        for of in &self.of {
            match of {
                NamesOf::Tunables => {
                    let known = names().into_iter().filter(|n| owners(n) != (false, false));
                    all.extend(known.map(str::to_owned));
                }
                NamesOf::Jobs => {
                    all.extend(each(&status["jobs"]).map(|j| j["id"].to_string()));
                }
                NamesOf::Volumes | NamesOf::Sets => {
                    let found = named(&status, *of).into_iter().filter(|n| is_plain(n));
                    all.extend(found.map(str::to_owned));
                }
            }
        }
        out::print(&all.into_iter().map(|name| name + "\n").collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// bash expands the words of a completion: a label must not become a command.
    #[test]
    fn no_name_acts_in_a_shell() {
        for (name, plain) in [
            ("data", true),
            ("bcache0", true),
            ("/dev/nvme0n1p4", true),
            ("$(reboot)", false),
            ("a b", false),
            ("`x`", false),
            ("a;b", false),
            ("-x", false),
            ("a*", false),
            ("", false),
        ] {
            assert_eq!(is_plain(name), plain, "{name}");
        }
        let status = json!({"sets": [
            {"id": "u1", "has_cache": true, "set": {"device": "/dev/c"},
             "volumes": [{"name": "bcache0", "label": "data"}]},
            {"id": "u2", "has_cache": false, "volumes": [{"name": "bcache1", "label": ""}]}]});
        assert_eq!(named(&status, NamesOf::Volumes), ["bcache0", "data", "bcache1", ""]);
        assert_eq!(named(&status, NamesOf::Sets), ["u1", "", "/dev/c"]);
    }
}
