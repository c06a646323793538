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
    /// ([`super::aging::Aging::count`]).
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
    // Below 95 percent.
    let more = random.checked_rem(span).unwrap_or(0);
    cutoff_writeback_sync.saturating_add(more as u8)
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
mod tests;
