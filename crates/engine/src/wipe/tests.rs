//! Tests of what a wipe does with one range of the cache device.

use io::Handle;

use super::*;
use crate::set::SetOptions;
use crate::testing::{Watching, components, open_set, run};

/// The range behind the metadata of a new set that the tests erase: two parts of 2048 sectors and a rest.
const AT: Sector = Sector(8000);
const SIZE: Sectors = Sectors(5000);

async fn set(device: &Rc<Watching>, rt: &Handle) -> Rc<Cache> {
    let cache = components(open_set(device, rt, (16, false), SetOptions::default()).await, rt);
    rt.sleep(Nanos::from_secs(60)).await;
    device.requests.take();
    cache
}

/// The test device accepts a discard and keeps the data. The whole range is read, up to the first part with data.
#[test]
fn a_discarded_range_is_a_hole_if_all_of_it_reads_as_zeros() {
    run(|rt| async move {
        let device = Watching::new(16_384);
        let cache = set(&device, &rt).await;
        let parts = [(8000, 2048), (10_048, 2048), (12_096, 904)];
        assert!(makes_hole(&cache, AT, SIZE).await);
        assert_eq!(device.take(Op::Read), parts);
        for (sector, byte, read) in [(8000, 0, 1), (10_048, 511, 2), (12_999, 511, 3)] {
            let mut bytes = vec![0; 512];
            bytes[byte] = 1;
            let disk = cache.device.disk();
            disk.write(Sector(sector), rt.pool().copy_of(&bytes), false).await.unwrap();
            device.requests.take();
            assert!(!makes_hole(&cache, AT, SIZE).await, "sector {sector} has data");
            assert_eq!(device.take(Op::Read), parts[..read]);
            disk.write(Sector(sector), rt.pool().zeroed(512), false).await.unwrap();
        }
        for sector in [7999, 13_000] {
            let data = rt.pool().copy_of(&[1; 512]);
            cache.device.disk().write(Sector(sector), data, false).await.unwrap();
        }
        assert!(makes_hole(&cache, AT, SIZE).await, "the data is outside the range");
    });
}

#[test]
fn a_range_is_no_hole_if_its_discard_or_a_read_of_it_fails() {
    run(|rt| async move {
        let device = Watching::new(16_384);
        let cache = set(&device, &rt).await;
        device.refuses.set(|r| (r.op == Op::Discard).then_some(95));
        assert!(!makes_hole(&cache, AT, SIZE).await);
        assert_eq!(device.take(Op::Read), []);
        device.refuses.set(|r| (r.op == Op::Read && r.sector == Sector(12_096)).then_some(5));
        assert!(!makes_hole(&cache, AT, SIZE).await);
        assert_eq!(device.take(Op::Read).len(), 3);
    });
}
