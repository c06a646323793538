//! The hardware of a run: a cache device and its backing devices, newly formatted.
//!
//! Owns the layout and the formatting. Every data sector of a backing device carries the stamp of write 0 of its volume, so
//! that sectors without a write can be recognised, too. Must not know the plan.

use std::rc::Rc;

use engine::{CacheSet, EngineError, SetOptions, Volume};
use format::superblock::{BackingFormat, CacheFormat};
use format::{
    BackingSuper, BucketPrio, CacheSuper, FooterKey, Gen, RawSuperblock, Sector, Sectors, Uuid,
    encode_prio_set, parse_bucket, parse_prio_set,
};
use io::Disk;

use crate::disk::{Retained, SimDisk};
use crate::image::Image;
pub use crate::layout::{BackingLayout, Layout, SET_UUID, uuid_of};
use crate::plan::Cut;
use crate::stamp::{SECTOR, fill_data};
use crate::world::{Machine, Order, World};

/// The key of the checksums of every set that has them.
pub const CHECKSUM_KEY: FooterKey = FooterKey(0x5eed);

/// The number of the second cache device in the world, behind those of all backing devices.
const SECOND: u64 = 50;
/// UUID of the second set.
pub const SECOND_SET_UUID: Uuid = Uuid([0x2e; 16]);

/// The place of every superblock.
const SUPERBLOCK: Sector = Sector(8);

/// The devices of a run.
pub struct Hardware {
    /// The world of the devices.
    pub world: World,
    /// The cache device.
    pub cache: Rc<SimDisk>,
    /// The cache device of the second set, if the volumes have one.
    pub second: Option<Rc<SimDisk>>,
    /// The backing devices.
    pub backings: Vec<Rc<SimDisk>>,
    /// The layout of the devices.
    pub layout: Layout,
}

impl Hardware {
    /// Makes and formats new devices. The backing devices name the set to which they will belong.
    ///
    /// # Panics
    /// If the layout breaks a rule of the format.
    pub fn new(world: &World, layout: Layout) -> Hardware {
        let l = &layout;
        let cache = new_cache(world, l, (0, "cache"), SET_UUID);
        let backings = l.backings.iter().enumerate().map(|(i, b)| new_backing(world, l, i, b)).collect();
        Hardware { world: world.clone(), cache, second: None, backings, layout }
    }

    /// Adds the cache device of a second set, which is like the first one.
    ///
    /// # Panics
    /// If the layout breaks a rule of the format.
    pub fn add_second(&mut self) {
        self.second = Some(new_cache(&self.world, &self.layout, (SECOND, "second"), SECOND_SET_UUID));
    }

    /// Initialises the set and sets the generation of every bucket without metadata, as years of use would.
    ///
    /// # Panics
    /// If the set cannot be initialised, or its metadata cannot be read.
    pub fn age(&self, generation: u8) {
        let mut machine = self.boot(Order::Fifo);
        let cache = self.disk(&machine, &self.cache);
        machine.block_on(async move {
            let set = CacheSet::open(cache, SetOptions::default()).await;
            let set = set.unwrap_or_else(|e| panic!("a new set: {e}"));
            set.stop().await.unwrap_or_else(|e| panic!("a new set: {e}"));
            set.abandon();
        });
        self.power_loss(machine, Retained::Nothing);
        let image = self.cache.image();
        set_generations(&image, Gen(generation)).into_iter().for_each(|(at, set)| self.cache.put(at, &set));
    }

    /// Turns checksums on in the superblock of the cache device, if it is valid and has none.
    pub fn turn_checksums_on(&self) {
        self.set_checksum_key(Some(CHECKSUM_KEY));
    }

    /// Turns checksums off in the superblock of the cache device: the next process ignores footers, as a kernel does.
    pub fn turn_checksums_off(&self) {
        self.set_checksum_key(None);
    }

