//! Bytes that a kernel preserves and does not read (format section 15).
//!
//! Patterns are put there while nothing runs. Then a kernel registers the set, makes changes that write the superblocks and the
//! UUID table, and stops; after each step the images are read here.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use format::superblock::{BACKING_PADDING_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_PADDING_BYTES};
use format::uuid_table::{SLOT_PADDING_BYTES, SLOT_RESERVED_BYTES, UUID_ENTRY_BYTES, parse_uuid_table};
use format::{BucketNr, Gen, RawSuperblock, Sector, Sectors, UuidEntry};
use inspect::{Mode, SetView, SliceSource};
use ubcache_vm::wait_until;

use crate::world::*;

/// Byte of the superblock on a device.
const SUPERBLOCK: usize = 4096;
/// First byte of a slot behind its fields.
const RESERVED: usize = 72;
/// Slots with a pattern: that of the backing device, and the first free ones.
const SLOTS: usize = 4;
/// Bytes for the time and the first bucket of a backing superblock, which the kernel does not preserve when it writes one.
const REWRITTEN: [u8; 6] = [0xaa; 6];
/// Name of a place.
const BACKING_PADDING: &str = "padding of the backing superblock";
/// Blocks of the set, in sectors.
const BLOCK: Sectors = Sectors(8);

/// Bytes at a place of a device. None of them is zero.
fn pattern(place: u64, len: usize) -> Vec<u8> {
    let hash = |i: u64| (place.wrapping_add(i).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1;
    (0..len as u64).map(hash).collect()
}

fn open(disk: &Disk) -> File {
    File::options().read(true).write(true).open(&disk.path).unwrap()
}

fn read(disk: &Disk, range: &Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    open(disk).read_exact_at(&mut bytes, range.start as u64).unwrap();
    bytes
}

/// A range at a fixed place of a device, without a meaning for the kernel.
struct Fixed<'a> {
    what: &'static str,
    disk: &'a Disk,
    range: Range<usize>,
}

