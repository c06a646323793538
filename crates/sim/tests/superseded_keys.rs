//! A leaf that does not change retains the keys of its older bsets for years. Their buckets are reused many times meanwhile;
//! the start must not take such a key for a newer one.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::{BucketNr, CacheMode};
use inspect::{Mode, SetView};
use sim::disk::Retained;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// The first leaf's region: extents of one sector, 16 sectors apart. Everything else happens far behind it.
const STEP: u64 = 16;
/// The region that is read over and over.
const BUSY: std::ops::Range<u64> = 4096..8192;
/// Size of a bucket, and of what is read at once.
const BUCKET: u64 = 8;
/// A generation that is ahead of another by more looks older (format section 4.5).
const HALF_WAY_ROUND: u8 = 128;

/// Two leaves of which the first says in its second set where some extents were, and in its third where they are.
async fn superseded_in_the_first_leaf(b: &Boot) {
    b.open_with(SetOptions::default()).await;
    b.stay_dirty(0).await;
    let mut i = 0;
    while b.set().status().btree_nodes < 3 {
        assert!(b.clients[0].write(i * STEP, 1, false).await);
        assert!(b.clients[0].write(BUSY.start - 1 - i * STEP, 1, false).await);
        i += 1;
    }
    for _ in 0..2 {
        b.sleep_ms(90_000).await;
        for i in 0..10 {
            assert!(b.clients[0].write(i * STEP + 4, BUCKET, false).await);
        }
    }
    b.sleep_ms(90_000).await;
}

/// Number of bsets of the leaf that begins the index, and the highest generation that is stored for a bucket.
fn sets_and_generation(scenario: &Scenario) -> (usize, u8) {
    let view = SetView::open(&scenario.hardware.cache.image(), Mode::BestEffort).unwrap();
    let leaves = view.nodes.iter().filter(|n| n.level == 0);
    let first = leaves.min_by_key(|n| n.after).unwrap();
    let buckets = (0..view.geometry().nbuckets).map(|b| view.gens.state(BucketNr(b)));
    (first.bsets.len(), buckets.filter_map(|s| s.stored).map(|(g, _)| g.0).max().unwrap())
}

/// The buckets behind the busy region are used about 185 times, so that the generation of a superseded key, 1, is ahead
/// of its bucket's by about 72. Then some of them hold dirty data.
#[test]
fn a_superseded_key_does_not_outlive_its_bucket() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].data_sectors = 8192;
    let mut scenario = Scenario::new(17, layout, 0);
    scenario.boot(|b| async move {
        superseded_in_the_first_leaf(&b).await;
        let mut at = BUSY.start;
        for _ in 0..150 * b.set().status().nbuckets {
            b.clients[0].read(at, BUCKET).await.unwrap();
            at = if at + BUCKET < BUSY.end { at + BUCKET } else { BUSY.start };
        }
        for i in 0..100 {
            assert!(b.clients[0].write(BUSY.start + i * BUCKET, BUCKET, false).await);
        }
        assert!(b.clients[0].flush().await);
    });
    scenario.power_loss(Retained::Nothing);
    let (sets, highest) = sets_and_generation(&scenario);
    assert!(sets >= 3, "the first leaf was written anew: the scenario is about a leaf that was not");
    assert!(highest > HALF_WAY_ROUND, "generations went up to {highest} only");
    scenario.judge().happy_end();
}
