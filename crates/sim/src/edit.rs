//! A set at rest whose structures a test reads and changes, with their checksums.
//!
//! Owns the search for the newest journal entry, and the appending of entries after it. Must not know the engine.

use format::bset::BsetBuilder;
use format::uuid_table::{encode_uuid_table, parse_uuid_table};
use format::{
    Bkey, BucketNr, CacheSuper, Inode, JournalSeq, Jset, JsetBuilder, JsetRoots, Ptr, RawSuperblock, Sector,
    Sectors, UuidEntry, parse_bucket,
};
use inspect::usage::{Usage, Use};
use inspect::{Mode, SetView};

use crate::disk::SimDisk;

/// Largest position of the engine's index, in sectors.
pub const MOST: u64 = (1 << 47) - 1;

/// The structures of a cache device from which all others can be found.
pub struct Heads {
    /// The superblock.
    pub superblock: CacheSuper,
    /// The newest journal entry.
    pub newest: Jset,
    /// The place in the ring after the newest entry.
    end: Sector,
    /// Number of buckets between that place and the physical end of the ring that no start needs.
    room: usize,
}

/// Number of keys that fit into an entry in every bucket of a ring.
const KEYS: usize = 100;

impl Heads {
    /// Reads the superblock and the newest journal entry.
    ///
    /// # Panics
    /// If the set on the device was never in use.
    pub fn read(cache: &SimDisk) -> Heads {
        Heads::find(cache).unwrap_or_else(|| panic!("the journal of the cache device is empty"))
    }

