//! Whether a request goes through the cache, and where a write goes.
//!
//! Owns the bypass decision (semantics section 4), the writeback decision (semantics section 3.1), what the
//! admission policy `cost` changes about both (it looks at what requests cost the devices, and at the room
//! that is left) and the rule of the durability contract for writes over dirty data: such a write goes
//! through the cache as dirty data, whatever the mode; while detaching, or when the cache cannot take it,
//! the backing device is written *and flushed* before the dirty keys are replaced durably. (The kernel
//! replaces them in parallel with the backing write, and can lose flushed data by that.)
//!
//! *Invariants:* pure functions; a request that was decided to bypass never becomes writethrough; a
//! discard never becomes dirty data. *Must not know:* how a path is carried out.

use format::{CacheMode, Sector, Sectors};

use super::choices::ReadaheadPolicy;

/// Above this share of used buckets, in percent, everything bypasses (semantics section 4, rule 2).
pub const CUTOFF_CACHE_ADD_PERCENT: u8 = 95;

/// What a request wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    /// Data from the volume.
    Read,
    /// Data to the volume.
    Write,
    /// The data of the range is no longer needed.
    Discard,
}

/// What a request is for, as far as the export knows; all false for most requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RequestHints {
    /// Somebody waits for its durability: forced unit access, or part of a flush.
    pub sync: bool,
    /// A file system's metadata, or otherwise marked as important.
    pub meta: bool,
    /// Reads ahead of what was asked for.
    pub readahead: bool,
    /// Nobody waits for it.
    pub background: bool,
}

/// Why a request, or a part of it, is not cached.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BypassReason {
    /// The cached device is being detached.
    Detaching,
    /// It is a discard.
    Discard,
    /// The set is being stopped; misses are no longer cached.
    Stopping,
    /// More than 95 % of the buckets are in use.
    CacheFull95,
    /// The cache mode is none.
    ModeNone,
    /// The cache mode is writearound, and it is a write.
    WriteAround,
    /// It reads ahead, and only metadata is to be cached of that.
    Readahead,
    /// It runs in the background, and only metadata is to be cached of that.
    Background,
    /// It does not consist of whole blocks of the cache set.
    Unaligned,
    /// Its stream has reached `sequential_cutoff`.
    Sequential,
    /// The cache device is congested, and the stream is too long for that.
    Congested,
    /// No bucket was free for its data. Never decided here: found out when the data is to be stored.
    NoBucket,
}

impl BypassReason {
    /// Number of reasons.
    pub const COUNT: usize = BypassReason::ALL.len();

    /// Every reason, in the order of [`BypassReason::index`].
    pub const ALL: [BypassReason; 12] = [
        BypassReason::Detaching,
        BypassReason::Discard,
        BypassReason::Stopping,
        BypassReason::CacheFull95,
        BypassReason::ModeNone,
        BypassReason::WriteAround,
        BypassReason::Readahead,
        BypassReason::Background,
        BypassReason::Unaligned,
        BypassReason::Sequential,
        BypassReason::Congested,
        BypassReason::NoBucket,
    ];

    /// Position in [`BypassReason::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Name for metrics and listings.
    pub const fn name(self) -> &'static str {
        match self {
            BypassReason::Detaching => "detaching",
            BypassReason::Discard => "discard",
            BypassReason::Stopping => "stopping",
            BypassReason::CacheFull95 => "cache_full",
            BypassReason::ModeNone => "mode_none",
            BypassReason::WriteAround => "writearound",
            BypassReason::Readahead => "readahead",
            BypassReason::Background => "background",
            BypassReason::Unaligned => "unaligned",
            BypassReason::Sequential => "sequential",
            BypassReason::Congested => "congested",
            BypassReason::NoBucket => "no_bucket",
        }
    }
}

/// What the bypass decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct BypassInputs {
    /// What the request wants.
    pub kind: RequestKind,
    /// What it is for.
    pub hints: RequestHints,
    /// Its position on the *backing device*, i.e. including `data_offset`.
    pub start: Sector,
    /// Its length.
    pub sectors: Sectors,
    /// Block size of the cache set, in sectors.
    pub block: Sectors,
    /// The device's cache mode.
    pub mode: CacheMode,
    /// The device is being detached.
    pub detaching: bool,
    /// The set is being stopped.
    pub stopping: bool,
    /// Share of used buckets, see [`super::in_use_percent`].
    pub in_use_percent: u8,
    /// `readahead_cache_policy`.
    pub readahead_policy: ReadaheadPolicy,
    /// `sequential_cutoff` in bytes, 0 for off.
    pub sequential_cutoff_bytes: u32,
    /// Limit from [`super::congestion::Congestion::limit`]; `None` if not congested.
    pub congestion_limit: Option<Sectors>,
}

