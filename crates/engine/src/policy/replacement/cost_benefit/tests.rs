//! The choice against one that looks for each bucket anew, and what segments and ghosts are for.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::Candidate;
use super::super::tests::space;
use super::*;

const FIRST: u32 = 2;
const BUCKETS: u32 = 40;
/// Buckets of a cache of which each share of some has several.
const MANY: u32 = 402;

fn policy() -> CostBenefit {
    policy_of(BUCKETS)
}

fn policy_of(nbuckets: u32) -> CostBenefit {
    CostBenefit::new(&space(FIRST, nbuckets, 0))
}

fn choose(policy: &mut CostBenefit, wanted: usize, cache: &[Candidate]) -> Vec<u32> {
    let mut out = Vec::new();
    policy.choose(wanted, 0, &|nr| cache[nr.0 as usize], &mut out);
    out.into_iter().map(|nr| nr.0).collect()
}

fn full() -> Vec<Candidate> {
    full_of(BUCKETS)
}

fn full_of(nbuckets: u32) -> Vec<Candidate> {
    vec![Candidate { eligible: true, prio: 30_000, live_sectors: 1000 }; nbuckets as usize]
}

#[derive(Clone, Debug)]
enum Step {
    Fills(u32, bool),
    Hit(u32, u32),
    Ticks(u32),
    Changes(u32, Candidate),
    Choose(usize),
    Miss(u16, u64),
}

/// Changes of a cache of so many buckets, of which up to `most` are wanted at once.
fn steps(nbuckets: u32, most: usize) -> impl Strategy<Value = Vec<Step>> {
    let bucket = FIRST..nbuckets;
    let candidate = (prop::bool::weighted(0.9), 0_u16..3, prop_oneof![1 => Just(0), 9 => 1_u32..1000])
        .prop_map(|(eligible, prio, live_sectors)| Candidate { eligible, prio, live_sectors });
    let step = prop_oneof![
        4 => (bucket.clone(), any::<bool>()).prop_map(|(b, p)| Step::Fills(b, p)),
        8 => (bucket.clone(), 1_u32..2000).prop_map(|(b, w)| Step::Hit(b, w)),
        4 => (0_u32..200).prop_map(Step::Ticks),
        2 => (bucket, candidate).prop_map(|(b, c)| Step::Changes(b, c)),
        3 => (0..most).prop_map(Step::Choose),
        2 => (0_u16..2, 0_u64..3).prop_map(|(inode, n)| Step::Miss(inode, n * 8)),
    ];
    prop::collection::vec(step, 1..200)
}

/// The policy as its description says it, with everything looked for when it is needed.
struct Oracle {
    now: u32,
    buckets: Vec<Bucket>,
    hits: u64,
    worth: u64,
    is_full: bool,
    has_room: bool,
    missed: BTreeSet<(u16, u64)>,
}

#[derive(Clone, Default)]
struct Bucket {
    probation: bool,
    drains: Option<u32>,
    born: u32,
    hits: u64,
    windows: Vec<(u64, u64)>,
    drained_rate: u64,
}

impl Oracle {
    fn new(nbuckets: u32) -> Oracle {
        let buckets = vec![Bucket::default(); nbuckets as usize];
        Oracle { now: 0, buckets, hits: 0, worth: 0, is_full: false, has_room: true, missed: BTreeSet::new() }
    }

    fn rate(&self, b: &Bucket) -> u64 {
        let parts = RATE_PARTS * u64::from(WINDOW_TICKS);
        let age = u64::from(self.now - b.born);
        if b.probation {
            return b.hits * parts / age.max(1);
        }
        if b.drains.is_some() {
            return b.drained_rate;
        }
        match b.windows.last() {
            None => {
                let usual = self.worth.checked_div(self.hits).unwrap_or(u64::from(UNKNOWN_WORTH));
                (b.hits + CREDIT_HITS * usual) * parts / (age + u64::from(WINDOW_TICKS / 2))
            }
            Some((short, long)) => *short.min(long),
        }
    }

