//! Compares the counts of the allocator with the buckets.

use format::{Gen, Ptr, Sector, Sectors};
use proptest::prelude::*;

use super::pool::Pool;
use super::*;
use crate::testing::geometry;

const BUCKET: Sectors = Sectors(64);
const NBUCKETS: u32 = 128;
const FIRST: u32 = 4;

/// Makes one change of a bucket if it is allowed; otherwise does nothing.
fn change(buckets: &mut Buckets, b: BucketNr, what: u8, sectors: u64) {
    let ptr = Ptr::new(0, Sector(u64::from(b.0) * BUCKET.0), buckets.generation(b));
    let size = Sectors(sectors);
    let used = buckets.used(b);
    let is_data = used == Use::Data;
    match what {
        0 if buckets.may_invalidate(b) => {
            buckets.invalidate(b);
        }
        1 | 2 if used == Use::Ready => buckets.take(b, what == 2),
        3 if used == Use::Metadata => buckets.free_metadata(b),
        4 if used == Use::Metadata => buckets.make_ready(b),
        5 | 6 if is_data && buckets.live(b) + size <= BUCKET => drop(buckets.add(ptr, size, what == 6)),
        7 if is_data && buckets.dirty(b) >= size => drop(buckets.sub(ptr, size, true)),
        8 if is_data && buckets.live(b) - buckets.dirty(b) >= size => drop(buckets.sub(ptr, size, false)),
        9 if is_data => buckets.pin(b),
        10 if buckets.pins(b) > 0 => buckets.unpin(b),
        11 if is_data && buckets.live(b) == Sectors::ZERO && buckets.pins(b) == 0 => buckets.mark_metadata(b),
        12 => buckets.load(b, Gen(buckets.generation(b).0), 7),
        _ => {}
    }
}

proptest! {
    /// The counts that are updated with each change always equal a complete count.
    #[test]
    fn counts_are_those_of_the_table(
        changes in prop::collection::vec((FIRST..NBUCKETS, 0u8..13, 1u64..64), 1..300)
    ) {
        let mut buckets = Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        for (b, what, sectors) in changes {
            change(&mut buckets, BucketNr(b), what, sectors);
            let count = |which: &dyn Fn(BucketNr) -> bool| buckets.all().filter(|b| which(*b)).count() as u32;
            let is_ready = |b: BucketNr| buckets.used(b) == Use::Ready;
            let is_reclaimable = |b: BucketNr| {
                buckets.used(b) == Use::Data && buckets.dirty(b) == Sectors::ZERO && buckets.pins(b) == 0
            };
            let available = count(&|b| is_ready(b) || is_reclaimable(b));
            prop_assert_eq!(buckets.available(), available);
            prop_assert_eq!(buckets.in_use_percent(), (NBUCKETS - available) * 100 / NBUCKETS);
            prop_assert_eq!(buckets.reclaimable(), count(&is_reclaimable));
            let is_unused = |b| is_ready(b) || is_reclaimable(b) && buckets.live(b) == Sectors::ZERO;
            prop_assert_eq!(buckets.unused(), count(&is_unused));
            let live = buckets.all().fold(Sectors::ZERO, |n, b| n + buckets.live(b));
            prop_assert_eq!(buckets.live_total(), live);
        }
    }
}

/// The list is refilled when it is half empty, and at once while a task waits for a bucket.
#[test]
fn the_list_is_refilled_up_to_its_target() {
    for more in 0..40 {
        let alloc = Pool::new(1024, 2);
        let (reserves, target) = (alloc.reserves.total(), alloc.reserves.total() + alloc.batch);
        assert_eq!(alloc.batch, 32);
        let have = reserves + more;
        alloc.put_ready((0..have as u32).map(BucketNr));
        let when_short = if more < 16 { target - have } else { 0 };
        assert_eq!(alloc.missing(), when_short, "{have} of {target}");
        alloc.waiting.set(1);
        assert_eq!(alloc.missing(), target.saturating_sub(have), "{have} of {target}, waited for");
    }
}

/// A bucket as the table should have it, changed one field at a time.
#[derive(Clone, Debug)]
struct Row {
    generation: u8,
    oldest: u8,
    used: Use,
    prio: u16,
    pins: u16,
    slow: bool,
    moving: bool,
    to_wipe: bool,
    unstored: bool,
    live: u64,
    dirty: u64,
}