/// What the admission policy `cost` knows about the devices, for one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// There are buckets without any data, more than are kept ready for what comes next.
    pub free_room: bool,
    /// A stream of such requests is faster through the cache device, or too little is known.
    pub streams_faster: bool,
    /// The cache device, with what it has to do, answers the request before the backing device would, or too little is
    /// known.
    pub answers_first: bool,
}

/// The bypass decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Through the cache. The caller counts the request for the aging of priorities
    /// ([`super::replacement::Aging::count`]).
    Cache,
    /// Past the cache. The caller counts the request as bypassed. With
    /// [`BypassReason::CacheFull95`] and a clean device a garbage collection is due, for the cache
    /// could stay full for ever otherwise.
    Bypass(BypassReason),
}

/// Decides about a request (semantics section 4, rules 1 to 8 in their order).
///
/// `stream` is called at most once, and only where the length of the request's stream matters; it is
/// to return what [`super::sequential::SequentialDetector::observe`] says. So requests that bypass for
/// another reason are not part of any stream, as in the kernel.
pub fn decide(inputs: &BypassInputs, stream: impl FnOnce() -> Sectors) -> Decision {
    decide_by_cost(inputs, stream, || None)
}

/// The same with the admission policy `cost`: while there is room to spare, streams are cached that are faster through
/// the cache; nothing goes past a congested cache to a device that would take even longer; and a file system's metadata
/// goes past it for neither reason. `compare` is called at
/// most once, and only for requests that the kernel's rules would send past the cache by these two; without an answer
/// the kernel's rules hold.
pub fn decide_by_cost(
    inputs: &BypassInputs,
    stream: impl FnOnce() -> Sectors,
    compare: impl FnOnce() -> Option<Comparison>,
) -> Decision {
    match early_reason(inputs) {
        Some(reason) => Decision::Bypass(reason),
        None => decide_by_stream(inputs, stream, compare),
    }
}

/// Rules 1 to 5: what is known without looking at the stream.
fn early_reason(inputs: &BypassInputs) -> Option<BypassReason> {
    if inputs.detaching {
        return Some(BypassReason::Detaching);
    }
    if inputs.kind == RequestKind::Discard {
        return Some(BypassReason::Discard);
    }
    if inputs.stopping && inputs.kind == RequestKind::Read {
        return Some(BypassReason::Stopping);
    }
    if inputs.in_use_percent > CUTOFF_CACHE_ADD_PERCENT {
        return Some(BypassReason::CacheFull95);
    }
    match (inputs.mode, inputs.kind) {
        (CacheMode::None, _) => return Some(BypassReason::ModeNone),
        (CacheMode::Writearound, RequestKind::Write) => return Some(BypassReason::WriteAround),
        _ => {}
    }
    if inputs.readahead_policy != ReadaheadPolicy::All && !inputs.hints.meta {
        if inputs.hints.readahead {
            return Some(BypassReason::Readahead);
        }
        if inputs.hints.background {
            return Some(BypassReason::Background);
        }
    }
    let block = inputs.block.0.max(1);
    if !inputs.start.0.is_multiple_of(block) || !inputs.sectors.0.is_multiple_of(block) {
        return Some(BypassReason::Unaligned);
    }
    None
}

