//! What is certain in the contents of a disk, before its data is read.
//!
//! Owns the rules. A key of a verified structure decides about its range, unless a newer key can have been lost. Journal keys are newer
//! than those of leaves, and later entries are newer than earlier ones: so the loss of a leaf does not touch ranges that the journal
//! names, and the loss of an entry does not touch ranges that a later entry names. A clean backing device has all writes that were
//! acknowledged. It is judged by the same rules: in the range of a write that was under way at a crash, the cache and the device can
//! have different bytes.
//! A right checksum of data raises no range: it does not prove that the key is the newest one. `mapper` compares bytes where a rule
//! depends on them.
//!
//! Invariant: the segments cover the disk without gaps, in order.

use std::rc::Rc;

use format::{BucketNr, Inode, JournalSeq, Sector, Sectors};
use inspect::view::KeyRange;
use inspect::{Invariant, Origin, Piece, PieceKind, SetView, Severity};

use super::history::Devices;
use super::journal_end::JournalEnd;
use super::map::State;
use super::{end_of, history, orphans};
use crate::plan::Plan;
use crate::work::Doubt;

/// The disk that is judged.
#[derive(Clone, Debug, Default)]
pub(super) struct Case {
    /// The backing device; `None` for a volume.
    pub(super) backing: Option<usize>,
    /// The slot whose keys count.
    pub(super) slot: Option<Inode>,
    /// First data sector, as keys count.
    pub(super) data_offset: Sector,
    /// Size of the disk.
    pub(super) sectors: Sectors,
    /// The backing device is attached to no set, so nothing else has data of it.
    pub(super) is_alone: bool,
    /// The backing device has every write that was acknowledged.
    pub(super) is_clean: bool,
    /// Why nothing at all is certain.
    pub(super) hard: Option<String>,
    /// The newest journal entry that was found counts as the last one.
    pub(super) is_trusted: bool,
}

/// A state and its reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Verdict {
    pub(super) state: State,
    pub(super) why: Option<Rc<str>>,
    /// The end of the journal is the only reason.
    pub(super) by_journal_end: bool,
}

impl Verdict {
    const CERTAIN: Verdict = Verdict { state: State::Certain, why: None, by_journal_end: false };

    pub(super) fn uncertain(why: &Rc<str>) -> Verdict {
        Verdict { state: State::Uncertain, why: Some(Rc::clone(why)), by_journal_end: false }
    }
}

/// Other bytes that may be those of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Other {
    /// Those of the backing device.
    Backing,
    /// Those of the cache device from this sector on.
    Cache(Sector),
}

/// A range with one verdict.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// First sector on the volume.
    pub(super) start: u64,
    /// End (exclusive).
    pub(super) end: u64,
    pub(super) from: &'static str,
    pub(super) verdict: Verdict,
    /// The verdict where the bytes are not these other ones.
    pub(super) unless: Option<(Other, Verdict)>,
}

/// The segments of a disk.
pub(super) struct Judged {
    pub(super) data_offset: Sector,
    pub(super) segments: Vec<Segment>,
    /// Why clean data that was read from the backing device instead is uncertain.
    pub(super) instead: Rc<str>,
    /// The backing device has every write that was acknowledged.
    pub(super) is_clean: bool,
}

/// Judges the contents of a disk.
pub(super) fn judge(
    plan: &Plan<'_>,
    view: Option<&SetView>,
    case: &Case,
    end: Option<&JournalEnd>,
) -> Judged {
    let mut judge = Judge { case, reasons: Reasons::of(plan, view, case, end), segments: Vec::new() };
    let (first, end) = (case.data_offset, end_of(case.data_offset, case.sectors));
    let mut at = first;
    if let (Some(view), Some(slot)) = (view, case.slot) {
        for piece in view.extents.of_inode(slot) {
            let Some(cut) = piece.cut(first, end) else { continue };
            judge.range(at, cut.start, None);
            judge.range(cut.start, cut.end(), Some(&Cached::of(view, &cut)));
            at = cut.end();
        }
    }
    judge.range(at, end, None);
    let instead =
        "clean data in the cache is damaged or cannot be read; the image has the data of the backing device";
    Judged { data_offset: first, segments: judge.segments, instead: instead.into(), is_clean: case.is_clean }
}