impl Row {
    fn may_invalidate(&self) -> bool {
        let behind = self.generation.wrapping_sub(self.oldest);
        self.used == Use::Data && self.dirty == 0 && self.pins == 0 && behind < 96
    }

    fn holds(&self) -> Holds {
        match self.used {
            Use::Reserved | Use::Metadata => Holds::Metadata,
            _ if self.live == 0 => Holds::Nothing,
            _ if self.dirty == 0 => Holds::Clean,
            _ => Holds::Dirty,
        }
    }

    fn has_prio(&self) -> bool {
        self.prio != 0 && self.prio != u16::MAX
    }
}

/// The table as the comments of its functions define it.
struct Table {
    rows: Vec<Row>,
    agings: u32,
    invalidated: u64,
}

impl Table {
    fn new() -> Table {
        let row = |n: u32| Row {
            generation: 0,
            oldest: 0,
            used: if n < FIRST { Use::Reserved } else { Use::Data },
            prio: 0,
            pins: 0,
            slow: false,
            moving: false,
            to_wipe: false,
            unstored: false,
            live: 0,
            dirty: 0,
        };
        Table { rows: (0..NBUCKETS).map(row).collect(), agings: 0, invalidated: 0 }
    }

    /// Makes the same change in both tables, if it is allowed.
    #[allow(clippy::too_many_lines)]
    fn change(&mut self, buckets: &mut Buckets, b: BucketNr, what: u8, n: u64) {
        let r = &mut self.rows[b.0 as usize];
        // A pointer with the previous generation is stale.
        let stale = n.is_multiple_of(7);
        let generation = Gen(r.generation.wrapping_sub(u8::from(stale)));
        let ptr = Ptr::new(0, Sector(u64::from(b.0) * BUCKET.0 + n % BUCKET.0), generation);
        let is_data = r.used == Use::Data;
        match what {
            0 if r.may_invalidate() => {
                let next = r.generation.wrapping_add(1);
                assert_eq!(buckets.invalidate(b), next < r.generation);
                r.generation = next;
                (r.used, r.prio, r.live, r.slow, r.unstored) = (Use::Ready, 32768, 0, false, true);
                self.invalidated += 1;
            }
            1 | 2 if r.used == Use::Ready => {
                buckets.take(b, what == 2);
                (r.used, r.prio) = if what == 2 { (Use::Metadata, u16::MAX) } else { (Use::Data, 32768) };
            }
            3 if r.used == Use::Metadata => {
                buckets.free_metadata(b);
                r.generation = r.generation.wrapping_add(1);
                (r.used, r.prio, r.unstored) = (Use::Data, 0, true);
            }
            4 if r.used == Use::Metadata => {
                buckets.make_ready(b);
                (r.used, r.prio) = (Use::Ready, 32768);
            }
            5 | 6 if is_data && r.live + n <= BUCKET.0 => {
                assert_eq!(buckets.add(ptr, Sectors(n), what == 6), !stale);
                if !stale {
                    (r.live, r.dirty) = (r.live + n, r.dirty + if what == 6 { n } else { 0 });
                }
            }
            7 if is_data && r.dirty >= n => {
                assert_eq!(buckets.sub(ptr, Sectors(n), true), !stale);
                if !stale {
                    (r.live, r.dirty) = (r.live - n, r.dirty - n);
                }
            }
            8 if is_data && r.live - r.dirty >= n => {
                assert_eq!(buckets.sub(ptr, Sectors(n), false), !stale);
                r.live -= if stale { 0 } else { n };
            }
            9 if is_data => {
                buckets.pin(b);
                r.pins += 1;
            }
            10 if r.pins > 0 => {
                buckets.unpin(b);
                r.pins -= 1;
            }
            11 if r.may_invalidate() && r.live == 0 => {
                buckets.mark_metadata(b);
                (r.used, r.prio) = (Use::Metadata, u16::MAX);
            }
            12 if r.used != Use::Reserved => {
                buckets.load(b, Gen(n as u8), n as u16 * 500);
                (r.generation, r.oldest, r.prio, r.unstored) = (n as u8, n as u8, n as u16 * 500, false);
            }
            13 => {
                buckets.touch(ptr);
                r.prio = if is_data { 32768 } else { r.prio };
            }
            14 => {
                buckets.age_slowly(b);
                r.slow = true;
            }
            15 | 16 => {
                assert_eq!(buckets.set_moving(b, what == 15), r.moving != (what == 15));
                r.moving = what == 15;
            }
            17 => {
                buckets.wiped(b);
                r.to_wipe = false;
            }
            18 if r.used == Use::Data && r.live == 0 => {
                // The pointer is from 32 generations behind the present one to 32 ahead of it.
                let pointer = r.generation.wrapping_add(n as u8).wrapping_sub(32);
                buckets.raise(b, Gen(pointer));
                let older = |a: u8, b: u8| (1..=Gen::MAX_AGE).contains(&b.wrapping_sub(a));
                let before = r.generation;
                r.generation = if older(pointer, r.generation) { r.generation } else { pointer };
                r.unstored |= r.generation != before;
                r.oldest = if older(pointer, r.oldest) { pointer } else { r.oldest };
            }
            _ => {}
        }
    }

