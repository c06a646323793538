//! Tests of the whole export on the fake driver: requests, life cycle of devices, recovery, refusals.

use std::rc::Rc;
use std::sync::Arc;

use blockio::Driver;
use blockio::DriverOptions;
use rig::{RamOp, RamVolume};

use crate::abi;
use crate::control::{Command, Control};
use crate::device::{Device, Host};
use crate::error::UblkError;
use crate::find::{Identities, Identity};
use crate::shape::Shape;
use crate::testing::{Answered, Ask, Fake, ram};

const SHAPE: Shape = Shape { queues: 3, depth: 8 };

struct World {
    driver: Driver,
    fake: Fake,
    host: Rc<Host<Fake>>,
    volume: Rc<RamVolume>,
}

type Dev = Device<RamVolume, Fake>;

impl World {
    fn new() -> World {
        World::on(Fake::default(), ram(4096))
    }

    /// A second process on the same driver and data.
    fn on(fake: Fake, volume: Rc<RamVolume>) -> World {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let control = Control::over(Arc::new(fake.clone()));
        let (rt, reactor) = (driver.handle(), driver.reactor().clone());
        let host = Rc::new(Host { control, node: fake.clone(), rt, reactor });
        World { driver, fake, host, volume }
    }

    async fn start(&self, number: Option<u32>) -> Result<Dev, UblkError> {
        self.start_as(Identity::of(&[b"volume"]).into(), number).await
    }

    async fn start_as(&self, identities: Identities, number: Option<u32>) -> Result<Dev, UblkError> {
        Device::start(&self.host, self.volume.clone(), identities, number, SHAPE).await
    }

    async fn ask(&self, op: u8, sector: u64, sectors: u32, data: &[u8]) -> Answered {
        self.flagged(op.into(), sector, sectors, data).await
    }

    async fn flagged(&self, op_flags: u32, sector: u64, sectors: u32, data: &[u8]) -> Answered {
        self.fake.ask(0, Ask { op_flags, sector, sectors, data: data.to_vec() }).await
    }
}

#[test]
fn requests_are_carried_out_and_answered() {
    let w = World::new();
    w.driver.block_on(async {
        let device = w.start(None).await.unwrap();
        assert_eq!(
            (device.number(), device.shape()),
            (0, Shape { queues: 2, depth: 8 }),
            "as many as the driver gives"
        );
        let data: Vec<u8> = (0..4096).map(|i| i as u8).collect();
        assert_eq!(w.ask(abi::OP_WRITE, 8, 8, &data).await.0, 4096);
        assert_eq!(w.ask(abi::OP_READ, 8, 8, &[]).await, (4096, data.clone()));
        assert_eq!(w.flagged(u32::from(abi::OP_WRITE) | abi::IO_FUA, 9, 1, &[7; 512]).await.0, 512);
        assert_eq!(w.flagged(u32::from(abi::OP_WRITE) | abi::IO_META, 12, 1, &[8; 512]).await.0, 512);
        assert_eq!(w.flagged(u32::from(abi::OP_READ) | abi::IO_META, 12, 1, &[]).await, (512, vec![8; 512]));
        assert_eq!(
            (w.volume.counts().meta_reads, w.volume.counts().meta_writes),
            (1, 1),
            "the hint of metadata arrives, and only where it was given"
        );
        assert_eq!(
            (w.volume.counts().durable, w.ask(abi::OP_FLUSH, 0, 0, &[]).await.0, w.volume.counts().flushes),
            (1, 0, 1)
        );
        assert_eq!(w.ask(abi::OP_DISCARD, 10, 1, &[]).await.0, 0);
        assert_eq!(w.ask(abi::OP_WRITE_ZEROES, 11, 1, &[]).await.0, 0);
        let (n, read) = w.ask(abi::OP_READ, 8, 8, &[]).await;
        assert_eq!(n, 4096);
        assert_eq!((&read[..512], &read[512..1024]), (&data[..512], &[7; 512][..]));
        assert_eq!((&read[1024..1536], &read[1536..2048]), (&[0xdd; 512][..], &[0; 512][..]));
        assert_eq!((&read[2048..2560], &read[2560..]), (&[8; 512][..], &data[2560..]));
        // An impossible request is refused, and the tag continues.
        assert_eq!(w.ask(abi::OP_READ, 4095, 2, &[]).await.0, -libc::EIO);
        assert_eq!(w.ask(abi::OP_READ, 0, 1025, &[]).await.0, -libc::EINVAL);
        assert_eq!(w.ask(17, 0, 1, &[]).await.0, -libc::EOPNOTSUPP);
        assert_eq!(w.ask(abi::OP_READ, 11, 1, &[]).await, (512, vec![0; 512]));
        device.remove().await.unwrap();
        assert!(w.fake.numbers().is_empty());
    });
}

