//! The check of all invariants of a cache set.
//!
//! Owns the check of all invariants (format section 11). The view finds violations inside one structure, `usage` those about
//! buckets, and the files of this module the others. The check continues after damage as far as it can, and never writes.
//!
//! Invariant: an image that a correct writer left, interrupted at any moment, has no finding worse than a notice.

mod backing;
mod data;
mod extents;
mod report;

pub use data::{DamagedRange, DataSummary};
pub use report::{
    BackingSummary, BtreeSummary, CheckReport, Count, DeviceSummary, JournalSummary, SetReport, SetSummary,
};

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use format::{BackingSuper, Inode, Sector, Sectors};
use serde::Serialize;

use data::Which;

use crate::attach::Relation;
use crate::device::{DeviceSuper, read_superblock};
use crate::extract::Progress;
use crate::finding::{Finding, Findings};
use crate::source::ReadAt;
use crate::usage::Usage;
use crate::view::{Mode, SetView};

/// How thoroughly to check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckOptions {
    /// Compare the data of clean extents with the backing device (invariant 20). This reads all clean
    /// data from both devices.
    pub compare_clean: bool,
    /// Compare all cached data with its checksums (invariant 21). This reads the data of buckets that have a footer; a set
    /// without checksums has none. Everything else reads metadata only.
    pub verify_data: bool,
}

impl CheckOptions {
    /// Reads metadata only.
    pub const METADATA: CheckOptions = CheckOptions { compare_clean: false, verify_data: false };
}

impl Default for CheckOptions {
    fn default() -> CheckOptions {
        CheckOptions { compare_clean: true, verify_data: true }
    }
}

/// A backing device whose superblock is valid.
struct Backing<'a> {
    source: &'a dyn ReadAt,
    superblock: BackingSuper,
}

