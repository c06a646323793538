//! `gc`, `volume create` and `volume delete`: the space of a cache device.

use std::path::Path;

use clap::{Args, Subcommand};
use format::{Sectors, counted};
use serde_json::{Value, json};

use super::offline::{self, NewVolume};
use super::{answer, text};
use crate::client::{Control, described, segment};
use crate::failure::Failure;
use crate::size;

fn bytes(value: &Value) -> String {
    size::human(value.as_u64().unwrap_or(0))
}

/// Collect garbage of a set now: drop stale keys, and make their buckets available
///
/// Walks the index once while the set is served. A set collects garbage by itself; this command is for measurements, and
/// before data that needs much room.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache gc /dev/nvme0n1p4 --json")]
pub(crate) struct Gc {
    /// Set (UUID or cache device)
    set: String,
    /// Print what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    control: Control,
}

impl Gc {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = format!("/v1/sets/{}/gc", segment(&self.control.device_name(&self.set)?));
        let body = self.control.post(&path, &json!({"dry_run": self.dry_run}))?;
        answer(&self.control, &body, || {
            let (gc, set) = (&body["gc"], described(&body["resolved"]));
            let available = format!("{} of {} buckets are available", gc["buckets_available"], gc["buckets"]);
            if self.dry_run {
                let nodes = counted(&gc["btree_nodes"], "node");
                return format!("{set}: would walk {nodes} of the btree; {available}\n");
            }
            format!(
                "{set}: {} freed ({}); {available}\n",
                counted(&gc["buckets_freed"], "bucket"),
                bytes(&gc["freed_bytes"])
            )
        })
    }
}

/// Make or delete flash-only volumes, whose data is on the cache device alone
#[derive(Args, Debug)]
pub(crate) struct Volume {
    #[command(subcommand)]
    what: VolumeAction,
}

#[derive(Subcommand, Debug)]
enum VolumeAction {
    Create(Create),
    Delete(Delete),
}

impl Volume {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match &self.what {
            VolumeAction::Create(c) => c.run(),
            VolumeAction::Delete(c) => c.run(),
        }
    }
}

/// Make a flash-only volume in a set, and serve it
///
/// Its data is on the cache device alone and is never written back. All flash-only volumes of a set together may have the
/// share cutoff_writeback_sync of the cache (70 % by default); a volume that does not fit is refused. With --offline the set
/// must not be served; its default tunables apply, and the volume is served when the set is.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache volume create /dev/nvme0n1p4 20G --label scratch")]
struct Create {
    /// Set (UUID or cache device)
    set: String,
    /// Size of the volume, a multiple of 512 bytes
    #[arg(value_parser = size::parse)]
    size: u64,
    /// Label, at most 32 bytes
    #[arg(short = 'l', long, value_name = "L", default_value = "")]
    label: String,
    /// Print whether it fits, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Make the volume without the daemon, in a set that no process serves: SET is its cache device
    #[arg(long, conflicts_with_all = ["socket", "api", "token_file", "ca"])]
    offline: bool,
    #[command(flatten)]
    control: Control,
}

impl Create {
    fn run(&self) -> Result<(), Failure> {
        if self.offline {
            return self.run_offline();
        }
        let path = format!("/v1/sets/{}/volumes", segment(&self.control.device_name(&self.set)?));
        let wanted = json!({"size_bytes": self.size, "label": self.label, "dry_run": self.dry_run});
        let body = self.control.post(&path, &wanted)?;
        self.print(&body)?;
        match body["not_exported"].as_str() {
            None => Ok(()),
            Some(why) => Err(Failure::Failed(format!(
                "{}: NOT EXPORTED: {why}, then run `ubcache reload`",
                serve::plain::named(&self.label, text(&body["volume"]))
            ))),
        }
    }

    fn run_offline(&self) -> Result<(), Failure> {
        if self.size == 0 || !self.size.is_multiple_of(512) {
            return Err(Failure::Usage(format!(
                "size: expected a multiple of 512 bytes, found {}",
                self.size
            )));
        }
        let wanted =
            NewVolume { sectors: Sectors(self.size / 512), label: &self.label, dry_run: self.dry_run };
        self.print(&offline::create(Path::new(&self.set), &wanted)?)
    }

    fn print(&self, body: &Value) -> Result<(), Failure> {
        answer(&self.control, body, || {
            let (room, set) = (&body["room"], described(&body["resolved"]));
            let taken = format!(
                "flash-only volumes had {} of {} before",
                bytes(&room["taken_bytes"]),
                bytes(&room["most_bytes"])
            );
            let size = size::human(self.size);
            match body["volume"].as_str() {
                Some(name) => {
                    format!("{}: {size} in {set}; {taken}\n", serve::plain::named(&self.label, name))
                }
                None if self.offline && !self.dry_run => {
                    format!("{set}: made a volume of {size}, which is served when the set is; {taken}\n")
                }
                None => format!("{set}: would make a volume of {size}; {taken}\n"),
            }
        })
    }
}

/// Destroy a flash-only volume with its data, which exists nowhere else
///
/// Without --force it prints what it would destroy and does nothing. A volume that is in use is refused.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache volume delete scratch --force")]
struct Delete {
    /// Volume, by name or label
    volume: String,
    /// Destroy the data
    #[arg(long)]
    force: bool,
    /// Print what would be destroyed, and do nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    control: Control,
}

impl Delete {
    fn run(&self) -> Result<(), Failure> {
        let path = format!("/v1/volumes/{}/delete", segment(&self.control.device_name(&self.volume)?));
        let body = self.control.post(&path, &json!({"force": self.force, "dry_run": self.dry_run}))?;
        answer(&self.control, &body, || {
            let destroys = &body["destroys"];
            format!(
                "{}: {} a volume of {} with {} of data\n",
                serve::plain::named(text(&destroys["label"]), text(&destroys["volume"])),
                if self.dry_run { "would destroy" } else { "destroyed" },
                bytes(&destroys["size_bytes"]),
                bytes(&destroys["data_bytes"])
            )
        })
    }
}
