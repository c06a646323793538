//! Damage to extents, and to the buckets that they lie in.

use super::*;

// 13: extents

#[test]
fn extents_broken() {
    let ptr = |at| Ptr::new(0, Sector(at), Gen(0));
    let cases: [(Bkey, &[&str]); 6] = [
        (Bkey::extent(Inode(0), Sector(4), Sectors(8), false, ptr(20_000)), &["size", "at most 4"]),
        (
            Bkey::extent(Inode(0), Sector(400), Sectors(200), false, ptr(20_000)),
            &["pointer", "inside one bucket"],
        ),
        (
            Bkey::extent(Inode(0), Sector(400), Sectors(8), false, ptr(1 << 40)),
            &["pointer", "inside one bucket"],
        ),
        (
            Bkey::extent(Inode(0), Sector(400), Sectors(8), false, Ptr::new(3, Sector(20_000), Gen(0))),
            &["device 3"],
        ),
        (Bkey::hole(Inode(7), Sector(400), Sectors(8)), &["slot 7", "uuid"]),
        (
            Bkey::extent(Inode(0), Sector(32_772), Sectors(8), false, ptr(20_000)),
            &["range", "inside the device, sectors 16+32752 of it"],
        ),
    ];
    for (key, words) in cases {
        let mut e = Edit::new(SINGLE_LEAF);
        e.append_set(ROOT, &[key]);
        expect(&e, I::ExtentValid, Error, words);
    }
}

/// The device that had the slot before may have been larger, or have begun earlier: its holes do no harm.
#[test]
fn holes_may_lie_outside_the_device() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.append_set(
        ROOT,
        &[Bkey::hole(Inode(0), Sector(8), Sectors(8)), Bkey::hole(Inode(0), Sector(32_772), Sectors(8))],
    );
    let report = report(&e);
    assert!(report.findings.iter().all(|f| f.invariant != I::ExtentValid), "{report}");
}

// 14: generations

#[test]
fn generation_newer_than_dirty_data() {
    let e = Edit::new(SINGLE_LEAF);
    let key = e.extent(0, true, 1);
    let bucket = e.view.geometry().bucket_of(key.ptr.offset()).unwrap();
    for (by, severity, words) in
        [(1, Notice, "1 generations behind"), (96, Notice, "96 generations"), (97, Error, "found 97")]
    {
        let mut e = Edit::new(SINGLE_LEAF);
        e.advance_gen(bucket, by);
        expect(&e, I::PointerAge, severity, &[words]);
    }
}

#[test]
fn generation_newer_than_a_node() {
    let mut e = Edit::new(SINGLE_LEAF);
    let bucket = e.view.nodes[0].bucket;
    e.advance_gen(bucket, 1);
    expect(&e, I::PointerAge, Error, &["pointer to the node", "1 generations behind"]);
}

#[test]
fn freed_node_too_old() {
    let mut e = Edit::new("08-synthetic");
    let root = e.view.nodes[0].clone();
    let key = Bkey::node(
        Inode(0),
        Sector(50),
        Sectors(128),
        root.key.ptr.with_generation(Gen(root.key.ptr.generation().0.wrapping_sub(100))),
    );
    e.append_set(ROOT, &[key]);
    expect(&e, I::PointerAge, Error, &["age of the pointer", "found 100"]);
}

// 15: alignment

#[test]
fn extent_not_aligned() {
    let mut e = Edit::new("05-clean-only");
    let mut key = e.extent(0, false, 8);
    key.cut_front(Sectors(3));
    e.append_set(ROOT, &[key]);
    expect(&e, I::Alignment, Notice, &["multiples of 8 sectors"]);
}

// 16, 17, 18: buckets

#[test]
fn bucket_with_two_uses() {
    let mut e = Edit::new(SINGLE_LEAF);
    let (newest, prio) = (e.newest(), e.view.prio.chain[0]);
    let sector = e.view.geometry().bucket_start(prio);
    e.entry(newest, |jset| jset.uuid_bucket.ptr = Ptr::new(0, sector, Gen(0)));
    expect(&e, I::BucketUse, Error, &["uuid table", "it is used for prio too"]);

    for (at, what) in [(3 * 128, "journal"), (u64::from(prio.0) * 128, "prio")] {
        let mut e = Edit::new(SINGLE_LEAF);
        let ptr = Ptr::new(0, Sector(at), e.view.gens.current(format::BucketNr((at / 128) as u32)));
        e.append_set(ROOT, &[Bkey::extent(Inode(0), Sector(400), Sectors(8), true, ptr)]);
        expect(&e, I::BucketUse, Error, &["data alone", &format!("used for {what} too")]);
    }
}

#[test]
fn data_shared_by_two_extents() {
    let mut e = Edit::new(SINGLE_LEAF);
    let key = e.extent(0, true, 4);
    let other = Bkey::extent(Inode(0), Sector(30_000), Sectors(4), true, key.ptr);
    e.append_set(ROOT, &[other]);
    expect(&e, I::DataShared, Error, &["no other live extent"]);
}

#[test]
fn extent_in_a_btree_node() {
    let mut e = Edit::new(SINGLE_LEAF);
    let ptr = e.view.nodes[0].key.ptr;
    e.append_set(ROOT, &[Bkey::extent(Inode(0), Sector(400), Sectors(8), true, ptr)]);
    expect(&e, I::NodeAsData, Error, &["used for btree too"]);
}

// 18a: room

#[test]
fn no_room_to_start() {
    let e = Edit::new("02-attached-empty");
    let unused: Vec<_> = e.unused_buckets().collect();
    for (spare, severity) in [(0, Error), (1, Notice), (8, Notice)] {
        let mut e = Edit::new("02-attached-empty");
        let keys: Vec<Bkey> = unused[spare..]
            .iter()
            .zip(100u64..)
            .map(|(bucket, n)| {
                let ptr = Ptr::new(0, e.view.geometry().bucket_start(*bucket), e.view.gens.current(*bucket));
                Bkey::extent(Inode(0), Sector(n), Sectors(1), false, ptr)
            })
            .collect();
        e.append_set(ROOT, &keys);
        let found = format!("found {spare}");
        expect(&e, I::Room, severity, &["without any live pointer", &found]);
    }
}