    /// Changes of all buckets at the same time.
    fn change_all(&mut self, buckets: &mut Buckets, what: u8) {
        match what {
            19 => {
                self.agings += 1;
                let all = self.agings.is_multiple_of(8);
                let aging = |r: &&mut Row| r.has_prio() && r.pins == 0;
                let mut least = 32768;
                for r in self.rows.iter_mut().filter(aging) {
                    r.prio -= u16::from(all || !r.slow);
                    least = least.min(r.prio);
                }
                assert_eq!(buckets.age(), least);
            }
            20 => {
                buckets.mark_for_wipe();
                self.rows.iter_mut().filter(|r| r.used != Use::Reserved).for_each(|r| r.to_wipe = true);
            }
            22 => {
                // The chain has an older generation of every third bucket.
                let older = |n: usize| n.is_multiple_of(3);
                let chain = self.rows.iter().enumerate();
                let chain = chain.map(|(n, r)| Gen(r.generation.wrapping_sub(u8::from(older(n)))));
                let mut waited = Vec::new();
                for (n, r) in self.rows.iter().enumerate().filter(|(n, r)| r.unstored && !older(*n)) {
                    waited.extend((r.used == Use::Data && r.live > 0).then_some(BucketNr(n as u32)));
                }
                assert_eq!(buckets.stored(chain), waited);
                let rows = self.rows.iter_mut().enumerate();
                rows.filter(|(n, _)| !older(*n)).for_each(|(_, r)| r.unstored = false);
            }
            21 => {
                let oldest: Vec<Gen> = self.rows.iter().map(|r| Gen(r.generation.wrapping_sub(3))).collect();
                buckets.finish_gc(&oldest);
                self.rows.iter_mut().for_each(|r| r.oldest = r.generation.wrapping_sub(3));
                self.invalidated = 0;
            }
            _ => {}
        }
    }

