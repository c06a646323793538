//! `ubcache dump`: shows structures of a set as they are on the device.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use inspect::dump;
use inspect::{Mode, SetView};

use super::IN_USE;
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::{out, superblock};

/// A structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum What {
    /// The superblock
    Superblock,
    /// The journal: its ring, its entries, the keys to replay
    Journal,
    /// The nodes of the index
    Btree,
    /// The buckets: use, generations, priorities
    Buckets,
    /// The table of devices and volumes
    Uuids,
    /// The cached extents, after replay of the journal
    Extents,
}

/// Show structures of a cache set
///
/// Works on sets that were not shut down, and as far as possible on damaged ones; assumptions about damaged structures
/// are printed on stderr, and the exit code is 1.
#[derive(Args, Debug)]
pub(crate) struct Dump {
    /// Cache device (for `superblock` also a backing device)
    #[arg(value_name = "DEV")]
    device: PathBuf,
    /// Structure to show
    #[arg(value_name = "WHAT")]
    what: What,
    /// With `btree`: also the keys
    #[arg(long)]
    keys: bool,
    /// With `btree`: this node and the nodes below it, given by the buckets on the path from the root: 12/88/160
    #[arg(long, value_name = "PATH", default_value = "")]
    path: String,
    /// Read a device that another process writes to; the output may be inconsistent
    #[arg(long)]
    in_use: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Dump {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if self.what != What::Btree && (self.keys || !self.path.is_empty()) {
            return Err(Failure::Usage("--keys and --path go with `btree`".into()));
        }
        let path = match self.path.as_str() {
            "" => Vec::new(),
            text => dump::parse_path(text).map_err(Failure::bad_value)?,
        };
        let device = ReadOnlyOpener::new(self.in_use, IN_USE)?.open(&self.device)?;
        superblock::has_room(&device.source)?;
        if self.what == What::Superblock {
            let doc = dump::superblock(&device.source)?;
            out::document(self.json, &doc)?;
            return match doc.problem {
                None => Ok(()),
                Some(problem) => Err(Failure::Failed(problem.to_string())),
            };
        }
        let view = SetView::open(&device.source, Mode::BestEffort)?;
        let json = self.json;
        match self.what {
            What::Superblock => {}
            What::Journal => match dump::journal(&view) {
                Some(doc) => out::document(json, &doc)?,
                None => {
                    return Err(Failure::Failed(format!(
                        "{}: the set was never used: it has no journal yet",
                        self.device.display()
                    )));
                }
            },
            What::Btree => {
                let doc = dump::btree(&view, &device.source, &dump::BtreeQuery { path, keys: self.keys })?;
                if doc.nodes.is_empty() && !self.path.is_empty() {
                    return Err(Failure::Failed(format!(
                        "{}: no node has the path {}",
                        self.device.display(),
                        self.path
                    )));
                }
                out::document(json, &doc)?;
            }
            What::Buckets => out::document(json, &dump::buckets(&view))?,
            What::Uuids => out::document(json, &dump::uuids(&view))?,
            What::Extents => out::document(json, &dump::extents(&view, None))?,
        }
        for assumed in &view.assumptions {
            out::warn(format!("{}: assumed: {assumed}", self.device.display()));
        }
        let worst = view.findings.list().iter().filter(|f| f.severity > inspect::Severity::Notice);
        let damage: Vec<_> = worst.collect();
        for finding in &damage {
            out::message("error", &finding.to_string());
        }
        if damage.is_empty() { Ok(()) } else { Err(Failure::Found) }
    }
}
