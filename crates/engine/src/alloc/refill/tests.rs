//! Buckets made ready, in a whole set: which, in what order, and what happens when there are none.

use std::cell::Cell;

use format::{Gen, Replacement};
use io::{CrashLogMemory, CrashLogRef, Handle, Op};

use super::*;
use crate::alloc::{Purpose, Use, load_prios};
use crate::device::Reader;
use crate::events::SetEvent;
use crate::policy::replacement::PolicyEntry;
use crate::set::{CacheSet, SetOptions};
use crate::testing::{Watching, components, fill_bucket, open_set, run, turns};
use crate::volume::Cache;

const BUCKET: u64 = 16;
const NBUCKETS: u32 = 1024;

async fn set_on(device: &Rc<Watching>, rt: &Handle, discard: bool) -> CacheSet {
    let set = open_set(device, rt, (BUCKET, discard), SetOptions::default()).await;
    // The priorities belong to the set, so their bucket is ready again after another one has replaced it.
    set.cache().alloc.prios.is_ours.set(true);
    set
}

async fn cache(rt: &Handle) -> Rc<Cache> {
    components(set_on(&Watching::new(u64::from(NBUCKETS) * BUCKET), rt, false).await, rt)
}

/// Buckets that may be invalidated now.
fn free(cache: &Cache) -> Vec<BucketNr> {
    let buckets = cache.alloc.buckets();
    buckets.all().filter(|b| buckets.may_invalidate(*b)).collect()
}

/// Keeps every bucket from being invalidated.
fn pin_all(cache: &Cache) -> Vec<BucketNr> {
    let all = free(cache);
    all.iter().for_each(|b| cache.alloc.buckets_mut().pin(*b));
    all
}

/// At a start, buckets without live data are ready, and no others; as many as are wanted, the first ones first.
#[test]
fn empty_buckets_are_ready_at_once() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let ready = cache.alloc.pool.ready_len();
        let first: Vec<u32> = free(&cache).iter().map(|b| b.0).collect();
        fill_bucket(&cache, first[0], 1, false);
        fill_bucket(&cache, first[1], 1, true);
        cache.alloc.buckets_mut().pin(BucketNr(first[2]));
        let before = cache.alloc.buckets().generations();
        prime(&cache.alloc, 3);
        assert_eq!(cache.alloc.pool.ready_len(), ready + 3);
        let taken = cache.alloc.pool.take_out(5000, |_| true);
        assert_eq!(taken[ready..], [first[3], first[4], first[5]].map(BucketNr));
        let buckets = cache.alloc.buckets();
        for b in buckets.all() {
            let is_new = taken[ready..].contains(&b);
            let was = before[b.0 as usize];
            assert_eq!(buckets.generation(b), if is_new { was.next() } else { was }, "{b}");
            assert!(!is_new || buckets.used(b) == Use::Ready);
        }
    });
}

/// Chosen buckets get new generations; those whose generations went around are counted.
#[test]
fn invalidated_buckets_get_new_generations() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let all = free(&cache);
        let (around, others) = (&all[..3], &all[3..]);
        around.iter().for_each(|b| cache.alloc.buckets_mut().load(*b, Gen(255), 9));
        others.iter().for_each(|b| cache.alloc.buckets_mut().load(*b, Gen(9), 9));
        assert_eq!(invalidate(&cache.alloc, 0), []);
        let picked = invalidate(&cache.alloc, 10);
        assert_eq!(picked, all[..10], "nothing is in them, so by number");
        assert_eq!(cache.alloc.counters().gen_wraps, 3);
        let generations = |bs: &[BucketNr]| -> Vec<u8> {
            bs.iter().map(|b| cache.alloc.buckets().generation(*b).0).collect()
        };
        assert_eq!(generations(&picked), [0, 0, 0, 10, 10, 10, 10, 10, 10, 10]);
        assert!(picked.iter().all(|b| cache.alloc.buckets().used(*b) == Use::Ready));
        // Buckets with the least live data are evicted first.
        let rest = free(&cache);
        rest.iter().for_each(|b| fill_bucket(&cache, b.0, if b.0 % 3 == 0 { 2 } else { 3 }, false));
        let light: Vec<BucketNr> = rest.iter().filter(|b| b.0 % 3 == 0).copied().collect();
        assert_eq!(invalidate(&cache.alloc, light.len()), light);
        assert_eq!(cache.alloc.counters().gen_wraps, 3);
    });
}

