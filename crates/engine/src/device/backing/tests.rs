//! Tests of a backing device alone: the states in its superblock, its flushes and its errors.

use std::rc::Rc;

use format::superblock::BackingFormat;
use io::{Handle, Nanos, Op};

use super::*;
use crate::refusal::Refusal;
use crate::testing::{Watching, run, turns};

fn formatted(disk: &Disk) -> BackingSuper {
    let mut label = [0; 32];
    label[..4].copy_from_slice(b"data");
    BackingSuper::format(&BackingFormat {
        uuid: Uuid([2; 16]),
        set_uuid: Uuid([7; 16]),
        device_sectors: disk.info().sectors,
        block_sectors: Sectors(2),
        bucket_sectors: Sectors(64),
        data_offset: Sector(32),
        cache_mode: CacheMode::Writeback,
        label,
    })
    .unwrap()
}

fn backing_on(device: &Rc<Watching>, rt: &Handle) -> Rc<BackingDevice> {
    let disk = Disk::new(device.clone(), rt.clone());
    let mut superblock = formatted(&disk);
    superblock.set_state(BackingState::Clean);
    Rc::new(BackingDevice::new(disk, superblock))
}

/// The superblock on the device.
async fn on_device(backing: &BackingDevice) -> BackingSuper {
    read_backing(&backing.disk).await.unwrap()
}

const FUA: Op = Op::Write { fua: true };

#[test]
fn the_superblock_is_shown_as_it_is() {
    run(|rt| async move {
        let b = backing_on(&Watching::new(4096), &rt);
        assert_eq!((b.uuid(), b.set_uuid(), b.state()), (Uuid([2; 16]), Uuid([7; 16]), BackingState::Clean));
        assert_eq!(
            (b.data_offset(), b.data_sectors(), b.block_sectors()),
            (Sector(32), Sectors(4064), Sectors(2))
        );
        assert_eq!(
            (b.cache_mode(), b.label(), &b.label_bytes()[..5]),
            (CacheMode::Writeback, "data".into(), &b"data\0"[..])
        );
        assert_eq!(b.registration(), None);
        let number = Some(RegistrationNr::from_random(9));
        b.update(|sb| sb.set_registration(number)).await.unwrap();
        assert_eq!(b.registration(), number);
    });
}

/// An update takes effect after it is on the device, with the time of the write; a failed one has no effect.
#[test]
fn an_update_counts_when_it_is_on_the_device() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        rt.sleep(Nanos::from_secs(5)).await;
        b.update(|sb| sb.set_cache_mode(CacheMode::None)).await.unwrap();
        assert_eq!(device.take(FUA), [(8, 8)]);
        let there = on_device(&b).await;
        assert_eq!((there.cache_mode(), there.last_mount()), (Some(CacheMode::None), 1_000_005));
        assert_eq!(b.cache_mode(), CacheMode::None);
        device.refuses.set(|r| (r.op == FUA).then_some(5));
        assert!(b.update(|sb| sb.set_cache_mode(CacheMode::Writethrough)).await.is_err());
        assert_eq!((b.cache_mode(), b.state()), (CacheMode::None, BackingState::Clean));
        device.refuses.set(|_| None);
        b.update(|sb| sb.set_cache_mode(CacheMode::Writearound)).await.unwrap();
        assert_eq!(
            (b.cache_mode(), on_device(&b).await.cache_mode()),
            (CacheMode::Writearound, Some(CacheMode::Writearound))
        );
    });
}

/// The state dirty takes effect when it is on the device. It ends when the write of another state begins.
#[test]
fn neither_state_counts_while_the_other_is_on_its_way() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        let disk = device.disk();
        disk.hold(true);
        let (one, two) = (b.clone(), b.clone());
        let one = rt.spawn(async move { one.ensure_dirty(|| Ok(())).await.unwrap() });
        let two = rt.spawn(async move { two.ensure_dirty(|| Ok(())).await.unwrap() });
        disk.held(1, &rt).await;
        turns(&rt).await;
        assert!(one.try_take().is_none() && two.try_take().is_none());
        assert_eq!(b.state(), BackingState::Clean);
        disk.hold(false);
        assert_eq!((one.await, two.await), (true, false), "one write is enough");
        assert_eq!((b.state(), on_device(&b).await.state()), (BackingState::Dirty, BackingState::Dirty));
        assert_eq!(device.take(FUA).len(), 1);

        // The update of a label does not change the state.
        disk.hold(true);
        let label = b.clone();
        let label = rt.spawn(async move { label.update(|sb| sb.set_label([65; 32])).await.unwrap() });
        disk.held(1, &rt).await;
        assert_eq!(b.state(), BackingState::Dirty);
        disk.hold(false);
        label.await;

        disk.hold(true);
        let clean = b.clone();
        let clean = rt.spawn(async move { clean.ensure_clean(|| true).await.unwrap() });
        disk.held(1, &rt).await;
        assert_eq!(b.state(), BackingState::Clean, "a writer must not rely on dirty");
        // The second update waits for its turn, and sets the state dirty again.
        let dirty = b.clone();
        let dirty = rt.spawn(async move { dirty.ensure_dirty(|| Ok(())).await.unwrap() });
        turns(&rt).await;
        assert!(dirty.try_take().is_none());
        disk.hold(false);
        assert_eq!((clean.await, dirty.await), (true, true));
        assert_eq!((b.state(), on_device(&b).await.state()), (BackingState::Dirty, BackingState::Dirty));
    });
}

