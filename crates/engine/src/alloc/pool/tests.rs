//! Tests of the conditions that end a wait for buckets, and of the events that are sent.

use std::pin::pin;
use std::rc::Rc;

use format::Sectors;
use io::sync::{Either, select};

use super::*;
use crate::testing::{geometry, run, turns};

const FIRST: u32 = 4;
const NBUCKETS: u32 = 128;

/// A wait whose future is dropped no longer counts.
#[test]
fn a_wait_that_is_dropped_does_not_count() {
    run(|rt| async move {
        let alloc = Pool::new(1024, 2);
        {
            let wait = pin!(alloc.wait(Purpose::Data, || false));
            assert!(matches!(select(wait, rt.sleep(Nanos(1))).await, Either::Right(())));
            assert!(alloc.is_wanted());
        }
        assert!(!alloc.is_wanted());
    });
}

/// A wait ends when one more bucket is ready than is reserved for other purposes, or when `give_up` is true.
#[test]
fn a_wait_ends_with_the_first_bucket_beyond_the_reserves() {
    for (purpose, reserved) in
        [(Purpose::Data, 19), (Purpose::Moving, 11), (Purpose::Btree, 3), (Purpose::Prio, 0)]
    {
        run(move |rt| async move {
            let alloc = Rc::new(Pool::new(1024, 3));
            let give_up = Rc::new(Cell::new(false));
            let wait = || {
                let (alloc, give_up) = (alloc.clone(), give_up.clone());
                rt.spawn(async move { alloc.wait(purpose, || give_up.get()).await })
            };
            let asked = alloc.clone();
            let asked = rt.spawn(async move { asked.wanted.changed().await });
            rt.yield_now().await;
            let (first, second) = (wait(), wait());
            turns(&rt).await;
            assert!(asked.try_take().is_some(), "{purpose:?}: the refill task is woken");
            alloc.put_ready((0..reserved).map(BucketNr));
            turns(&rt).await;
            assert!(first.try_take().is_none() && alloc.is_wanted(), "{purpose:?}");
            alloc.put_ready([BucketNr(reserved)]);
            turns(&rt).await;
            assert!(first.try_take().is_some() && second.try_take().is_some(), "{purpose:?}");
            assert!(!alloc.is_wanted());
            alloc.take_out(99, |_| true);
            let third = wait();
            turns(&rt).await;
            give_up.set(true);
            turns(&rt).await;
            assert!(third.try_take().is_none(), "no event was sent");
            alloc.kick();
            turns(&rt).await;
            assert!(third.try_take().is_some());
        });
    }
}

/// The wait is for rounds of invalidation before the call, and for no later ones.
#[test]
fn generations_are_waited_for_until_they_are_durable() {
    run(|rt| async move {
        let alloc = Rc::new(Pool::new(1024, 3));
        let give_up = Rc::new(Cell::new(false));
        let wait = || {
            let (alloc, give_up) = (alloc.clone(), give_up.clone());
            rt.spawn(async move { alloc.generations_durable(|| give_up.get()).await })
        };
        let none = wait();
        turns(&rt).await;
        assert!(none.try_take().is_some(), "nothing was invalidated");
        alloc.invalidated();
        let one = wait();
        turns(&rt).await;
        assert!(one.try_take().is_none());
        alloc.settled();
        turns(&rt).await;
        assert!(one.try_take().is_some());
        let again = wait();
        turns(&rt).await;
        assert!(again.try_take().is_some(), "all are durable");
        alloc.invalidated();
        let given_up = wait();
        turns(&rt).await;
        give_up.set(true);
        alloc.kick();
        turns(&rt).await;
        assert!(given_up.try_take().is_some());
        // The refill task waits for `wanted`.
        let refills = alloc.clone();
        let refills = rt.spawn(async move { refills.wanted.changed().await });
        turns(&rt).await;
        assert!(refills.try_take().is_none());
        alloc.kick();
        turns(&rt).await;
        assert!(refills.try_take().is_some());
    });
}

/// Each try to take a bucket wakes the refill task, also a try that takes none.
#[test]
fn each_try_to_take_wakes_the_refill_task() {
    run(|rt| async move {
        for ready in [0, 30] {
            let alloc = Rc::new(Pool::new(1024, 3));
            let mut buckets =
                Buckets::new(&geometry(Sectors(64), NBUCKETS, FIRST as u16), BucketNr(FIRST), NBUCKETS)
                    .unwrap();
            let all: Vec<BucketNr> = (FIRST..FIRST + ready).map(BucketNr).collect();
            all.iter().for_each(|b| {
                buckets.invalidate(*b);
            });
            alloc.put_ready(all);
            let refills = alloc.clone();
            let refills = rt.spawn(async move { refills.wanted.changed().await });
            turns(&rt).await;
            assert_eq!(alloc.try_take(Purpose::Data, &mut buckets).is_some(), ready > 0);
            turns(&rt).await;
            assert!(refills.try_take().is_some());
        }
    });
}
