//! Tests of writing and reading chains, and of damaged chains.

use std::rc::Rc;
use std::sync::Arc;

use format::{Geometry, SetMagic};
use io::Handle;

use super::*;
use crate::alloc::Use;
use crate::error::Place;
use crate::set::SetOptions;
use crate::testing::{TestDisk, Watching, components, open_set, run};
use crate::volume::Cache;

const MAGIC: SetMagic = SetMagic(7);
const ONE: Sectors = Sectors(1);

fn place() -> Place {
    Place { device: Arc::from("test disk"), set: "a set".into() }
}

fn reader<'a>(disk: &'a io::Disk, place: &'a Place, geometry: &'a Geometry) -> Reader<'a> {
    Reader { disk, place, geometry, magic: MAGIC }
}

fn prio(n: u64) -> BucketPrio {
    BucketPrio { prio: (n % 50_000) as u16, generation: Gen((n % 251) as u8) }
}

/// Writes prio set `index` of a chain to a bucket.
async fn put(
    disk: &io::Disk,
    g: &Geometry,
    size: Sectors,
    at: u32,
    header: PrioHeader,
    prios: &[BucketPrio],
) {
    let mut buffer = disk.runtime().pool().zeroed(size.bytes() as usize);
    encode_prio_set(buffer.as_mut(), MAGIC, header, prios);
    disk.write(g.bucket_start(BucketNr(at)), buffer, true).await.unwrap();
}

/// Buckets of 4 KiB, each with a prio set of 1352 places: three prio sets for 3000 buckets.
fn three_prio_sets() -> Geometry {
    let g = Geometry::new(Sectors(8), ONE, 3000, 4, 4).unwrap();
    assert_eq!((g.prio_buckets, g.prios_per_bucket, g.first_dynamic()), (3, 1352, BucketNr(8)));
    g
}

/// Reads a chain of three prio sets in these buckets, with these sequence numbers.
async fn read(rt: &Handle, at: [u32; 3], seqs: [u64; 3], first: u64) -> Result<LoadedPrios, EngineError> {
    let g = three_prio_sets();
    let disk = io::Disk::new(TestDisk::new(3000 * 8), rt.clone());
    let prios: Vec<BucketPrio> = (0..3000).map(prio).collect();
    let groups: Vec<&[BucketPrio]> = prios.chunks(1352).collect();
    for n in 0..3 {
        let next_bucket = u64::from(at.get(n + 1).copied().unwrap_or(0));
        put(&disk, &g, Sectors(8), at[n], PrioHeader { seq: seqs[n], next_bucket }, groups[n]).await;
    }
    load_prios(&reader(&disk, &place(), &g), first).await
}

#[test]
fn a_chain_is_read_in_its_order() {
    run(|rt| async move {
        for at in [[8, 2999, 100], [2999, 8, 9], [500, 400, 300]] {
            let loaded = read(&rt, at, [5, 5, 5], at[0].into()).await.unwrap();
            assert_eq!((loaded.chain, loaded.seq), (at.map(BucketNr).to_vec(), 5));
            assert_eq!(loaded.prios, (0..3000).map(prio).collect::<Vec<_>>());
        }
    });
}

#[test]
fn a_damaged_chain_is_refused_with_its_place() {
    run(|rt| async move {
        for (at, seqs, first, what) in [
            (
                [8, 9, 10],
                [5; 3],
                7,
                "sector 0: prio set 0 of 3: bucket number: expected an unused one in 8..3000, found 7",
            ),
            ([8, 9, 10], [5; 3], 3000, "found 3000"),
            ([8, 9, 10], [5; 3], (1 << 32) + 8, "found 4294967304"),
            ([8, 9, 10], [5; 3], 0, "found 0"),
            (
                [8, 9, 10],
                [5; 3],
                9,
                "prio set 2 of 3: bucket number: expected an unused one in 8..3000, found 0",
            ),
            ([8, 9, 10], [5, 6, 5], 8, "bucket 9: prio set 1 of 3: seq: expected 5, found 6"),
            ([8, 9, 10], [5, 5, 4], 8, "bucket 10: prio set 2 of 3: seq: expected 5, found 4"),
            ([8, 9, 10], [4, 5, 5], 8, "bucket 9: prio set 1 of 3: seq: expected 4, found 5"),
            ([8, 9, 10], [5; 3], 11, "sector 88, bucket 11"),
        ] {
            let refused = read(&rt, at, seqs, first).await.map(|l| l.chain).unwrap_err().to_string();
            assert!(refused.contains(what) && refused.contains("test disk"), "{refused}, expected {what}");
        }
    });
}