impl<'a> Fixed<'a> {
    /// A part of the superblock.
    fn part(disk: &'a Disk, what: &'static str, range: Range<usize>) -> Fixed<'a> {
        Fixed { what, disk, range: SUPERBLOCK + range.start..SUPERBLOCK + range.end }
    }

    /// The places on a cache device with `keys` journal buckets, and a first bucket that begins at byte `end`.
    fn of_cache(disk: &'a Disk, keys: usize, end: usize) -> Vec<Fixed<'a>> {
        vec![
            Fixed { what: "sectors 0 to 7 of the cache device", disk, range: 0..SUPERBLOCK },
            Fixed::part(disk, "padding of the cache superblock", 144..184),
            Fixed::part(disk, "unused journal slots of the cache superblock", 208 + 8 * keys..2256),
            Fixed::part(disk, "tail of the cache superblock", 2258..SUPERBLOCK_BYTES),
            Fixed { what: "rest of the superblock area", disk, range: SUPERBLOCK + SUPERBLOCK_BYTES..end },
        ]
    }

    /// The places on a backing device of version 1.
    fn of_backing(disk: &'a Disk) -> Vec<Fixed<'a>> {
        vec![
            Fixed { what: "sectors 0 to 7 of the backing device", disk, range: 0..SUPERBLOCK },
            Fixed::part(disk, "feature words of the backing superblock", 120..144),
            Fixed::part(disk, BACKING_PADDING, 144..184),
            Fixed::part(disk, "data offset of a backing superblock of version 1", 184..192),
            Fixed::part(disk, "bucket size and index of the backing superblock", 194..200),
            Fixed::part(disk, "journal slots of the backing superblock", 208..2256),
            Fixed::part(disk, "tail of the backing superblock", 2256..SUPERBLOCK_BYTES),
        ]
    }

    fn expected(&self) -> Vec<u8> {
        pattern(self.range.start as u64, self.range.len())
    }

    fn put(&self) {
        open(self.disk).write_all_at(&self.expected(), self.range.start as u64).unwrap();
    }

    fn check(&self, step: &str) {
        let found = read(self.disk, &self.range);
        let wrong = found.iter().zip(self.expected()).filter(|(f, e)| *f != e).count();
        assert_eq!(wrong, 0, "{step}: {}: {wrong} of {} bytes differ", self.what, found.len());
    }
}

/// Puts the patterns into their places, and computes the checksums of the superblocks.
fn put_all(places: &[Fixed<'_>]) {
    places.iter().for_each(Fixed::put);
    for disk in places.iter().map(|p| p.disk) {
        let bytes = read(disk, &(SUPERBLOCK..SUPERBLOCK + SUPERBLOCK_BYTES));
        let csum = RawSuperblock::from_prefix(&bytes).unwrap().computed_csum().unwrap();
        open(disk).write_all_at(&csum.to_le_bytes(), SUPERBLOCK as u64).unwrap();
    }
}

/// A cache device as it is now.
struct Image {
    /// The contents from before the rest was read: a bucket gets a new generation before it gets new data.
    earlier: Vec<u8>,
    bytes: Vec<u8>,
    view: SetView,
}

/// A block of a data bucket, and the generation that the bucket had.
#[derive(Clone, Copy)]
struct Block {
    at: Sector,
    bucket: BucketNr,
    generation: Gen,
    is_last: bool,
}

impl Image {
    /// `None` while a kernel is in the middle of a change.
    fn try_read(cache: &Disk) -> Option<Image> {
        let earlier = std::fs::read(&cache.path).unwrap();
        let bytes = std::fs::read(&cache.path).unwrap();
        let view = SetView::open(&SliceSource::new("cache", &bytes), Mode::Strict).ok()?;
        Some(Image { earlier, bytes, view })
    }

    /// The first image with this property.
    fn when(cache: &Disk, what: &str, condition: impl Fn(&Image) -> bool) -> Image {
        let mut found = None;
        wait_until(what, || {
            found = Image::try_read(cache).filter(|i| condition(i));
            found.is_some()
        });
        found.unwrap()
    }

    fn table(&self) -> (Sector, Vec<UuidEntry>) {
        let newest = self.view.journal.as_ref().unwrap().replay.last().unwrap();
        let at = newest.uuid_bucket.pointer().unwrap().offset();
        let bytes = &self.bytes[at.bytes() as usize..][..newest.uuid_bucket.size().bytes() as usize];
        (at, parse_uuid_table(bytes, newest.version).unwrap())
    }

    fn slot(&self, slot: usize) -> UuidEntry {
        self.table().1[slot]
    }

    /// The blocks of each bucket with live data: whether a key names them.
    fn blocks(&self) -> Vec<(Block, bool)> {
        let g = *self.view.geometry();
        let mut named: BTreeMap<BucketNr, Vec<bool>> = BTreeMap::new();
        for (_, piece, _) in self.view.pieces().filter(|(_, _, kind)| kind.is_live()) {
            let ptr = piece.ptr.unwrap();
            let bucket = self.view.gens.bucket_of(ptr, piece.len).unwrap();
            let blocks =
                named.entry(bucket).or_insert_with(|| vec![false; (g.bucket_sectors.0 / BLOCK.0) as usize]);
            let first = g.offset_in_bucket(ptr.offset()).0;
            (first / BLOCK.0..(first + piece.len.0).div_ceil(BLOCK.0))
                .for_each(|b| blocks[b as usize] = true);
        }
        let block = |bucket: BucketNr, n: usize, is_last: bool| {
            let at = g.bucket_start(bucket) + Sectors(n as u64 * BLOCK.0);
            Block { at, bucket, generation: self.view.gens.current(bucket), is_last }
        };
        let of_bucket = |(bucket, blocks): (BucketNr, Vec<bool>)| {
            let last = blocks.len() - 1;
            let all = blocks.into_iter().enumerate();
            all.map(|(n, named)| (block(bucket, n, n == last), named)).collect::<Vec<_>>()
        };
        named.into_iter().flat_map(of_bucket).collect()
    }

    fn has_pattern(&self, block: &Block) -> bool {
        self.earlier[block.at.bytes() as usize..][..BLOCK.bytes() as usize] == block.pattern()
    }
}

impl Block {
    fn pattern(&self) -> Vec<u8> {
        pattern(self.at.bytes() | u64::from(self.generation.0) << 48, BLOCK.bytes() as usize)
    }
}

fn of_slot(slot: usize) -> Vec<u8> {
    pattern(1 << 32 | (slot as u64) << 16, SLOT_RESERVED_BYTES)
}

/// Puts patterns into the first slots of the UUID table.
fn put_slots(cache: &Disk) {
    let at = Image::try_read(cache).unwrap().table().0;
    for slot in 0..SLOTS {
        let at = at.bytes() + (slot * UUID_ENTRY_BYTES + RESERVED) as u64;
        open(cache).write_all_at(&of_slot(slot), at).unwrap();
    }
}

/// Puts patterns into all blocks of data buckets that no key names.
fn put_blocks(cache: &Disk) -> Vec<Block> {
    let all = Image::try_read(cache).unwrap().blocks();
    let unnamed: Vec<Block> = all.into_iter().filter(|(_, named)| !named).map(|(block, _)| block).collect();
    let file = open(cache);
    unnamed.iter().for_each(|b| file.write_all_at(&b.pattern(), b.at.bytes()).unwrap());
    let last = unnamed.iter().filter(|b| b.is_last).count();
    println!("patterns in {} blocks that no key names, {last} at the end of a bucket", unnamed.len());
    assert!(last >= 5, "the last block of {last} buckets has no name");
    unnamed
}

/// What became of blocks with patterns.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Fate {
    /// The bucket has its generation; the block has its pattern.
    preserved: usize,
    /// The bucket has its generation; the block has changed.
    changed: usize,
    /// The bucket has another generation; the block has its pattern.
    outdated: usize,
    /// The bucket has another generation; the block has changed.
    overwritten: usize,
}

impl Fate {
    fn of(image: &Image, blocks: &[Block]) -> Fate {
        let mut fate = Fate::default();
        for block in blocks {
            let same = image.view.gens.current(block.bucket) == block.generation;
            *match (same, image.has_pattern(block)) {
                (true, true) => &mut fate.preserved,
                (true, false) => &mut fate.changed,
                (false, true) => &mut fate.outdated,
                (false, false) => &mut fate.overwritten,
            } += 1;
        }
        fate
    }
}

/// Everything with a pattern.
struct Patterns<'a> {
    cache: &'a Disk,
    fixed: Vec<Fixed<'a>>,
    blocks: Vec<Block>,
    /// Whether a block had its pattern although its bucket had another generation.
    outdated: Cell<bool>,
}