    fn compare(&self, buckets: &Buckets) {
        let mut holds = Vec::new();
        buckets.visit_range(3..NBUCKETS as usize + 9, |h, live| holds.push((h, live)));
        let expected: Vec<_> = self.rows[3..].iter().map(|r| (r.holds(), Sectors(r.live))).collect();
        assert_eq!(holds, expected);
        let mut looks = Vec::new();
        buckets.visit_all(|h, age| looks.push((h, age)));
        let age = |r: &Row| r.has_prio().then(|| 32768_u16.saturating_sub(r.prio));
        assert_eq!(looks, self.rows.iter().map(|r| (r.holds(), age(r))).collect::<Vec<_>>());
        for (n, r) in (0..).zip(&self.rows) {
            let b = BucketNr(n);
            assert_eq!((buckets.generation(b), buckets.prio(b)), (Gen(r.generation), r.prio), "{b}");
            assert_eq!((buckets.used(b), buckets.pins(b)), (r.used, r.pins), "{b}");
            assert_eq!((buckets.live(b), buckets.dirty(b)), (Sectors(r.live), Sectors(r.dirty)), "{b}");
            assert_eq!((buckets.is_moving(b), buckets.is_to_wipe(b)), (r.moving, r.to_wipe), "{b}");
            assert_eq!(buckets.may_invalidate(b), r.may_invalidate(), "{b}: {r:?}");
            let reclaimable = r.used == Use::Data && r.dirty == 0 && r.pins == 0;
            assert_eq!(buckets.is_reclaimable(b), reclaimable, "{b}");
            assert_eq!(buckets.is_stored(b), !r.unstored, "{b}");
        }
        let to_wipe = self.rows.iter().filter(|r| r.to_wipe).count();
        assert_eq!((buckets.to_wipe(), buckets.len()), (to_wipe as u32, NBUCKETS));
        assert_eq!(buckets.invalidated_since_gc(), self.invalidated);
        let prios: Vec<_> = self.rows.iter().map(|r| (r.prio, Gen(r.generation))).collect();
        assert_eq!(buckets.prios().collect::<Vec<_>>(), prios);
        assert!(buckets.generations().into_iter().eq(prios.iter().map(|p| p.1)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every field of every bucket is as the comments of the functions define it.
    #[test]
    fn the_table_has_what_was_put_into_it(
        changes in prop::collection::vec((FIRST..FIRST + 6, 0u8..23, 1u64..64), 1..300)
    ) {
        let mut buckets = Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        let mut table = Table::new();
        for (b, what, n) in changes {
            table.change(&mut buckets, BucketNr(b), what, n);
            table.change_all(&mut buckets, what);
            table.compare(&buckets);
        }
    }
}

/// The reserves in caches of several sizes: for moved data, for btree nodes, for priorities.
#[test]
fn reserves_by_the_size_of_the_cache() {
    for (nbuckets, moving, btree, batch) in
        [(64, 1, 6, 4), (1024, 8, 8, 32), (4096, 32, 32, 128), (100_000, 256, 64, 1024)]
    {
        let alloc = Pool::new(nbuckets, 3);
        let r = alloc.reserves;
        assert_eq!((r.moving, r.btree, r.prio, alloc.batch), (moving, btree, 3, batch), "{nbuckets}");
        assert_eq!(r.total(), moving + btree + 3);
        assert_eq!(r.below(Purpose::Moving), btree + 3);
        assert_eq!((r.below(Purpose::Btree), r.below(Purpose::Prio)), (3, 0));
        let plenty = 2 * (r.total() + batch) as u32;
        assert!(alloc.is_plenty(plenty + 1) && !alloc.is_plenty(plenty));
    }
}

/// All kinds of data, in the order in which the tests open their buckets.
const KINDS: [DataKind; 6] = [
    DataKind::Dirty,
    DataKind::Clean,
    DataKind::Promoted,
    DataKind::Meta,
    DataKind::Volume,
    DataKind::Moving,
];

/// The number of open buckets in caches of several sizes: one more closes the least recently used one.
#[test]
fn open_buckets_by_the_size_of_the_cache() {
    for (nbuckets, limit) in [(64, 4), (319, 4), (320, 5), (384, 6), (100_000, 6)] {
        let mut buckets =
            Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        let open = &mut OpenBuckets::of_set(&Geometry {
            nbuckets,
            bucket_sectors: BUCKET,
            block_sectors: Sectors(1),
            ..geometry(BUCKET, NBUCKETS, FIRST as u16)
        });
        for (n, kind) in (0..).zip(KINDS) {
            let bucket = BucketNr(FIRST + n);
            buckets.invalidate(bucket);
            buckets.take(bucket, false);
            let placed = open.place(kind, Sectors(8), &mut buckets, |_| Some(bucket));
            assert_eq!(placed.map(|p| buckets.bucket_of(p.ptr)), Some(bucket));
            buckets.unpin(bucket);
        }
        let are_open: Vec<u32> =
            buckets.all().filter(|b| buckets.pins(*b) > 0).map(|b| b.0 - FIRST).collect();
        assert_eq!(are_open, (6 - limit..6).collect::<Vec<_>>(), "{nbuckets}");
    }
}

/// Each purpose takes buckets, the oldest first, until the reserves for other purposes are left.
#[test]
fn buckets_are_taken_down_to_the_reserves() {
    for (purpose, left) in
        [(Purpose::Data, 19), (Purpose::Moving, 11), (Purpose::Btree, 3), (Purpose::Prio, 0)]
    {
        let mut buckets =
            Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        let alloc = Pool::new(1024, 3);
        let ready: Vec<BucketNr> = (FIRST..FIRST + 30).map(BucketNr).collect();
        ready.iter().for_each(|b| {
            buckets.invalidate(*b);
        });
        alloc.put_ready(ready.clone());
        let taken: Vec<BucketNr> = std::iter::from_fn(|| alloc.try_take(purpose, &mut buckets)).collect();
        assert_eq!(taken, ready[..30 - left], "{purpose:?}");
        assert_eq!(alloc.is_short_of_btree(), left <= 3, "{purpose:?}");
        let metadata = matches!(purpose, Purpose::Btree | Purpose::Prio);
        let used = if metadata { Use::Metadata } else { Use::Data };
        assert!(taken.iter().all(|b| buckets.used(*b) == used));
        // A wipe takes out buckets: at most the given number, in their order.
        let rest: Vec<BucketNr> = ready[30 - left..].iter().filter(|b| b.0 % 2 == 0).copied().collect();
        let most = rest.len().min(4);
        assert_eq!(alloc.take_out(4, |b| b.0 % 2 == 0), rest[..most]);
        assert_eq!(alloc.ready_len(), left - most);
    }
}

/// 106 buckets are to spare; the recent rate would fill them within 12 s, or not.
#[test]
fn a_cache_fills_up_by_what_is_taken() {
    let buckets = Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
    let at = |seconds| Nanos::from_secs(seconds);
    for (taken, filling) in [(0, false), (35, false), (36, true)] {
        let alloc = Pool::new(1024, 2);
        (0..taken).for_each(|_| alloc.fills());
        // After two seconds half of the mean rate counts.
        assert_eq!(alloc.is_filling(&buckets, at(2)), filling, "{taken}");
    }
    let alloc = Pool::new(1024, 2);
    (0..80).for_each(|_| alloc.fills());
    // The rate is 20 per second, then half of that, then a quarter.
    assert!(alloc.is_filling(&buckets, at(2)) && alloc.is_filling(&buckets, at(4)));
    assert!(!alloc.is_filling(&buckets, at(6)));
}

/// An open bucket of the naive allocator.
struct OpenedBucket {
    bucket: BucketNr,
    kind: DataKind,
    used: u64,
    last_used: usize,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// A piece goes to the open bucket of its kind, otherwise to a new bucket. A new bucket above the limit closes the
    /// bucket that was used least recently.
    #[test]
    fn pieces_of_one_kind_fill_one_bucket(
        pieces in prop::collection::vec((0usize..6, 1u64..100, prop::bool::weighted(0.8)), 1..200)
    ) {
        let (limit, block) = (4, Sectors(8));
        let mut buckets = Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        (FIRST..NBUCKETS).for_each(|b| {
            buckets.invalidate(BucketNr(b));
        });
        let mut free: Vec<BucketNr> = (FIRST..NBUCKETS).map(BucketNr).collect();
        let mut open = OpenBuckets::new(limit, BUCKET, block);
        let mut naive: Vec<OpenedBucket> = Vec::new();
        let mut pins = vec![0u16; NBUCKETS as usize];
        for (now, (kind, want, has_room)) in pieces.into_iter().enumerate() {
            let kind = KINDS[kind];
            let fresh = if has_room { free.last().copied() } else { None };
            let expected = naive.iter().find(|o| o.kind == kind).map(|o| o.bucket).or(fresh);
            let placed = open.place(kind, Sectors(want), &mut buckets, |buckets| {
                let b = fresh?;
                free.pop();
                buckets.take(b, false);
                Some(b)
            });
            prop_assert_eq!(placed.map(|p| buckets.bucket_of(p.ptr)), expected);
            let (Some(placed), Some(b)) = (placed, expected) else { continue };
            if !naive.iter().any(|o| o.bucket == b) {
                pins[b.0 as usize] += 1;
                naive.push(OpenedBucket { bucket: b, kind, used: 0, last_used: now });
                if naive.len() > limit {
                    let coldest = (0..naive.len()).min_by_key(|i| naive[*i].last_used).unwrap();
                    pins[naive.swap_remove(coldest).bucket.0 as usize] -= 1;
                }
            }
            let i = naive.iter().position(|o| o.bucket == b).unwrap();
            let o = &mut naive[i];
            let size = want.min(BUCKET.0 - o.used);
            prop_assert_eq!(placed.size, Sectors(size));
            prop_assert_eq!(placed.ptr.offset(), Sector(u64::from(b.0) * BUCKET.0 + o.used));
            prop_assert_eq!(placed.ptr.generation(), buckets.generation(b));
            o.used += size;
            o.last_used = now;
            pins[b.0 as usize] += 1;
            if BUCKET.0 - o.used < block.0 {
                naive.swap_remove(i);
                pins[b.0 as usize] -= 1;
            }
            prop_assert!(buckets.all().all(|b| buckets.pins(b) == pins[b.0 as usize]));
        }
        // A wipe closes the buckets that it has not finished.
        buckets.mark_for_wipe();
        naive.iter().take(2).for_each(|o| buckets.wiped(o.bucket));
        open.close_marked(&mut buckets);
        naive.iter().skip(2).for_each(|o| pins[o.bucket.0 as usize] -= 1);
        prop_assert!(buckets.all().all(|b| buckets.pins(b) == pins[b.0 as usize]));
    }
}

/// Of two open buckets, a wipe has not finished one: no more data goes there, and the other is still filled.
#[test]
fn a_wipe_closes_what_it_has_before_it() {
    for marked in [10, 11] {
        let mut buckets =
            Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        let mut open = OpenBuckets::new(4, BUCKET, Sectors(1));
        let place = |open: &mut OpenBuckets, buckets: &mut Buckets, kind, fresh: u32| {
            let fresh = BucketNr(fresh);
            let placed = open.place(kind, Sectors(8), buckets, |b| {
                b.invalidate(fresh);
                b.take(fresh, false);
                Some(fresh)
            });
            buckets.bucket_of(placed.unwrap().ptr).0
        };
        assert_eq!(place(&mut open, &mut buckets, DataKind::Dirty, 10), 10);
        assert_eq!(place(&mut open, &mut buckets, DataKind::Clean, 11), 11);
        buckets.mark_for_wipe();
        buckets.wiped(BucketNr(21 - marked));
        open.close_marked(&mut buckets);
        let is = |bucket| if bucket == marked { bucket + 10 } else { bucket };
        assert_eq!(place(&mut open, &mut buckets, DataKind::Dirty, 20), is(10));
        assert_eq!(place(&mut open, &mut buckets, DataKind::Clean, 21), is(11));
    }
}

/// A pointer that is one generation older than all others determines the age of the bucket.
#[test]
fn the_oldest_pointer_decides() {
    for (pointers, newest, may) in [
        (vec![], 95, true),
        (vec![], 96, false),
        (vec![255], 94, true),
        (vec![255], 95, false),
        (vec![255, 1, 0], 94, true),
    ] {
        let mut buckets =
            Buckets::new(&geometry(BUCKET, NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS).unwrap();
        let b = BucketNr(FIRST);
        buckets.load(b, Gen(0), 9);
        for pointer in pointers.iter().chain([&newest]) {
            buckets.raise(b, Gen(*pointer));
        }
        assert_eq!((buckets.generation(b), buckets.may_invalidate(b)), (Gen(newest), may), "{pointers:?}");
    }
}

/// The bucket of metadata of a file system ages more slowly than the buckets of other data.
#[test]
fn only_metadata_of_file_systems_ages_slowly() {
    use crate::testing::{Watching, components, open_set, run};
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), crate::set::SetOptions::default()).await;
        let alloc = components(set, &rt).alloc.clone();
        rt.sleep(io::Nanos::from_secs(60)).await;
        let kinds = [DataKind::Dirty, DataKind::Clean, DataKind::Promoted, DataKind::Meta, DataKind::Volume];
        let filled = kinds.map(|kind| {
            let placed = alloc.try_place(kind, Sectors(16)).unwrap();
            let bucket = alloc.buckets().bucket_of(placed.ptr);
            alloc.release(placed);
            bucket
        });
        let before = filled.map(|b| alloc.buckets().prio(b));
        for _ in 0..64 {
            alloc.buckets_mut().age();
        }
        let aged = filled.map(|b| alloc.buckets().prio(b));
        assert_eq!([0, 1, 2, 3, 4].map(|i| before[i] - aged[i]), [64, 64, 64, 8, 64]);
    });
}
