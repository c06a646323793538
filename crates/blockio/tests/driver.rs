//! The driver's loop: timers, wake-ups from other threads, the bridge, the end.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blockio::bridge::{Disconnected, TrySendError, channel, oneshot};
use blockio::{Backend, BusyPoll, Driver, DriverOptions, FileDevice, OpenOptions};
use common::{drivers, sparse_file};
use format::{Sector, Sectors};
use io::{Disk, Nanos};

#[test]
fn the_backend_is_told() {
    let [ring, pool]: [Driver; 2] = drivers().try_into().unwrap_or_else(|_| panic!("two drivers"));
    assert!(!pool.reactor().is_uring());
    assert!(pool.backend_note().contains("16 threads"), "{}", pool.backend_note());
    let note = ring.backend_note();
    assert!(note.contains(if ring.reactor().is_uring() { "io_uring (" } else { "cannot be used" }), "{note}");
}

#[test]
fn timers_fire_in_order_and_not_early() {
    for driver in drivers() {
        let rt = driver.handle();
        let order = Rc::new(Cell::new(0));
        driver.block_on(async {
            let start = rt.now();
            let tasks: Vec<_> = [3u64, 1, 2]
                .into_iter()
                .map(|ms| {
                    let (rt, order) = (rt.clone(), order.clone());
                    rt.clone().spawn(async move {
                        rt.sleep(Nanos::from_ms(ms)).await;
                        assert!(rt.now().since(start) >= Nanos::from_ms(ms));
                        order.set(order.get() * 10 + ms);
                    })
                })
                .collect();
            for t in tasks {
                t.await;
            }
        });
        assert_eq!(order.get(), 123);
    }
}

#[test]
fn an_idle_driver_sleeps() {
    for driver in drivers() {
        let rt = driver.handle();
        let mut polls = 0;
        let before = cpu_time();
        driver.block_on(async {
            let mut sleep = std::pin::pin!(rt.sleep(Nanos::from_ms(200)));
            std::future::poll_fn(|cx| {
                polls += 1;
                sleep.as_mut().poll(cx)
            })
            .await;
        });
        assert_eq!(polls, 2, "polled when it began and when it was woken");
        let used = cpu_time() - before;
        assert!(used < 100_000_000, "a thread that waits uses no time, this one used {used} ns");
    }
}

/// Nanoseconds that this thread has run.
fn cpu_time() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

#[test]
fn requests_of_threads_are_answered_by_a_task() {
    for driver in drivers() {
        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(2048));
        let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        let disk = Disk::new(Rc::new(device), driver.handle());
        let (sender, mut receiver) = channel::<(u64, blockio::bridge::Reply<u8>)>(4);
        let threads: Vec<_> = (0..4u64)
            .map(|t| {
                let sender = sender.clone();
                thread::spawn(move || {
                    for i in 0..200 {
                        let n = t * 200 + i;
                        assert_eq!(sender.call(|reply| (n, reply)), Ok(n as u8));
                    }
                })
            })
            .collect();
        drop(sender);
        driver.block_on(async {
            let mut served = 0;
            while let Some((n, reply)) = receiver.recv().await {
                served += 1;
                let mut buffer = disk.runtime().pool().take(512);
                buffer.as_mut().fill(n as u8);
                disk.write(Sector(n), buffer.clone(), false).await.unwrap();
                drop(buffer);
                let (buffer, result) = disk.read(Sector(n), disk.runtime().pool().take(512)).await;
                result.unwrap();
                reply.send(buffer.as_slice()[511]);
            }
            assert_eq!(served, 800, "the last sender is gone");
        });
        for t in threads {
            t.join().unwrap();
        }
    }
}

#[test]
fn a_wait_for_a_closed_side_ends() {
    let driver = drivers().remove(0);
    let (reply, answer) = oneshot::<u8>();
    drop(reply);
    assert_eq!(answer.wait(), Err(Disconnected(())));
    let (reply, answer) = oneshot::<u8>();
    let t = thread::spawn(move || drop(reply));
    assert_eq!(driver.block_on(answer), Err(Disconnected(())));
    t.join().unwrap();

    let (sender, receiver) = channel::<u8>(1);
    sender.send(1).unwrap();
    assert_eq!(sender.try_send(2), Err(TrySendError::Full(2)));
    let blocked = thread::spawn({
        let sender = sender.clone();
        move || sender.send(3)
    });
    drop(receiver);
    // Either it got its place before the receiver ended, or it got an error; it returned in both cases.
    let _ = blocked.join().unwrap();
    assert_eq!(sender.send(4), Err(Disconnected(4)));
    assert_eq!(sender.try_send(4), Err(TrySendError::Disconnected(4)));

    // A request that is dropped with the queue answers its caller.
    let (sender, receiver) = channel::<blockio::bridge::Reply<u8>>(8);
    let caller = thread::spawn(move || sender.call(|reply| reply));
    driver.block_on(async {
        let mut receiver = receiver;
        let request = receiver.recv().await.unwrap();
        drop(request);
    });
    assert_eq!(caller.join().unwrap(), Err(Disconnected(())));
}