impl<'a> Patterns<'a> {
    /// Puts them into a set at rest.
    fn put(cache: &'a Disk, backing: &'a Disk) -> Patterns<'a> {
        let g = *Image::try_read(cache).unwrap().view.geometry();
        let end = g.bucket_start(g.first_bucket).bytes() as usize;
        let mut fixed = Fixed::of_cache(cache, g.njournal as usize, end);
        fixed.extend(Fixed::of_backing(backing));
        open(backing).write_all_at(&REWRITTEN, (SUPERBLOCK + 200) as u64).unwrap();
        put_all(&fixed);
        put_slots(cache);
        Patterns { cache, fixed, blocks: put_blocks(cache), outdated: Cell::new(false) }
    }

    /// Every pattern is there, except for blocks of buckets with another generation.
    fn check(&self, image: &Image, step: &str) -> Fate {
        self.fixed.iter().for_each(|p| p.check(step));
        for slot in 0..SLOTS {
            assert_eq!(image.slot(slot).reserved[..], of_slot(slot), "{step}: slot {slot}");
        }
        let fate = Fate::of(image, &self.blocks);
        println!("{step}: {fate:?}");
        self.outdated.set(self.outdated.get() || fate.outdated > 0);
        assert_eq!(fate.changed, 0, "{step}: blocks that no key names: {fate:?}");
        fate
    }

    fn check_now(&self, step: &str) -> Fate {
        self.check(&Image::when(self.cache, step, |_| true), step)
    }
}

