//! Pieces of the format: checksum, journal entry, bset.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use format::checksum::crc64;
use format::{
    Bkey, BsetBuilder, Gen, Inode, JournalSeq, JsetBuilder, JsetRoots, Ptr, Sector, Sectors, SetMagic,
    for_each_bset,
};

const BLOCK: Sectors = Sectors(1);
const MAGIC: SetMagic = SetMagic(0x1234_5678_9abc_def0);

fn key(i: u64) -> Bkey {
    Bkey::extent(Inode(0), Sector(i * 16 + 8), Sectors(8), true, Ptr::new(0, Sector(i * 8 + 4096), Gen(1)))
}

fn checksum(c: &mut Criterion) {
    let bytes = vec![0xA5_u8; 256 << 10];
    let mut group = c.benchmark_group("crc64");
    for len in [512, 4096, 256 << 10] {
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(format!("{len} bytes"), |b| b.iter(|| crc64(black_box(&bytes[..len]))));
    }
    group.finish();
}

fn journal(c: &mut Criterion) {
    let node = Bkey::root(Sectors(512), Ptr::new(0, Sector(8192), Gen(1)));
    let roots = JsetRoots {
        uuid_bucket: Bkey::uuid_bucket(Sectors(1024), Ptr::new(0, Sector(4096), Gen(1))),
        btree_root: node,
        btree_level: 0,
        prio_bucket: [9; 8],
    };
    let keys: Vec<Bkey> = (0..1000).map(key).collect();
    let mut buffer = vec![0_u8; 32768];
    c.bench_function("journal entry of 1000 keys", |b| {
        b.iter(|| {
            let mut jset = JsetBuilder::begin(&mut buffer[..], BLOCK);
            for k in &keys {
                assert!(jset.push_key(k));
            }
            jset.finish(MAGIC, JournalSeq(7), JournalSeq(3), &roots)
        });
    });
}

fn bset(c: &mut Criterion) {
    let ptr = Ptr::new(0, Sector(8192), Gen(1));
    let node = Bkey::root(Sectors(512), ptr);
    let keys: Vec<Bkey> = (0..10_000).map(key).collect();
    let mut buffer = vec![0_u8; 256 << 10];
    c.bench_function("bset of 10000 keys written", |b| {
        b.iter(|| {
            let mut set = BsetBuilder::begin(&mut buffer[..], 1, BLOCK);
            for k in &keys {
                assert!(set.push_key(k));
            }
            set.finish(MAGIC, ptr)
        });
    });
    c.bench_function("node of 10000 keys read", |b| {
        b.iter(|| {
            let mut sum = 0;
            let read = for_each_bset(&buffer, &node, MAGIC, BLOCK, |_, k| sum += k.offset().0);
            assert!(read.is_ok());
            sum
        });
    });
}

criterion_group!(benches, checksum, journal, bset);
criterion_main!(benches);
