//! The report of a check, as data and as text.
//!
//! Owns the serialisable report (`schema_version` 1) and its text form. Sizes are in sectors.

use std::fmt;

use serde::Serialize;

use super::data::DataSummary;
use super::{Backing, DataRead};
use crate::SCHEMA_VERSION;
use crate::attach::{Attachment, Relation};
use crate::finding::{Finding, Findings, Invariant, Severity};
use crate::source::ReadAt;
use crate::usage::{Usage, UsageCounts};
use crate::view::{SetView, SlotKind};
use format::{BackingSuper, Sector, counted, form};

/// The findings on all devices.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// One report per cache device.
    pub sets: Vec<SetReport>,
    /// Backing devices without a cache device among those given.
    pub backings_alone: Vec<BackingSummary>,
    /// Findings about devices that are neither cache devices nor backing devices.
    pub findings: Vec<Finding>,
    /// Findings that are errors or fatal, on all devices.
    pub errors: u64,
    /// Findings that are notices, on all devices.
    pub notices: u64,
}

/// The findings on a cache device and its backing devices.
#[derive(Clone, Debug, Serialize)]
pub struct SetReport {
    /// Name of the cache device.
    pub device: String,
    /// Contents of the set; absent if it could not be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<SetSummary>,
    /// The findings; a bounded number per invariant and severity.
    pub findings: Vec<Finding>,
    /// Number of findings of each kind, listed or not.
    pub counts: Vec<Count>,
    /// Assumptions about damaged structures.
    pub assumptions: Vec<String>,
    /// Findings that are errors or fatal.
    pub errors: u64,
    /// Findings that are notices.
    pub notices: u64,
}

/// Number of findings of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Count {
    /// The violated invariant.
    pub invariant: Invariant,
    /// Severity of the findings.
    pub severity: Severity,
    /// Number of findings.
    pub count: u64,
}

/// The contents of a set.
#[derive(Clone, Debug, Serialize)]
pub struct SetSummary {
    /// UUID of the set.
    pub set_uuid: String,
    /// UUID of the cache device.
    pub uuid: String,
    /// False on a device that was never initialised: then nothing is cached.
    pub initialised: bool,
    /// The journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<JournalSummary>,
    /// The btree.
    pub btree: BtreeSummary,
    /// Buckets by use.
    pub buckets: UsageCounts,
    /// Buckets whose generation is newer than stored.
    pub gens_newer_than_prio_sets: u64,
    /// Devices and volumes that have a slot.
    pub devices: Vec<DeviceSummary>,
    /// Backing devices that were given and have no data in this set.
    pub other_backings: Vec<BackingSummary>,
    /// The caller stopped the reading of cached data before its end.
    pub cancelled: bool,
}

/// The journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct JournalSummary {
    /// Number of the newest entry.
    pub newest_seq: u64,
    /// Number of the oldest entry that the newest one needs.
    pub last_seq: u64,
    /// Number of entries to replay.
    pub replay_entries: u64,
    /// Number of keys in the entries to replay.
    pub replay_keys: u64,
    /// Index in the ring of the newest entry's bucket.
    pub newest_in_journal_index: u32,
}

/// The btree and the extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct BtreeSummary {
    /// Level of the root.
    pub root_level: u16,
    /// Number of nodes.
    pub nodes: u64,
    /// Nodes that a key names and that could not be read.
    pub missing_nodes: u64,
    /// Number of sets in all nodes.
    pub bsets: u64,
    /// Largest number of sets in a node.
    pub max_bsets: u64,
    /// Keys that state that a node was freed.
    pub freeing_keys: u64,
    /// Keys of nodes that were freed.
    pub stale_child_keys: u64,
    /// Extents that are cached, after replay of the journal.
    pub live_extents: u64,
    /// Cached extents that are dirty.
    pub dirty_extents: u64,
    /// Extents whose bucket was reused.
    pub stale_extents: u64,
    /// Ranges that a key states to be not cached.
    pub holes: u64,
}