/// A random choice that finds none of the few that there are finds them all the same.
#[test]
fn the_last_bucket_is_found() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        cache.alloc.eviction().set_policy(PolicyEntry::stored(Replacement::Random));
        let all = pin_all(&cache);
        assert_eq!(invalidate(&cache.alloc, 1), []);
        for b in all.iter().step_by(29) {
            cache.alloc.buckets_mut().unpin(*b);
            assert_eq!(invalidate(&cache.alloc, 2), [*b]);
        }
    });
}

/// Before a bucket is ready, its new generation is on the device, and a request that waits for the bucket continues.
#[test]
fn generations_are_durable_before_their_buckets_are_ready() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let (ready, expected) = (cache.alloc.pool.ready_len(), free(&cache)[..5].to_vec());
        assert_eq!(refill(&cache.alloc, 5).await.unwrap(), 5);
        assert_eq!(cache.alloc.pool.ready_len(), ready + 5);
        let chain = cache.alloc.prios.buckets.borrow()[0];
        let reader = Reader {
            disk: cache.device.disk(),
            place: cache.device.place(),
            geometry: &cache.geometry,
            magic: cache.device.magic(),
        };
        let loaded = load_prios(&reader, chain.0.into()).await.unwrap();
        for b in &expected {
            let (on_device, now) =
                (loaded.prios[b.0 as usize].generation, cache.alloc.buckets().generation(*b));
            assert_eq!(on_device, now, "{b}");
        }
        cache.alloc.generations_durable(|| false).await;
        let taken = cache.alloc.pool.take_out(5000, |b| expected.contains(&b));
        assert_eq!(taken, expected);
        let writes = cache.alloc.counters().prio_writes;
        pin_all(&cache);
        assert_eq!(refill(&cache.alloc, 5).await.unwrap(), 0);
        assert_eq!(cache.alloc.counters().prio_writes, writes, "nothing has changed");
        assert!(cache.alloc.prios.lock.try_lock().is_some(), "others may write");
    });
}

/// While the new generations are on their way, no request may rely on them, and the buckets are not ready.
#[test]
fn generations_on_their_way_are_waited_for() {
    run(|rt| async move {
        let device = Watching::new(u64::from(NBUCKETS) * BUCKET);
        let cache = components(set_on(&device, &rt, false).await, &rt);
        let ready = cache.alloc.pool.ready_len();
        device.disk().hold(true);
        let refills = cache.clone();
        let refills = rt.spawn(async move { refill(&refills.alloc, 3).await.unwrap() });
        device.disk().held(1, &rt).await;
        let waiting = cache.clone();
        let waiting = rt.spawn(async move { waiting.alloc.generations_durable(|| false).await });
        turns(&rt).await;
        assert!(waiting.try_take().is_none() && refills.try_take().is_none());
        assert!(
            cache.alloc.pool.ready_len() < ready,
            "one is taken for the priorities, and none is there yet"
        );
        device.disk().hold(false);
        assert_eq!(refills.await, 3);
        waiting.await;
        assert_eq!(cache.alloc.pool.ready_len(), ready + 3);
    });
}

/// While buckets are discarded, others may write priorities: it is the device that takes its time.
#[test]
fn discards_hold_up_no_priorities() {
    run(|rt| async move {
        let device = Watching::new(u64::from(NBUCKETS) * BUCKET);
        let cache = components(set_on(&device, &rt, true).await, &rt);
        device.holds.set(Some(Op::Discard));
        let refills = cache.clone();
        let refills = rt.spawn(async move { refill(&refills.alloc, 3).await.unwrap() });
        device.disk().held(3, &rt).await;
        assert!(cache.alloc.prios.lock.try_lock().is_some());
        device.holds.set(None);
        device.disk().hold(false);
        assert_eq!(refills.await, 3);
    });
}

/// Whether the crash log of a set was given up.
#[derive(Default)]
struct Log(Cell<u32>);

impl CrashLogMemory for Log {
    fn record(&self, _: u64, _: &[u64]) {}

    fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
        Vec::new()
    }

    fn reset(&self) {
        self.0.set(self.0.get() + 1);
    }

    fn tie(&self, _: [u64; 2]) {}

    fn tied(&self) -> [u64; 2] {
        [0, 0]
    }
}