/// Collects garbage and waits until that is done.
fn collect_garbage(kernel: &mut Kernel) {
    // This zeroes the figures that the next garbage collection sets.
    kernel.set_of_set("clear_stats", "1");
    kernel.set_of_set("internal/trigger_gc", "1");
    kernel.vm.wait_for("garbage collection", "! grep -qx 0.* /sys/fs/bcache/*-*/average_key_size");
}

/// Overwrites the whole device, mostly in pieces of a bucket.
fn overwrite(kernel: &mut Kernel, disk: &Disk) {
    let device = kernel.device(disk);
    kernel
        .vm
        .sh(&format!("tr '\\0' x </dev/zero | dd of={device} bs=64k count=700 iflag=fullblock oflag=direct"))
        .ok();
}

/// A kernel initialises a set whose superblock has patterns.
fn initialise(kernel: &mut Kernel, fresh: &Disk) {
    // The number of journal buckets is chosen now.
    let places = Fixed::of_cache(fresh, 1024 / 128, 64 << 10);
    put_all(&places);
    kernel.register(&[fresh]);
    kernel.stop_set();
    places.iter().for_each(|p| p.check("initialisation"));
}

/// Serves the backing device without its cache, which makes its state stale.
fn serve_alone(kernel: &mut Kernel, backing: &Disk) {
    let device = format!("$(readlink -f {})", backing.guest());
    let running = format!("/sys/block/$(basename {device})/bcache/running");
    kernel.vm.sh(&format!("echo {device} > /sys/fs/bcache/register")).ok();
    kernel.vm.wait_for("it is registered", &format!("test -e {running}"));
    kernel.vm.sh(&format!("echo 1 > {running}")).ok();
    kernel.vm.wait_for("it is served", "test -e /sys/block/bcache0");
    kernel.stop_set();
}

/// Formats in the usual way, with larger blocks.
fn make(set: &Set<'_>) {
    set.make(&["--bucket", "64k", "--block", "4k", "--writeback"]);
}

#[test]
fn padding_and_blocks_without_a_key_survive_a_kernel() {
    unless_skipped!("padding_and_blocks_without_a_key_survive_a_kernel");
    let mut w = World::new();
    w.block_sectors = BLOCK.0 as u32;
    make(&w.set());
    w.our_turn(1, WRITEBACK_OFF);
    let (second, fresh) = (w.dir.disk("second", 16 << 20), w.dir.disk("fresh", CACHE_BYTES));
    make(&Set::new(&w.dir, &fresh, &[&second]));
    let (cache, backing) = (w.cache.clone(), w.backing.clone());
    let mut patterns = Patterns::put(&cache, &backing);
    w.check();

    let mut kernel = Kernel::boot("padding", &[&cache, &backing, &second, &fresh]);
    println!("kernel {}", kernel.vm.sh("uname -r").ok().line());
    initialise(&mut kernel, &fresh);
    kernel.register(&[&cache, &backing]);
    patterns.check_now("registration");
    kernel.judge(&backing, &mut w.model);
    patterns.check_now("reads");
    change(&mut kernel, &mut w, &patterns);
    detach_and_attach(&mut kernel, &second, &w, &patterns);
    kernel.judge(&backing, &mut w.model);
    kernel.stop_set();
    patterns.check_now("stop");
    assert!(patterns.outdated.get(), "a block has its pattern although its bucket has another generation");

    // Also the blocks that the kernel's open buckets have left.
    patterns.blocks = put_blocks(&cache);
    kernel.register(&[&cache, &backing, &second]);
    let plan = w.plan(4);
    kernel.load(&backing, &plan, &mut w.model);
    patterns.check_now("writes after a stop");
    kernel.judge(&backing, &mut w.model);
    fill_again(&mut kernel, &backing, &patterns);
    serve_alone(&mut kernel, &backing);
    patterns.check_now("start without the cache");
    kernel.stop();
    our_turn(&w, &second, patterns);
}

