//! `damaged`: the damaged dirty data of a set or a volume, and the decisions about it.

use clap::{Args, ValueEnum};
use format::counted;
use serde_json::{Value, json};
use serve::plain;

use super::status::each;
use super::{answer, text};
use crate::client::{Control, described, segment};
use crate::failure::Failure;
use crate::size;

/// A decision about damaged data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Decision {
    /// The damaged bytes are valid from now on: they get a new checksum, and are read and written back
    Accept,
    /// The data in the cache is dropped: reads return the older data of the disk, or zeros from a flash-only volume
    Drop,
}

impl Decision {
    fn name(self) -> &'static str {
        match self {
            Decision::Accept => "accept",
            Decision::Drop => "drop",
        }
    }
}

/// A range of sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    sector: u64,
    sectors: u64,
}

/// The text is no range.
#[derive(Debug, thiserror::Error)]
#[error("expected START+LENGTH in sectors of 512 bytes, such as 2048+8, as `ubcache damaged` prints it")]
struct RangeError;

impl std::str::FromStr for Range {
    type Err = RangeError;

    fn from_str(s: &str) -> Result<Range, RangeError> {
        let (sector, sectors) = s.split_once('+').ok_or(RangeError)?;
        let (Ok(sector), Ok(sectors)) = (sector.parse(), sectors.parse()) else { return Err(RangeError) };
        if sectors == 0 { Err(RangeError) } else { Ok(Range { sector, sectors }) }
    }
}

/// List the damaged dirty data of a set or a volume, accept it, or drop it
///
/// Damaged dirty data does not match its checksum, and no other device has it. Reads of it fail, and it is not written back,
/// until it is overwritten, accepted or dropped. Without a decision the command lists it.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache damaged data drop --range 2048+8 --yes")]
pub(crate) struct Damaged {
    /// Volume (name, label or device) or set (UUID, label or cache device)
    name: String,
    /// The decision about this data
    decision: Option<Decision>,
    /// The blocks that overlap these sectors of the volume
    #[arg(long, value_name = "START+LENGTH", requires = "decision", conflicts_with = "all")]
    range: Option<Range>,
    /// All damaged dirty data
    #[arg(long, requires = "decision")]
    all: bool,
    /// Drop the data, which is lost then
    #[arg(long, requires = "decision")]
    yes: bool,
    /// Print what would be accepted or dropped, and do nothing
    #[arg(long, requires = "decision")]
    dry_run: bool,
    #[command(flatten)]
    control: Control,
}

impl Damaged {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if self.decision.is_some() && !self.all && self.range.is_none() {
            return Err(Failure::Usage("expected --range START+LENGTH, or --all".into()));
        }
        let name = segment(&self.control.device_name(&self.name)?);
        let is_volume = self.control.ask("GET", &format!("/v1/volumes/{name}"), None)?.status == 200;
        let kind = if is_volume { "volumes" } else { "sets" };
        let path = format!("/v1/{kind}/{name}/damaged");
        let Some(decision) = self.decision else {
            let body = self.control.get(&path)?;
            return answer(&self.control, &body, || listed(&body));
        };
        if self.dry_run || self.range.is_some() || (decision == Decision::Drop && !self.yes) {
            let body = self.control.get(&path)?;
            let chosen: Vec<&Value> = each(&body["damaged"]).filter(|d| self.overlaps(d)).collect();
            if let Some(range) = self.range.filter(|_| chosen.is_empty()) {
                return Err(Failure::Failed(format!(
                    "{}: sectors {}+{} have no damaged dirty data, so nothing was changed: `ubcache damaged {}` lists what is damaged",
                    self.name, range.sector, range.sectors, self.name
                )));
            }
            if self.dry_run {
                let body = json!({"schema_version": 1, "action": decision.name(), "damaged": chosen});
                return answer(&self.control, &body, || {
                    format!("would {}:\n{}", decision.name(), lines(&chosen))
                });
            }
            if decision == Decision::Drop && !self.yes {
                let ranges: Vec<String> = chosen.iter().map(|d| line(d)).collect();
                return Err(Failure::Usage(format!(
                    "dropping destroys this data; pass --yes to drop it: {}",
                    ranges.join("; ")
                )));
            }
        }
        let range = self.range.map(|r| json!({"sector": r.sector, "sectors": r.sectors}));
        let wanted = json!({"action": decision.name(), "all": self.all, "range": range});
        let body = self.control.post(&path, &wanted)?;
        answer(&self.control, &body, || {
            let amount = size::human(body["bytes"].as_u64().unwrap_or(0));
            let done = if decision == Decision::Accept { "accepted" } else { "dropped" };
            format!(
                "{}: {amount} {done}; {} left\n",
                described(&body["resolved"]),
                counted(each(&body["damaged"]).count(), "damaged range")
            )
        })
    }

    /// Whether a damaged range has a part that was chosen.
    fn overlaps(&self, damaged: &Value) -> bool {
        let number = |key: &str| damaged[key].as_u64().unwrap_or(0);
        let (at, end) = (number("sector"), number("sector").saturating_add(number("sectors")));
        self.range.is_none_or(|r| at < r.sector.saturating_add(r.sectors) && r.sector < end)
    }
}