/// The second prio set names the first.
#[test]
fn a_chain_that_goes_around_is_refused() {
    run(|rt| async move {
        let g = three_prio_sets();
        let disk = io::Disk::new(TestDisk::new(3000 * 8), rt.clone());
        for (at, next_bucket) in [(20, 21), (21, 20)] {
            put(&disk, &g, Sectors(8), at, PrioHeader { seq: 5, next_bucket }, &[prio(1); 1352]).await;
        }
        let refused =
            load_prios(&reader(&disk, &place(), &g), 20).await.map(|l| l.chain).unwrap_err().to_string();
        assert!(refused.contains("prio set 2 of 3") && refused.contains("found 20"), "{refused}");
    });
}

/// Buckets of 8 MiB may have prio sets of 4 MiB, which is usual, or of 8 MiB; a chain has one size.
#[test]
fn sets_of_a_chain_have_one_size() {
    run(|rt| async move {
        let g = Geometry::new(Sectors(16384), Sectors(8), 1_400_000, 1, 1).unwrap();
        let usual = g.meta_sectors;
        assert_eq!((usual, g.prio_buckets, g.prios_per_bucket), (Sectors(8192), 2, 1_398_088));
        let disk = io::Disk::new(TestDisk::new(5 * 16384), rt.clone());
        let prios: Vec<BucketPrio> = (0..1_400_000).map(prio).collect();
        let large = Sectors(16384);
        for (sizes, split, is_valid) in [
            ([usual, usual], 1_398_088, true),
            ([large, large], 1_400_000, true),
            ([usual, large], 1_398_088, false),
            ([large, usual], 1_400_000, false),
        ] {
            let (one, two) = prios.split_at(split);
            put(&disk, &g, sizes[0], 2, PrioHeader { seq: 3, next_bucket: 4 }, one).await;
            put(&disk, &g, sizes[1], 4, PrioHeader { seq: 3, next_bucket: 0 }, two).await;
            let loaded = load_prios(&reader(&disk, &place(), &g), 2).await;
            assert_eq!(loaded.is_ok(), is_valid, "{sizes:?}");
            if let Ok(loaded) = loaded {
                assert!(loaded.prios == prios, "{sizes:?}");
                assert_eq!(loaded.chain, [BucketNr(2), BucketNr(4)]);
            }
        }
    });
}

#[test]
fn the_content_of_a_chain_is_put_into_the_table() {
    let g = three_prio_sets();
    let mut buckets = Buckets::new(&g, g.first_dynamic(), 3000).unwrap();
    let loaded =
        LoadedPrios { prios: (0..3000).map(prio).collect(), chain: [9, 70].map(BucketNr).to_vec(), seq: 1 };
    apply_prios(&mut buckets, &loaded);
    for b in buckets.all() {
        let metadata = b == BucketNr(9) || b == BucketNr(70);
        let said = prio(b.0.into());
        assert_eq!(buckets.generation(b), said.generation);
        assert_eq!(buckets.prio(b), if metadata { u16::MAX } else { said.prio }, "{b}");
        assert_eq!(buckets.used(b) == Use::Metadata, metadata, "{b}");
    }
}

/// A set of 4096 buckets of 4 KiB: four prio sets.
async fn with_set(rt: &Handle) -> Rc<Cache> {
    let set = open_set(&Watching::new(4096 * 8), rt, (8, false), SetOptions::default()).await;
    assert_eq!(set.cache().geometry.prio_buckets, 4);
    components(set, rt)
}

