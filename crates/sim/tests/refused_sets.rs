//! Sets that a start must refuse with an error that names the cause, and sets near such a limit that it must accept.
#![allow(clippy::unwrap_used)]

use engine::{CacheSet, SetOptions};
use format::{Bkey, BucketNr, CacheMode, Gen, Inode, Ptr, Sector, Sectors};
use sim::disk::{Retained, SimDisk};
use sim::edit::{Heads, MOST};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// What an error says of an entry of the ring, which begins with bucket 1 in the small layout.
const ENTRY: &str = ": sector 24: journal entry ";

/// A set with one device that was used and stopped.
fn used_set(flash_sectors: u64) -> Scenario {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), flash_sectors);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        assert!(b.clients[0].write(0, 16, true).await);
        b.stop().await;
    });
    scenario
}

/// What a start says after `change` was made to the cache device.
fn refused_after(mut scenario: Scenario, change: impl Fn(&SimDisk, Heads) + 'static) -> String {
    let said = std::rc::Rc::new(std::cell::RefCell::new(String::new()));
    let theirs = said.clone();
    scenario.boot(move |b| async move {
        change(&b.cache, Heads::read(&b.cache));
        let before = b.cache.image();
        let opened = b.parts.open(SetOptions::default()).await;
        *theirs.borrow_mut() = opened.map(drop).unwrap_err().to_string();
        let (size, after) = (before.size(), b.cache.image());
        let all = |image: &sim::image::Image| image.read_vec(Sector(0), size);
        assert_eq!(all(&before), all(&after), "a set that is refused stays as it is");
    });
    said.take()
}

/// A write to the end of such a volume asserted in the index.
#[test]
pub fn a_flash_only_volume_beyond_the_largest_position() {
    let said = refused_after(used_set(64), |cache, heads| {
        assert!(heads.enlarge_volume(cache));
    });
    assert!(said.contains("flash-only volume: expected at most"), "{said}");
}

/// The key was skipped, and the next rewrite of the leaf would have dropped it.
#[test]
pub fn a_leaf_with_a_key_beyond_the_largest_position() {
    let said = refused_after(used_set(0), |cache, heads| {
        let bucket = heads.superblock.geometry().nbuckets - 1;
        let at = heads.superblock.geometry().bucket_start(BucketNr(bucket));
        let key = Bkey::extent(Inode(0), Sector(MOST + 8), Sectors(8), true, Ptr::new(0, at, Gen(0)));
        heads.replace_root(cache, &[key]);
    });
    assert!(said.contains("expected an offset of at most"), "{said}");
}

/// The error names the entry and the key. The last position itself is inside.
#[test]
fn a_journal_entry_with_a_key_beyond_the_largest_position() {
    let said = refused_after(used_set(0), |cache, mut heads| {
        let roots = heads.newest.roots();
        heads.append(cache, &[Bkey::hole(Inode(3), Sector(MOST), Sectors(8))], &roots);
        heads.append(cache, &[Bkey::hole(Inode(3), Sector(MOST + 1), Sectors(8))], &roots);
    });
    let key = format!("key 3:{}: expected an offset of at most {MOST}", MOST + 1);
    assert!(said.contains(ENTRY) && said.ends_with(&key), "{said}");
}

/// Dirty data in the bucket of a btree node could never be written back: a detach waited for ever.
#[test]
fn dirty_data_in_a_bucket_of_metadata() {
    let key = |heads: &Heads| {
        let root = heads.newest.btree_root.pointer().unwrap();
        Bkey::extent(Inode(0), Sector(256), Sectors(8), true, root)
    };
    let in_a_leaf = refused_after(used_set(0), move |cache, heads| {
        heads.replace_root(cache, &[key(&heads)]);
    });
    assert!(in_a_leaf.contains("which holds metadata"), "{in_a_leaf}");
    let in_the_journal = refused_after(used_set(0), move |cache, mut heads| {
        let (key, roots) = (key(&heads), heads.newest.roots());
        heads.append(cache, &[key], &roots);
    });
    assert!(in_the_journal.contains(ENTRY), "{in_the_journal}");
    assert!(in_the_journal.contains("which holds metadata"), "{in_the_journal}");
}

