//! Damaged images: flipped bits, misdirected and lost writes, in images at rest. No contract covers such damage.
//!
//! Owns the damage and the requests to a set on a damaged image. The engine may refuse the set, fail or answer. It must not
//! panic, wait for ever, or write outside of the areas of its devices. Answers are not judged: the format has no checksums
//! over data, and metadata may be damaged together with its checksum. Must not know the engine's structures in memory.

use std::rc::Rc;

use engine::{SetOptions, Volume};
use format::checksum::{crc64, crc64_seeded};
use format::{CacheSuper, Gen, Ptr, RawSuperblock, Sector, Sectors};
use io::{Nanos, Rng, WriteFlags};

use crate::hardware::{Hardware, Layout};
use crate::image::Image;
use crate::plan::{Plan, Request};
use crate::run::run;
use crate::stamp::SECTOR;
use crate::violation::Violation;
use crate::world::{Machine, Order, Outcome, World};

/// Limit of the virtual time for one image.
const LIMIT: Nanos = Nanos::from_secs(100_000);
/// The place of every superblock.
const SUPERBLOCK: Sector = Sector(8);
/// Number of bytes before the keys of a superblock, of a journal entry and of a bset.
const SUPERBLOCK_HEADER_BYTES: usize = 208;
const JSET_HEADER_BYTES: usize = 240;
const BSET_HEADER_BYTES: usize = 32;

/// The damage to an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// A bit is flipped.
    Flip {
        /// The sector.
        sector: u64,
        /// The bit of the sector.
        bit: u16,
    },
    /// A field has another value.
    Word {
        /// The sector.
        sector: u64,
        /// The word of 64 bits in the sector.
        word: u16,
        /// The new contents.
        value: u64,
    },
    /// A write was misdirected: these sectors are also at another place.
    Astray {
        /// The first sector of the data.
        from: u64,
        /// The first sector of the other place.
        to: u64,
        /// The number of sectors.
        sectors: u64,
    },
    /// A completed write was lost.
    Lost {
        /// The first sector.
        sector: u64,
        /// The number of sectors.
        sectors: u64,
    },
}

impl Damage {
    /// The damage of a disk of `size` sectors that four numbers determine.
    pub fn of(kind: u8, at: u64, other: u64, amount: u16, size: u64) -> Damage {
        let (at, other) = (at % size, other % size);
        let sectors = 1 + u64::from(amount % 16);
        let fits = |at: u64| sectors.min(size - at);
        match kind % 4 {
            0 => Damage::Astray { from: at, to: other, sectors: fits(at.max(other)) },
            1 => Damage::Lost { sector: at, sectors: fits(at) },
            _ => Damage::Flip { sector: at, bit: amount % (8 * SECTOR as u16) },
        }
    }

    /// Applies the damage to an image.
    pub fn apply(self, image: &mut Image) {
        match self {
            Damage::Flip { sector, bit } => {
                let mut bytes = image.read_vec(Sector(sector), Sectors(1));
                bytes[usize::from(bit / 8)] ^= 1 << (bit % 8);
                image.write(Sector(sector), &bytes);
            }
            Damage::Word { sector, word, value } => {
                let mut bytes = image.read_vec(Sector(sector), Sectors(1));
                bytes[8 * usize::from(word)..][..8].copy_from_slice(&value.to_le_bytes());
                image.write(Sector(sector), &bytes);
            }
            Damage::Astray { from, to, sectors } => {
                let bytes = image.read_vec(Sector(from), Sectors(sectors));
                image.write(Sector(to), &bytes);
            }
            Damage::Lost { sector, sectors } => {
                image.write(Sector(sector), &vec![0; sectors as usize * SECTOR]);
            }
        }
    }
}

/// Updates the checksum of the superblock in an image.
fn mend_superblock(image: &mut Image) {
    let mut bytes = image.read_vec(SUPERBLOCK, Sectors(8));
    let keys = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
    if let Some(covered) = bytes.get(8..SUPERBLOCK_HEADER_BYTES + 8 * keys) {
        let sum = crc64(covered);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        image.write(SUPERBLOCK, &bytes);
    }
}