    fn tick(&mut self) {
        self.now += 1;
        if !self.now.is_multiple_of(WINDOW_TICKS) {
            return;
        }
        let now = self.now;
        for b in self.buckets.iter_mut().filter(|b| !b.probation && b.drains.is_none()) {
            let age = u64::from((now - b.born).clamp(WINDOW_TICKS / 4, WINDOW_TICKS));
            let next = match b.windows.last() {
                None => [b.hits * RATE_PARTS * u64::from(WINDOW_TICKS) / age; 2].into(),
                Some((short, long)) => {
                    let new = b.hits * RATE_PARTS;
                    // The averages are rounded down.
                    let toward = |old: u64, n: u64| (old * (n - 1) + new) / n;
                    let n = (b.windows.len() as u64 + 1).min(u64::from(LONG_WINDOWS));
                    (toward(*short, u64::from(SHORT_WINDOWS)), toward(*long, n))
                }
            };
            b.windows.push(next);
            b.hits = 0;
        }
        (self.hits, self.worth) = (self.hits / 2, self.worth / 2);
    }

    fn choose(&mut self, wanted: usize, cache: &[Candidate]) -> Vec<u32> {
        let nbuckets = self.buckets.len();
        let eligible: Vec<u32> = (FIRST..nbuckets as u32).filter(|b| cache[*b as usize].eligible).collect();
        let (empty, mut clean): (Vec<u32>, Vec<u32>) =
            eligible.into_iter().partition(|b| cache[*b as usize].live_sectors == 0);
        let all = clean.len();
        let drains = |o: &Oracle, b: u32| o.buckets[b as usize].drains.is_some();
        let probation = |o: &Oracle, b: u32| o.buckets[b as usize].probation;
        let protected = clean.iter().filter(|b| !probation(self, **b)).count();
        self.is_full = empty.len() < wanted + nbuckets / SPARE_PART;
        // The smallest share of probation is not available to protected buckets.
        self.has_room = protected + all / PROBATION_LEAST_PART + all / 64 < all;
        let mut chosen: Vec<u32> = empty.into_iter().take(wanted).collect();
        let coldest = |o: &Oracle, clean: &[u32]| {
            let some = clean.iter().copied().filter(|b| !probation(o, *b) && !drains(o, *b));
            some.min_by_key(|b| (o.rate(&o.buckets[*b as usize]), cache[*b as usize].prio, *b))
        };
        while chosen.len() < wanted {
            let young: Vec<u32> = clean.iter().copied().filter(|b| probation(self, *b)).collect();
            let oldest = young.iter().copied().min_by_key(|b| (self.buckets[*b as usize].born, *b));
            let going = clean.iter().copied().filter(|b| drains(self, *b));
            let going = going.min_by_key(|b| (self.buckets[*b as usize].drains, *b));
            let (least, most) = (all / PROBATION_LEAST_PART, all / PROBATION_MOST_PART);
            let rate = |b: u32| self.rate(&self.buckets[b as usize]);
            let young_first = match (young.len(), oldest, going) {
                (n, ..) if n > most => true,
                (n, ..) if n <= least => false,
                (_, Some(o), Some(g)) => rate(o) <= rate(g) * PROBATION_HANDICAP,
                _ => true,
            };
            let first = if young_first { oldest.or(going) } else { going.or(oldest) };
            let Some(b) = first.or_else(|| coldest(self, &clean)) else { break };
            clean.retain(|other| *other != b);
            chosen.push(b);
        }
        let many = (protected / DRAINING_PART).max(wanted);
        while clean.iter().filter(|b| drains(self, **b)).count() < many
            && let Some(b) = coldest(self, &clean)
        {
            let rate = self.rate(&self.buckets[b as usize]);
            let (now, bucket) = (self.now, &mut self.buckets[b as usize]);
            (bucket.drains, bucket.drained_rate) = (Some(now), rate);
        }
        chosen
    }
}