/// A chain has the priority and generation of every bucket at one moment; the journal names the chain; the old chain is
/// free.
#[test]
fn a_chain_takes_the_place_of_the_one_before() {
    run(|rt| async move {
        let cache = with_set(&rt).await;
        let _lock = cache.alloc.prios.lock.lock().await;
        for is_ours in [true, true, false] {
            cache.alloc.prios.is_ours.set(is_ours);
            for b in 2000..2300 {
                let generation = cache.alloc.buckets().generation(BucketNr(b)).next();
                cache.alloc.buckets_mut().load(BucketNr(b), generation, b as u16);
            }
            let (old, seq) = (cache.alloc.prios.buckets.borrow().clone(), cache.alloc.prios.seq.get());
            let before: Vec<_> = cache.alloc.buckets().prios().collect();
            let (ready, written) = (cache.alloc.pool.ready_len(), cache.alloc.counters().prio_writes);
            write_prios(&cache.alloc).await.unwrap();

            let chain = cache.alloc.prios.buckets.borrow().clone();
            assert_eq!((chain.len(), old.len(), cache.alloc.prios.seq.get()), (4, 4, seq + 1));
            assert_eq!(cache.alloc.counters().prio_writes, written + 1);
            assert_eq!(cache.alloc.pool.ready_len(), if is_ours { ready } else { ready - 4 });
            assert_eq!(
                cache.journal.roots().prio_bucket[usize::from(cache.device.superblock().nr_this_dev())],
                u64::from(chain[0].0)
            );
            let first = u64::from(chain[0].0);
            let reader = Reader {
                magic: cache.device.magic(),
                ..reader(cache.device.disk(), cache.device.place(), &cache.geometry)
            };
            let loaded = load_prios(&reader, first).await.unwrap();
            assert_eq!((&loaded.chain, loaded.seq), (&chain, seq + 1));
            // The last prio set names no further one.
            let last = cache.geometry.bucket_start(chain[3]);
            let (buffer, _) = cache.device.disk().read(last, rt.pool().take(4096)).await;
            let header = parse_prio_set(buffer.as_slice(), cache.device.magic(), &mut [prio(0); 1]).unwrap();
            assert_eq!((header.next_bucket, header.seq), (0, seq + 1));
            let buckets = cache.alloc.buckets();
            for (b, p) in buckets.all().zip(&loaded.prios) {
                let (prio, generation) = before[b.0 as usize];
                let prio = if chain.contains(&b) { u16::MAX } else { prio };
                assert_eq!((p.prio, p.generation), (prio, generation), "{b}");
            }
            assert!(chain.iter().all(|b| buckets.used(*b) == Use::Metadata && !old.contains(b)));
            for b in &old {
                let (_, generation) = before[b.0 as usize];
                let now = (buckets.used(*b), buckets.generation(*b));
                let expected =
                    if is_ours { (Use::Ready, generation) } else { (Use::Data, generation.next()) };
                assert_eq!(now, expected, "{b}");
            }
            assert!(cache.alloc.prios.is_ours.get(), "this run wrote it");
        }
    });
}

/// If three buckets are ready and four are needed, the three stay ready and no prio set is written.
#[test]
fn without_room_for_a_chain_nothing_changes() {
    run(|rt| async move {
        let cache = with_set(&rt).await;
        let _lock = cache.alloc.prios.lock.lock().await;
        let all = cache.alloc.pool.take_out(5000, |_| true);
        cache.alloc.pool.put_ready(all[..3].iter().copied());
        let (chain, seq) = (cache.alloc.prios.buckets.borrow().clone(), cache.alloc.prios.seq.get());
        let refused = write_prios(&cache.alloc).await.unwrap_err().to_string();
        assert!(refused.contains("no 4 buckets are free for priorities"), "{refused}");
        assert_eq!((cache.alloc.pool.ready_len(), cache.alloc.prios.seq.get()), (3, seq));
        assert_eq!(*cache.alloc.prios.buckets.borrow(), chain);
        assert!(all[..3].iter().all(|b| cache.alloc.buckets().used(*b) == Use::Ready));
        cache.alloc.pool.put_ready([all[3]]);
        write_prios(&cache.alloc).await.unwrap();
        assert_eq!(*cache.alloc.prios.buckets.borrow(), all[..4]);
    });
}

/// Without the prio sets on the device, the journal does not name the chain.
#[test]
fn a_chain_that_cannot_be_written_does_not_count() {
    run(|rt| async move {
        let device = Watching::new(4096 * 8);
        let cache = components(open_set(&device, &rt, (8, false), SetOptions::default()).await, &rt);
        let _lock = cache.alloc.prios.lock.lock().await;
        let roots = cache.journal.roots().prio_bucket;
        device.refuses.set(|r| (r.sectors == Sectors(8)).then_some(5));
        assert!(write_prios(&cache.alloc).await.is_err());
        assert!(cache.device.is_failed());
        assert_eq!(cache.journal.roots().prio_bucket, roots);
    });
}