/// A slot.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceSummary {
    /// Slot in the UUID table.
    pub inode: u32,
    /// `cached`, `volume`, or `invalidated`.
    pub kind: &'static str,
    /// UUID of the device or volume.
    pub uuid: String,
    /// Label of the device or volume.
    pub label: String,
    /// Size; absent for a cached device whose backing device was not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sectors: Option<u64>,
    /// The backing device of the slot, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<BackingSummary>,
    /// Dirty sectors in the cache.
    pub dirty_sectors: u64,
    /// Clean sectors in the cache.
    pub clean_sectors: u64,
    /// Number of clean extents that differ from the backing device; absent if they were not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clean_extents_differing_from_backing: Option<u64>,
    /// What the checksums of the data say; absent if the set has none, or they were not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataSummary>,
}

/// A backing device.
#[derive(Clone, Debug, Serialize)]
pub struct BackingSummary {
    /// Name of the device.
    pub device: String,
    /// UUID of the device.
    pub uuid: String,
    /// UUID of the set that the superblock names.
    pub set_uuid: String,
    /// State in the superblock.
    pub state: &'static str,
    /// Cache mode in the superblock; absent if the value has no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_mode: Option<&'static str>,
    /// First data sector.
    pub data_offset: u64,
    /// Size of the cached device.
    pub sectors: u64,
    /// `attached`, `invalid`, `older copy`, `no slot`, `other set`, `unattached`; absent without a set to compare with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attachment: Option<&'static str>,
    /// The attachment under the key of version 0.1, whose word for `invalid` was `void`; the next release leaves it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "standing")]
    pub attachment_of_0_1: Option<&'static str>,
}

impl BackingSummary {
    pub(super) fn of(source: &dyn ReadAt, superblock: &BackingSuper) -> BackingSummary {
        BackingSummary {
            device: source.name().to_owned(),
            uuid: superblock.uuid().to_string(),
            set_uuid: superblock.set_uuid().to_string(),
            state: superblock.state().name(),
            cache_mode: superblock.cache_mode().map(|mode| mode.name()),
            data_offset: superblock.data_offset().0,
            sectors: superblock.data_sectors().0,
            attachment: None,
            attachment_of_0_1: None,
        }
    }

    fn in_set(source: &dyn ReadAt, superblock: &BackingSuper, attachment: Attachment) -> BackingSummary {
        let attachment = Some(match attachment {
            Attachment::Attached => "attached",
            Attachment::OlderDirty | Attachment::OlderClean => "older copy",
            Attachment::Invalid => "invalid",
            Attachment::NoSlot => "no slot",
            Attachment::OtherSet => "other set",
            Attachment::Unattached => "unattached",
        });
        let attachment_of_0_1 = attachment.map(|word| if word == "invalid" { "void" } else { word });
        BackingSummary { attachment, attachment_of_0_1, ..BackingSummary::of(source, superblock) }
    }
}

impl CheckReport {
    pub(super) fn new(
        sets: Vec<SetReport>,
        backings_alone: Vec<BackingSummary>,
        findings: Findings,
    ) -> CheckReport {
        let (errors, notices) = severities(&findings);
        CheckReport {
            schema_version: SCHEMA_VERSION,
            errors: errors + sets.iter().map(|s| s.errors).sum::<u64>(),
            notices: notices + sets.iter().map(|s| s.notices).sum::<u64>(),
            sets,
            backings_alone,
            findings: findings.list().to_vec(),
        }
    }

    /// True if every invariant holds; there may be notices.
    pub fn is_ok(&self) -> bool {
        self.errors == 0
    }
}

fn severities(findings: &Findings) -> (u64, u64) {
    let notices = findings.count(Severity::Notice);
    (findings.count(Severity::Error) + findings.count(Severity::Fatal), notices)
}

/// A backing device with its superblock and attachment.
type Related<'a> = (&'a dyn ReadAt, &'a BackingSuper, Relation);