#[test]
fn buffers_that_the_volume_still_holds_are_not_given_to_the_driver() {
    let w = World::new();
    w.volume.retain_buffers();
    w.driver.block_on(async {
        let device = w.start(None).await.unwrap();
        for i in 0..100u8 {
            assert_eq!(w.ask(abi::OP_WRITE, u64::from(i), 1, &[i; 512]).await.0, 512);
            assert_eq!(w.ask(abi::OP_READ, u64::from(i), 1, &[]).await, (512, vec![i; 512]));
        }
        for (n, held) in w.volume.retained().iter().enumerate() {
            assert!(
                held.as_slice()[..512].iter().all(|b| usize::from(*b) == n / 2),
                "buffer {n} was written to"
            );
        }
        device.remove().await.unwrap();
    });
}

#[test]
fn more_requests_than_tags_wait_their_turn() {
    let w = World::new();
    w.volume.hold(RamOp::Write);
    w.driver.block_on(async {
        let device = w.start(Some(0)).await.unwrap();
        let rt = w.driver.handle();
        let asked: Vec<_> = (0..40)
            .map(|i| {
                let fake = w.fake.clone();
                let ask =
                    Ask { op_flags: abi::OP_WRITE.into(), sector: i, sectors: 1, data: vec![i as u8; 512] };
                rt.spawn(async move { fake.ask(0, ask).await.0 })
            })
            .collect();
        rt.yield_now().await;
        w.volume.release();
        for task in asked {
            assert_eq!(task.await, 512);
        }
        device.remove().await.unwrap();
    });
}

#[test]
fn unanswered_requests_of_a_crashed_process_are_repeated() {
    let first = World::new();
    let (fake, volume) = (first.fake.clone(), first.volume.clone());
    first.fake.state().alive.push(1);
    first.driver.block_on(async {
        let device = first.start(Some(5)).await.unwrap();
        assert_eq!(device.number(), 5);
        // The write waits in the volume when the process ends.
        volume.hold(RamOp::Write);
        let rt = first.driver.handle();
        let theirs = fake.clone();
        rt.spawn(async move {
            let ask = Ask { op_flags: abi::OP_WRITE.into(), sector: 3, sectors: 1, data: vec![9; 512] };
            theirs.ask(5, ask).await;
        });
        rt.yield_now().await;
        rt.yield_now().await;
        std::mem::forget(device);
    });
    fake.server_died(5);

    let second = World::on(fake.clone(), ram(4096));
    second.driver.block_on(async {
        let device = second.start(None).await.unwrap();
        assert_eq!((device.number(), device.recovered_from), (5, Some(std::process::id() as i32)));
        let ask = Ask { op_flags: abi::OP_READ.into(), sector: 3, sectors: 1, data: Vec::new() };
        assert_eq!(
            fake.ask(5, ask).await,
            (512, vec![9; 512]),
            "the write was carried out by the next process"
        );
        assert_eq!(fake.params_of(5).basic.device_sectors, 4096);
        device.remove().await.unwrap();
    });
    assert!(fake.numbers().is_empty());
}

#[test]
fn a_device_of_an_earlier_version_is_recovered() {
    let [new, earlier] = [&b"volume"[..], b"set"].map(|part| Identity::of(&[part]));
    let first = World::new();
    let fake = first.fake.clone();
    first.driver.block_on(async {
        std::mem::forget(first.start_as(earlier.into(), Some(5)).await.unwrap());
    });
    fake.server_died(5);
    let second = World::on(fake.clone(), ram(4096));
    let both = Identities { new, earlier: Some(earlier) };
    second.driver.block_on(async {
        let device = second.start_as(both, Some(0)).await.unwrap();
        assert_eq!(device.number(), 5);
        std::mem::forget(device);
    });
    assert_eq!(fake.info(5).server_flags, earlier.bits(), "the driver never changes it");
    fake.server_died(5);
    // A device with the new identity comes first.
    let third = World::on(fake.clone(), ram(4096));
    third.driver.block_on(async {
        std::mem::forget(third.start_as(new.into(), Some(7)).await.unwrap());
    });
    fake.server_died(7);
    let fourth = World::on(fake.clone(), ram(4096));
    fourth.driver.block_on(async {
        let device = fourth.start_as(both, None).await.unwrap();
        assert_eq!(device.number(), 7);
        device.remove().await.unwrap();
    });
    assert_eq!(fake.numbers(), [5]);
}

