//! Damage to the data of buckets that have a footer, in great numbers.
//!
//! Owns the flips, misdirected writes and lost writes, the short lives with damage in the middle, and their tally. A life fails if
//! a client reads a wrong byte, the backing device gets one, or a block is reported twice. Must not know how the engine verifies.

use std::cell::Cell;
use std::rc::Rc;

use engine::tunables::Overwrite;
use engine::{SetEvent, SetOptions};
use format::checksum::crc32c;
use format::{BucketNr, CacheMode, FooterId, FooterLayout, Gen, Geometry, Sector, Sectors, parse_footer};
use io::Rng;

use crate::disk::Medium;
use crate::disk::SimDisk;
use crate::hardware::{CHECKSUM_KEY, Layout, SET_UUID};
use crate::image::Image;
use crate::scenario::{Boot, Scenario};
use crate::stamp::{Content, SECTOR, decode};

/// What was damaged, and what the engine reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Lives of a set.
    pub sets: u64,
    /// Blocks that were verified before the damage.
    pub blocks: u64,
    /// Blocks with a flipped bit.
    pub flipped: u64,
    /// Blocks with the data of another block, as after a write to the wrong place.
    pub misdirected: u64,
    /// Blocks with what was there earlier, as after a lost write; zeros if that is the same.
    pub lost: u64,
    /// Damaged blocks of dirty data that the engine reported.
    pub reported_dirty: u64,
    /// Damaged blocks of clean data that the engine reported.
    pub reported_clean: u64,
}

impl Tally {
    /// Damaged blocks.
    pub fn damaged(&self) -> u64 {
        self.flipped + self.misdirected + self.lost
    }

    /// Adds the counts of other lives.
    pub fn add(&mut self, other: &Tally) {
        self.sets += other.sets;
        self.blocks += other.blocks;
        self.flipped += other.flipped;
        self.misdirected += other.misdirected;
        self.lost += other.lost;
        self.reported_dirty += other.reported_dirty;
        self.reported_clean += other.reported_clean;
    }
}

/// Lives with these seeds until `wanted` blocks are damaged.
///
/// # Panics
/// If a client or the backing device gets damaged data, or a block is reported twice.
pub fn damage_many(wanted: u64, seeds: impl IntoIterator<Item = u64>) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        if tally.damaged() >= wanted {
            break;
        }
        tally.add(&life(seed));
    }
    tally
}

/// A life of one set, whose block size and settings follow from the seed.
fn life(seed: u64) -> Tally {
    let blocks = [1, 1, 2, 8][seed as usize % 4];
    let mut layout = Layout {
        checksums: true,
        block_sectors: blocks,
        bucket_sectors: 8 * blocks,
        ..Layout::small(CacheMode::Writeback)
    };
    layout.backings[0].block_sectors = blocks;
    let tally = Rc::new(Cell::new(Tally::default()));
    let (theirs, l) = (tally.clone(), layout.clone());
    let mut scenario = Scenario::new(seed, layout, 0);
    scenario.boot(move |b| async move { theirs.set(live_with_damage(b, l, seed).await) });
    tally.get()
}

/// Random requests, then damage, then reads of everything beside writeback.
async fn live_with_damage(b: Boot, l: Layout, seed: u64) -> Tally {
    let rng = &mut Rng::new(seed);
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = if rng.chance(1, 2) { Overwrite::Always } else { Overwrite::Off };
    b.open_with(options).await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_running", "0").await;
    let client = b.clients[0].clone();
    let mut earlier = b.cache.image();
    for n in 0..60 {
        if n == 40 {
            earlier = b.cache.image();
        }
        let (at, sectors) = (rng.below(300), 1 + rng.below(12));
        match rng.below(3) {
            0 => assert!(client.read(at, sectors).await.is_some()),
            _ => assert!(client.write(at, sectors, rng.chance(1, 4)).await),
        }
    }
    b.sleep_ms(500).await;
    client.set_tolerant(true);
    drop(b.set().take_events());
    let mut tally = damage_blocks(&b, &earlier, &l, rng);
    let volume = b.volume(0);
    let drained = b.rt.spawn(async move { volume.drained().await });
    // The oracle compares every byte that a read returns. A sector whose read fails is judged by the events.
    for _ in 0..2 {
        for at in 0..312 {
            client.read(at, 1 + rng.below(2)).await;
        }
    }
    drop(drained.await);
    let found = damage(b.set().take_events());
    let mut once: Vec<u64> = found.iter().map(|(sector, _)| *sector).collect();
    once.dedup();
    assert_eq!(once.len(), found.len(), "a damaged block was reported twice");
    let dirty = found.iter().filter(|(_, dirty)| *dirty).count() as u64;
    (tally.reported_dirty, tally.reported_clean) = (dirty, found.len() as u64 - dirty);
    assert!(found.len() as u64 <= tally.damaged(), "more blocks were reported than are damaged");
    let backing = b.backings[0].image();
    for at in 0..2048 {
        let bytes = read(&backing, 16 + at, 1);
        let right = matches!(decode(&bytes), Content::Data { volume: 0, sector, .. } if sector == at);
        assert!(right, "sector {at} of the backing device has damaged data");
    }
    tally
}