/// A piece of the extent map and what is known of it.
struct Cached {
    start: Sector,
    kind: PieceKind,
    is_dirty: bool,
    /// The journal entry of the key; `None` for a key in a leaf.
    entry: Option<JournalSeq>,
    /// Place of the data, and its bucket.
    place: Option<(Sector, BucketNr)>,
}

impl Cached {
    fn of(view: &SetView, piece: &Piece) -> Cached {
        let place = |ptr: format::Ptr| Some((ptr.offset(), view.gens.bucket_of(ptr, piece.len)?));
        Cached {
            start: piece.start,
            kind: view.kind(piece),
            is_dirty: piece.dirty,
            entry: match piece.origin {
                Origin::Journal(seq) => Some(seq),
                Origin::Node(_) => None,
            },
            place: piece.ptr.filter(|ptr| !ptr.is_check()).and_then(place),
        }
    }
}

/// The reasons why ranges are uncertain.
#[derive(Default)]
struct Reasons {
    /// For all ranges, whatever the cache device says.
    hard: Option<Rc<str>>,
    /// For all ranges.
    all: Option<Rc<str>>,
    /// For ranges about which no journal key decides.
    index: Option<Rc<str>>,
    /// For ranges about which no key of a later entry decides.
    entries: Option<(JournalSeq, Rc<str>)>,
    /// For data in this bucket and those behind it.
    generations: Option<(BucketNr, Rc<str>)>,
    /// For these ranges, as far as no journal key decides about them; in order, and disjoint.
    unknown: Vec<(Sector, Sector, Rc<str>)>,
    stale_why: Rc<str>,
    invalid_why: Rc<str>,
    /// For all ranges: there may have been a newer entry.
    end: Option<Rc<str>>,
}

impl Reasons {
    fn of(plan: &Plan<'_>, view: Option<&SetView>, case: &Case, end: Option<&JournalEnd>) -> Reasons {
        let mut reasons = Reasons {
            hard: case.hard.as_deref().map(Rc::from),
            stale_why: "the key says dirty data, and its bucket was reused: it was written back before, or the key is out of date"
                .into(),
            invalid_why: "dirty data whose pointer leads to no bucket".into(),
            ..Reasons::default()
        };
        for doubt in &plan.work.doubts {
            reasons.add(doubt, case);
        }
        let Some(view) = view else { return reasons };
        if let Some(end) = end {
            match &end.contradicted {
                Some(why) => reasons.end = Some(why.as_str().into()),
                None if end.is_proven || case.is_trusted => {}
                None => reasons.end = Some(end.doubt().into()),
            }
            // What contradicts the end is damage, which no trust takes away.
            if end.contradicted.is_some() {
                reasons.all = reasons.all.take().or(reasons.end.take());
            }
        }
        if view.journal.is_some() && !view.prio.complete {
            let per_set = format::geometry::prios_in(view.prio.set_sectors);
            let described = per_set.saturating_mul(u32::try_from(view.prio.chain.len()).unwrap_or(u32::MAX));
            let why = "the generation of the bucket is not known, because prio sets are lost";
            reasons.generations.get_or_insert((BucketNr(described), why.into()));
        }
        if let Some(finding) = plan.after.findings.iter().find(|f| decides(f, plan, view)) {
            let why = || format!("an error remains: {finding}").into();
            reasons.all.get_or_insert_with(why);
        }
        if let Some(slot) = case.slot {
            reasons.unknown = unknown(plan, view, case, slot);
        }
        reasons
    }