impl DeviceSummary {
    /// Describes every slot of the set, with its backing device if that was given.
    fn of_slots(view: &SetView, related: &[Related<'_>], mut read: DataRead) -> Vec<DeviceSummary> {
        let devices = view.slots.iter().map(|(inode, slot)| {
            let of_slot = related.iter().find(|(_, _, r)| r.slot == Some(*inode));
            let backing = of_slot.map(|(source, sb, r)| BackingSummary::in_set(*source, sb, r.attachment));
            let totals = view.totals_of(*inode);
            let (kind, sectors) = match slot.kind {
                SlotKind::Cached => ("cached", backing.as_ref().map(|b| b.sectors)),
                SlotKind::Volume(sectors) => ("volume", Some(sectors.0)),
                SlotKind::Invalidated => ("invalidated", None),
            };
            let data_offset = match slot.kind {
                SlotKind::Cached => of_slot.map(|(_, sb, _)| sb.data_offset()),
                SlotKind::Volume(_) | SlotKind::Invalidated => Some(Sector(0)),
            };
            let data = read.verified.slots.remove(inode).unwrap_or_default().finished(data_offset);
            DeviceSummary {
                data: Some(data).filter(|_| read.verified.compared),
                inode: inode.0,
                kind,
                uuid: slot.uuid.to_string(),
                label: slot.label.clone(),
                sectors,
                backing,
                dirty_sectors: totals.dirty_sectors,
                clean_sectors: totals.clean_sectors,
                clean_extents_differing_from_backing: read.compared.differing.get(inode).copied(),
            }
        });
        devices.collect()
    }
}

impl SetReport {
    pub(super) fn unopened(device: &str, findings: Findings) -> SetReport {
        SetReport::with(device, None, Vec::new(), &findings)
    }

    fn with(
        device: &str,
        summary: Option<SetSummary>,
        assumptions: Vec<String>,
        findings: &Findings,
    ) -> SetReport {
        let (errors, notices) = severities(findings);
        let counts = findings.counts().iter();
        let counts = counts.map(|((invariant, severity), count)| Count {
            invariant: *invariant,
            severity: *severity,
            count: *count,
        });
        SetReport {
            device: device.to_owned(),
            summary,
            findings: findings.list().to_vec(),
            counts: counts.collect(),
            assumptions,
            errors,
            notices,
        }
    }

    pub(super) fn new(
        view: &SetView,
        usage: &Usage,
        backings: &[&Backing<'_>],
        read: DataRead,
        findings: Findings,
    ) -> SetReport {
        let related = backings.iter().map(|b| (b.source, &b.superblock, Relation::of(view, &b.superblock)));
        let related: Vec<_> = related.collect();
        let cancelled = read.compared.cancelled || read.verified.cancelled;
        let devices = DeviceSummary::of_slots(view, &related, read);
        let others = related.iter().filter(|(_, _, r)| r.slot.is_none());
        let others =
            others.map(|(source, sb, r)| BackingSummary::in_set(*source, sb, r.attachment)).collect();
        let (stats, totals) = (&view.btree, view.totals());
        let summary = SetSummary {
            set_uuid: view.superblock.set_uuid().to_string(),
            uuid: view.superblock.uuid().to_string(),
            initialised: view.is_initialised(),
            journal: view.journal.as_ref().map(|j| JournalSummary {
                newest_seq: j.newest.0,
                last_seq: j.oldest.0,
                replay_entries: u64::try_from(j.replay.len()).unwrap_or(u64::MAX),
                replay_keys: j.replay_keys(),
                newest_in_journal_index: j.newest_info().map_or(0, |e| e.journal_index),
            }),
            btree: BtreeSummary {
                root_level: stats.root_level,
                nodes: stats.nodes,
                missing_nodes: stats.missing,
                bsets: stats.bsets,
                max_bsets: stats.max_bsets,
                freeing_keys: stats.freeing_keys,
                stale_child_keys: stats.stale_child_keys,
                live_extents: totals.live_extents(),
                dirty_extents: totals.dirty_extents,
                stale_extents: totals.stale_extents,
                holes: totals.holes,
            },
            buckets: *usage.counts(),
            gens_newer_than_prio_sets: view.gens.raised(),
            devices,
            other_backings: others,
            cancelled,
        };
        SetReport::with(&view.device, Some(summary), view.assumptions.clone(), &findings)
    }

    /// Adds findings that were made outside of the view.
    pub(super) fn add(&mut self, more: Vec<Finding>) {
        for finding in more {
            let Finding { invariant, severity, .. } = finding;
            let counts = &mut self.counts;
            match counts.iter_mut().find(|c| (c.invariant, c.severity) == (invariant, severity)) {
                Some(count) => count.count += 1,
                None => counts.push(Count { invariant, severity, count: 1 }),
            }
            match severity {
                Severity::Notice => self.notices += 1,
                Severity::Error | Severity::Fatal => self.errors += 1,
            }
            self.findings.push(finding);
        }
    }

    /// True if every invariant holds; there may be notices.
    pub fn is_ok(&self) -> bool {
        self.errors == 0
    }

    /// How many findings there are about one invariant, of any severity.
    pub fn count_of(&self, invariant: Invariant) -> u64 {
        self.counts.iter().filter(|c| c.invariant == invariant).map(|c| c.count).sum()
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for set in &self.sets {
            write!(f, "{set}")?;
        }
        for backing in &self.backings_alone {
            writeln!(f, "{backing}")?;
        }
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        writeln!(f, "{}", verdict(self.errors, self.notices))
    }
}

fn verdict(errors: u64, notices: u64) -> String {
    let errors = if errors == 0 { "no errors".to_owned() } else { counted(errors, "error") };
    if notices == 0 { errors } else { format!("{errors}, {}", counted(notices, "notice")) }
}

impl fmt::Display for BackingSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BackingSummary { device, uuid, set_uuid, state, sectors, data_offset, .. } = self;
        write!(f, "{device}: backing device {uuid} of set {set_uuid}, state {state}")?;
        if let Some(mode) = self.cache_mode {
            write!(f, ", {mode}")?;
        }
        if let Some(attachment) = self.attachment {
            write!(f, ", {attachment}")?;
        }
        write!(f, ": {sectors} sectors from sector {data_offset} on")
    }
}

