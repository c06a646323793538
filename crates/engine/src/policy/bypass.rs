//! The decisions whether a request goes through the cache, and to which devices a write goes.
//!
//! Owns the bypass decision (semantics section 4), the writeback decision (semantics section 3.1), the changes of both
//! by the admission policy `cost` (which uses the costs of requests to the devices, and the room in the cache), and the
//! rule of the durability contract for writes over dirty data. Such a write goes through the cache as dirty data in
//! every mode. While the volume is being detached, or when the cache cannot take the write, the backing device is
//! written *and flushed* before the dirty keys are replaced durably. (The kernel replaces them in parallel with the
//! write to the backing device, which can lose flushed data.)
//!
//! *Invariants:* pure functions; a request that bypasses the cache never becomes writethrough; a discard never becomes
//! dirty data. *Must not know:* how a path is carried out.

use format::{CacheMode, Sector, Sectors};

use super::choices::ReadaheadPolicy;

/// Above this percentage of used buckets every request bypasses the cache (semantics section 4, rule 2).
pub const CUTOFF_CACHE_ADD_PERCENT: u8 = 95;

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    /// A read of data from the volume.
    Read,
    /// A write of data to the volume.
    Write,
    /// A discard: the data of the range is no longer needed.
    Discard,
}

/// The purpose of a request, as far as the export knows it; all false for most requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RequestHints {
    /// The client waits until the data is durable: forced unit access, or a part of a flush.
    pub sync: bool,
    /// The data is metadata of a file system, or marked as important in another way.
    pub meta: bool,
    /// The request is read-ahead.
    pub readahead: bool,
    /// The request runs in the background: no client waits for it.
    pub background: bool,
}

/// The reason why a request, or a part of it, is not cached.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BypassReason {
    /// The cached device is being detached.
    Detaching,
    /// The request is a discard.
    Discard,
    /// The set is being stopped, so misses are no longer cached.
    Stopping,
    /// More than 95 % of the buckets are in use.
    CacheFull95,
    /// The cache mode is none.
    ModeNone,
    /// The cache mode is writearound, and the request is a write.
    WriteAround,
    /// The request is read-ahead, of which only metadata is cached.
    Readahead,
    /// The request runs in the background, and only metadata of such requests is cached.
    Background,
    /// The request does not consist of whole blocks of the cache set.
    Unaligned,
    /// The stream of the request has reached `sequential_cutoff`.
    Sequential,
    /// The cache device is congested, and the stream of the request is longer than the limit for that.
    Congested,
    /// No bucket was free for the data. The paths find this when they store the data; it is never decided here.
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

/// The inputs of the bypass decision.
#[derive(Clone, Copy, Debug)]
pub struct BypassInputs {
    /// The kind of the request.
    pub kind: RequestKind,
    /// The purpose of the request.
    pub hints: RequestHints,
    /// The position on the *backing device*, including `data_offset`.
    pub start: Sector,
    /// The length of the request.
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
    /// `sequential_cutoff` in bytes; 0 if it is off.
    pub sequential_cutoff_bytes: u32,
    /// The limit of [`super::congestion::Congestion::limit`]; `None` if the cache device is not congested.
    pub congestion_limit: Option<Sectors>,
}

/// The comparison of the two devices for one request, for the admission policy `cost`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// Whether there are more buckets without data than are kept ready.
    pub free_room: bool,
    /// Whether a stream of such requests is faster on the cache device; true if the costs are unknown.
    pub streams_faster: bool,
    /// Whether the cache device would answer the request before the backing device, after its requests in flight; true
    /// if the costs are unknown.
    pub answers_first: bool,
}

/// The bypass decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The request goes through the cache. The caller counts it for the aging of priorities
    /// ([`super::aging::Aging::count`]).
    Cache,
    /// The request bypasses the cache. The caller counts it as bypassed. With [`BypassReason::CacheFull95`] and a clean
    /// device a garbage collection is due, because otherwise the cache could stay full for ever.
    Bypass(BypassReason),
}