/// Rules 6 to 8.
fn decide_by_stream(
    inputs: &BypassInputs,
    stream: impl FnOnce() -> Sectors,
    compare: impl FnOnce() -> Option<Comparison>,
) -> Decision {
    let cutoff = Sectors::from_bytes_floor(u64::from(inputs.sequential_cutoff_bytes));
    let sequential_is_cut = inputs.sequential_cutoff_bytes != 0;
    if inputs.congestion_limit.is_none() && !sequential_is_cut {
        return Decision::Cache;
    }
    let length = stream();
    let sequential = sequential_is_cut && length >= cutoff;
    let congested = inputs.congestion_limit.is_some_and(|limit| length >= limit);
    if !sequential && !congested {
        return Decision::Cache;
    }
    let costs = compare();
    if inputs.hints.meta && costs.is_some() {
        return Decision::Cache;
    }
    if sequential && !costs.is_some_and(|c| c.free_room && c.streams_faster) {
        return Decision::Bypass(BypassReason::Sequential);
    }
    if congested && !costs.is_some_and(|c| c.answers_first) {
        return Decision::Bypass(BypassReason::Congested);
    }
    Decision::Cache
}

/// Up to which share of used buckets, in percent, a write becomes dirty data under the admission policy `cost`: all do
/// up to `cutoff_writeback_sync`, none above [`CUTOFF_CACHE_ADD_PERCENT`], and in between fewer and fewer. `random` is
/// any number: equal shares of all numbers give each limit in between.
pub fn dirty_limit_percent(cutoff_writeback_sync: u8, random: u32) -> u8 {
    let span = u32::from(CUTOFF_CACHE_ADD_PERCENT.saturating_sub(cutoff_writeback_sync));
    let more = if span == 0 { 0 } else { random % span };
    cutoff_writeback_sync.saturating_add(u8::try_from(more).unwrap_or(0))
}

/// What the path of a write or discard depends on, besides the bypass decision.
#[derive(Clone, Copy, Debug)]
pub struct WriteInputs {
    /// Write or discard.
    pub kind: RequestKind,
    /// What it is for.
    pub hints: RequestHints,
    /// The device's cache mode.
    pub mode: CacheMode,
    /// The device is being detached.
    pub detaching: bool,
    /// Share of used buckets, see [`super::in_use_percent`].
    pub in_use_percent: u8,
    /// `cutoff_writeback` in percent.
    pub cutoff_writeback: u8,
    /// `cutoff_writeback_sync` in percent.
    pub cutoff_writeback_sync: u8,
    /// Under the admission policy `cost`, where the cache answers first: what [`dirty_limit_percent`] says about this
    /// write. It takes the place of both cutoffs.
    pub dirty_limit_percent: Option<u8>,
    /// A stripe that the range touches has dirty data, and partial stripes are expensive
    /// ([`super::stripes::DirtyStripes::touches_dirty_stripe`]).
    pub touches_dirty_stripe: bool,
    /// The range itself holds dirty data, whether or not it is being written back just now.
    pub overlaps_dirty: bool,
    /// Space for dirty data can be had on the cache device, if need be by waiting for it.
    pub cache_takes_dirty: bool,
}

/// Where the data of a write goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritePath {
    /// To the cache alone, as dirty data.
    Writeback,
    /// To both devices, as clean data in the cache; what finds no free bucket at once is forgotten by
    /// the cache instead. The range holds no dirty data.
    Writethrough,
    /// To the backing device alone (or the discard is passed on to it); the cache forgets the range.
    Bypass {
        /// Why.
        reason: BypassReason,
        /// The range holds dirty data: wait for what is being written back of it, write the backing
        /// device and flush it, and only then let the loss of the dirty keys become durable.
        over_dirty: bool,
    },
}

/// Whether a write becomes dirty data by the rules of the cache mode (semantics section 3.1).
/// `bypass`: the bypass decision says so. Dirty data in the range is not looked at.
pub fn should_writeback(inputs: &WriteInputs, bypass: bool) -> bool {
    if inputs.mode != CacheMode::Writeback
        || inputs.detaching
        || inputs.in_use_percent > inputs.dirty_limit_percent.unwrap_or(inputs.cutoff_writeback_sync)
        || inputs.kind != RequestKind::Write
    {
        return false;
    }
    if inputs.touches_dirty_stripe {
        return true;
    }
    if bypass {
        return false;
    }
    inputs.dirty_limit_percent.is_some()
        || inputs.hints.sync
        || inputs.hints.meta
        || inputs.in_use_percent <= inputs.cutoff_writeback
}