    fn set_checksum_key(&self, key: Option<FooterKey>) {
        let image = self.cache.image();
        let head = image.read_vec(SUPERBLOCK, Sectors(8));
        let checked = RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_cache(image.size(), 512));
        if let Ok(mut superblock) = checked
            && superblock.checksum_key() != key
        {
            superblock.set_checksum_key(key);
            self.cache.put_durably(SUPERBLOCK, &superblock.encode());
        }
    }

    /// The cache device, the backing devices, and the second cache device.
    pub fn disks(&self) -> impl Iterator<Item = &Rc<SimDisk>> {
        std::iter::once(&self.cache).chain(&self.backings).chain(&self.second)
    }

    /// Switches the machine on.
    pub fn boot(&self, order: Order) -> Machine {
        self.world.power_on();
        Machine::boot(&self.world, order)
    }

    /// Switches the machine and every device off. Tasks are dropped where they are.
    pub fn power_loss(&self, machine: Machine, retained: Retained) {
        self.cut(machine, Cut::Power(retained, retained));
    }

    /// Ends the process, and cuts the power of all devices, of some or of none. Tasks are dropped where they are.
    pub fn cut(&self, machine: Machine, cut: Cut) {
        self.world.cut_power();
        drop(machine);
        let (cache, backing) = match cut {
            Cut::Power(cache, backing) => (Some(cache), Some(backing)),
            Cut::Cache(retained) => (Some(retained), None),
            Cut::Backing(retained) => (None, Some(retained)),
            Cut::Kill => (None, None),
        };
        let cut = |disk: &SimDisk, retained: Option<Retained>| match retained {
            Some(retained) => disk.power_loss(retained),
            None => disk.kill(),
        };
        cut(&self.cache, cache);
        self.second.iter().for_each(|s| cut(s, cache));
        self.backings.iter().for_each(|b| cut(b, backing));
        self.world.log(|| format!("CUT, cache: {cache:?}, backing devices: {backing:?}"));
    }

    /// Kills the process; the devices stay on.
    pub fn kill(&self, machine: Machine) {
        self.cut(machine, Cut::Kill);
    }

    /// Kills the process; its requests in flight take effect later ([`SimDisk::land_late`]).
    pub fn kill_late(&self, machine: Machine) {
        self.world.cut_power();
        drop(machine);
        self.disks().for_each(|d| d.kill_late());
        self.world.log(|| "KILLED, with late writes".into());
    }

    /// A device for the tasks of `machine`.
    pub fn disk(&self, machine: &Machine, disk: &Rc<SimDisk>) -> Disk {
        Disk::new(disk.clone(), machine.handle())
    }

    /// The devices with which the set is opened on `machine`.
    pub fn parts(&self, machine: &Machine) -> Parts {
        Parts {
            cache: self.disk(machine, &self.cache),
            second: self.second.as_ref().map(|s| self.disk(machine, s)),
            backings: self.backings.iter().map(|b| self.disk(machine, b)).collect(),
        }
    }
}

/// The devices for the tasks of one boot.
#[derive(Clone)]
pub struct Parts {
    /// The cache device.
    pub cache: Disk,
    /// The cache device of the second set.
    pub second: Option<Disk>,
    /// The backing devices.
    pub backings: Vec<Disk>,
}

impl Parts {
    /// Opens the set and registers all backing devices.
    ///
    /// # Errors
    /// If the engine refuses the set or a device.
    pub async fn open(&self, options: SetOptions) -> Result<(CacheSet, Vec<Rc<Volume>>), EngineError> {
        let set = CacheSet::open(self.cache.clone(), options).await?;
        let mut volumes = Vec::new();
        for b in &self.backings {
            volumes.push(set.register(b.clone()).await?);
        }
        Ok((set, volumes))
    }
}

/// A new cache device with a number and a name.
fn new_cache(world: &World, l: &Layout, (number, name): (u64, &str), set_uuid: Uuid) -> Rc<SimDisk> {
    let info = SimDisk::describe(name, l.nbuckets * l.bucket_sectors, l.logical_block_bytes);
    let cache = SimDisk::new(world, number, info);
    let superblock = CacheSuper::format(&CacheFormat {
        uuid: Uuid([0xca + number as u8; 16]),
        set_uuid,
        device_sectors: Sectors(l.nbuckets * l.bucket_sectors),
        block_sectors: Sectors(l.block_sectors),
        bucket_sectors: Sectors(l.bucket_sectors),
        replacement: l.replacement,
        discard: l.discard,
    });
    let mut superblock = superblock.unwrap_or_else(|e| panic!("{l:?}: {e}"));
    superblock.set_checksum_key(l.checksums.then_some(CHECKSUM_KEY));
    cache.put(SUPERBLOCK, &superblock.encode());
    cache.recognise(superblock.set_magic(), Sectors(l.bucket_sectors));
    cache
}