/// The table was lost, and the start gave the slot of the dirty data to the first device: the data was gone without a word.
#[test]
pub fn dirty_data_without_an_owner() {
    let said = refused_after(used_set(0), |cache, heads| {
        let at = heads.newest.uuid_bucket.pointer().unwrap().offset();
        cache.put(at, &vec![0; heads.newest.uuid_bucket.size().bytes() as usize]);
    });
    assert!(said.contains("UUID table: slot 0: expected a device or a volume"), "{said}");
}

/// The first update of the table freed the root: a panic.
#[test]
fn table_and_root_in_one_bucket() {
    let said = refused_after(used_set(0), |cache, mut heads| {
        let mut roots = heads.newest.roots();
        let size = roots.uuid_bucket.size();
        roots.uuid_bucket = Bkey::uuid_bucket(size, roots.btree_root.pointer().unwrap());
        heads.append(cache, &[], &roots);
    });
    assert!(said.contains("UUID table"), "{said}");
}

/// Priorities take one bucket here: with one bucket that is free the set can write them, and the bucket of the old ones is
/// free then. It was refused; with none it still is.
#[test]
pub fn as_many_free_buckets_as_priorities_need_are_enough() {
    for (left, opens) in [(0, false), (1, true)] {
        let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
        });
        scenario.power_loss(Retained::Nothing);
        scenario.boot(move |b| async move {
            assert!(Heads::read(&b.cache).fill(&b.cache, left));
            match CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await {
                Ok(set) => {
                    assert!(opens);
                    assert!(set.gc().await.is_ok() && set.failure().is_none());
                }
                Err(e) => assert!(!opens && e.to_string().contains("needed to write priorities"), "{e}"),
            }
        });
    }
}

/// The limit for the index in memory in the two tests below.
const LIMIT_BYTES: u64 = 8192;

/// Opens the set with [`LIMIT_BYTES`], and checks that it has 700 dirty sectors.
async fn open_limited(b: &Boot) -> CacheSet {
    let mut options = SetOptions::default();
    options.tunables.btree_cache_limit = LIMIT_BYTES;
    let set = CacheSet::open(b.parts.cache.clone(), options).await.unwrap();
    let status = set.status();
    // One leaf more than the limit: the last one that stayed was taken below it.
    let one_leaf = 2 * (128 * 16 + 64);
    assert!((status.index_bytes as u64) <= LIMIT_BYTES + one_leaf, "{} bytes", status.index_bytes);
    assert_eq!(
        set.dirty_sectors(Inode(0)),
        Sectors(700),
        "what did not stay in memory is counted all the same"
    );
    set
}

/// A replay kept every leaf that it changed in memory until the leaf was written: after a crash, a set with a large index
/// took more memory than the machine had, at each start.
#[test]
pub fn a_replay_keeps_no_more_of_the_index_than_it_may() {
    let layout = Layout { nbuckets: 1024, ..Layout::small(CacheMode::Writeback) };
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for n in 0..650 {
            assert!(b.clients[0].write(n * 2, 1, false).await);
        }
        b.set().gc().await.unwrap();
        // Keys in all leaves that are in the journal only.
        for n in 0..50 {
            assert!(b.clients[0].write(n * 26 + 1, 1, false).await);
        }
        assert!(b.clients[0].flush().await);
        assert!(b.set().status().index_bytes as u64 > 2 * LIMIT_BYTES);
    });
    scenario.power_loss(Retained::Nothing).judge();
    scenario.boot(|b| async move {
        let set = open_limited(&b).await;
        // The leaves are read to be written, and dropped again.
        set.stop().await.unwrap();
        assert!(set.status().index_bytes as u64 <= LIMIT_BYTES, "{} bytes", set.status().index_bytes);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A start with a full index took 16 bytes for each extent, whatever `btree_cache_limit` says.
#[test]
pub fn a_start_keeps_no_more_of_the_index_than_it_may() {
    let layout = Layout { nbuckets: 1024, ..Layout::small(CacheMode::Writeback) };
    let mut scenario = Scenario::new(1, layout, 0);
    async fn write_thinly(b: &Boot) {
        for n in 0..700 {
            assert!(b.clients[0].write(n * 2, 1, false).await);
        }
    }
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        write_thinly(&b).await;
        assert!(b.set().status().index_bytes as u64 > 2 * LIMIT_BYTES);
        b.stop().await;
    });
    scenario.boot(|b| async move {
        let set = open_limited(&b).await;
        set.abandon();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