/// A damaged range: the volume, the sectors, and their size.
fn line(d: &Value) -> String {
    let number = |key: &str| d[key].as_u64().unwrap_or(0);
    let place = if d["registered"] == true { "" } else { " (of the device, which is not registered)" };
    format!(
        "{}: sectors {}+{}{place}, {}",
        plain::label(text(&d["volume"])),
        number("sector"),
        number("sectors"),
        size::human(number("sectors").saturating_mul(512))
    )
}

fn lines(damaged: &[&Value]) -> String {
    damaged.iter().map(|d| format!("  {}\n", line(d))).collect()
}

fn listed(body: &Value) -> String {
    let damaged: Vec<&Value> = each(&body["damaged"]).collect();
    let set = described(&body["resolved"]);
    if damaged.is_empty() {
        if body["checksums"] == false {
            return format!(
                "{set}: cached data has no checksums, so no damage can be found: only `ubcache make --checksums` switches them \
                 on; see the page bit-rot of the guide\n"
            );
        }
        let searches = format!("ubcache scrub {}", body["set"].as_str().unwrap_or("SET"));
        return format!("{set}: no damaged dirty data is known; `{searches}` searches for it\n");
    }
    format!("{set}: damaged dirty data, which no other device has:\n{}", lines(&damaged))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A scrub was proposed, which a set without checksums refuses.
    #[test]
    fn a_set_without_checksums_is_called_so() {
        let body =
            |checksums: bool| json!({"damaged": [], "resolved": {}, "set": "fast", "checksums": checksums});
        assert!(listed(&body(true)).contains("`ubcache scrub fast` searches for it"));
        let said = listed(&body(false));
        assert!(said.contains("has no checksums") && said.contains("make --checksums"), "{said}");
        assert!(!said.contains("scrub"), "{said}");
    }

    #[test]
    fn a_range_is_as_it_is_printed() {
        assert_eq!("2048+8".parse::<Range>().ok(), Some(Range { sector: 2048, sectors: 8 }));
        for bad in ["", "8", "+", "1+", "+1", "1+0", "a+1", "1+-1"] {
            assert!(bad.parse::<Range>().is_err(), "{bad}");
        }
        let one = json!({"volume": "data", "registered": true, "sector": 2048, "sectors": 8});
        assert_eq!(lines(&[&one]), "  data: sectors 2048+8, 4.0 KiB\n");
        let other = json!({"volume": "u", "registered": false, "sector": 1, "sectors": 1});
        assert_eq!(lines(&[&other]), "  u: sectors 1+1 (of the device, which is not registered), 512 B\n");
    }
}
