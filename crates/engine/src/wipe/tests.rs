//! Tests of what a wipe does with one range of the cache device.

use io::Handle;

use super::*;
use crate::set::SetOptions;
use crate::testing::{TestDisk, Watching, backing_device, components, open_set, run};

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

/// Every bucket behind the metadata of the device is wiped once. The report agrees with the bytes on the device and with
/// the requests, and nothing is left but metadata and the live data of volumes.
#[test]
fn a_report_agrees_with_the_device() {
    const DATA: u8 = 0xaa;
    run(|rt| async move {
        let device = Watching::new(16_384);
        let set = open_set(&device, &rt, (16, false), SetOptions::default()).await;
        let volume = set.attached(backing_device(&TestDisk::new(8192), &rt)).await.unwrap();
        volume.settings_mut().writeback_running = false;
        let cache = components(set, &rt);
        rt.sleep(Nanos::from_secs(60)).await;
        let g = cache.geometry;
        let all = Sector(u64::from(g.first_dynamic().0) * 16)..Sector(u64::from(g.nbuckets) * 16);
        let is_metadata = |b: u32| cache.alloc.buckets().used(BucketNr(b)) == Use::Metadata;
        // Old data is everywhere but in metadata.
        let old = (g.first_dynamic().0..g.nbuckets).filter(|b| !is_metadata(*b));
        for b in old.collect::<Vec<_>>() {
            let data = rt.pool().copy_of(&[0x55; 16 * 512]);
            cache.device.disk().write(g.bucket_start(BucketNr(b)), data, false).await.unwrap();
        }
        let mut live = vec![false; 8192];
        for (at, sectors) in [(0, 40), (8, 3), (100, 16), (200, 1), (300, 250), (32, 20)] {
            let data = rt.pool().copy_of(&vec![DATA; sectors as usize * 512]);
            let flags = io::WriteFlags::default();
            volume.write(Sector(at), Sectors(sectors), data, 0, flags).await.unwrap();
            live[at as usize..][..sectors as usize].fill(true);
        }
        for (at, sectors) in [(310, 100), (104, 4)] {
            volume.discard(Sector(at), Sectors(sectors)).await.unwrap();
            live[at as usize..][..sectors as usize].fill(false);
        }
        device.requests.take();
        let wiped = wipe(&cache, &Rc::default()).await.unwrap();
        let zeroed = device.take(Op::WriteZeroes { may_unmap: true });
        assert_eq!(wiped.zeroed.0, zeroed.iter().map(|(_, sectors)| sectors).sum::<u64>());
        assert!(zeroed.iter().all(|(at, n)| all.contains(&Sector(*at)) && at + n <= all.end.0));

        let size = (all.end - all.start).bytes() as usize;
        let (bytes, result) = cache.device.disk().read(all.start, rt.pool().take(size)).await;
        result.unwrap();
        let (mut whole, mut shared, mut data) = (0, 0, 0);
        for (b, bucket) in (g.first_dynamic().0..).zip(bytes.as_slice().chunks(16 * 512)) {
            match bucket.iter().all(|byte| *byte == 0) {
                true => whole += 1,
                false => shared += 1,
            }
            if !is_metadata(b) {
                assert!(bucket.iter().all(|byte| [0, DATA].contains(byte)), "bucket {b} has old data");
                data += bucket.iter().filter(|byte| **byte == DATA).count() / 512;
            }
        }
        assert_eq!((wiped.whole_buckets, wiped.shared_buckets), (whole, shared));
        assert_eq!(data, live.iter().filter(|live| **live).count());
        assert_eq!(cache.alloc.buckets().to_wipe(), 0);
    });
}

/// The error says that the set is disabled, not that the wipe was cancelled.
#[test]
fn a_wipe_of_a_failed_set_writes_nothing() {
    run(|rt| async move {
        let device = Watching::new(16_384);
        let cache = set(&device, &rt).await;
        cache.device.fail(Refusal::Cancelled.into());
        device.requests.take();
        let failure = wipe(&cache, &Rc::default()).await.unwrap_err();
        let EngineError::Refused(refusal) = &failure else { panic!("{failure}") };
        let Refusal::WipeUnfinished { source, .. } = &**refusal else { panic!("{failure}") };
        assert!(source.to_string().contains("is disabled"), "{source}");
        assert_eq!(device.take(Op::WriteZeroes { may_unmap: true }), []);
    });
}
