//! What a leaf may hold that is read at the start.

use std::sync::Arc;

use format::{Gen, Geometry};

use super::*;
use crate::testing::{TestDisk, run};

const BUCKET: Sectors = Sectors(64);
const ONE: Inode = Inode(1);

/// Counts a leaf that begins behind sector 100 of device 1 and has this extent; returns the live and dirty sectors.
fn account(start: u64, size: u64, bucket: u64) -> Result<(Sectors, Sectors), String> {
    let result = std::rc::Rc::new(std::cell::RefCell::new(None));
    let found = result.clone();
    run(|rt| async move {
        let disk = Disk::new(TestDisk::new(4096), rt);
        let place = Place { device: Arc::from("test disk"), set: "a set".into() };
        let geometry = Geometry::new(BUCKET, Sectors(1), 128, 4, 4).expect("a geometry");
        let reader = Reader { disk: &disk, place: &place, geometry: &geometry, magic: SetMagic(7) };
        let mut buckets = Buckets::new(&geometry, BucketNr(4), 128);
        let root = Node {
            level: 0,
            bound: MAX_BOUND,
            ptr: Ptr::new(0, Sector(5 * BUCKET.0), Gen(0)),
            sectors: BUCKET,
            set_seq: 1,
            written: Sectors(1),
            parent: None,
            birth: 0,
            busy: false,
            replaced: false,
            dead: Vec::new(),
            body: Body::Leaf(Leaf::default()),
        };
        let mut tree = Tree::new(root);
        let id = tree.root();
        let mut extents = Extents::new(BUCKET);
        let ptr = Ptr::new(0, Sector(bucket * BUCKET.0), Gen(0));
        extents.push_back(ONE, Entry::extent(Sector(start + size), Sectors(size), true, ptr));
        let counted = account_leaf(&reader, &mut tree, &mut buckets, id, (ONE, Sector(100)), &extents);
        let figures = counted.map(|()| (buckets.live_total(), tree.dirty_sectors(ONE)));
        *found.borrow_mut() = Some(figures.map_err(|e| e.to_string()));
    });
    result.take().expect("the test ran")
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