/// Each bucket is discarded, if the superblock says so. A device that cannot is no worse for it; one that fails may have lost
/// its power.
#[test]
fn buckets_are_discarded_before_they_are_ready() {
    run(|rt| async move {
        let device = Watching::new(u64::from(NBUCKETS) * BUCKET);
        let log = Rc::new(Log::default());
        let crash_log = Some(CrashLogRef(log.clone()));
        let options = SetOptions { crash_log, ..SetOptions::default() };
        let cache = components(open_set(&device, &rt, (BUCKET, true), options).await, &rt);
        cache.alloc.prios.is_ours.set(true);
        let resets = log.0.get();
        device.take(Op::Discard);
        for (refuses, is_bad) in [
            ((|_| None) as fn(&io::Request) -> Option<i32>, false),
            (|r| (r.op == Op::Discard).then_some(95), false),
            (|r| (r.op == Op::Discard).then_some(5), true),
        ] {
            device.refuses.set(refuses);
            let (ready, expected) = (cache.alloc.pool.ready_len(), free(&cache)[..4].to_vec());
            cache.device.events().take();
            assert_eq!(refill(&cache.alloc, 4).await.unwrap(), 4);
            let places: Vec<(u64, u64)> =
                expected.iter().map(|b| (u64::from(b.0) * BUCKET, BUCKET)).collect();
            assert_eq!(device.take(Op::Discard), places);
            assert_eq!(cache.alloc.pool.ready_len(), ready + 4);
            let invalid =
                cache.device.events().take().iter().any(|e| matches!(e, SetEvent::CrashLogInvalid { .. }));
            assert_eq!((invalid, log.0.get() - resets), (is_bad, u32::from(is_bad)));
            assert!(!cache.device.is_failed());
        }
        let other = Watching::new(u64::from(NBUCKETS) * BUCKET);
        let cache = components(set_on(&other, &rt, false).await, &rt);
        refill(&cache.alloc, 4).await.unwrap();
        assert_eq!(other.take(Op::Discard), []);
    });
}

/// The list is filled up again when it gets short, and not before.
#[test]
fn a_short_list_is_refilled() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let (total, batch) = (cache.alloc.pool.reserves.total(), cache.alloc.pool.batch);
        assert_eq!(cache.alloc.pool.ready_len(), total + batch);
        let take = || cache.alloc.pool.try_take(Purpose::Data, &mut cache.alloc.buckets_mut());
        for _ in 0..batch / 2 {
            take().unwrap();
        }
        turns(&rt).await;
        assert_eq!(cache.alloc.pool.ready_len(), total + batch / 2, "not short yet");
        let packing = cache.clone();
        let packing = rt.spawn(async move { packing.alloc.walks.changed().await });
        turns(&rt).await;
        assert!(packing.try_take().is_none());
        take().unwrap();
        turns(&rt).await;
        assert_eq!(cache.alloc.pool.ready_len(), total + batch);
        assert!(packing.try_take().is_some(), "packing may be due");
        assert!(!cache.alloc.pool.starved.get());
    });
}

/// Nothing can be invalidated: the allocator starves until there is something. Buckets whose generations ran ahead need a
/// walk of the index; where there is nothing but pinned ones, a walk is no help.
#[test]
fn an_allocator_that_starves_goes_on_when_there_is_something() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let all = pin_all(&cache);
        let taken = cache.alloc.pool.take_out(5000, |_| true);
        let walks = || cache.tasks.times().borrow().gc_durations.count();
        let begun = walks();
        cache.alloc.kick();
        turns(&rt).await;
        assert!(cache.alloc.pool.starved.get());
        assert_eq!((walks(), cache.alloc.walks.is_wanted()), (begun, false), "no walk was asked for");

        // The first bucket is 96 generations ahead of its oldest pointer.
        for b in &all[..1] {
            cache.alloc.buckets_mut().load(*b, Gen(0), 9);
            cache.alloc.buckets_mut().raise(*b, Gen(96));
            cache.alloc.buckets_mut().unpin(*b);
        }
        cache.alloc.pool.put_ready(taken[..20].iter().copied());
        assert_eq!((free(&cache).len(), cache.alloc.buckets().reclaimable()), (0, 1));
        cache.alloc.kick();
        turns(&rt).await;
        assert!(walks() > begun, "a walk was asked for");
        cache.alloc.kick();
        turns(&rt).await;
        assert_eq!((cache.alloc.pool.ready_len(), cache.alloc.pool.starved.get()), (21, true));
        all[1..].iter().for_each(|b| cache.alloc.buckets_mut().unpin(*b));
        cache.alloc.kick();
        turns(&rt).await;
        let full = cache.alloc.pool.reserves.total() + cache.alloc.pool.batch;
        assert_eq!((cache.alloc.pool.ready_len(), cache.alloc.pool.starved.get()), (full, false));
    });
}

