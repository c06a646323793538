//! Bytes without a meaning for the engine, and blocks of data buckets that no key names (format section 15): the engine preserves
//! them whatever happens to the set.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::superblock::{BACKING_PADDING_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_PADDING_BYTES};
use format::uuid_table::{SLOT_PADDING_BYTES, UUID_ENTRY_BYTES, parse_uuid_table};
use format::{
    BackingSuper, BucketNr, CacheSuper, Gen, Inode, RawSuperblock, Sector, Sectors, Uuid, UuidEntry,
};
use inspect::{Mode, SetView, SliceSource};
use io::{Disk, Handle, WriteFlags};
use proptest::prelude::*;

const CACHE_SECTORS: Sectors = Sectors(1 << 13);
const BACKING_SECTORS: Sectors = Sectors(1 << 14);
const BLOCK: Sectors = Sectors(8);
const BUCKET: Sectors = Sectors(64);
/// Slots with a pattern.
const SLOTS: usize = 4;
/// First byte of a slot's padding.
const PADDING: usize = 96;
/// Byte of the superblock on a device.
const SUPERBLOCK: usize = 4096;

/// What an operator and clients do.
#[derive(Clone, Debug)]
enum Action {
    Write {
        at: u64,
        blocks: u64,
    },
    Read {
        at: u64,
        blocks: u64,
    },
    /// Writes half as much as the cache holds.
    Fill,
    Label(u8),
    SetLabel(u8),
    Mode(&'static str),
    Policy(&'static str),
    Gc,
    Drain,
    CreateVolume,
    Attach,
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    let blocks = || (0..BACKING_SECTORS.0 / BLOCK.0 - 10, 1u64..9);
    prop_oneof![
        8 => blocks().prop_map(|(at, blocks)| Action::Write { at, blocks }),
        4 => blocks().prop_map(|(at, blocks)| Action::Read { at, blocks }),
        1 => Just(Action::Fill),
        1 => any::<u8>().prop_map(Action::Label),
        1 => any::<u8>().prop_map(Action::SetLabel),
        1 => prop::sample::select(vec!["writeback", "writethrough", "writearound"]).prop_map(Action::Mode),
        1 => prop::sample::select(vec!["lru", "fifo", "random"]).prop_map(Action::Policy),
        1 => Just(Action::Gc),
        1 => Just(Action::Drain),
        1 => Just(Action::CreateVolume),
        1 => Just(Action::Attach),
        2 => Just(Action::Restart),
    ]
}

/// Bytes at a place. None of them is zero.
fn pattern(place: u64, len: usize) -> Vec<u8> {
    let hash = |i: u64| (place.wrapping_add(i).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1;
    (0..len as u64).map(hash).collect()
}

/// The bytes of a device.
async fn contents(disk: &Disk) -> Vec<u8> {
    let size = disk.info().sectors;
    let buffer = disk.runtime().pool().take(size.bytes() as usize);
    let (buffer, result) = disk.read(Sector(0), buffer).await;
    result.unwrap();
    buffer.as_slice().to_vec()
}

async fn replace(disk: &Disk, at: Sector, bytes: &[u8]) {
    disk.write(at, disk.runtime().pool().copy_of(bytes), false).await.unwrap();
}

/// The places outside of the checked superblocks, as bytes of the superblock, in which anything may be.
fn unused(superblock: &RawSuperblock) -> [Range<usize>; 2] {
    [208 + 8 * usize::from(superblock.keys.get())..2256, 2258..SUPERBLOCK_BYTES]
}

/// What is expected on the devices.
#[derive(Default)]
struct Expected {
    slots: BTreeMap<usize, Vec<u8>>,
    blocks: Vec<(Sector, BucketNr, Gen)>,
}

/// A set on devices in memory that is opened again and again.
struct Bench {
    rt: Handle,
    cache: Disk,
    backing: Disk,
    expected: Expected,
}

/// A set at rest.
struct Rest {
    bytes: Vec<u8>,
    view: SetView,
}

impl Rest {
    async fn of(cache: &Disk) -> Rest {
        let bytes = contents(cache).await;
        let view = SetView::open(&SliceSource::new("cache", &bytes), Mode::Strict).unwrap();
        Rest { bytes, view }
    }

    fn table(&self) -> (Sector, Vec<UuidEntry>) {
        let newest = self.view.journal.as_ref().unwrap().replay.last().unwrap();
        let at = newest.uuid_bucket.pointer().unwrap().offset();
        let bytes = &self.bytes[at.bytes() as usize..][..newest.uuid_bucket.size().bytes() as usize];
        (at, parse_uuid_table(bytes, newest.version).unwrap())
    }

    /// The blocks of buckets with live data that no key names.
    fn unnamed(&self) -> Vec<(Sector, BucketNr, Gen)> {
        let g = *self.view.geometry();
        let mut buckets: BTreeMap<BucketNr, Vec<bool>> = BTreeMap::new();
        for (_, piece, _) in self.view.pieces().filter(|(_, _, kind)| kind.is_live()) {
            let ptr = piece.ptr.unwrap();
            let bucket = self.view.gens.bucket_of(ptr, piece.len).unwrap();
            let named = buckets.entry(bucket).or_insert_with(|| vec![false; (BUCKET.0 / BLOCK.0) as usize]);
            let first = g.offset_in_bucket(ptr.offset()).0;
            (first / BLOCK.0..(first + piece.len.0).div_ceil(BLOCK.0)).for_each(|b| named[b as usize] = true);
        }
        let of_bucket = |(bucket, named): (BucketNr, Vec<bool>)| {
            let unnamed = named.into_iter().enumerate().filter(|(_, named)| !named);
            let at = move |n: usize| g.bucket_start(bucket) + Sectors(n as u64 * BLOCK.0);
            let generation = self.view.gens.current(bucket);
            unnamed.map(move |(n, _)| (at(n), bucket, generation)).collect::<Vec<_>>()
        };
        buckets.into_iter().flat_map(of_bucket).collect()
    }
}

fn of_block(at: Sector, generation: Gen) -> Vec<u8> {
    pattern(at.bytes() | u64::from(generation.0) << 48, BLOCK.bytes() as usize)
}

impl Bench {
    /// Puts the patterns into the superblocks and in front of them.
    async fn put_superblocks(&self) {
        for (disk, is_cache) in [(&self.cache, true), (&self.backing, false)] {
            replace(disk, Sector(0), &pattern(0, SUPERBLOCK)).await;
            let mut bytes = contents(disk).await[SUPERBLOCK..][..SUPERBLOCK_BYTES].to_vec();
            let raw = RawSuperblock::from_prefix(&bytes).unwrap().clone();
            unused(&raw)
                .into_iter()
                .for_each(|r| bytes[r.clone()].copy_from_slice(&pattern(r.start as u64, r.len())));
            let raw = RawSuperblock::from_prefix(&bytes).unwrap();
            let encoded = match is_cache {
                true => {
                    let mut superblock = raw.check_cache(CACHE_SECTORS, 512).unwrap();
                    superblock.set_padding(pattern(144, SUPERBLOCK_PADDING_BYTES).try_into().unwrap());
                    superblock.encode()
                }
                false => {
                    let mut superblock = raw.check_backing(BACKING_SECTORS, 512).unwrap();
                    superblock.set_padding(pattern(160, BACKING_PADDING_BYTES).try_into().unwrap());
                    superblock.encode()
                }
            };
            replace(disk, Sector(8), &encoded).await;
        }
    }

    async fn supers(&self) -> (CacheSuper, BackingSuper) {
        let (cache, backing) = (contents(&self.cache).await, contents(&self.backing).await);
        let raw = |bytes: &[u8]| RawSuperblock::from_prefix(&bytes[SUPERBLOCK..]).unwrap().clone();
        let cache = raw(&cache).check_cache(CACHE_SECTORS, 512).unwrap();
        (cache, raw(&backing).check_backing(BACKING_SECTORS, 512).unwrap())
    }

    /// Puts patterns into slots and into blocks without a name.
    async fn put_at_rest(&mut self) {
        let rest = Rest::of(&self.cache).await;
        let (at, slots) = rest.table();
        let mut bytes = rest.bytes[at.bytes() as usize..][..SLOTS * UUID_ENTRY_BYTES].to_vec();
        for (slot, entry) in slots.iter().take(SLOTS).enumerate() {
            let pattern = pattern(at.bytes() ^ (slot as u64) << 20, SLOT_PADDING_BYTES);
            let mut entry = *entry;
            entry.set_padding(pattern.clone().try_into().unwrap());
            bytes[slot * UUID_ENTRY_BYTES..][..UUID_ENTRY_BYTES].copy_from_slice(&entry.to_bytes());
            assert_eq!(bytes[slot * UUID_ENTRY_BYTES + PADDING..][..SLOT_PADDING_BYTES], pattern);
            self.expected.slots.insert(slot, pattern);
        }
        replace(&self.cache, at, &bytes).await;
        self.expected.blocks = rest.unnamed();
        for (at, _, generation) in &self.expected.blocks {
            replace(&self.cache, *at, &of_block(*at, *generation)).await;
        }
    }

    /// Every pattern is there.
    async fn check_at_rest(&self) {
        let (cache, backing) = self.supers().await;
        assert_eq!(
            cache.padding()[..],
            pattern(144, SUPERBLOCK_PADDING_BYTES),
            "padding of the cache superblock"
        );
        assert_eq!(
            backing.padding()[..],
            pattern(160, BACKING_PADDING_BYTES),
            "padding of the backing superblock"
        );
        for disk in [&self.cache, &self.backing] {
            let bytes = contents(disk).await;
            assert_eq!(bytes[..SUPERBLOCK], pattern(0, SUPERBLOCK), "{}: sectors 0 to 7", disk.info().name);
            let raw = RawSuperblock::from_prefix(&bytes[SUPERBLOCK..]).unwrap();
            for r in unused(raw) {
                let found = &bytes[SUPERBLOCK..][r.clone()];
                assert_eq!(*found, pattern(r.start as u64, r.len()), "{}: bytes {r:?}", disk.info().name);
            }
        }
        let rest = Rest::of(&self.cache).await;
        let slots = rest.table().1;
        for (slot, expected) in &self.expected.slots {
            assert_eq!(slots[*slot].padding()[..], expected[..], "slot {slot}");
        }
        for (at, bucket, generation) in &self.expected.blocks {
            let found = &rest.bytes[at.bytes() as usize..][..BLOCK.bytes() as usize];
            let same = rest.view.gens.current(*bucket) == *generation;
            assert!(!same || *found == of_block(*at, *generation), "bucket {bucket}: the block at {at}");
        }
    }

    async fn open(&self) -> (CacheSet, Rc<Volume>) {
        let set = CacheSet::open(self.cache.clone(), SetOptions::default()).await.unwrap();
        let volume = set.register(self.backing.clone()).await.unwrap();
        (set, volume)
    }

    /// Stops the set, checks it at rest, and starts it again.
    async fn restart(&mut self, set: CacheSet, volume: Rc<Volume>) -> (CacheSet, Rc<Volume>) {
        set.stop().await.unwrap();
        drop((set, volume));
        self.check_at_rest().await;
        self.put_at_rest().await;
        self.open().await
    }

    /// Detaches the device and attaches it again, which takes another slot.
    async fn attach(&mut self, set: &CacheSet, volume: Rc<Volume>) -> Rc<Volume> {
        let old = volume.inode().unwrap();
        set.detach(&volume).await.unwrap();
        volume.stop().await.unwrap();
        drop(volume);
        let mut backing = self.supers().await.1;
        backing.set_set_uuid(set.uuid());
        replace(&self.backing, Sector(8), &backing.encode()).await;
        let volume = set.register(self.backing.clone()).await.unwrap();
        self.is_new(volume.inode().unwrap());
        assert_ne!(volume.inode().unwrap(), old);
        volume
    }

    /// The new user of a slot does not get the padding of the old one.
    fn is_new(&mut self, slot: Inode) {
        self.expected.slots.entry(slot.0 as usize).and_modify(|padding| padding.fill(0));
    }

    async fn write(&self, volume: &Rc<Volume>, at: u64, blocks: u64) {
        let sectors = Sectors(BLOCK.0 * blocks);
        let buffer = self.rt.pool().zeroed(sectors.bytes() as usize);
        volume.write(Sector(at * BLOCK.0), sectors, buffer, 0, WriteFlags::default()).await.unwrap();
    }

    async fn carry_out(
        &mut self,
        action: Action,
        set: CacheSet,
        volume: Rc<Volume>,
    ) -> (CacheSet, Rc<Volume>) {
        match action {
            Action::Write { at, blocks } => self.write(&volume, at, blocks).await,
            Action::Fill => {
                for at in (0..CACHE_SECTORS.0 / BLOCK.0 / 2).step_by(7) {
                    self.write(&volume, at, 7).await;
                }
            }
            Action::Read { at, blocks } => {
                let sectors = Sectors(BLOCK.0 * blocks);
                let buffer = self.rt.pool().take(sectors.bytes() as usize);
                volume.read(Sector(at * BLOCK.0), sectors, buffer, 0).await.1.unwrap();
            }
            Action::Label(n) => volume.set("label", &format!("label-{n}")).await.unwrap(),
            Action::SetLabel(n) => set.set_label(&format!("set-{n}")).await.unwrap(),
            Action::Mode(mode) => volume.set("cache_mode", mode).await.unwrap(),
            Action::Policy(policy) => set.set("cache_replacement_policy", policy).await.unwrap(),
            Action::Gc => set.gc().await.unwrap(),
            Action::Drain => volume.drained().await.unwrap(),
            Action::CreateVolume => {
                let uuid = Uuid((self.rt.random() as u128 | 1).to_le_bytes());
                let created = set.create_volume(uuid, Sectors(800), "flash").await.unwrap();
                self.is_new(created.inode().unwrap());
            }
            Action::Attach => {
                let volume = self.attach(&set, volume).await;
                return (set, volume);
            }
            Action::Restart => return self.restart(set, volume).await,
        }
        (set, volume)
    }
}

fn run(actions: Vec<Action>) {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let rt = driver.handle();
    driver.block_on(async {
        let disk = |name, sectors| Disk::new(Rc::new(MemDisk::new(name, sectors, 512)), rt.clone());
        let (cache, backing) = (disk("cache", CACHE_SECTORS), disk("backing", BACKING_SECTORS));
        rig::format(&cache, &backing, BLOCK, BUCKET).await;
        let mut bench = Bench { rt: rt.clone(), cache, backing, expected: Expected::default() };
        let (set, volume) = bench.open().await;
        set.stop().await.unwrap();
        drop((set, volume));
        bench.put_superblocks().await;
        bench.put_at_rest().await;
        let (mut set, mut volume) = bench.open().await;
        for action in actions {
            (set, volume) = bench.carry_out(action, set, volume).await;
        }
        (set, _) = bench.restart(set, volume).await;
        set.stop().await.unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_preserves_what_it_does_not_know(actions in prop::collection::vec(action(), 1..40)) {
        run(actions);
    }
}