impl fmt::Display for SetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(summary) = &self.summary {
            write!(f, "{}: {summary}", self.device)?;
        }
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let kept = u64::try_from(self.findings.len()).unwrap_or(u64::MAX);
        let all: u64 = self.counts.iter().map(|c| c.count).sum();
        if all > kept {
            writeln!(f, "{} like these:", counted(all - kept, "more finding"))?;
            for c in self.counts.iter().filter(|c| c.count > Findings::LISTED) {
                writeln!(f, "  {} {} of invariant {}", c.count, c.severity, c.invariant)?;
            }
        }
        for assumption in &self.assumptions {
            writeln!(f, "{}: assumed: {assumption}", self.device)?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  slot {}: {} {}", self.inode, self.kind, self.uuid)?;
        if !self.label.is_empty() {
            write!(f, " {:?}", self.label)?;
        }
        if let Some(sectors) = self.sectors {
            write!(f, ", {sectors} sectors")?;
        }
        let sectors = |n: u64| counted(n, "sector");
        write!(f, ": {} dirty, {} clean", sectors(self.dirty_sectors), sectors(self.clean_sectors))?;
        match self.clean_extents_differing_from_backing {
            None | Some(0) => writeln!(f)?,
            Some(n) => {
                let differ = form(n, "differs", "differ");
                writeln!(f, "; {} {differ} from the backing device", counted(n, "clean extent"))?;
            }
        }
        match &self.backing {
            Some(backing) => writeln!(f, "    {backing}")?,
            None if self.kind == "cached" => writeln!(f, "    its backing device was not given")?,
            None => {}
        }
        if let Some(data) = &self.data {
            write!(f, "{data}")?;
        }
        Ok(())
    }
}

impl fmt::Display for SetSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cache device {} of set {}", self.uuid, self.set_uuid)?;
        match &self.journal {
            None => writeln!(f, "  never initialised: nothing is cached")?,
            Some(j) => writeln!(
                f,
                "  journal: newest entry {}, {} with {} to replay, from {} on",
                j.newest_seq,
                counted(j.replay_entries, "entry"),
                counted(j.replay_keys, "key"),
                j.last_seq
            )?,
        }
        let b = &self.btree;
        writeln!(
            f,
            "  btree: {}, root at level {}, {}; {} ({} dirty), {} stale, {}",
            counted(b.nodes, "node"),
            b.root_level,
            counted(b.bsets, "bset"),
            counted(b.live_extents, "extent"),
            b.dirty_extents,
            b.stale_extents,
            counted(b.holes, "hole")
        )?;
        if b.missing_nodes > 0 {
            writeln!(f, "  btree: MISSING: {}", counted(b.missing_nodes, "node"))?;
        }
        let u = &self.buckets;
        writeln!(
            f,
            "  buckets: {} superblock, {} journal, {} prio, {} uuid, {} btree, {} data, {} unused",
            u.superblock, u.journal, u.prio, u.uuid, u.btree, u.data, u.unused
        )?;
        self.devices.iter().try_for_each(|d| write!(f, "{d}"))?;
        for backing in &self.other_backings {
            writeln!(f, "  {backing}")?;
        }
        if self.cancelled {
            writeln!(f, "  cached data was not read to the end")?;
        }
        Ok(())
    }
}