#[test]
fn states_change_only_where_they_may() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        assert!(!b.ensure_clean(|| true).await.unwrap(), "it is clean");
        let refused = || Err(EngineError::from(Refusal::SetFailed));
        assert!(b.ensure_dirty(refused).await.is_err());
        assert_eq!((b.state(), device.take(FUA)), (BackingState::Clean, Vec::new()));
        assert!(b.ensure_dirty(|| Ok(())).await.unwrap());
        assert!(!b.ensure_dirty(refused).await.unwrap(), "nothing is asked where it is dirty");
        assert!(!b.ensure_clean(|| false).await.unwrap());
        assert_eq!((b.state(), device.take(FUA).len()), (BackingState::Dirty, 1));
        assert!(b.ensure_clean(|| true).await.unwrap());
        assert_eq!((b.state(), on_device(&b).await.state()), (BackingState::Clean, BackingState::Clean));
        // A failed write of the state dirty leaves the old state; a failed write from dirty to clean leaves neither to
        // rely on.
        device.refuses.set(|r| (r.op == FUA).then_some(5));
        assert!(b.ensure_dirty(|| Ok(())).await.is_err());
        assert_eq!(b.state(), BackingState::Clean);
        b.update(|sb| sb.set_state(BackingState::Stale)).await.unwrap_err();
        assert_eq!(b.state(), BackingState::Clean);
        device.refuses.set(|_| None);
        b.update(|sb| sb.set_state(BackingState::Stale)).await.unwrap();
        assert_eq!(b.state(), BackingState::Stale);
    });
}

/// A caller that drops the future of an update leaves the write under way: the next update waits for it.
#[test]
fn an_update_whose_caller_is_dropped_ends() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        let disk = device.disk();
        disk.hold(true);
        {
            let update = std::pin::pin!(b.update(|sb| sb.set_cache_mode(CacheMode::None)));
            let held = std::pin::pin!(disk.held(1, &rt));
            assert!(matches!(io::sync::select(update, held).await, io::sync::Either::Right(())));
        }
        let next = b.clone();
        let next = rt.spawn(async move { next.update(|sb| sb.set_label([66; 32])).await.unwrap() });
        turns(&rt).await;
        assert!(next.try_take().is_none());
        disk.hold(false);
        next.await;
        assert_eq!(on_device(&b).await.cache_mode(), Some(CacheMode::None));
        assert_eq!(b.label_bytes(), [66; 32]);
    });
}

#[test]
fn direct_writes_are_made_durable_by_one_flush() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        b.settle_direct_writes().await.unwrap();
        assert_eq!(device.take(Op::Flush).len(), 0, "nothing was written");
        assert!(b.is_durable(b.direct_tick()));
        b.wrote_directly();
        let first = b.direct_tick();
        b.wrote_directly();
        assert!(first < b.direct_tick() && !b.is_durable(first));
        b.settle_direct_writes().await.unwrap();
        b.settle_direct_writes().await.unwrap();
        assert!(b.is_durable(b.direct_tick()));
        assert_eq!(device.take(Op::Flush).len(), 1);
        // A flush of a client does not have to cover writes of writeback.
        b.gate.wrote();
        b.settle_direct_writes().await.unwrap();
        assert_eq!(device.take(Op::Flush).len(), 0);
        b.wrote_directly();
        assert!(b.take_events().is_empty());
        device.refuses.set(|r| (r.op == Op::Flush).then_some(5));
        assert!(b.settle_direct_writes().await.is_err());
        assert_eq!((b.error_count(), b.take_events().len(), b.disabled.get()), (1, 1, false));
        assert!(!b.is_durable(b.direct_tick()));
    });
}

