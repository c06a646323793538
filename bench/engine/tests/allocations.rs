//! No heap allocation for a cached request, once everything is warm.

use bench::alloc::{Counting, allocations};
use bench::{driver, memory_set};
use format::{Sector, Sectors};
use io::{Rng, WriteFlags};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCKS: u64 = 4000;

#[test]
fn cached_requests_do_not_allocate() {
    let driver = driver();
    let rt = driver.handle();
    driver.block_on(async {
        let r = memory_set(&rt, Sectors(1 << 19), Sectors(1 << 18)).await;
        let mut rng = Rng::new(3);
        let at = |b: u64| Sector(b * 16);
        let write = async |b: u64| {
            let buffer = rt.pool().take(4096);
            let result = r.volume.write(at(b), Sectors(8), buffer, 0, WriteFlags::default()).await;
            result.expect("the request succeeds");
        };
        for b in 0..BLOCKS {
            write(b).await;
        }
        for _ in 0..4 * BLOCKS {
            write(rng.below(BLOCKS)).await;
        }
        let before = allocations();
        let mut buffer = rt.pool().take(4096);
        for _ in 0..10_000 {
            let (b, result) = r.volume.read(at(rng.below(BLOCKS)), Sectors(8), buffer, 0).await;
            result.expect("the request succeeds");
            buffer = b;
        }
        assert_eq!(allocations() - before, 0, "read hits");

        // Writes share the thread with the journal, leaf writes and new buckets; those are few and batched. Most
        // requests must allocate nothing at all.
        let mut allocating = 0;
        for _ in 0..10_000 {
            let before = allocations();
            write(rng.below(BLOCKS)).await;
            allocating += u64::from(allocations() != before);
        }
        assert!(allocating <= 100, "{allocating} of 10000 overwrites allocated");
    });
}
