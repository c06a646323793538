//! Tests of the requests that count in the cost model of a device.

use io::{Handle, Nanos, Op};

use super::*;
use crate::testing::{Watching, run};

fn on(device: &Rc<Watching>, rt: &Handle) -> (Disk, Rc<Meter>) {
    let disk = Disk::new(device.clone(), rt.clone());
    let meter = Meter::new(&disk);
    (disk, meter)
}

fn read(disk: &Disk, meter: &Rc<Meter>, sector: u64) -> MeteredIo {
    let buffer = disk.runtime().pool().take(512);
    meter.read(disk, Sector(sector), Sectors(1), buffer, 0)
}

/// After 64 answers the costs are known; requests that failed or were dropped do not count.
#[test]
fn answers_count_and_failures_do_not() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let (disk, meter) = on(&device, &rt);
        let in_flight = || meter.model(CostModel::in_flight);
        for n in 0..63 {
            read(&disk, &meter, n * 8).await.result.unwrap();
        }
        device.refuses.set(|r| (r.op == Op::Read).then_some(5));
        assert!(read(&disk, &meter, 0).await.result.is_err());
        device.refuses.set(|_| None);
        device.disk().hold(true);
        let given_up = read(&disk, &meter, 0);
        assert_eq!(in_flight(), 1);
        drop(given_up);
        device.disk().hold(false);
        assert_eq!((in_flight(), meter.model(CostModel::is_known)), (0, false));
        let buffer = rt.pool().take(512);
        meter.write(&disk, (Sector(8), Sectors(1)), buffer, 0, false).await.result.unwrap();
        assert_eq!((in_flight(), meter.model(CostModel::is_known)), (0, true));
    });
}

/// A flush counts as busy time of the device, and not as a request.
#[test]
fn a_flush_takes_time_and_is_no_request() {
    run(|rt| async move {
        let device = Watching::new(4096);
        let (disk, meter) = on(&device, &rt);
        let prior = meter.model(CostModel::costs);
        for _ in 0..100 {
            drop(meter.busy());
        }
        assert!(!meter.model(CostModel::is_known), "no answers");
        let one = read(&disk, &meter, 8);
        let flush = meter.busy();
        assert_eq!(meter.model(CostModel::in_flight), 2);
        one.await.result.unwrap();
        rt.sleep(Nanos::from_ms(50)).await;
        assert_eq!(meter.model(CostModel::costs), prior, "the device is busy");
        drop(flush);
        assert_eq!(meter.model(CostModel::in_flight), 0);
        let after = meter.model(CostModel::costs);
        assert!(after.per_request() > prior.per_request(), "50 ms for one read and one flush: {after:?}");
    });
}