fn new_backing(world: &World, l: &Layout, i: usize, b: &BackingLayout) -> Rc<SimDisk> {
    let sectors = b.data_offset + b.data_sectors;
    let mut info = SimDisk::describe(&format!("backing{i}"), sectors, b.logical_block_bytes);
    info.optimal_io_bytes = b.stripe_bytes;
    info.partial_stripes_expensive = b.stripe_bytes > 0;
    info.discard = b.discard;
    // A device that discards is likely to have holes.
    info.sparse = b.discard;
    let disk = SimDisk::new(world, i as u64 + 1, info);
    let superblock = BackingSuper::format(&BackingFormat {
        uuid: uuid_of(i),
        set_uuid: SET_UUID,
        device_sectors: Sectors(sectors),
        block_sectors: Sectors(b.block_sectors),
        bucket_sectors: Sectors(l.bucket_sectors),
        data_offset: Sector(b.data_offset),
        cache_mode: b.mode,
        label: [0; 32],
    });
    let superblock = superblock.unwrap_or_else(|e| panic!("{l:?}: {e}"));
    disk.put(SUPERBLOCK, &superblock.encode());
    let mut bytes = [0; SECTOR];
    for sector in 0..b.data_sectors {
        fill_data(&mut bytes, i as u8, sector, 0);
        disk.put(Sector(b.data_offset + sector), &bytes);
    }
    disk
}

/// The priority sets of an image, with this generation for every bucket without metadata.
fn set_generations(image: &Image, generation: Gen) -> Vec<(Sector, Vec<u8>)> {
    let head = image.read_vec(SUPERBLOCK, Sectors(8));
    let checked = RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_cache(image.size(), 512));
    let superblock = checked.unwrap_or_else(|e| panic!("the superblock of a new set: {e}"));
    let (g, magic) = (*superblock.geometry(), superblock.set_magic());
    let entries = superblock.journal_buckets().flat_map(|bucket| {
        let bytes = image.read_vec(g.bucket_start(bucket), g.bucket_sectors);
        let found = parse_bucket(&bytes, magic, g.block_sectors);
        found.unwrap_or_else(|e| panic!("the journal of a new set: {e}")).entries
    });
    let newest = entries.map(|(_, e)| e).max_by_key(|e| e.seq);
    let newest = newest.unwrap_or_else(|| panic!("the journal of a new set is empty"));
    let mut metadata: Vec<u64> = [newest.uuid_bucket, newest.btree_root]
        .iter()
        .filter_map(|key| Some(key.pointer()?.offset().0 / g.bucket_sectors.0))
        .collect();
    let mut sets = Vec::new();
    let mut next = newest.prio_bucket[0];
    for first in (0..g.nbuckets).step_by(g.prios_per_bucket as usize) {
        let at = Sector(next * g.bucket_sectors.0);
        let mut prios = vec![BucketPrio::default(); g.prios_per_bucket.min(g.nbuckets - first) as usize];
        let bytes = image.read_vec(at, g.meta_sectors);
        let header = parse_prio_set(&bytes, magic, &mut prios);
        let header = header.unwrap_or_else(|e| panic!("the priorities of a new set: {e}"));
        metadata.push(next);
        sets.push((at, header, first, prios));
        next = header.next_bucket;
    }
    let aged = sets.into_iter().map(|(at, header, first, mut prios)| {
        for (bucket, p) in (u64::from(first)..).zip(&mut prios) {
            if bucket >= u64::from(g.first_dynamic().0) && !metadata.contains(&bucket) {
                p.generation = generation;
            }
        }
        let mut bytes = vec![0; g.meta_sectors.bytes() as usize];
        encode_prio_set(&mut bytes, magic, header, &prios);
        (at, bytes)
    });
    aged.collect()
}