#[test]
fn blocking_work_runs_elsewhere_and_its_panic_comes_back() {
    for driver in drivers() {
        let here = thread::current().id();
        let reactor = driver.reactor().clone();
        let there = driver.block_on(reactor.blocking(|| thread::current().id()));
        assert_ne!(here, there);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            driver.block_on(reactor.blocking(|| panic!("of the helper")));
        }));
        assert_eq!(*caught.unwrap_err().downcast::<&str>().unwrap(), "of the helper");
        // The driver still works after a task panicked in it.
        assert_eq!(driver.block_on(reactor.blocking(|| 7)), 7);
    }
}

#[test]
fn dropping_the_driver_waits_for_writes_in_flight() {
    for driver in drivers() {
        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(1 << 16));
        let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        let disk = Disk::new(Rc::new(device), driver.handle());
        let rt = driver.handle();
        for i in 0..64u64 {
            let disk = disk.clone();
            rt.spawn(async move {
                let mut buffer = disk.runtime().pool().take(1 << 19);
                buffer.as_mut().fill(0x55);
                disk.write(Sector(i << 10), buffer, false).await.unwrap();
            });
        }
        driver.block_on(rt.yield_now());
        drop(driver);
        assert!(
            std::fs::read(&path).unwrap().iter().all(|b| *b == 0x55),
            "submitted writes ran to their end"
        );
        // What comes later fails, and the buffer comes back.
        let other = Driver::new(DriverOptions::default()).unwrap();
        let buffer = disk.runtime().pool().take(512);
        let done = other.block_on(disk.start_write(Sector(0), Sectors(1), buffer, 0, false));
        assert_eq!(done.result.unwrap_err().errno, 125, "ECANCELED");
        assert!(done.buffer.is_some());
    }
}

#[test]
fn a_task_must_not_block_on_its_own_driver() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        driver.block_on(async { driver.block_on(async {}) });
    }));
    assert!(caught.is_err());
    driver.block_on(async {});
}

#[test]
fn several_drivers_run_on_several_threads() {
    let sum = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..3)
        .map(|n| {
            let sum = sum.clone();
            thread::spawn(move || {
                let backend = if n == 0 { Backend::Pool } else { Backend::Auto };
                let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
                let rt = driver.handle();
                driver.block_on(async move {
                    rt.sleep(Nanos::from_ms(1)).await;
                    sum.fetch_add(n, Ordering::SeqCst);
                });
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
    assert_eq!(sum.load(Ordering::SeqCst), 3);
}

#[test]
fn operations_that_are_started_together_go_to_the_kernel_together() {
    let driver = drivers().remove(0);
    if !driver.reactor().is_uring() {
        rig::skipped(driver.backend_note());
        return;
    }
    let dir = common::dir();
    let path = sparse_file(dir.path(), "disk", Sectors(8192));
    let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
    let disk = Disk::new(Rc::new(device), driver.handle());
    let before = driver.reactor().counts();
    driver.block_on(async {
        let reads: Vec<_> = (0..30)
            .map(|i| disk.start_read(Sector(i * 8), Sectors(8), disk.runtime().pool().take(4096), 0))
            .collect();
        // The last first: what the others wake is taken in meanwhile.
        for r in reads.into_iter().rev() {
            r.await.result.unwrap();
        }
    });
    let after = driver.reactor().counts();
    assert_eq!((after.operations - before.operations, after.commands - before.commands), (30, 30));
    let calls = after.kernel_calls - before.kernel_calls;
    assert!(calls < 32, "30 reads fit into one submission, and each result may end one wait: {calls} calls");
}

/// Two threads send numbers to each other. A thread that polls before it sleeps is often still awake, and no number is lost.
#[test]
fn a_wake_up_before_sleep_is_not_lost() {
    const ROUNDS: u64 = 3000;
    let looking = || {
        let busy_poll = BusyPoll::UpTo(Nanos::from_ms(5));
        let options = DriverOptions { busy_poll, ..DriverOptions::default() };
        Driver::new(options).unwrap()
    };
    let (there, mut inbox) = channel::<u64>(1);
    let (back, mut answers) = channel::<u64>(1);
    let other = thread::spawn(move || {
        let driver = looking();
        driver.block_on(async {
            while let Some(n) = inbox.recv().await {
                back.send(n + 1).unwrap();
            }
        });
    });
    let driver = looking();
    driver.block_on(async {
        for n in 0..ROUNDS {
            there.send(n).unwrap();
            assert_eq!(answers.recv().await, Some(n + 1));
        }
    });
    drop(there);
    other.join().unwrap();
    let counts = driver.reactor().counts();
    assert!(counts.found <= counts.looks && counts.looks <= counts.waits, "{counts:?}");
    if driver.reactor().is_uring() {
        assert!(counts.found > 0, "{counts:?}");
        assert!(driver.backend_note().contains("polled for up to 5000 us"), "{}", driver.backend_note());
    } else {
        assert_eq!(counts.looks, 0, "{counts:?}");
    }
}