/// Decides where a write or discard goes, `decision` being what [`decide`] said about it.
pub fn write_path(inputs: &WriteInputs, decision: Decision) -> WritePath {
    let over_dirty = inputs.overlaps_dirty;
    let bypass = match decision {
        Decision::Bypass(reason) => Some(reason),
        Decision::Cache => None,
    };
    // Both imply a bypass already, if `decision` is about this request; they are what makes dirty data
    // wrong, so they are not left to that.
    if inputs.kind != RequestKind::Write {
        return WritePath::Bypass { reason: bypass.unwrap_or(BypassReason::Discard), over_dirty };
    }
    if inputs.detaching {
        return WritePath::Bypass { reason: bypass.unwrap_or(BypassReason::Detaching), over_dirty };
    }
    if inputs.cache_takes_dirty && (over_dirty || should_writeback(inputs, bypass.is_some())) {
        return WritePath::Writeback;
    }
    match bypass {
        Some(reason) => WritePath::Bypass { reason, over_dirty },
        // Writethrough would put a clean key in place of a dirty one.
        None if over_dirty => WritePath::Bypass { reason: BypassReason::NoBucket, over_dirty },
        None => WritePath::Writethrough,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [CacheMode; 4] =
        [CacheMode::Writethrough, CacheMode::Writeback, CacheMode::Writearound, CacheMode::None];
    const KINDS: [RequestKind; 3] = [RequestKind::Read, RequestKind::Write, RequestKind::Discard];
    const BOOLS: [bool; 2] = [false, true];

    /// A read of 64 KiB that is cached.
    fn inputs() -> BypassInputs {
        BypassInputs {
            kind: RequestKind::Read,
            hints: RequestHints::default(),
            start: Sector(1024),
            sectors: Sectors(128),
            block: Sectors(8),
            mode: CacheMode::Writeback,
            detaching: false,
            stopping: false,
            in_use_percent: 95,
            readahead_policy: ReadaheadPolicy::All,
            sequential_cutoff_bytes: 4 << 20,
            congestion_limit: None,
        }
    }

    fn reason(inputs: &BypassInputs) -> Option<BypassReason> {
        match decide(inputs, || inputs.sectors) {
            Decision::Cache => None,
            Decision::Bypass(reason) => Some(reason),
        }
    }

    #[test]
    fn reasons_are_listed_by_their_index() {
        for (i, reason) in BypassReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), i, "{}", reason.name());
        }
        let mut names: Vec<_> = BypassReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BypassReason::COUNT);
    }

    #[test]
    fn each_rule_has_its_reason() {
        let base = inputs();
        assert_eq!(reason(&base), None);
        let write = BypassInputs { kind: RequestKind::Write, ..base };
        let meta_only = BypassInputs { readahead_policy: ReadaheadPolicy::MetaOnly, ..base };
        let ahead = RequestHints { readahead: true, ..RequestHints::default() };
        let background = RequestHints { background: true, ..RequestHints::default() };
        let congested = BypassInputs { congestion_limit: Some(Sectors(128)), ..base };
        let cases = [
            (BypassInputs { detaching: true, ..base }, Some(BypassReason::Detaching)),
            (BypassInputs { kind: RequestKind::Discard, ..base }, Some(BypassReason::Discard)),
            (BypassInputs { stopping: true, ..base }, Some(BypassReason::Stopping)),
            (BypassInputs { stopping: true, ..write }, None),
            (BypassInputs { in_use_percent: 96, ..base }, Some(BypassReason::CacheFull95)),
            (BypassInputs { mode: CacheMode::None, ..base }, Some(BypassReason::ModeNone)),
            (BypassInputs { mode: CacheMode::None, ..write }, Some(BypassReason::ModeNone)),
            (BypassInputs { mode: CacheMode::Writearound, ..write }, Some(BypassReason::WriteAround)),
            (BypassInputs { mode: CacheMode::Writearound, ..base }, None),
            (BypassInputs { hints: ahead, ..base }, None),
            (BypassInputs { hints: ahead, ..meta_only }, Some(BypassReason::Readahead)),
            (BypassInputs { hints: background, ..meta_only }, Some(BypassReason::Background)),
            (BypassInputs { hints: RequestHints { meta: true, ..ahead }, ..meta_only }, None),
            (meta_only, None),
            (BypassInputs { start: Sector(1025), ..base }, Some(BypassReason::Unaligned)),
            (BypassInputs { sectors: Sectors(127), ..base }, Some(BypassReason::Unaligned)),
            (BypassInputs { block: Sectors(1), start: Sector(3), ..base }, None),
            (BypassInputs { sequential_cutoff_bytes: 128 * 512, ..base }, Some(BypassReason::Sequential)),
            (BypassInputs { sequential_cutoff_bytes: 129 * 512, ..base }, None),
            (congested, Some(BypassReason::Congested)),
            (BypassInputs { congestion_limit: Some(Sectors(129)), ..base }, None),
            (BypassInputs { sequential_cutoff_bytes: 0, ..congested }, Some(BypassReason::Congested)),
            (
                BypassInputs { sequential_cutoff_bytes: 128 * 512, ..congested },
                Some(BypassReason::Sequential),
            ),
            // A cutoff below one sector: everything is long enough.
            (BypassInputs { sequential_cutoff_bytes: 511, ..base }, Some(BypassReason::Sequential)),
        ];
        for (case, expected) in cases {
            assert_eq!(reason(&case), expected, "{case:?}");
        }
    }

    #[test]
    fn rules_go_in_the_order_of_the_specification() {
        // Everything is wrong with this request; its defects are mended one by one.
        let mut case = BypassInputs {
            kind: RequestKind::Discard,
            hints: RequestHints { readahead: true, ..RequestHints::default() },
            start: Sector(1),
            mode: CacheMode::None,
            detaching: true,
            stopping: true,
            in_use_percent: 100,
            readahead_policy: ReadaheadPolicy::MetaOnly,
            sequential_cutoff_bytes: 512,
            congestion_limit: Some(Sectors(1)),
            ..inputs()
        };
        type Mend = fn(&mut BypassInputs);
        let order: [(BypassReason, Mend); 9] = [
            (BypassReason::Detaching, |c| c.detaching = false),
            (BypassReason::Discard, |c| c.kind = RequestKind::Read),
            (BypassReason::Stopping, |c| c.stopping = false),
            (BypassReason::CacheFull95, |c| c.in_use_percent = 0),
            (BypassReason::ModeNone, |c| c.mode = CacheMode::Writethrough),
            (BypassReason::Readahead, |c| c.hints.readahead = false),
            (BypassReason::Unaligned, |c| c.start = Sector(0)),
            (BypassReason::Sequential, |c| c.sequential_cutoff_bytes = 0),
            (BypassReason::Congested, |c| c.congestion_limit = None),
        ];
        for (expected, mend) in order {
            assert_eq!(reason(&case), Some(expected));
            mend(&mut case);
        }
        assert_eq!(reason(&case), None);
    }

    #[test]
    fn the_stream_is_looked_at_only_where_it_matters() {
        let asked = |case: &BypassInputs| {
            let mut asked = false;
            decide(case, || {
                asked = true;
                Sectors(1)
            });
            asked
        };
        assert!(asked(&inputs()));
        assert!(!asked(&BypassInputs { in_use_percent: 96, ..inputs() }));
        assert!(!asked(&BypassInputs { start: Sector(1), ..inputs() }));
        let no_cutoff = BypassInputs { sequential_cutoff_bytes: 0, ..inputs() };
        assert!(!asked(&no_cutoff));
        assert!(asked(&BypassInputs { congestion_limit: Some(Sectors(9)), ..no_cutoff }));
    }

    fn write_inputs() -> WriteInputs {
        WriteInputs {
            kind: RequestKind::Write,
            hints: RequestHints::default(),
            mode: CacheMode::Writeback,
            detaching: false,
            in_use_percent: 40,
            cutoff_writeback: 40,
            cutoff_writeback_sync: 70,
            dirty_limit_percent: None,
            touches_dirty_stripe: false,
            overlaps_dirty: false,
            cache_takes_dirty: true,
        }
    }

    #[test]
    fn writeback_has_a_cutoff_and_one_for_synchronous_writes() {
        let sync = RequestHints { sync: true, ..RequestHints::default() };
        let meta = RequestHints { meta: true, ..RequestHints::default() };
        for (in_use_percent, hints, bypass, stripe, expected) in [
            (40, RequestHints::default(), false, false, true),
            (41, RequestHints::default(), false, false, false),
            (41, sync, false, false, true),
            (70, sync, false, false, true),
            (70, meta, false, false, true),
            (71, sync, false, false, false),
            (0, sync, true, false, false),
            (70, RequestHints::default(), true, true, true),
            (71, RequestHints::default(), false, true, false),
        ] {
            let case = WriteInputs { in_use_percent, hints, touches_dirty_stripe: stripe, ..write_inputs() };
            assert_eq!(should_writeback(&case, bypass), expected, "{case:?}, bypass {bypass}");
        }
        for mode in MODES {
            let case = WriteInputs { mode, ..write_inputs() };
            assert_eq!(should_writeback(&case, false), mode == CacheMode::Writeback);
        }
        assert!(!should_writeback(&WriteInputs { detaching: true, ..write_inputs() }, false));
        assert!(!should_writeback(&WriteInputs { kind: RequestKind::Discard, ..write_inputs() }, false));
    }

    /// Full caches take a smaller share of the writes the fuller they are, and all of them before that.
    #[test]
    fn by_cost_the_share_of_dirty_writes_falls_smoothly() {
        let share = |in_use_percent: u8| {
            let dirty = (0..1000).filter(|r| {
                let limit = Some(dirty_limit_percent(70, r * 7919));
                let case = WriteInputs { in_use_percent, dirty_limit_percent: limit, ..write_inputs() };
                should_writeback(&case, false)
            });
            dirty.count() as u32
        };
        assert_eq!((share(0), share(41), share(70)), (1000, 1000, 1000));
        assert_eq!((share(95), share(100)), (0, 0));
        for percent in 70..95 {
            let (here, next) = (share(percent), share(percent + 1));
            assert!(next <= here && here - next <= 80, "{percent} %: {here}, then {next} of 1000");
        }
        assert_eq!(dirty_limit_percent(90, 4), 94);
        assert_eq!(dirty_limit_percent(95, 4), 95);
        assert_eq!(dirty_limit_percent(255, 4), 255);
    }

    /// Streams are cached while there is room and it pays, congestion is no reason to ask a device that is slower
    /// still; whatever else bypasses does so as before.
    #[test]
    fn by_cost_only_streams_and_congestion_are_seen_differently() {
        let sequential = BypassInputs { sequential_cutoff_bytes: 4096, ..inputs() };
        let congested = BypassInputs { congestion_limit: Some(Sectors(8)), ..inputs() };
        let both = BypassInputs { congestion_limit: Some(Sectors(8)), ..sequential };
        for bits in 0..8 {
            let (free_room, streams_faster, answers_first) = (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0);
            let costs = Some(Comparison { free_room, streams_faster, answers_first });
            let by_cost = |case: &BypassInputs| decide_by_cost(case, || case.sectors, || costs);
            let bypass = |yes: bool, reason| if yes { Decision::Bypass(reason) } else { Decision::Cache };
            let stream_out = !(free_room && streams_faster);
            assert_eq!(by_cost(&sequential), bypass(stream_out, BypassReason::Sequential), "{costs:?}");
            assert_eq!(by_cost(&congested), bypass(!answers_first, BypassReason::Congested), "{costs:?}");
            let reason = if stream_out { BypassReason::Sequential } else { BypassReason::Congested };
            assert_eq!(by_cost(&both), bypass(stream_out || !answers_first, reason), "{costs:?}");
            for case in [
                BypassInputs { in_use_percent: 96, ..inputs() },
                BypassInputs { mode: CacheMode::None, ..inputs() },
                BypassInputs { detaching: true, ..inputs() },
                BypassInputs { start: Sector(1), ..inputs() },
            ] {
                assert_eq!(by_cost(&case), decide(&case, || case.sectors));
            }
        }
    }

    /// A file system's metadata goes past the cache for neither reason; for others, and by the kernel's rules, it does.
    #[test]
    fn by_cost_metadata_is_neither_a_stream_nor_too_much() {
        let hints = RequestHints { meta: true, ..RequestHints::default() };
        let stream = BypassInputs { hints, sequential_cutoff_bytes: 4096, ..inputs() };
        let congested = BypassInputs { hints, congestion_limit: Some(Sectors(8)), ..inputs() };
        let costs = Comparison { free_room: false, streams_faster: false, answers_first: false };
        for (case, reason) in [(stream, BypassReason::Sequential), (congested, BypassReason::Congested)] {
            assert_eq!(decide_by_cost(&case, || case.sectors, || Some(costs)), Decision::Cache);
            assert_eq!(decide(&case, || case.sectors), Decision::Bypass(reason));
            let full = BypassInputs { in_use_percent: 96, ..case };
            let decision = decide_by_cost(&full, || full.sectors, || Some(costs));
            assert_eq!(decision, Decision::Bypass(BypassReason::CacheFull95));
        }
    }

    /// All combinations, against the rules of the durability contract on the one hand and what the
    /// kernel would do on the other.
    #[test]
    fn no_combination_breaks_the_contract() {
        let decisions = [Decision::Cache, Decision::Bypass(BypassReason::Sequential)];
        let percents = [0, 40, 41, 70, 71, 95, 100];
        let mut seen = 0;
        for bits in 0..1u32 << 6 {
            let bit = |n: u32| BOOLS[(bits >> n & 1) as usize];
            for (kind, mode) in KINDS.into_iter().flat_map(|k| MODES.map(|m| (k, m))) {
                for (decision, in_use_percent) in decisions.into_iter().flat_map(|d| percents.map(|p| (d, p)))
                {
                    let case = WriteInputs {
                        kind,
                        hints: RequestHints { sync: bit(0), meta: bit(1), ..RequestHints::default() },
                        mode,
                        detaching: bit(2),
                        in_use_percent,
                        touches_dirty_stripe: bit(3),
                        overlaps_dirty: bit(4),
                        cache_takes_dirty: bit(5),
                        ..write_inputs()
                    };
                    check(&case, decision);
                    seen += 1;
                }
            }
        }
        assert_eq!(seen, 64 * 12 * 14);
    }

    fn check(case: &WriteInputs, decision: Decision) {
        let path = write_path(case, decision);
        let bypass = decision != Decision::Cache;
        let what = format!("{case:?}, {decision:?}: {path:?}");
        let is_write = case.kind == RequestKind::Write;
        match path {
            WritePath::Writeback => {
                assert!(is_write && !case.detaching && case.cache_takes_dirty, "{what}");
                assert!(case.overlaps_dirty || should_writeback(case, bypass), "{what}");
            }
            WritePath::Writethrough => {
                assert!(is_write && !case.detaching && !case.overlaps_dirty && !bypass, "{what}");
                assert!(!(should_writeback(case, bypass) && case.cache_takes_dirty), "{what}");
            }
            WritePath::Bypass { reason, over_dirty } => {
                assert_eq!(over_dirty, case.overlaps_dirty, "{what}");
                if case.overlaps_dirty && is_write {
                    assert!(case.detaching || !case.cache_takes_dirty, "{what}");
                }
                if bypass {
                    assert_eq!(reason, BypassReason::Sequential, "the reason given stays: {what}");
                } else {
                    assert!(!is_write || case.detaching || case.overlaps_dirty, "{what}");
                }
            }
        }
        // Where there is no dirty data and no trouble, the kernel's semantics hold.
        if !case.overlaps_dirty && case.cache_takes_dirty && is_write && !case.detaching {
            let kernel = match (should_writeback(case, bypass), bypass) {
                (true, _) => WritePath::Writeback,
                (false, true) => WritePath::Bypass { reason: BypassReason::Sequential, over_dirty: false },
                (false, false) => WritePath::Writethrough,
            };
            assert_eq!(path, kernel, "{what}");
        }
    }

    #[test]
    fn a_bypass_says_why() {
        let discard = WriteInputs { kind: RequestKind::Discard, overlaps_dirty: true, ..write_inputs() };
        let path = write_path(&discard, Decision::Bypass(BypassReason::Discard));
        assert_eq!(path, WritePath::Bypass { reason: BypassReason::Discard, over_dirty: true });
        let stuck = WriteInputs { overlaps_dirty: true, cache_takes_dirty: false, ..write_inputs() };
        let path = write_path(&stuck, Decision::Cache);
        assert_eq!(path, WritePath::Bypass { reason: BypassReason::NoBucket, over_dirty: true });
        let detaching = WriteInputs { detaching: true, overlaps_dirty: true, ..write_inputs() };
        let path = write_path(&detaching, Decision::Bypass(BypassReason::Detaching));
        assert_eq!(path, WritePath::Bypass { reason: BypassReason::Detaching, over_dirty: true });
    }
}