    fn add(&mut self, doubt: &Doubt, case: &Case) {
        match doubt {
            Doubt::CacheSuperblock => {
                self.all.get_or_insert("the superblock of the cache device is rebuilt".into());
            }
            Doubt::BackingSuperblock(index) if Some(*index) == case.backing => {
                self.hard.get_or_insert(
                    "the superblock of the backing device is rebuilt, and the start of the data is assumed"
                        .into(),
                );
            }
            Doubt::BackingSuperblock(_) => {}
            Doubt::Entries(newest) => {
                let why =
                    format!("keys of journal entries up to {newest} are lost, and the ranges are not known");
                self.entries = Some((*newest, why.into()));
            }
            Doubt::Root => {
                self.index.get_or_insert(
                    "the root of the btree is rebuilt from its leaves, one of which may have been freed"
                        .into(),
                );
            }
            Doubt::Generations(first) => {
                let why =
                    "the generation of the bucket is rebuilt from keys, and the bytes on the devices differ";
                self.generations = Some((*first, why.into()));
            }
            Doubt::Slots(same) => {
                let is_known = case.backing.is_some() && case.slot.is_none_or(|slot| same.contains(&slot));
                if !is_known {
                    self.all.get_or_insert("the slot of the disk in the UUID table is rebuilt".into());
                }
            }
        }
    }

    /// The reason that does not depend on bytes, for a range of a piece or without one.
    fn plain<'r>(&'r self, cached: Option<&Cached>, unknown: Option<&'r Rc<str>>) -> Option<&'r Rc<str>> {
        let entry = cached.and_then(|c| c.entry);
        let is_stale = cached.is_some_and(|c| c.kind == PieceKind::Stale && c.is_dirty);
        let lost = self.entries.as_ref().filter(|(newest, _)| entry.is_none_or(|seq| seq < *newest));
        (self.all.as_ref())
            .or(self.index.as_ref().filter(|_| entry.is_none()))
            .or(lost.map(|(_, why)| why))
            .or(unknown.filter(|_| entry.is_none()))
            .or(Some(&self.stale_why).filter(|_| is_stale))
    }
}

/// Whether an error that remains can decide about data, and no other rule covers it.
fn decides(finding: &inspect::Finding, plan: &Plan<'_>, view: &SetView) -> bool {
    let of_cache = finding.place.device == view.device;
    let is_backing = plan.backings().iter().any(|b| inspect::ReadAt::name(b) == finding.place.device);
    let covered = match finding.invariant {
        // The ranges of the keys are in the view.
        Invariant::NodeReadable | Invariant::NodeShape => true,
        Invariant::PrioChain => !view.prio.complete,
        // Whether the device has a slot, and which state, is asked for the disk that is judged.
        Invariant::BackingState | Invariant::Room => true,
        Invariant::Superblock => is_backing && !of_cache,
        _ => false,
    };
    finding.severity > Severity::Notice && !covered
}

/// The ranges of a slot of which not all keys are known, and why; in order, and disjoint.
fn unknown(plan: &Plan<'_>, view: &SetView, case: &Case, slot: Inode) -> Vec<(Sector, Sector, Rc<str>)> {
    let lost: Rc<str> = "a node of the btree that had the keys of this range is lost".into();
    let torn: Rc<str> =
        "an old journal entry has a key that the leaf of this range does not have: the end of the leaf may be destroyed".into();
    let backing = case.backing.and_then(|index| plan.backings().get(index));
    let devices = Devices { view, cache: plan.cache(), backing: backing.map(|b| b as &dyn inspect::ReadAt) };
    let leaves = history::torn_leaves(devices, slot).into_iter().filter_map(|id| view.node(id));
    let leaves = leaves.map(|node| (KeyRange { after: node.after, last: node.key.position() }, &torn));
    let unnamed: Rc<str> =
        "a node of the btree has keys of this range, and no other node names it: the end of a node may be destroyed".into();
    let orphans = orphans::orphans(view, plan.cache()).into_iter().map(|range| (range, &unnamed));
    let ranges = view.unknown.iter().map(|range| (*range, &lost)).chain(leaves).chain(orphans);
    let of_slot = |(range, why): (KeyRange, &Rc<str>)| {
        let from = if range.after.0 == slot { range.after.1 } else { Sector(0) };
        let to = if range.last.0 == slot { range.last.1 } else { Sector(u64::MAX) };
        (range.after.0 <= slot && range.last.0 >= slot && from < to).then(|| (from, to, Rc::clone(why)))
    };
    let mut all: Vec<(Sector, Sector, Rc<str>)> = ranges.filter_map(of_slot).collect();
    all.sort_by_key(|(from, to, _)| (*from, *to));
    let mut disjoint: Vec<(Sector, Sector, Rc<str>)> = Vec::new();
    for (from, to, why) in all {
        let from = disjoint.last().map_or(from, |(_, end, _)| from.max(*end));
        if from < to {
            disjoint.push((from, to, why));
        }
    }
    disjoint
}