fn error(errno: i32) -> IoError {
    let request = io::Request {
        op: Op::Flush,
        sector: Sector(0),
        sectors: Sectors(0),
        buffer: None,
        buffer_offset_bytes: 0,
    };
    IoError::of(&"hdd".into(), &request, errno)
}

fn texts(events: &[SetEvent]) -> Vec<String> {
    events.iter().map(|e| format!("{e:?}")).collect()
}

/// The third error disables the device if the limit is three, and sends one event. A lack of room does not count.
#[test]
fn a_device_is_disabled_at_its_limit() {
    run(|rt| async move {
        let b = backing_on(&Watching::new(4096), &rt);
        let event = |errno| SetEvent::DeviceError { error: error(errno).into() };
        for errno in [28, 122] {
            (0..9).for_each(|_| b.failed(&error(errno), 1));
            assert_eq!((b.error_count(), b.disabled.get()), (0, false));
            assert_eq!(texts(&b.take_events()), texts(&vec![event(errno); 9]));
        }
        for n in 1..=4 {
            b.failed(&error(5), 3);
            assert_eq!((b.error_count(), b.disabled.get()), (n, n >= 3));
            let mut expected = vec![event(5)];
            if n == 3 {
                expected.push(SetEvent::GivenUp { device: "hdd".into(), errors: 3 });
            }
            assert_eq!(texts(&b.take_events()), texts(&expected), "error {n}");
        }
        let waits = b.clone();
        let waits = rt.spawn(async move { waits.events_arrived().await });
        turns(&rt).await;
        assert!(waits.try_take().is_none());
        b.failed(&error(5), 3);
        turns(&rt).await;
        assert!(waits.try_take().is_some());
        // 64 failed flushes disable the device, whatever the limit for requests is.
        let b = backing_on(&Watching::new(4096), &rt);
        (0..63).for_each(|_| b.failed(&error(5), LIMIT_OF_FLUSHES));
        assert!(!b.disabled.get());
        b.failed(&error(5), LIMIT_OF_FLUSHES);
        assert!(b.disabled.get());
    });
}

#[test]
fn a_device_is_late_until_its_flush_ends() {
    run(|rt| async move {
        let b = backing_on(&Watching::new(4096), &rt);
        let end = Rc::new(io::sync::Event::default());
        let flush = |result: Result<(), IoError>| {
            let end = end.clone();
            rt.spawn(async move {
                end.changed().await;
                result
            })
        };
        for result in [Ok(()), Err(error(5))] {
            assert!(!b.is_late());
            b.late_until(flush(result.clone()));
            assert!(b.is_late());
            b.late_until(flush(result));
            let events = b.take_events();
            let [SetEvent::FlushOverdue { device }] = events.as_slice() else { panic!("{events:?}") };
            assert_eq!(device, "test disk");
            turns(&rt).await;
            assert!(b.is_late());
            end.notify_all();
            turns(&rt).await;
            assert!(!b.is_late());
            assert_eq!(b.error_count(), 0, "the next flush finds that it failed");
        }
    });
}

/// A write puts the data in its place, and counts in the cost model while it is under way.
#[test]
fn data_goes_to_its_place() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let b = backing_on(&device, &rt);
        let buffer = |byte: u8, sectors: usize| rt.pool().copy_of(&vec![byte; sectors * 512]);
        let write = b.write_back(Sector(100), Sectors(2), buffer(3, 2));
        assert_eq!(b.meter.model(|m| m.in_flight()), 1);
        write.await.result.unwrap();
        b.write_data(Sector(102), Sectors(1), buffer(4, 3), 1024, true).await.result.unwrap();
        assert_eq!(b.meter.model(|m| m.in_flight()), 0);
        assert_eq!(device.take(FUA), [(102, 1)]);
        for for_writeback in [false, true] {
            let read = match for_writeback {
                false => b.read_data(Sector(100), Sectors(3), buffer(9, 4), 512),
                true => b.read_for_writeback(Sector(100), Sectors(3), buffer(9, 4), 512),
            };
            assert_eq!(b.meter.model(|m| m.in_flight()), 1);
            let done = read.await;
            done.result.unwrap();
            let bytes = done.buffer.unwrap();
            let firsts: Vec<u8> = bytes.as_slice().chunks(512).map(|s| s[0]).collect();
            assert_eq!(firsts, [9, 3, 3, 4]);
        }
    });
}
