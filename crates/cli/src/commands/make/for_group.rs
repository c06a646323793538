//! `make` for one more cache device of a group.
//!
//! Owns the properties of the new set: those of the set that is in the group already, because their blocks must be equal.

use std::path::Path;

use clap::Args;
use daemon::{JoinOrder, MakeOrder};
use format::{CacheSuper, Replacement, Uuid};
use inspect::{DeviceSuper, FileSource, read_superblock};

use super::{Make, Notes, Policy, Switch};
use crate::failure::Failure;
use crate::out;

/// What may be overwritten on the new device.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Overwrite superblocks of bcache, unless dirty data would be lost
    #[arg(long)]
    pub(crate) wipe: bool,
    /// Overwrite whatever is on the device, unless dirty data would be lost
    #[arg(long)]
    pub(crate) force: bool,
    /// Print what would be made and what would be lost, and write nothing
    #[arg(long, conflicts_with = "no_wait")]
    pub(crate) dry_run: bool,
}

/// Formats a device as the cache device of a new set in a group, with the sizes of `like`, and prints the report.
pub(crate) fn make(
    device: &Path,
    like: &CacheSuper,
    group: Uuid,
    (options, json): (Options, bool),
) -> Result<(), Failure> {
    let notes = Notes::default();
    let made = wanted(device, like, group, options).carry_out(&notes);
    notes.take().iter().for_each(|(level, text)| out::message(level, text));
    out::document(json, &made?)
}

/// The command that formats the device of a client of the daemon.
pub(super) fn of_order(device: &Path, join: &JoinOrder, order: &MakeOrder) -> Result<Make, Failure> {
    let like = match read_superblock(&FileSource::open(&join.like)?).map_err(Failure::of)? {
        DeviceSuper::Cache(like) => like,
        DeviceSuper::Backing(_) => {
            let path = join.like.display();
            return Err(Failure::Failed(format!("{path}: expected a cache device, found a backing device")));
        }
    };
    let options = Options { wipe: order.wipe, force: order.force, dry_run: order.dry_run };
    Ok(wanted(device, &like, join.group, options))
}

fn wanted(device: &Path, like: &CacheSuper, group: Uuid, options: Options) -> Make {
    Make {
        cache: vec![device.to_owned()],
        backing: Vec::new(),
        bucket: like.geometry().bucket_sectors,
        block: Some(like.geometry().block_sectors),
        data_offset: None,
        writeback: false,
        discard: like.discard(),
        cache_replacement_policy: match like.replacement() {
            Some(Replacement::Fifo) => Policy::Fifo,
            Some(Replacement::Random) => Policy::Random,
            Some(Replacement::Lru) | None => Policy::Lru,
        },
        label: None,
        set_label: None,
        cset_uuid: None,
        wipe: options.wipe,
        wipe_dirty: false,
        force: options.force,
        dry_run: options.dry_run,
        json: false,
        as_bcache_tools: false,
        checksums: like.checksum_key().map(|_| Switch::On),
        join: Some(group),
        wipe_dirty_of: Vec::new(),
    }
}