/// Checks devices of any kind, in any order: every cache device with the backing devices of its set.
///
/// `progress` is called while cached data is read; [`ControlFlow::Break`] ends the reading.
pub fn check(
    devices: &[&dyn ReadAt],
    options: CheckOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> CheckReport {
    let (mut caches, mut backings) = (Vec::new(), Vec::new());
    let mut findings = Findings::default();
    for &source in devices {
        match read_superblock(source) {
            Ok(DeviceSuper::Backing(superblock)) => backings.push(Backing { source, superblock }),
            Ok(DeviceSuper::Cache(_)) => caches.push(source),
            // What is wrong with a cache device is said by opening it.
            Err(e) if e.finding().place.structure == "cache superblock" => caches.push(source),
            Err(e) => findings.push(*e.into_finding()),
        }
    }
    let mut sets = Vec::new();
    let mut used = vec![false; backings.len()];
    let single = caches.len() == 1;
    for cache in caches {
        let mut of_set = Vec::new();
        let opened = SetView::open(cache, Mode::BestEffort);
        if let Ok(view) = &opened {
            for (backing, used) in backings.iter().zip(&mut used) {
                // With a single cache device, all backing devices are meant for it, so each one that is not attached is reported.
                let relation = Relation::of(view, &backing.superblock);
                let ours = backing.superblock.set_uuid() == view.superblock.set_uuid();
                if single || ours || relation.slot.is_some() {
                    *used = true;
                    of_set.push(backing);
                }
            }
        }
        sets.push(match opened {
            Ok(mut view) => {
                know_data_offsets(&mut view, &of_set);
                check_view(&view, cache, &of_set, options, progress)
            }
            Err(e) => SetReport::unopened(cache.name(), e.findings),
        });
    }
    let alone = backings.iter().zip(used).filter(|(_, used)| !used);
    let alone = alone.map(|(backing, _)| BackingSummary::of(backing.source, &backing.superblock)).collect();
    CheckReport::new(sets, alone, findings)
}

/// Checks one cache device, with the backing devices that were given.
pub fn check_set(cache: &dyn ReadAt, backings: &[&dyn ReadAt], options: CheckOptions) -> SetReport {
    let mut view = match SetView::open(cache, Mode::BestEffort) {
        Ok(view) => view,
        Err(e) => return SetReport::unopened(cache.name(), e.findings),
    };
    let mut bad: Vec<Finding> = Vec::new();
    let mut good = Vec::new();
    for &source in backings {
        match read_superblock(source) {
            Ok(DeviceSuper::Backing(superblock)) => good.push(Backing { source, superblock }),
            Ok(DeviceSuper::Cache(_)) => bad.push(backing::not_backing(source)),
            Err(e) => bad.push(*e.into_finding()),
        }
    }
    let of_set: Vec<&Backing<'_>> = good.iter().collect();
    know_data_offsets(&mut view, &of_set);
    let mut report = check_view(&view, cache, &of_set, options, &mut |_| ControlFlow::Continue(()));
    report.add(bad);
    report
}

fn check_view(
    view: &SetView,
    cache: &dyn ReadAt,
    backings: &[&Backing<'_>],
    options: CheckOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> SetReport {
    let mut findings = view.findings.clone();
    let (usage, conflicts) = Usage::of(view);
    findings.append(conflicts);
    if view.is_initialised() {
        usage.check_room(view).into_iter().for_each(|f| findings.push(f));
    }
    extents::check(view, backings, &mut findings);
    extents::check_nodes(view, &mut findings);
    backing::check_states(view, backings, &mut findings);
    let read = read_data(&Opened { view, cache, backings }, options, &mut findings, progress);
    SetReport::new(view, &usage, backings, read, findings)
}

/// Tells the view the data offsets of the backing devices that have a slot.
fn know_data_offsets(view: &mut SetView, backings: &[&Backing<'_>]) {
    let offset_of = |b: &&Backing<'_>| {
        Relation::of(view, &b.superblock).slot.map(|slot| (slot, b.superblock.data_offset()))
    };
    let offsets: Vec<_> = backings.iter().filter_map(offset_of).collect();
    view.know_data_offsets(offsets.into_iter());
}

/// Damaged dirty data of one device or volume of a set.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DamagedDirtyData {
    /// Slot in the UUID table.
    pub inode: u32,
    /// UUID of the device or volume.
    pub uuid: String,
    /// Label of the device or volume.
    pub label: String,
    /// Name of its backing device; absent if that was not given, and for a flash-only volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Number of damaged blocks.
    pub blocks: u64,
    /// The damaged ranges, in order.
    pub ranges: Vec<DamagedRange>,
}

/// Compares the dirty data of a set with its checksums, and returns the damage; no damage if the set cannot be opened or has no
/// checksums. `None` if `progress` ended the comparison.
pub fn damaged_dirty(
    cache: &dyn ReadAt,
    backings: &[&dyn ReadAt],
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Option<Vec<DamagedDirtyData>> {
    let Ok(view) = SetView::open(cache, Mode::BestEffort) else { return Some(Vec::new()) };
    let slot_of = |source: &&dyn ReadAt| match read_superblock(*source) {
        Ok(DeviceSuper::Backing(sb)) => {
            Some((Relation::of(&view, &sb).slot?, (Some(source.name().to_owned()), sb.data_offset())))
        }
        _ => None,
    };
    let volumes = view.volumes().map(|(inode, _)| (inode, (None, Sector(0))));
    let known: BTreeMap<Inode, (Option<String>, Sector)> =
        backings.iter().filter_map(slot_of).chain(volumes).collect();
    let (mut done, total) = (Sectors(0), data::sectors_to_verify(&view, cache, Which::Dirty));
    let mut advance = |n: Sectors| {
        done.0 += n.0;
        progress(Progress { done, total })
    };
    let found = data::verify(&view, cache, Which::Dirty, &mut Findings::default(), &mut advance);
    if found.cancelled {
        return None;
    }
    let damaged = found.slots.into_iter().filter(|(_, summary)| summary.damaged_dirty_blocks > 0);
    let described = damaged.map(|(inode, summary)| {
        let slot = view.slots.get(&inode);
        let (backing, offset) = known.get(&inode).cloned().unzip();
        DamagedDirtyData {
            backing: backing.flatten(),
            inode: inode.0,
            uuid: slot.map(|s| s.uuid.to_string()).unwrap_or_default(),
            label: slot.map(|s| s.label.clone()).unwrap_or_default(),
            blocks: summary.damaged_dirty_blocks,
            ranges: summary.finished(offset).damaged,
        }
    });
    Some(described.collect())
}

/// What the reading of cached data showed.
#[derive(Default)]
struct DataRead {
    compared: backing::Compared,
    verified: data::VerifiedData,
}

/// A set and its devices.
struct Opened<'a> {
    view: &'a SetView,
    cache: &'a dyn ReadAt,
    backings: &'a [&'a Backing<'a>],
}

/// Carries out the checks that read cached data.
fn read_data(
    set: &Opened<'_>,
    options: CheckOptions,
    findings: &mut Findings,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> DataRead {
    let Opened { view, cache, backings } = *set;
    let mut read = DataRead::default();
    let mut to_verify = Sectors(0);
    if options.verify_data {
        to_verify = data::sectors_to_verify(view, cache, Which::All);
    }
    let mut to_compare = Sectors(0);
    if options.compare_clean {
        to_compare = clean_sectors(view, backings);
    }
    let (mut done, total) = (Sectors(0), Sectors(to_verify.0 + to_compare.0));
    let mut advance = |n: Sectors| {
        done.0 += n.0;
        progress(Progress { done, total })
    };
    if options.verify_data {
        read.verified = data::verify(view, cache, Which::All, findings, &mut advance);
    }
    if options.compare_clean && !read.verified.cancelled {
        read.compared = backing::compare_clean(view, cache, backings, findings, &mut advance);
    }
    read
}

/// Clean sectors that will be compared.
fn clean_sectors(view: &SetView, backings: &[&Backing<'_>]) -> Sectors {
    let slots = backings.iter().filter_map(|b| Relation::of(view, &b.superblock).attached());
    Sectors(slots.map(|slot| view.totals_of(slot).clean_sectors).sum())
}
