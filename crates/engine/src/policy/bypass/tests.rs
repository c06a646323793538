//! Tests of the bypass decision: each rule with its reason, the order of the rules, and the path of a write.

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

/// The decision by the kernel's rules alone.
fn decide(inputs: &BypassInputs, stream: impl FnOnce() -> Sectors) -> Decision {
    decide_by_cost(inputs, stream, || None)
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
        (BypassInputs { sequential_cutoff_bytes: 128 * 512, ..congested }, Some(BypassReason::Sequential)),
        // With a cutoff below one sector every stream is long enough.
        (BypassInputs { sequential_cutoff_bytes: 511, ..base }, Some(BypassReason::Sequential)),
    ];
    for (case, expected) in cases {
        assert_eq!(reason(&case), expected, "{case:?}");
    }
}

#[test]
fn rules_go_in_the_order_of_the_specification() {
    // Every rule applies to this request; the test removes the reasons one by one.
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
fn the_stream_is_read_only_where_it_matters() {
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

/// Above the cutoff, the cache takes a smaller share of the writes the fuller it is; below it, the cache takes all
/// writes.
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

/// Streams are cached while there is room and the cache is faster. A congested cache is not bypassed for a slower
/// device. All other reasons to bypass are unchanged.
#[test]
fn the_policy_cost_changes_only_streams_and_congestion() {
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

/// Metadata of file systems bypasses the cache for neither of these two reasons, but it does for others and by the
/// kernel's rules.
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

/// Compares all combinations with the rules of the durability contract and with the kernel's rules.
#[test]
fn no_combination_breaks_the_contract() {
    let decisions = [Decision::Cache, Decision::Bypass(BypassReason::Sequential)];
    let percents = [0, 40, 41, 70, 71, 95, 100];
    let mut seen = 0;
    for bits in 0..1u32 << 6 {
        let bit = |n: u32| BOOLS[(bits >> n & 1) as usize];
        for (kind, mode) in KINDS.into_iter().flat_map(|k| MODES.map(|m| (k, m))) {
            for (decision, in_use_percent) in decisions.into_iter().flat_map(|d| percents.map(|p| (d, p))) {
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
        WritePath::Bypass(reason) => {
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
    // Without dirty data, and if the cache takes dirty data, the kernel's rules apply.
    if !case.overlaps_dirty && case.cache_takes_dirty && is_write && !case.detaching {
        let kernel = match (should_writeback(case, bypass), bypass) {
            (true, _) => WritePath::Writeback,
            (false, true) => WritePath::Bypass(BypassReason::Sequential),
            (false, false) => WritePath::Writethrough,
        };
        assert_eq!(path, kernel, "{what}");
    }
}

#[test]
fn a_bypass_has_its_reason() {
    let discard = WriteInputs { kind: RequestKind::Discard, overlaps_dirty: true, ..write_inputs() };
    let path = write_path(&discard, Decision::Bypass(BypassReason::Discard));
    assert_eq!(path, WritePath::Bypass(BypassReason::Discard));
    let stuck = WriteInputs { overlaps_dirty: true, cache_takes_dirty: false, ..write_inputs() };
    let path = write_path(&stuck, Decision::Cache);
    assert_eq!(path, WritePath::Bypass(BypassReason::NoBucket));
    let detaching = WriteInputs { detaching: true, overlaps_dirty: true, ..write_inputs() };
    let path = write_path(&detaching, Decision::Bypass(BypassReason::Detaching));
    assert_eq!(path, WritePath::Bypass(BypassReason::Detaching));
}

/// The limits of the writes under the admission policy `cost`: equally many random numbers for each percent.
#[test]
fn dirty_limits_by_hand() {
    for (cutoff, random, limit) in [
        (70, 0, 70),
        (70, 24, 94),
        (70, 25, 70),
        (70, 26, 71),
        (70, u32::MAX, 90),
        (90, 4, 94),
        (90, 5, 90),
        (94, 7, 94),
        (95, 7, 95),
        (96, 7, 96),
        (0, 94, 94),
        (0, 95, 0),
    ] {
        assert_eq!(dirty_limit_percent(cutoff, random), limit, "{cutoff} %, {random}");
    }
}

/// A set without a block size has blocks of a sector, and a stream may be as long as the limit or the cutoff allows.
#[test]
fn limits_of_lengths_are_met_exactly() {
    let odd = BypassInputs { block: Sectors(0), start: Sector(3), sectors: Sectors(7), ..inputs() };
    assert_eq!(reason(&odd), None);
    assert_eq!(
        reason(&BypassInputs { block: Sectors(2), start: Sector(4), ..odd }),
        Some(BypassReason::Unaligned)
    );
    assert_eq!(reason(&BypassInputs { block: Sectors(7), start: Sector(14), ..odd }), None);
    let cut = BypassInputs { sequential_cutoff_bytes: 1, ..inputs() };
    let limited = BypassInputs { congestion_limit: Some(Sectors(9)), sequential_cutoff_bytes: 0, ..inputs() };
    for length in 0..12 {
        let stream = |case: &BypassInputs| decide(case, || Sectors(length));
        assert_eq!(stream(&cut), Decision::Bypass(BypassReason::Sequential), "{length}");
        let congested = if length < 9 { Decision::Cache } else { Decision::Bypass(BypassReason::Congested) };
        assert_eq!(stream(&limited), congested, "{length}");
        let bytes = BypassInputs { sequential_cutoff_bytes: 10 * 512 + 511, ..inputs() };
        let cached = if length < 10 { Decision::Cache } else { Decision::Bypass(BypassReason::Sequential) };
        assert_eq!(stream(&bytes), cached, "{length}");
    }
}

/// Metadata is cached for these reasons only where costs are known; without costs neither it nor other data is.
#[test]
fn without_costs_the_rules_of_the_kernel_hold() {
    for meta in BOOLS {
        let hints = RequestHints { meta, ..RequestHints::default() };
        let case = BypassInputs { hints, congestion_limit: Some(Sectors(8)), ..inputs() };
        assert_eq!(decide_by_cost(&case, || Sectors(8), || None), Decision::Bypass(BypassReason::Congested));
        let mut asked = false;
        let compare = || {
            asked = true;
            None
        };
        assert_eq!(decide_by_cost(&case, || Sectors(7), compare), Decision::Cache);
        assert!(!asked, "costs matter only for what would bypass");
    }
}

/// Under the admission policy `cost` the limit of the write takes the place of both cutoffs.
#[test]
fn a_dirty_limit_takes_the_place_of_the_cutoffs() {
    let limited = |in_use_percent, limit| WriteInputs {
        in_use_percent,
        dirty_limit_percent: limit,
        cutoff_writeback: 10,
        cutoff_writeback_sync: 20,
        ..write_inputs()
    };
    assert!(should_writeback(&limited(80, Some(80)), false), "above both cutoffs");
    assert!(!should_writeback(&limited(81, Some(80)), false));
    assert!(!should_writeback(&limited(15, Some(12)), false), "below the cutoff of synchronous writes");
    assert!(!should_writeback(&limited(15, None), false));
    assert!(should_writeback(&limited(10, None), false));
    assert!(!should_writeback(&limited(80, Some(80)), true), "a bypass is one");
}

/// A write that the cache cannot take as dirty data goes to both devices if it is to be cached.
#[test]
fn paths_of_writes_by_hand() {
    let path = |change: fn(&mut WriteInputs), decision| {
        let mut case = write_inputs();
        change(&mut case);
        write_path(&case, decision)
    };
    let out = Decision::Bypass(BypassReason::Sequential);
    let bypass = WritePath::Bypass;
    assert_eq!(path(|_| {}, Decision::Cache), WritePath::Writeback);
    assert_eq!(path(|_| {}, out), bypass(BypassReason::Sequential));
    assert_eq!(path(|c| c.cache_takes_dirty = false, Decision::Cache), WritePath::Writethrough);
    assert_eq!(path(|c| c.in_use_percent = 71, Decision::Cache), WritePath::Writethrough);
    assert_eq!(path(|c| c.overlaps_dirty = true, out), WritePath::Writeback);
    let full: fn(&mut WriteInputs) = |c| (c.overlaps_dirty, c.cache_takes_dirty) = (true, false);
    assert_eq!(path(full, out), bypass(BypassReason::Sequential));
    assert_eq!(path(full, Decision::Cache), bypass(BypassReason::NoBucket));
    assert_eq!(path(|c| c.detaching = true, Decision::Cache), bypass(BypassReason::Detaching));
    let discard: fn(&mut WriteInputs) = |c| c.kind = RequestKind::Discard;
    assert_eq!(path(discard, Decision::Cache), bypass(BypassReason::Discard));
}