/// Decides whether a request bypasses the cache: semantics section 4, rules 1 to 8 in their order, with the changes of the
/// admission policy `cost`.
///
/// `stream` is called at most once, and only where the length of the request's stream matters; it returns the result of
/// [`super::sequential::SequentialDetector::observe`]. So requests that bypass for another reason are not part of any
/// stream, as in the kernel.
///
/// The policy `cost` differs from the kernel's rules in three points: while there is room to spare, a stream that is faster
/// through the cache is cached; no request bypasses a congested cache for a device that would take even longer; metadata of
/// file systems bypasses the cache for neither reason. `compare` is called at most once, and only for requests that bypass
/// the cache by rule 7. It returns `None` under the admission policy `kernel`, where the kernel's rules apply.
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

/// Rules 1 to 5, which do not need the stream of the request.
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

/// Rules 6 to 8, which need the stream of the request.
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

/// The percentage of used buckets up to which a write becomes dirty data under the admission policy `cost`. Up to
/// `cutoff_writeback_sync` all writes do, above [`CUTOFF_CACHE_ADD_PERCENT`] none, and in between fewer and fewer.
/// `random` is a random number; each limit in between is equally likely.
pub fn dirty_limit_percent(cutoff_writeback_sync: u8, random: u32) -> u8 {
    let span = u32::from(CUTOFF_CACHE_ADD_PERCENT.saturating_sub(cutoff_writeback_sync));
    // The sum stays below 95 percent.
    let more = random.checked_rem(span).unwrap_or(0);
    cutoff_writeback_sync.saturating_add(more as u8)
}

/// The inputs of the path of a write or discard, other than the bypass decision.
#[derive(Clone, Copy, Debug)]
pub struct WriteInputs {
    /// The kind of the request: write or discard.
    pub kind: RequestKind,
    /// The purpose of the request.
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
    /// The result of [`dirty_limit_percent`] for this write, under the admission policy `cost` if the cache answers
    /// first. It replaces both cutoffs.
    pub dirty_limit_percent: Option<u8>,
    /// Whether a stripe that the range touches has dirty data, on a device on which partial stripes are expensive
    /// ([`super::stripes::DirtyStripes::touches_dirty_stripe`]).
    pub touches_dirty_stripe: bool,
    /// Whether the range itself has dirty data, which may be being written back.
    pub overlaps_dirty: bool,
    /// Whether the cache device can take dirty data, possibly after a wait for room.
    pub cache_takes_dirty: bool,
}

/// The path of a write or discard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritePath {
    /// The data goes to the cache alone, as dirty data.
    Writeback,
    /// The data goes to both devices, and is clean in the cache. A part for which no bucket is free becomes a hole
    /// instead. The range has no dirty data.
    Writethrough,
    /// The data or discard goes to the backing device alone, and the range becomes a hole in the cache.
    Bypass(BypassReason),
}

/// Whether a write becomes dirty data by the rules of the cache mode (semantics section 3.1). `bypass`: the bypass
/// decision is to bypass. Dirty data in the range does not matter here.
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

/// Decides the path of a write or discard; `decision` is the result of [`decide_by_cost`] for it.
pub fn write_path(inputs: &WriteInputs, decision: Decision) -> WritePath {
    let over_dirty = inputs.overlaps_dirty;
    let bypass = match decision {
        Decision::Bypass(reason) => Some(reason),
        Decision::Cache => None,
    };
    // The bypass decision covers both conditions. They are checked again here, because dirty data would be an error in
    // these cases.
    if inputs.kind != RequestKind::Write {
        return WritePath::Bypass(bypass.unwrap_or(BypassReason::Discard));
    }
    if inputs.detaching {
        return WritePath::Bypass(bypass.unwrap_or(BypassReason::Detaching));
    }
    if inputs.cache_takes_dirty && (over_dirty || should_writeback(inputs, bypass.is_some())) {
        return WritePath::Writeback;
    }
    match bypass {
        Some(reason) => WritePath::Bypass(reason),
        // Writethrough would replace a dirty key by a clean one.
        None if over_dirty => WritePath::Bypass(BypassReason::NoBucket),
        None => WritePath::Writethrough,
    }
}

#[cfg(test)]
mod tests;