/// Waiters of a starving allocator look again: what they wait for may not come.
#[test]
fn waits_end_when_no_bucket_can_be_made_ready() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        pin_all(&cache);
        cache.alloc.pool.take_out(5000, |_| true);
        let waiting = cache.clone();
        let waits = rt.spawn(async move {
            waiting.alloc.wait(Purpose::Data, || waiting.alloc.pool.starved.get()).await;
        });
        turns(&rt).await;
        assert!(waits.try_take().is_some());
    });
}

/// Buckets are there but none for the priorities: the set fails.
#[test]
fn a_set_that_cannot_write_priorities_fails() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        cache.alloc.pool.take_out(5000, |_| true);
        cache.alloc.kick();
        turns(&rt).await;
        assert!(cache.device.is_failed());
        let why = cache.device.check().unwrap_err().to_string();
        assert!(why.contains("buckets are free for priorities"), "{why}");
    });
}

/// A stop ends the task, whatever is missing.
#[test]
fn a_stop_ends_the_refilling() {
    run(|rt| async move {
        let cache = cache(&rt).await;
        let task = rt.spawn(refill_task(cache.alloc.clone()));
        turns(&rt).await;
        assert!(task.try_take().is_none());
        cache.device.stop();
        cache.alloc.kick();
        turns(&rt).await;
        assert!(task.try_take().is_some());
        cache.alloc.pool.take_out(5000, |_| true);
        let late = rt.spawn(refill_task(cache.alloc.clone()));
        turns(&rt).await;
        assert!(late.try_take().is_some() && !cache.device.is_failed());
    });
}

/// Generations of a start are not durable. On request the refill task stores them, if that leaves the reserves of btree nodes and
/// of the next chain. The buckets with data are reported, because their footers have waited.
#[test]
fn generations_are_stored_on_request() {
    run(|rt| async move {
        let set = open_set(
            &Watching::new(u64::from(NBUCKETS) * BUCKET),
            &rt,
            (BUCKET, false),
            SetOptions::default(),
        )
        .await;
        let core = components(set, &rt);
        let alloc = &core.alloc;
        alloc.idle.want();
        let mut ready = alloc.pool.take_out(5000, |_| true);
        let (with_data, pinned, empty) = (ready.remove(0), ready.remove(0), ready.remove(0));
        for b in [with_data, pinned, empty] {
            alloc.buckets_mut().take(b, false);
            assert!(!alloc.is_stored(b));
        }
        fill_bucket(&core, with_data.0, 3, true);
        fill_bucket(&core, pinned.0, 3, true);
        alloc.pin(pinned);
        let chain = core.geometry.prio_buckets as usize;
        let rest = ready.split_off(alloc.pool.reserves.below(Purpose::Moving) + chain - 1);
        alloc.pool.put_ready(ready);
        let written = alloc.counters().prio_writes;
        assert!(!alloc.store_generation(with_data).await, "there is no room");
        assert_eq!(alloc.counters().prio_writes, written);
        alloc.pool.put_ready(rest);
        assert!(alloc.store_generation(empty).await);
        assert_eq!(alloc.counters().prio_writes, written + 1);
        assert!([with_data, pinned, empty].iter().all(|b| alloc.is_stored(*b)));
        assert_eq!(alloc.idle.take(), [with_data]);
        assert!(alloc.store_generation(with_data).await && !alloc.prios.is_wanted());
        assert_eq!(alloc.counters().prio_writes, written + 1, "all are stored");
        let reader = Reader {
            disk: core.device.disk(),
            place: core.device.place(),
            geometry: &core.geometry,
            magic: core.device.magic(),
        };
        let first = alloc.prios.buckets.borrow()[0];
        let loaded = load_prios(&reader, first.0.into()).await.unwrap();
        let now = alloc.buckets().generation(with_data);
        assert_eq!(loaded.prios[with_data.0 as usize].generation, now);
    });
}
