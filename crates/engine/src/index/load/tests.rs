//! Tests of the content of nodes that are read at the start.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use format::{Gen, Geometry, SetMagic};
use io::Disk;

use super::*;
use crate::error::Place;
use crate::testing::{TestDisk, run};

const BUCKET: Sectors = Sectors(64);
const ONE: Inode = Inode(1);

/// Gives a reader of a device of 128 buckets to a test. Returns what the test returns.
fn with_reader<T: 'static>(test: impl FnOnce(&Reader<'_>) -> T + 'static) -> T {
    let result = Rc::new(RefCell::new(None));
    let found = result.clone();
    run(move |rt| async move {
        let disk = Disk::new(TestDisk::new(4096), rt);
        let place = Place { device: Arc::from("test disk"), set: "a set".into() };
        let geometry = Geometry::new(BUCKET, Sectors(1), 128, 4, 4).expect("a geometry");
        let reader = Reader { disk: &disk, place: &place, geometry: &geometry, magic: SetMagic(7) };
        *found.borrow_mut() = Some(test(&reader));
    });
    result.take().expect("the test ran")
}

/// A node in bucket 5.
fn node_at(level: u16, bound: Bound, body: Body) -> Node {
    Node {
        level,
        bound,
        ptr: Ptr::new(0, Sector(5 * BUCKET.0), Gen(0)),
        sectors: BUCKET,
        set_seq: 1,
        written: Sectors(1),
        parent: None,
        birth: 0,
        busy: false,
        replaced: false,
        dead: Vec::new(),
        body,
    }
}

/// Accounts a leaf that begins behind sector 100 of device 1 and has this extent; returns the live and dirty sectors.
fn account(start: u64, size: u64, bucket: u64) -> Result<(Sectors, Sectors), String> {
    with_reader(move |reader| {
        let mut buckets = Buckets::new(reader.geometry, BucketNr(4), 128).unwrap();
        let root = node_at(0, MAX_BOUND, Body::Leaf(Leaf::default()));
        let mut tree = Tree::new(root);
        let id = tree.root();
        let mut extents = Extents::new(BUCKET);
        let ptr = Ptr::new(0, Sector(bucket * BUCKET.0), Gen(0));
        extents.push_back(ONE, Entry::extent(Sector(start + size), Sectors(size), true, ptr));
        let lower = (ONE, Sector(100));
        let checked = check_leaf(reader, tree.node(id), lower, &extents, &buckets);
        let figures = checked.map(|()| {
            tree.account_leaf(id, &extents, &mut buckets);
            (buckets.live_total(), tree.dirty_sectors(ONE))
        });
        figures.map_err(|e| e.to_string())
    })
}

#[test]
fn an_extent_before_its_leaf_is_damage() {
    assert_eq!(account(100, 8, 9), Ok((Sectors(8), Sectors(8))));
    for start in [99, 92, 0] {
        let error = account(start, 8, 9).unwrap_err();
        assert!(error.contains("expected extents inside 1:100"), "{error}");
    }
}

#[test]
fn live_data_in_a_bucket_of_metadata_is_damage() {
    let error = account(200, 8, 2).unwrap_err();
    assert!(error.contains("expected a bucket of data, found bucket 2"), "{error}");
}

/// Some damage.
fn short() -> format::Corrupt {
    format::RawSuperblock::from_prefix(&[0; 8]).err().expect("it is too short")
}

/// Loads an internal node with these keys as the root; bucket 18 has been reused. Returns the pointers on disk to
/// former children, the children to read, and the number of sectors of the node that have bsets.
fn take_root(keys: Vec<Bkey>, torn: bool) -> Result<(Vec<Ptr>, Vec<Bkey>, Sectors), String> {
    with_reader(move |reader| {
        let mut buckets = Buckets::new(reader.geometry, BucketNr(4), 128).unwrap();
        buckets.raise(BucketNr(18), Gen(2));
        let mut loading = Loading {
            reader,
            buckets: &mut buckets,
            tree: None,
            events: Vec::new(),
            queue: VecDeque::new(),
            node_buckets: BTreeSet::new(),
            limit_bytes: 0,
        };
        let key = Bkey::node(MAX_BOUND.0, MAX_BOUND.1, BUCKET, node_ptr(10, 0));
        let w = Wanted { key, level: 1, parent: None, path: Vec::new(), child: 0 };
        let summary = NodeSummary { written_bytes: 3 * 512, ..NodeSummary::default() };
        let parsed = Parsed { summary, torn: torn.then(short), keys };
        let taken = loading.take_internal(&w, BucketNr(10), &parsed).map(|()| {
            let tree = loading.tree.as_ref().expect("the root was added");
            let root = tree.node(tree.root());
            let wanted: Vec<&Wanted> = loading.queue.iter().collect();
            assert_eq!(root.children().len(), wanted.len());
            for (n, child) in wanted.iter().enumerate() {
                let parent = (child.level, child.parent, child.child);
                assert_eq!(parent, (0, Some(tree.root()), n));
                assert_eq!(child.path, [BucketNr(10)]);
            }
            (root.dead.clone(), wanted.iter().map(|w| w.key).collect(), root.written)
        });
        taken.map_err(|e| e.to_string())
    })
}