/// Does the same to the policy and to its description.
fn compare(nbuckets: u32, cache: &mut [Candidate], steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (mut policy, mut oracle) = (policy_of(nbuckets), Oracle::new(nbuckets));
    for step in steps {
        match step {
            Step::Fills(b, probation) => {
                policy.on_fill(BucketNr(b), if probation { FillKind::FirstRead } else { FillKind::Lasting });
                oracle.buckets[b as usize] = Bucket { probation, born: oracle.now, ..Bucket::default() };
            }
            Step::Hit(b, worth) => {
                let leaves = policy.on_hit(BucketNr(b), worth);
                let bucket = &mut oracle.buckets[b as usize];
                prop_assert_eq!(leaves, oracle.is_full && (bucket.probation || bucket.drains.is_some()));
                bucket.hits += u64::from(worth);
                oracle.hits += 1;
                oracle.worth += u64::from(worth);
            }
            Step::Ticks(n) => {
                for _ in 0..n {
                    policy.age();
                    oracle.tick();
                }
            }
            Step::Changes(b, c) => cache[b as usize] = c,
            Step::Miss(inode, at) => {
                let again = !oracle.missed.insert((inode, at));
                let protect = policy.on_miss(Inode(inode.into()), Sector(at));
                prop_assert_eq!(protect, again && oracle.has_room);
            }
            Step::Choose(wanted) => {
                let chosen = choose(&mut policy, wanted, cache);
                let mut distinct = chosen.clone();
                distinct.sort_by_key(|b| Reverse(*b));
                distinct.dedup();
                prop_assert_eq!(distinct.len(), chosen.len());
                let eligible = cache.iter().skip(FIRST as usize).filter(|c| c.eligible).count();
                prop_assert_eq!(chosen.len(), wanted.min(eligible));
                prop_assert_eq!(chosen, oracle.choose(wanted, cache));
            }
        }
        let rates = |b: u32| (u64::from(policy.rate(&policy.heat[b as usize])), b);
        let described = |b: u32| (oracle.rate(&oracle.buckets[b as usize]), b);
        prop_assert!((FIRST..nbuckets).map(rates).eq((FIRST..nbuckets).map(described)));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A cache of which every share has several buckets, most of them on probation or not.
    #[test]
    fn chooses_as_described_of_many(
        steps in steps(MANY, 40), young in prop::collection::vec(any::<bool>(), MANY as usize), lean: bool,
    ) {
        let fills = (FIRST..MANY).map(|b| Step::Fills(b, if lean { b % 16 == 0 } else { young[b as usize] }));
        compare(MANY, &mut full_of(MANY), fills.chain(steps).collect())?;
    }
}

proptest! {
    #[test]
    fn chooses_as_described(steps in steps(BUCKETS, 12)) {
        compare(BUCKETS, &mut full(), steps)?;
    }
}

/// Whatever a scan fills, what is hit stays.
#[test]
fn a_scan_goes_through_probation_alone() {
    let mut policy = policy();
    let cache = full();
    for round in 0..400 {
        for hot in FIRST..30 {
            policy.on_hit(BucketNr(hot), 10);
        }
        for _ in 0..10 {
            policy.age();
        }
        for b in choose(&mut policy, 2, &cache) {
            assert!(b >= 30 || round < 20, "round {round}: bucket {b} is hit all the time");
            policy.on_fill(BucketNr(b), FillKind::FirstRead);
        }
    }
}

/// Of buckets with equally many hits, those go first whose hits saved less.
#[test]
fn time_counts_not_hits() {
    let mut policy = policy();
    for _ in 0..WINDOW_TICKS * 4 {
        for b in FIRST..BUCKETS {
            policy.on_hit(BucketNr(b), if b % 2 == 0 { 600 } else { 30 });
        }
        policy.age();
    }
    let chosen = choose(&mut policy, 10, &full());
    assert!(chosen.iter().all(|b| b % 2 == 1), "{chosen:?}");
}

#[test]
fn data_that_is_missed_again_is_protected_while_there_is_room() {
    let mut policy = policy();
    assert!(!policy.on_miss(Inode(1), Sector(800)), "never seen");
    assert!(policy.on_miss(Inode(1), Sector(800)));
    assert!(!policy.on_miss(Inode(2), Sector(800)), "another device");
    // All buckets count as protected now, which is more than their share.
    choose(&mut policy, 1, &full());
    assert!(!policy.on_miss(Inode(1), Sector(800)));
}

#[test]
fn ghosts_are_bounded() {
    let small = Ghosts::new(1 << 20, 8);
    assert_eq!((small.slots.len(), small.granule_shift), (1 << 19, 3), "four for each block");
    let large = Ghosts::new(1 << 40, 8);
    assert_eq!((large.slots.len(), large.granule_shift), (1 << 24, 7), "512 TiB: 32 MiB");
    let tiny = Ghosts::new(0, 0);
    assert_eq!(tiny.slots.len(), 64);
}

/// The first numbers of the generator SplitMix64 from the state 0, as they are published; each state is one step further.
#[test]
fn ghosts_are_placed_by_splitmix64() {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let published = [
        0xe220_a839_7b1d_cdaf,
        0x6e78_9e6a_a1b9_65f4,
        0x06c4_5d18_8009_454f,
        0xf88b_b8a8_724c_81ec,
        0x1b39_896a_51a8_749b,
    ];
    // Each sector is a granule, and there are 2^19 slots.
    let ghosts = Ghosts { granule_shift: 0, ..Ghosts::new(1 << 20, 8) };
    for (state, number) in (0..).map(|n: u64| n.wrapping_mul(STEP)).zip(published) {
        assert_eq!(splitmix64(state), number);
        let (index, print) = ghosts.place(Inode(0), Sector(state));
        assert_eq!((index as u64, u64::from(print)), (number & 0x7_ffff, number >> 48 | 1));
    }
    // The number of the device is in the upper bits, and the sectors of a granule have one fingerprint.
    let ghosts = Ghosts::new(1 << 20, 8);
    assert_eq!(ghosts.granule_shift, 3);
    let number = splitmix64(0x0007_0000_0000_0005);
    for sector in 40..48 {
        let (index, print) = ghosts.place(Inode(7), Sector(sector));
        assert_eq!((index as u64, u64::from(print)), (number & 0x7_ffff, number >> 48 | 1), "{sector}");
    }
    // Beyond 2^48 granules, the numbers of device and granule are in the same bits.
    let far = ghosts.place(Inode(7), Sector(3 << 51));
    assert_eq!(far, ghosts.place(Inode(4), Sector(0)), "7 ^ 3");
}

/// Sizes of caches and blocks around their limits: slots, and sectors in a granule.
#[test]
fn ghosts_by_the_size_of_the_cache() {
    for (cache, block, slots, granule) in [
        (1 << 10, 1, 1 << 12, 1),
        (1 << 10, 2, 1 << 11, 2),
        (1 << 10, 3, 1 << 10, 4),
        (16 * 8, 8, 64, 8),
        (17 * 8, 8, 128, 8),
        // The largest number of slots, and larger devices.
        (1 << 22, 1, 1 << 24, 1),
        (1 << 23, 1, 1 << 24, 2),
        (1 << 28, 1, 1 << 24, 64),
        (1 << 29, 1, 1 << 24, 128),
        (1 << 30, 1, 1 << 24, 128),
        (1 << 40, 256, 1 << 24, 256),
    ] {
        let g = Ghosts::new(cache, block);
        assert_eq!(
            (g.slots.len(), 1 << g.granule_shift),
            (slots, granule),
            "{cache} sectors, blocks of {block}"
        );
    }
}

/// Where the pool of protected buckets is as large as its share, the next miss again goes to probation.
#[test]
fn the_protected_segment_has_its_share() {
    // Of 1280 clean buckets at least 64 are for probation. 20 more keep buckets from moving back and forth.
    for (protected, has_room) in [(1195, true), (1196, false), (1197, false)] {
        let mut policy = CostBenefit::new(&space(0, 1280, 0));
        (protected..1280).for_each(|b| policy.on_fill(BucketNr(b), FillKind::FirstRead));
        policy.on_miss(Inode(1), Sector(800));
        choose(&mut policy, 0, &full_of(1280));
        assert_eq!(policy.on_miss(Inode(1), Sector(800)), has_room, "{protected} protected");
    }
}

/// As many begin to drain as are wanted next, at least a 32nd of the protected segment.
#[test]
fn a_drain_takes_a_share_of_the_protected_segment() {
    for (nbuckets, wanted, drains) in
        [(62, 1, 1), (640, 1, 20), (640, 30, 30), (640, 0, 20), (63, 0, 1), (31, 0, 0)]
    {
        let mut policy = CostBenefit::new(&space(0, nbuckets, 0));
        let cache = full_of(nbuckets);
        let chosen = choose(&mut policy, wanted, &cache);
        assert_eq!(chosen.len(), wanted);
        // All buckets are equally cold with the same priority, so the smallest numbers are evicted first.
        assert_eq!(chosen, (0..wanted as u32).collect::<Vec<_>>());
        let left: Vec<u32> = (0..nbuckets).filter(|b| policy.on_hit(BucketNr(*b), 1)).collect();
        let first = wanted as u32;
        assert_eq!(left, (first..first + drains).collect::<Vec<_>>(), "{nbuckets} buckets, {wanted} wanted");
    }
}

/// What is hit on probation is copied only while fewer buckets hold nothing than are wanted, and a quarter of all.
#[test]
fn nothing_is_copied_while_there_is_room() {
    for (empty, wanted, copies) in
        [(12, 3, true), (13, 3, false), (10, 0, false), (9, 0, true), (38, 28, false)]
    {
        let mut policy = policy();
        let mut cache = full();
        policy.on_fill(BucketNr(BUCKETS - 1), FillKind::FirstRead);
        (FIRST..FIRST + empty).for_each(|b| cache[b as usize].live_sectors = 0);
        choose(&mut policy, wanted, &cache);
        assert_eq!(policy.on_hit(BucketNr(BUCKETS - 1), 1), copies, "{empty} empty, {wanted} wanted");
        assert!(!policy.on_hit(BucketNr(BUCKETS), 1), "there is no such bucket");
    }
}

/// The first window of a bucket is as long as the bucket is old, at least a quarter of a whole one.
#[test]
fn the_first_rate_is_by_the_age_of_the_bucket() {
    let (hits, parts) = (10, 16 * 128);
    for (age, ticks) in [(1, 32), (25, 32), (31, 32), (32, 32), (33, 33), (127, 127), (128, 128), (200, 128)]
    {
        let mut policy = policy();
        let b = BucketNr(FIRST);
        // The bucket is filled this many ticks before the end of a window in which it is hit ten times.
        (0..256 - age).for_each(|_| policy.age());
        policy.on_fill(b, FillKind::Lasting);
        (0..age - 1).for_each(|_| policy.age());
        let before = if age > 128 { 0 } else { hits };
        for _ in 0..before {
            policy.on_hit(b, 1);
        }
        policy.age();
        let rate = policy.rate(&policy.heat[FIRST as usize]);
        assert_eq!(rate, before * parts / ticks, "{age} ticks old");
    }
}

/// A new bucket starts with eight hits of the recent mean worth. If there were too few recent hits, it starts with eight
/// hits of the default worth.
#[test]
fn a_new_bucket_is_credited_with_the_usual_hits() {
    let b = BucketNr(FIRST);
    for (hits, worth, windows, usual) in [
        (0, 0, 0, 16),
        (10, 40, 0, 40),
        (10, 40, 1, 40),
        (10, 40, 2, 50),
        (10, 40, 3, 50),
        (10, 40, 4, 16),
        (1, 7, 1, 16),
    ] {
        let mut policy = policy();
        for _ in 0..hits {
            policy.on_hit(BucketNr(FIRST + 1), worth);
        }
        (0..windows * 128).for_each(|_| policy.age());
        policy.on_fill(b, FillKind::Lasting);
        for age in 0..3 {
            let rate = policy.rate(&policy.heat[FIRST as usize]);
            assert_eq!(rate, 8 * usual * 16 * 128 / (64 + age), "{hits} hits, {windows} windows ago");
            policy.age();
        }
    }
}

/// On probation all hits count, by the age of the bucket.
#[test]
fn a_rate_on_probation_is_by_the_age_of_the_bucket() {
    let mut policy = policy();
    policy.on_fill(BucketNr(FIRST), FillKind::FirstRead);
    policy.on_hit(BucketNr(FIRST), 3);
    for age in 0..300_u32 {
        let rate = policy.rate(&policy.heat[FIRST as usize]);
        assert_eq!(rate, 3 * 16 * 128 / age.max(1), "{age} ticks old");
        policy.age();
    }
}
