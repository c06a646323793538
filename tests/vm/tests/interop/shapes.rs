//! Geometries of all kinds, each with a turn of both sides.

use crate::world::*;

/// We format, then we, the kernel, and we again.
#[track_caller]
fn both_sides(label: &str, mut w: World, make: &[&str]) {
    w.set().make(make);
    w.our_turn(1, WRITEBACK_OFF);
    w.kernels_turn(label, 2);
    w.our_turn(3, &[]);
}

fn buckets(bucket_bytes: u64, cache_buckets: u64) {
    let w = World::with_cache(bucket_bytes * cache_buckets);
    let size = bucket_bytes.to_string();
    both_sides(&format!("bucket-{size}"), w, &["--bucket", &size, "--block", "512", "--writeback"]);
}

macro_rules! bucket_sizes {
    ($($name:ident: $bytes:expr, $buckets:expr;)*) => {
        $(#[test]
        fn $name() {
            unless_skipped!(stringify!($name));
            buckets($bytes, $buckets);
        })*
    };
}

bucket_sizes! {
    buckets_of_4_kib: 4 << 10, 20_000;
    buckets_of_128_kib: 128 << 10, 600;
    buckets_of_256_kib: 256 << 10, 600;
    // Most made by make-bcache: nodes are half a bucket.
    buckets_of_512_kib: 512 << 10, 600;
    buckets_of_1_mib: 1 << 20, 600;
    buckets_of_2_mib: 2 << 20, 600;
    // Needs the feature "large bucket".
    buckets_of_32_mib: 32 << 20, 600;
}

#[test]
fn blocks_of_4_kib() {
    unless_skipped!("blocks_of_4_kib");
    let mut w = World::new();
    w.block_sectors = 8;
    both_sides("block-4k", w, &["--bucket", "64k", "--block", "4k", "--writeback"]);
}

#[test]
fn blocks_of_2_kib() {
    unless_skipped!("blocks_of_2_kib");
    let mut w = World::new();
    w.block_sectors = 4;
    both_sides("block-2k", w, &["--bucket", "64k", "--block", "2k", "--writeback"]);
}

fn data_offset(sectors: u64) {
    let mut w = World::new();
    w.model = Model::new(1, BACKING_BYTES / 512 - sectors);
    let offset = sectors.to_string();
    let make = ["--bucket", "64k", "--block", "512", "--writeback", "--data-offset", &offset];
    both_sides(&format!("offset-{offset}"), w, &make);
}

#[test]
fn data_at_1_mib() {
    unless_skipped!("data_at_1_mib");
    data_offset(2048);
}

#[test]
fn data_at_an_odd_sector() {
    unless_skipped!("data_at_an_odd_sector");
    data_offset(77);
}

/// A set with a data offset, made by the kernel's tool.
#[test]
fn the_kernels_data_offset() {
    unless_skipped!("the_kernels_data_offset");
    let mut w = World::with_cache(80 << 20);
    w.model = Model::new(1, BACKING_BYTES / 512 - 4096);
    let mut kernel = Kernel::boot("their-offset", &[&w.cache, &w.backing]);
    let options = "--writeback --data-offset 4096 --cache_replacement_policy=random --discard";
    kernel.make(&format!("-C /dev/disk/cache -B /dev/disk/backing -b 128k {options}"));
    kernel.register(&[&w.cache, &w.backing]);
    let plan = w.plan(1);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.stop();
    w.check();
    w.our_turn(2, WRITEBACK_OFF);
    w.kernels_turn("their-offset-2", 3);
}