/// The sectors of the volume at which events report damage, and whether the data is dirty, in order.
pub fn damage(events: Vec<SetEvent>) -> Vec<(u64, bool)> {
    let of = |e: &SetEvent| match e {
        SetEvent::DamagedData { sector, dirty, .. } => Some((sector.0, *dirty)),
        _ => None,
    };
    let mut found: Vec<_> = events.iter().filter_map(of).collect();
    found.sort_unstable();
    found
}

/// The first sectors of the blocks whose checksum is on the device and matches.
///
/// A footer is written after its data. A footer of an earlier generation of the bucket can match newer data: the same data was
/// written again to the same place. It does not count, because no reader uses it.
pub(crate) fn blocks_with_checksums(medium: &Medium, l: &Layout) -> Vec<u64> {
    let image = medium.live();
    let geometry = Geometry::new(Sectors(l.bucket_sectors), Sectors(l.block_sectors), l.nbuckets, 4, 8);
    // Small buckets have no room for footers.
    let Some(layout) = geometry.ok().and_then(|g| FooterLayout::of(&g)) else { return Vec::new() };
    let mut found = Vec::new();
    for bucket in 0..l.nbuckets {
        let start = bucket * l.bucket_sectors;
        let (at, size) = layout.place(Sector(start));
        let footer = read(image, at.0, size.0);
        let id =
            FooterId { set_uuid: SET_UUID, bucket: BucketNr(bucket as u32), generation: Gen(footer[40]) };
        let Ok(sums) = parse_footer(&layout, CHECKSUM_KEY, id, &footer) else { continue };
        for block in 0..layout.blocks() {
            let block_at = start + block as u64 * l.block_sectors;
            let matches = || sums.get(block) == Some(crc32c(&read(image, block_at, l.block_sectors)));
            if matches() && medium.is_written_after(at, Sector(block_at)) {
                found.push(block_at);
            }
        }
    }
    found
}

fn read(image: &Image, at: u64, sectors: u64) -> Vec<u8> {
    image.read_vec(Sector(at), Sectors(sectors))
}

/// Contents to which a block can be damaged: a flipped bit, the data of another one of these blocks, or zeros.
pub(crate) fn damaged_contents(
    image: &Image,
    blocks: &[u64],
    (at, bytes): (u64, &[u8]),
    rng: &mut Rng,
) -> Vec<u8> {
    let other = blocks.get(rng.below(blocks.len().max(1) as u64) as usize).copied().unwrap_or(at);
    match rng.below(4) {
        0 => read(image, other, (bytes.len() / SECTOR) as u64),
        1 => vec![0; bytes.len()],
        _ => flipped(bytes, rng),
    }
}

/// The same bytes with a flipped bit.
fn flipped(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let (at, bit) = (rng.below(bytes.len() as u64) as usize, rng.below(8));
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << bit;
    }
    bytes
}

/// Damages a third of the blocks that have a checksum: a flipped bit, a write to the wrong place, or a write that was lost.
fn damage_blocks(b: &Boot, earlier: &Image, l: &Layout, rng: &mut Rng) -> Tally {
    let image = b.cache.image();
    let blocks = blocks_with_checksums(&b.cache.medium(), l);
    let mut tally = Tally { sets: 1, blocks: blocks.len() as u64, ..Tally::default() };
    for &at in &blocks {
        if !rng.chance(1, 3) {
            continue;
        }
        let before = read(&image, at, l.block_sectors);
        let (bytes, kind) = match rng.below(4) {
            0 => {
                let other = blocks[rng.below(blocks.len() as u64) as usize];
                (read(&image, other, l.block_sectors), &mut tally.misdirected)
            }
            1 => {
                let old = read(earlier, at, l.block_sectors);
                let lost = if old == before { vec![0; old.len()] } else { old };
                (lost, &mut tally.lost)
            }
            _ => (flipped(&before, rng), &mut tally.flipped),
        };
        // Another block may have the same data.
        *kind += u64::from(bytes != before);
        b.cache.put(Sector(at), &bytes);
    }
    tally
}

/// Flips a bit in each sector of the cache device that has data of one of these sectors of volume 0. Returns how many.
pub fn flip(b: &Boot, sectors: std::ops::Range<u64>) -> usize {
    flip_on(&b.cache, sectors)
}

/// As [`flip`], on this cache device.
pub fn flip_on(cache: &SimDisk, sectors: std::ops::Range<u64>) -> usize {
    let image = cache.image();
    let mut flipped = 0;
    for at in 0..256 * 8 {
        let mut bytes = [0; SECTOR];
        image.read(Sector(at), &mut bytes);
        if matches!(decode(&bytes), Content::Data { volume: 0, sector, .. } if sectors.contains(&sector)) {
            bytes[77] ^= 4;
            cache.put(Sector(at), &bytes);
            flipped += 1;
        }
    }
    flipped
}