struct Judge<'a> {
    case: &'a Case,
    reasons: Reasons,
    segments: Vec<Segment>,
}

impl Judge<'_> {
    /// Judges a range of positions of keys, which is a piece or part of a gap.
    fn range(&mut self, start: Sector, end: Sector, cached: Option<&Cached>) {
        let mut at = start;
        let from = self.reasons.unknown.partition_point(|(_, to, _)| *to <= start);
        let unknown: Vec<_> =
            self.reasons.unknown.iter().skip(from).take_while(|(from, ..)| *from < end).cloned().collect();
        for (from, to, why) in unknown {
            self.push(at, from.max(at), cached, None);
            at = from.max(at);
            self.push(at, to.min(end), cached, Some(&why));
            at = to.min(end);
        }
        self.push(at, end, cached, None);
    }

    fn push(&mut self, start: Sector, end: Sector, cached: Option<&Cached>, unknown: Option<&Rc<str>>) {
        if start >= end {
            return;
        }
        let beyond = if self.case.backing.is_some() { "backing" } else { "nowhere" };
        let from = match cached.map(|c| (c.kind, c.is_dirty)) {
            Some((PieceKind::Dirty, _)) | Some((PieceKind::Invalid, true)) => "cache dirty",
            Some((PieceKind::Clean, _)) => "cache clean",
            _ => beyond,
        };
        let (verdict, unless) = self.verdict(start, cached, unknown);
        let first = self.case.data_offset.0;
        let (start, end) = (start.0.saturating_sub(first), end.0.saturating_sub(first));
        self.segments.push(Segment { start, end, from, verdict, unless });
    }

    fn verdict(
        &self,
        start: Sector,
        cached: Option<&Cached>,
        unknown: Option<&Rc<str>>,
    ) -> (Verdict, Option<(Other, Verdict)>) {
        let reasons = &self.reasons;
        if let Some(why) = &reasons.hard {
            return (Verdict::uncertain(why), None);
        }
        if self.case.is_alone {
            return (Verdict::CERTAIN, None);
        }
        if cached.is_some_and(|c| c.kind == PieceKind::Invalid && c.is_dirty) {
            let why = Some(Rc::clone(&reasons.invalid_why));
            return (Verdict { state: State::Lost, why, by_journal_end: false }, None);
        }
        let is_live = cached.is_some_and(|c| c.kind.is_live());
        let plain = reasons.plain(cached, unknown);
        let place = cached.and_then(|c| Some((c.start, c.place?)));
        let generation = match (&reasons.generations, place) {
            (Some((first, why)), Some((_, (_, bucket)))) if bucket >= *first => Some(why),
            _ => None,
        };
        let end = reasons.end.as_ref().map(|why| Verdict { by_journal_end: true, ..Verdict::uncertain(why) });
        if let Some(why) = plain {
            return (Verdict::uncertain(why), None);
        }
        let base = end.unwrap_or(Verdict::CERTAIN);
        let Some(why) = generation else { return (base, None) };
        let other = match place {
            Some(_) if is_live => self.case.backing.map(|_| Other::Backing),
            Some((piece, (at, _))) => {
                let inside = start.checked_since(piece).unwrap_or_default();
                Some(Other::Cache(end_of(at, inside)))
            }
            None => None,
        };
        match other {
            Some(other) => (base, Some((other, Verdict::uncertain(why)))),
            None => (Verdict::uncertain(why), None),
        }
    }
}