#[test]
fn a_device_that_is_left_begins_nothing_more() {
    let w = World::new();
    w.driver.block_on(async {
        let device = w.start(None).await.unwrap();
        w.volume.hold(RamOp::Write);
        let rt = w.driver.handle();
        let write = |i: u8| {
            let fake = w.fake.clone();
            let ask =
                Ask { op_flags: abi::OP_WRITE.into(), sector: i.into(), sectors: 1, data: vec![i; 512] };
            rt.spawn(async move { fake.ask(0, ask).await.0 })
        };
        let under_way = write(1);
        rt.yield_now().await;
        rt.yield_now().await;
        let opener = {
            let (rt, volume) = (rt.clone(), w.volume.clone());
            rt.clone().spawn(async move {
                rt.sleep(io::Nanos::from_ms(20)).await;
                volume.release();
            })
        };
        device.leave().await;
        opener.await;
        assert_eq!(under_way.await, 512, "what was under way is answered");
        let late = write(2);
        rt.sleep(io::Nanos::from_ms(20)).await;
        assert_eq!(late.try_take(), None);
        assert!(w.volume.contents(2 * 512..3 * 512).iter().all(|b| *b == 0), "and nothing more is begun");
    });
}

#[test]
fn a_device_that_fails_answers_errors() {
    let w = World::new();
    w.driver.block_on(async {
        let device = w.start(None).await.unwrap();
        device.fail_everything();
        assert_eq!(w.ask(abi::OP_WRITE, 0, 1, &[1; 512]).await.0, -libc::EIO);
        device.remove().await.unwrap();
    });
    assert!(w.volume.contents(0..4096 * 512).iter().all(|b| *b == 0));
}

#[test]
fn refusals_leave_nothing_behind() {
    let w = World::new();
    w.driver.block_on(async {
        for (command, errno) in
            [(Command::Add, libc::ENOMEM), (Command::SetParams, libc::EINVAL), (Command::Start, libc::ENOMEM)]
        {
            w.fake.state().refuse = Some((command, errno));
            let e = w.start(None).await.err().unwrap_or_else(|| panic!("{command:?} was refused"));
            assert!(e.to_string().contains(&std::io::Error::from_raw_os_error(errno).to_string()), "{e}");
            assert!(w.fake.numbers().is_empty(), "{command:?}");
            w.fake.state().refuse = None;
        }
        let device = w.start(None).await.unwrap();
        device.remove().await.unwrap();
    });
}

#[test]
fn a_number_that_is_taken_names_who_has_it() {
    let w = World::new();
    let other = World::on(w.fake.clone(), ram(8));
    w.driver.block_on(async {
        let device = w.start(Some(3)).await.unwrap();
        let theirs = Identity::of(&[b"another"]);
        let taken = other.start_as(theirs.into(), Some(3)).await.err().unwrap();
        let pid = std::process::id();
        assert_eq!(
            taken.to_string(),
            format!("/dev/ublkb3 is in use by process {pid}: choose another number, or leave it out")
        );
        device.remove().await.unwrap();
    });
}

#[test]
fn a_volume_that_is_served_or_has_changed_is_refused() {
    let first = World::new();
    let fake = first.fake.clone();
    first.driver.block_on(async {
        let device = first.start(None).await.unwrap();
        std::mem::forget(device);
    });
    // According to the driver, another process serves the device.
    let info = fake.info(0);
    assert_eq!(info.server_pid, std::process::id() as i32);
    fake.set_pid(0, 77);
    fake.state().alive.push(77);
    let second = World::on(fake.clone(), ram(4096));
    second.driver.block_on(async {
        let e = second.start(None).await.err().unwrap();
        assert!(matches!(e, UblkError::InService { number: 0, pid: 77 }), "{e}");
    });
    fake.server_died(0);
    let smaller = World::on(fake.clone(), ram(8));
    smaller.driver.block_on(async {
        let e = smaller.start(None).await.err().unwrap();
        assert!(matches!(e, UblkError::Changed { number: 0, expected: 8, found: 4096 }), "{e}");
    });
    assert_eq!(fake.numbers(), [0], "it waits for the right volume");
}

#[test]
fn a_device_that_was_never_started_is_made_anew() {
    let first = World::new();
    let fake = first.fake.clone();
    first.driver.block_on(async {
        first.fake.state().refuse = Some((Command::Delete, libc::EINTR));
        let device = first.start(Some(2)).await.unwrap();
        assert!(device.remove().await.is_err());
        first.fake.state().refuse = None;
    });
    assert_eq!(fake.info(2).state, abi::STATE_DEAD);
    let second = World::on(fake.clone(), ram(8));
    second.driver.block_on(async {
        let device = second.start(Some(2)).await.unwrap();
        assert_eq!((device.number(), device.recovered_from), (2, None));
        device.remove().await.unwrap();
    });
}

#[test]
fn users_without_privileges_get_devices_that_do_not_outlive_them() {
    let w = World::new();
    w.fake.state().unprivileged = true;
    w.driver.block_on(async {
        let device = w.start(None).await.unwrap();
        assert_eq!(w.fake.info(0).flags, abi::F_UNPRIVILEGED_DEV);
        device.remove().await.unwrap();
    });
}