fn word(bytes: &[u8], i: usize) -> u64 {
    bytes.get(i..i + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Bytes of a structure with a list of keys whose first sector this is; 0 if the length is not plausible.
fn length(first: &[u8], header: usize) -> usize {
    let words = (word(first, 24) >> 32) as usize;
    if words < 4096 { header + 8 * words } else { 0 }
}

/// The place of a structure with a checksum.
#[derive(Clone, Copy)]
struct Sum {
    at: Sector,
    /// Start value of the checksum.
    seed: u64,
}

/// The bsets of btree nodes. The checksum of each starts from the pointer to its node.
fn sets(image: &Image, superblock: &CacheSuper) -> Vec<Sum> {
    let bucket = superblock.geometry().bucket_sectors.0;
    let mut found = Vec::new();
    for at in (0..image.size().0).map(Sector) {
        let first = image.read_vec(at, Sectors(1));
        let bytes = length(&first, BSET_HEADER_BYTES);
        let sectors = bytes.div_ceil(SECTOR) as u64;
        if word(&first, 8) != superblock.set_magic().bset() || at.0 + sectors > image.size().0 {
            continue;
        }
        let all = image.read_vec(at, Sectors(sectors));
        let node = Sector(at.0 / bucket * bucket);
        let pointers = (0..=255).map(|generation| Ptr::new(0, node, Gen(generation)).0);
        let fits = |seed: &u64| crc64_seeded(*seed, &all[8..bytes]) == word(&all, 0);
        found.extend(pointers.chain([u64::MAX]).find(fits).map(|seed| Sum { at, seed }));
    }
    found
}

/// The devices after a short run, with an index, a journal to be replayed, and dirty data.
pub struct Images {
    layout: Layout,
    superblock: CacheSuper,
    sets: Vec<Sum>,
    /// The cache device.
    pub cache: Image,
    /// The backing devices.
    pub backings: Vec<Image>,
}

impl Images {
    /// Makes the images by an interrupted run.
    ///
    /// # Panics
    /// If the run itself fails.
    pub fn of_a_life(seed: u64) -> Images {
        let layout = Layout { nbuckets: 160, ..Layout::small(format::CacheMode::Writeback) };
        let world = World::new(seed);
        let hardware = Hardware::new(&world, layout.clone());
        let mut m = hardware.boot(Order::Fifo);
        let (rt, parts) = (m.handle(), hardware.parts(&m));
        m.block_on(async move {
            let (set, v) = parts.open(SetOptions::default()).await.unwrap_or_else(|e| panic!("{e}"));
            let _ = v[0].set("sequential_cutoff", "0").await;
            let _ = v[0].set("writeback_running", "0").await;
            for i in 0..60 {
                let buffer = rt.pool().zeroed(3 * SECTOR);
                let _ = v[0]
                    .write(
                        Sector(i * 7),
                        Sectors(3),
                        buffer,
                        0,
                        WriteFlags { fua: i % 8 == 0, meta: i % 3 == 0 },
                    )
                    .await;
                let _ = v[0].read(Sector(600 + i * 8), Sectors(8), rt.pool().take(8 * SECTOR), 0).await;
            }
            let _ = set.gc().await;
            for i in 0..40 {
                let buffer = rt.pool().zeroed(SECTOR);
                let _ = v[0].write(Sector(i * 11), Sectors(1), buffer, 0, WriteFlags::default()).await;
            }
            let _ = v[0].flush().await;
            // The set is not stopped, so that there is something to replay. Without this, the set and its volume would keep
            // each other alive for ever.
            set.abandon();
        });
        hardware.kill(m);
        let backings = hardware.backings.iter().map(|b| b.image()).collect();
        let cache = hardware.cache.image();
        let head = cache.read_vec(SUPERBLOCK, Sectors(8));
        let raw = RawSuperblock::from_prefix(&head).unwrap_or_else(|e| panic!("{e}"));
        let superblock = raw.check_cache(cache.size(), 512).unwrap_or_else(|e| panic!("{e}"));
        let sets = sets(&cache, &superblock);
        assert!(!sets.is_empty(), "this life has written nodes");
        Images { layout, superblock, sets, cache, backings }
    }

    /// Updates the checksums of superblock, journal entries, priority sets and bsets, so that the damage reaches the code
    /// after the checks.
    fn mend(&self, image: &mut Image) {
        mend_superblock(image);
        let magic = self.superblock.set_magic();
        for at in (0..image.size().0).map(Sector) {
            let first = image.read_vec(at, Sectors(1));
            let set = self.sets.iter().find(|s| s.at == at);
            let (covered, seed) = match (word(&first, 8), set) {
                (m, _) if m == magic.jset() => (length(&first, JSET_HEADER_BYTES), u64::MAX),
                (m, _) if m == magic.pset() => {
                    (self.superblock.geometry().meta_sectors.bytes() as usize, u64::MAX)
                }
                (_, Some(set)) => (length(&first, BSET_HEADER_BYTES), set.seed),
                _ => continue,
            };
            let sectors = covered.div_ceil(SECTOR) as u64;
            if covered > 8 && at.0 + sectors <= image.size().0 {
                let mut bytes = image.read_vec(at, Sectors(sectors));
                let sum = crc64_seeded(seed, &bytes[8..covered]);
                bytes[..8].copy_from_slice(&sum.to_le_bytes());
                image.write(at, &bytes);
            }
        }
    }

    /// The devices with a fuzzer's bytes as damage: the first byte says whether checksums are updated, then each damage has
    /// ten bytes.
    pub fn damaged(&self, input: &[u8]) -> (Image, Vec<Image>) {
        let (mut cache, mut backings) = (self.cache.clone(), self.backings.clone());
        let (mend, rest) = input.split_first().unwrap_or((&0, &[]));
        for piece in rest.chunks_exact(10).take(32) {
            let number =
                |r: std::ops::Range<usize>| piece[r].iter().fold(0_u64, |n, b| n << 8 | u64::from(*b));
            // Of a backing device only the sectors around the superblock matter.
            let (image, size) = match backings.first_mut() {
                Some(backing) if piece[9] % 8 == 7 => (backing, 24),
                _ => (&mut cache, self.cache.size().0),
            };
            let (at, other, amount) = (number(1..4), number(4..7), number(7..9) as u16);
            if piece[9] % 4 == 2 {
                // The value is a small number, or a number slightly below 2^64.
                let value = if other >> 23 == 1 { other | !0xff_ffff } else { other };
                Damage::Word { sector: at % size, word: amount % 64, value }.apply(image);
            } else {
                Damage::of(piece[0], at, other, amount, size).apply(image);
            }
        }
        if mend % 2 == 1 {
            self.mend(&mut cache);
            backings.iter_mut().for_each(mend_superblock);
        }
        (cache, backings)
    }

    /// Opens the set on these images and sends some requests, with any results.
    ///
    /// # Errors
    /// If the engine waits for ever, or a request broke the contract of devices.
    pub fn serve(&self, cache: Image, backings: &[Image]) -> Result<(), Violation> {
        let world = World::new(1);
        let hardware = Hardware::new(&world, self.layout.clone());
        hardware.cache.load(cache);
        hardware.backings.iter().zip(backings).for_each(|(d, i)| d.load(i.clone()));
        let mut machine: Machine = hardware.boot(Order::Fifo);
        let (rt, parts) = (machine.handle(), hardware.parts(&machine));
        let task = machine.handle().spawn(async move {
            let Ok((set, volumes)) = parts.open(SetOptions::default()).await else { return };
            for v in &volumes {
                ask(&rt, v).await;
            }
            let _ = set.gc().await;
            for v in &volumes {
                let _ = v.drained().await;
                let _ = v.stop().await;
            }
            let _ = set.stop().await;
            set.abandon();
        });
        let outcome = machine.run(&task, LIMIT);
        if let Some(d) = hardware.disks().find(|d| d.was_misused()) {
            return Err(Violation::Misuse { disk: d.dump() });
        }
        match outcome {
            Outcome::Done(()) => Ok(()),
            Outcome::PowerLoss => Err(Violation::PowerLoss),
            Outcome::Stuck(why) => Err(Violation::Stuck { why }),
        }
    }
}

async fn ask(rt: &io::Handle, v: &Rc<Volume>) {
    let size = v.size().0;
    let mut at = 0;
    while at < size {
        let n = 64.min(size - at);
        let _ = v.read(Sector(at), Sectors(n), rt.pool().take(n as usize * SECTOR), 0).await;
        at += n;
    }
    for at in (0..size.saturating_sub(16)).step_by(97) {
        let buffer = rt.pool().zeroed(5 * SECTOR);
        let _ = v
            .write(Sector(at), Sectors(5), buffer, 0, WriteFlags { fua: at % 2 == 0, meta: at % 3 == 0 })
            .await;
    }
    let _ = v.discard(Sector(size / 4), Sectors(size / 4)).await;
    let _ = v.flush().await;
}

/// Serves a set on devices that a fuzzer damaged, see [`Images::damaged`].
///
/// # Errors
/// If the engine waits for ever, or a request broke the contract of devices.
pub fn fuzz_image(images: &Images, input: &[u8]) -> Result<(), Violation> {
    let (cache, backings) = images.damaged(input);
    images.serve(cache, &backings)
}

/// Random damage in the form of a fuzzer's input.
pub fn random_input(rng: &mut Rng) -> Vec<u8> {
    let n = 1 + rng.below(4) as usize;
    (0..1 + 10 * n).map(|_| rng.next_u64() as u8).collect()
}

/// Runs a fuzzer's bytes as a stream of requests against the oracle.
///
/// Eight bytes determine the devices and all unspecified details; then each request takes five bytes.
///
/// # Errors
/// If the oracle does not allow an answer.
pub fn fuzz_stream(input: &[u8]) -> Result<(), Violation> {
    let Some((head, rest)) = input.split_at_checked(8) else { return Ok(()) };
    let mut seed = [0; 8];
    seed.copy_from_slice(head);
    let mut plan = Plan::from_seed(u64::from_le_bytes(seed) % 100_000);
    let boots = plan.boots.len();
    let mut pieces = rest.chunks_exact(5);
    for boot in plan.boots.iter_mut().take(boots.saturating_sub(1)) {
        boot.requests = pieces.by_ref().take(60).map(|p| request(p, plan.layout.backings.len())).collect();
    }
    run(&plan, false).map(drop).map_err(|f| *f.violation)
}

fn request(piece: &[u8], volumes: usize) -> (usize, Request) {
    // Every volume has at least this many sectors.
    let start = u64::from(piece[1]) % 48;
    let sectors = 1 + u64::from(piece[2]) % 16;
    let (fua, may_unmap) = (piece[3] & 1 == 1, piece[3] & 2 == 2);
    let request = match piece[0] % 6 {
        0 => Request::Read { start, sectors },
        1 | 2 => Request::Write { start, sectors, fua },
        3 => Request::Flush,
        4 => Request::Discard { start, sectors },
        _ => Request::Zeroes { start, sectors, fua, may_unmap },
    };
    (usize::from(piece[4]) % volumes, request)
}