fn node_ptr(bucket: u64, generation: u8) -> Ptr {
    Ptr::new(0, Sector(bucket * BUCKET.0), Gen(generation))
}

/// Until the node is rewritten, the age of these pointers on disk must stay limited.
#[test]
fn pointers_to_former_children_are_recorded() {
    let node =
        |end: u64, bucket, generation| Bkey::node(ONE, Sector(end), BUCKET, node_ptr(bucket, generation));
    let last = Bkey::node(MAX_BOUND.0, MAX_BOUND.1, BUCKET, node_ptr(19, 0));
    let (gone, freed) = (node(100, 18, 1), Bkey::freeing(node_ptr(17, 0), BUCKET));
    // The keys are in the order of the bsets; the children are in the order of their positions.
    let keys = vec![last, gone, freed, node(100, 18, 2), node(50, 16, 0)];
    let (dead, children, written) = take_root(keys.clone(), false).expect("a sound node");
    assert_eq!(dead, [node_ptr(18, 1), node_ptr(17, 0)]);
    assert_eq!(children, [node(50, 16, 0), node(100, 18, 2), last]);
    assert_eq!(written, Sectors(3));
    // A node whose last bset is torn takes no further bsets.
    let (dead, _, written) = take_root(keys, true).expect("a sound node");
    assert_eq!((dead.len(), written), (2, BUCKET));
}

/// The children of each node ascend, but those of the second node may begin before the first node ends. A replayed key of that
/// range had no part in the leaf between them: the start ended with an overflow.
#[test]
fn leaves_that_do_not_ascend_are_damage() {
    with_reader(|reader| {
        for (middle, wanted) in [(150, None), (100, Some("found 1:100")), (50, Some("found 1:50"))] {
            let mut tree = Tree::new(node_at(1, MAX_BOUND, Body::Internal(Vec::new())));
            let bounds = [(ONE, Sector(100)), (ONE, Sector(middle)), MAX_BOUND];
            let leaves = bounds.map(|b| tree.add_node(node_at(0, b, Body::Leaf(Leaf::default()))));
            *tree.node_mut(tree.root()).children_mut() = leaves.to_vec();
            tree.rebuild_directory();
            let found = check_order(reader, &tree).map_err(|e| e.to_string());
            match wanted {
                None => assert_eq!(found, Ok(())),
                Some(end) => assert!(found.as_ref().is_err_and(|e| e.ends_with(end)), "{found:?}"),
            }
        }
    });
}

/// Every requirement for the keys of an internal node is checked.
#[test]
fn children_that_make_no_sense_are_damage() {
    let last = |bucket| Bkey::node(MAX_BOUND.0, MAX_BOUND.1, BUCKET, node_ptr(bucket, 0));
    let said = |keys| take_root(keys, false).expect_err("damage");
    let two = said(vec![last(19), last(20)]);
    assert!(two.contains("expected one live child per position, found two at"), "{two}");
    assert!(said(Vec::new()).ends_with("found no live child"));
    let short = said(vec![Bkey::node(ONE, Sector(50), BUCKET, node_ptr(16, 0))]);
    assert!(short.ends_with("found 1:50"), "{short}");
    let stale = Bkey::node(ONE, Sector(50), BUCKET, node_ptr(18, 2 + 128 + 31));
    let aged = said(vec![last(19), stale]);
    assert!(aged.contains("generation age: expected at most 96, found 97"), "{aged}");
    let old = Bkey::node(ONE, Sector(50), BUCKET, node_ptr(18, 2 + 128 + 32));
    assert!(take_root(vec![last(19), old], false).is_ok());
}

/// Check keys, keys without a pointer and empty keys refer to no data; every other key has its data inside one bucket.
#[test]
fn the_data_of_a_key_is_inside_one_bucket() {
    with_reader(|reader| {
        let node = Bkey::node(MAX_BOUND.0, MAX_BOUND.1, BUCKET, node_ptr(10, 0));
        let w = Wanted { key: node, level: 0, parent: None, path: Vec::new(), child: 0 };
        let key = |size, dev, at| {
            Bkey::extent(ONE, Sector(100), Sectors(size), true, Ptr::new(dev, Sector(at), Gen(3)))
        };
        let found = |keys: &[Bkey]| reader.pointers(keys, &w).map_err(|e| e.to_string());
        let without = [key(8, Ptr::CHECK_DEV, 640), key(0, 0, 640), key(0, 0, 1)];
        assert_eq!(found(&without), Ok(Vec::new()));
        assert_eq!(found(&[Bkey::hole(ONE, Sector(100), Sectors(8))]), Ok(Vec::new()));
        let ptr = |at| Ptr::new(0, Sector(at), Gen(3));
        let with = [key(8, 0, 640), key(64, 0, 704), key(1, 0, 767)];
        let wanted = [(10, 640), (11, 704), (11, 767)].map(|(b, at)| (BucketNr(b), ptr(at)));
        assert_eq!(found(&with), Ok(wanted.to_vec()));
        for (size, at) in [(9, 760), (64, 705), (8, 8), (8, 128 * BUCKET.0)] {
            let error = found(&[key(8, 0, 640), key(size, 0, at)]).unwrap_err();
            let what =
                format!("key 1:100: pointer: expected {size} sectors inside one bucket, found sector {at}");
            assert!(error.contains(&what), "{error}");
        }
    });
}