/// A new label, writes in two modes, garbage collection, and another write of the cache superblock.
fn change(kernel: &mut Kernel, w: &mut World, patterns: &Patterns<'_>) {
    let before = Image::when(&w.cache, "the table", |_| true).table().0;
    let rewritten = SUPERBLOCK + 200..SUPERBLOCK + 200 + REWRITTEN.len();
    assert_eq!(read(&w.backing, &rewritten), REWRITTEN, "no backing superblock was written");
    kernel.set(&w.backing, "label", "other");
    let image = Image::when(&w.cache, "the label", |i| i.slot(0).label() == "other");
    assert_ne!(image.table().0, before, "the table is in another bucket");
    patterns.check(&image, "label");
    assert_ne!(read(&w.backing, &rewritten), REWRITTEN, "the backing superblock was written");

    let plan = w.plan(2);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.set(&w.backing, "cache_mode", "writethrough");
    let plan = w.plan(3);
    kernel.load(&w.backing, &plan, &mut w.model);
    patterns.check_now("writes");

    kernel.set_of_set("internal/copy_gc_enabled", "1");
    collect_garbage(kernel);
    patterns.check_now("garbage collection");
    let written = |seq: u64| move |i: &Image| i.view.superblock.seq() > seq;
    let seq = Image::when(&w.cache, "the superblock", |_| true).view.superblock.seq();
    kernel.set_of_set("cache0/cache_replacement_policy", "fifo");
    let image = Image::when(&w.cache, "the cache superblock was written", written(seq));
    patterns.check(&image, "replacement policy");
}

/// Each device that is attached gets a free slot, which has a pattern.
fn detach_and_attach(kernel: &mut Kernel, second: &Disk, w: &World, patterns: &Patterns<'_>) {
    kernel.register(&[second]);
    kernel.attach(second);
    let image = Image::when(&w.cache, "a second device", |i| i.slot(1).is_live());
    patterns.check(&image, "attach of another device");
    kernel.detach(&w.backing);
    let image = Image::when(&w.cache, "an invalid slot", |i| i.slot(0).is_invalidated());
    patterns.check(&image, "detach");
    kernel.attach(&w.backing);
    let image = Image::when(&w.cache, "a third slot", |i| i.slot(2).is_live());
    assert!(image.slot(0).is_invalidated(), "a kernel does not reuse an invalid slot");
    patterns.check(&image, "attach");
}

/// Buckets get new generations and new data, to their last block.
fn fill_again(kernel: &mut Kernel, backing: &Disk, patterns: &Patterns<'_>) {
    overwrite(kernel, backing);
    overwrite(kernel, backing);
    kernel.stop_set();
    let fate = patterns.check_now("reuse of buckets");
    assert!(fate.overwritten > 1000, "{fate:?}");
    let image = Image::try_read(patterns.cache).unwrap();
    let named = image.blocks().iter().filter(|(b, named)| b.is_last && *named).count();
    assert!(named > 100, "the kernel fills {named} buckets to their last block");
}

/// ubcache serves the set after that. The backing device is stale, so it gets a new slot: the last one with a pattern.
fn our_turn(w: &World, second: &Disk, mut patterns: Patterns<'_>) {
    let set = Set::new(&w.dir, &w.cache, &[&w.backing, second]);
    let up = set.up(2, &[]);
    up.stop();
    let image = Image::try_read(&w.cache).unwrap();
    assert!(image.slot(2).is_invalidated() && image.slot(3).is_live());
    assert_eq!(image.slot(3).padding(), [0; SLOT_PADDING_BYTES], "a new slot has no padding of before");
    for slot in 0..3 {
        let numbers = SLOT_RESERVED_BYTES - SLOT_PADDING_BYTES;
        assert_eq!(image.slot(slot).padding()[..], of_slot(slot)[numbers..], "slot {slot}");
    }
    // The registration has its number there.
    patterns.fixed.retain(|p| p.what != BACKING_PADDING);
    patterns.fixed.iter().for_each(|p| p.check("ubcache"));
    // The number comes before the bytes without a use, and the size of the data area behind them.
    let rest = 16..16 + BACKING_PADDING_BYTES;
    let expected = &pattern(SUPERBLOCK as u64 + 144, SUPERBLOCK_PADDING_BYTES)[rest.clone()];
    let padding = SUPERBLOCK + 144;
    assert_eq!(read(&w.backing, &(padding + rest.start..padding + rest.end)), expected);
    set.check();
}