    /// Reads the superblock and the newest journal entry; `None` if the set was never in use.
    ///
    /// # Panics
    /// If the device is damaged.
    pub fn find(cache: &SimDisk) -> Option<Heads> {
        let image = cache.image();
        let head = image.read_vec(Sector(8), Sectors(8));
        let checked = RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_cache(image.size(), 512));
        let superblock = checked.unwrap_or_else(|e| panic!("the superblock of the cache device: {e}"));
        let g = *superblock.geometry();
        let entries = superblock.journal_buckets().flat_map(|bucket| {
            let start = g.bucket_start(bucket);
            let bytes = image.read_vec(start, g.bucket_sectors);
            let found = parse_bucket(&bytes, superblock.set_magic(), g.block_sectors);
            let found = found.unwrap_or_else(|e| panic!("journal bucket {bucket}: {e}"));
            let end = start + Sectors::from_bytes_floor(found.stopped_at as u64);
            found.entries.into_iter().map(move |(_, e)| (e, bucket, end)).collect::<Vec<_>>()
        });
        let entries: Vec<(Jset, BucketNr, Sector)> = entries.collect();
        let (newest, last, end) = entries.iter().max_by_key(|(e, ..)| e.seq)?.clone();
        let needed =
            |bucket: &BucketNr| entries.iter().any(|(e, b, _)| b == bucket && e.seq >= newest.last_seq);
        let room = superblock.journal_buckets().filter(|b| *b > last).take_while(|b| !needed(b)).count();
        Some(Heads { superblock, newest, end, room })
    }

    /// Fills the set, except for `left` empty buckets, with dirty data of a slot whose device is missing.
    ///
    /// Returns false if that is not possible: fewer buckets are empty, the keys do not fit into the ring, or every slot is
    /// used.
    ///
    /// # Panics
    /// If the device is damaged.
    pub fn fill(&mut self, cache: &SimDisk, left: usize) -> bool {
        let g = *self.superblock.geometry();
        let image = cache.image();
        let view = SetView::open(&image, Mode::BestEffort).unwrap_or_else(|e| panic!("{}", e.fatal));
        let usage = Usage::of(&view).0;
        let all = || (g.first_dynamic().0..g.nbuckets).map(BucketNr);
        // Clean data cannot make room for priorities, because its bucket may be reused only after they are written.
        let empty: Vec<BucketNr> = all().filter(|b| usage.get(*b).what == Use::Unused).take(left).collect();
        if empty.len() < left {
            return false;
        }
        let may_be_filled = |b: &BucketNr| {
            let found = usage.get(*b);
            matches!(found.what, Use::Unused | Use::Data) && found.dirty_sectors == 0 && !empty.contains(b)
        };
        let slots = self.uuids(cache);
        let Some(slot) = slots.iter().rposition(|s| !s.is_live()) else { return false };
        let key = |(i, b): (usize, BucketNr)| {
            let end = Sector(16 + g.bucket_sectors.0 * (i as u64 + 1));
            // The new generation makes the clean data of the bucket stale.
            let ptr = Ptr::new(0, g.bucket_start(b), view.gens.current(b).next());
            Bkey::extent(Inode(slot as u32), end, g.bucket_sectors, true, ptr)
        };
        let keys: Vec<Bkey> = all().filter(may_be_filled).enumerate().map(key).collect();
        if keys.chunks(KEYS).len() > self.room {
            return false;
        }
        let roots = self.newest.roots();
        keys.chunks(KEYS).for_each(|group| self.append(cache, group, &roots));
        true
    }

    /// Replaces the keys in the root of the index, which is a leaf.
    ///
    /// # Panics
    /// If the keys do not fit.
    pub fn replace_root(&self, cache: &SimDisk, keys: &[Bkey]) {
        let g = *self.superblock.geometry();
        let ptr = self.newest.btree_root.pointer().unwrap_or_default();
        let mut bytes = vec![0; g.bucket_sectors.bytes() as usize];
        let mut set = BsetBuilder::begin(&mut bytes[..], 77, g.block_sectors);
        assert!(keys.iter().all(|k| set.push_key(k)), "{} keys fit into the root", keys.len());
        set.finish(self.superblock.set_magic(), ptr);
        cache.put(ptr.offset(), &bytes);
    }

    /// The slots of the table of devices.
    ///
    /// # Panics
    /// If the table cannot be read.
    pub fn uuids(&self, cache: &SimDisk) -> Vec<UuidEntry> {
        let at = self.newest.uuid_bucket.pointer().unwrap_or_default().offset();
        let table = cache.image().read_vec(at, self.newest.uuid_bucket.size());
        let slots = parse_uuid_table(&table, self.newest.version);
        slots.unwrap_or_else(|e| panic!("the table of devices: {e}"))
    }

    /// Moves the end of a flash-only volume beyond the largest position. Returns false if there is no such volume.
    ///
    /// # Panics
    /// If the table of devices cannot be read.
    pub fn enlarge_volume(&self, cache: &SimDisk) -> bool {
        let at = self.newest.uuid_bucket.pointer().unwrap_or_default().offset();
        let mut table = cache.image().read_vec(at, self.newest.uuid_bucket.size());
        let mut slots = self.uuids(cache);
        let Some(flash) = slots.iter_mut().find(|u| u.is_live() && u.is_flash_only()) else { return false };
        flash.sectors = Sectors(MOST + 1);
        encode_uuid_table(&mut table, &slots);
        cache.put(at, &table);
        true
    }

    /// Appends an entry with these keys and roots, at the beginning of the next bucket of the ring.
    ///
    /// # Panics
    /// If the keys do not fit into one bucket, or the ring has no room before its physical end.
    pub fn append(&mut self, cache: &SimDisk, keys: &[Bkey], roots: &JsetRoots) {
        let g = *self.superblock.geometry();
        let seq: JournalSeq = self.newest.seq.next();
        let mut bytes = vec![0; g.bucket_sectors.bytes() as usize];
        let mut entry = JsetBuilder::begin(&mut bytes[..], g.block_sectors);
        assert!(keys.iter().all(|k| entry.push_key(k)), "{} keys fit into a bucket", keys.len());
        let len = entry.finish(self.superblock.set_magic(), seq, self.newest.last_seq, roots);
        let size = g.bucket_sectors.0;
        let at = Sector((self.end.0 - 1) / size * size + size);
        cache.put(at, &bytes[..len]);
        self.end = at + Sectors::from_bytes_floor(len as u64);
        self.newest.seq = seq;
        self.room -= 1;
    }
}
