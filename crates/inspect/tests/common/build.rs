//! Sets built from nothing, with any geometry: small ones of huge devices.

use std::collections::BTreeMap;

use format::journal::JsetBuilder;
use format::superblock::CacheFormat;
use format::uuid_table::encode_uuid_table;
use format::{
    Bkey, BsetBuilder, BucketNr, BucketPrio, CacheSuper, Gen, Geometry, INVALID_UUID, Inode, JournalSeq,
    JsetRoots, PrioHeader, Ptr, Replacement, Sector, Sectors, Uuid, UuidEntry, encode_prio_set,
};
use inspect::{ReadAt, ReadError};

/// A device of any size that keeps what was written.
pub struct SparseImage {
    pub chunks: BTreeMap<u64, Box<[u8; 4096]>>,
    pub sectors: u64,
}

impl SparseImage {
    pub fn write(&mut self, at: Sector, bytes: &[u8]) {
        for (n, sector) in bytes.chunks(512).enumerate() {
            let at = at.0 + n as u64;
            if sector.iter().all(|&b| b == 0) && !self.chunks.contains_key(&(at / 8)) {
                continue;
            }
            let chunk = self.chunks.entry(at / 8).or_insert_with(|| Box::new([0; 4096]));
            chunk[(at % 8) as usize * 512..][..sector.len()].copy_from_slice(sector);
        }
    }
}

impl ReadAt for SparseImage {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        assert!(at.0 + into.len() as u64 / 512 <= self.sectors, "callers stay inside");
        into.fill(0);
        for (sector, bytes) in (at.0..).zip(into.chunks_mut(512)) {
            if let Some(chunk) = self.chunks.get(&(sector / 8)) {
                bytes.copy_from_slice(&chunk[(sector % 8) as usize * 512..][..bytes.len()]);
            }
        }
        Ok(())
    }
    fn sectors(&self) -> Sectors {
        Sectors(self.sectors)
    }
    fn name(&self) -> &str {
        "built"
    }
}

/// What to build.
pub struct Build {
    pub bucket_sectors: u64,
    pub nbuckets: u64,
    pub discard: bool,
    /// Size of a prio set, if not the usual one.
    pub prio_sectors: Option<u64>,
    /// Journal entries: number, oldest needed, and keys.
    pub entries: Vec<(u64, u64, Vec<Bkey>)>,
    /// Keys of the root leaf.
    pub keys: Vec<Bkey>,
    pub slots: Vec<UuidEntry>,
}

/// UUID of the backing device in slot 0.
pub const BACKING: Uuid = Uuid([7; 16]);

impl Build {
    /// One cached device, one volume of 1000 sectors, one slot of a device that was detached.
    pub fn new(bucket_sectors: u64, nbuckets: u64) -> Build {
        let mut gone = UuidEntry::backing(Uuid([9; 16]), [0; 32], 1);
        gone.invalidate(2);
        assert_eq!(gone.uuid, INVALID_UUID);
        Build {
            bucket_sectors,
            nbuckets,
            discard: false,
            prio_sectors: None,
            entries: vec![(1, 1, Vec::new())],
            keys: Vec::new(),
            slots: vec![
                UuidEntry::backing(BACKING, [0; 32], 1),
                UuidEntry::volume(Uuid([8; 16]), [0; 32], Sectors(1000), 1),
                gone,
            ],
        }
    }

    pub fn superblock(&self) -> CacheSuper {
        let mut sb = CacheSuper::format(&CacheFormat {
            uuid: Uuid([1; 16]),
            set_uuid: Uuid([2; 16]),
            device_sectors: Sectors(self.bucket_sectors * self.nbuckets),
            block_sectors: Sectors(1),
            bucket_sectors: Sectors(self.bucket_sectors),
            replacement: Replacement::Lru,
            discard: self.discard,
        })
        .unwrap();
        sb.set_journal_buckets(sb.default_journal_buckets()).unwrap();
        sb.set_sync(true);
        sb.prepare_write(3);
        sb
    }

    pub fn geometry(&self) -> Geometry {
        *self.superblock().geometry()
    }

    /// The n-th bucket for data, from its start on.
    pub fn data(&self, n: u32) -> Ptr {
        let g = self.geometry();
        let bucket = BucketNr(g.first_dynamic().0 + g.prio_buckets.min(40) + 2 + n);
        Ptr::new(0, g.bucket_start(bucket), Gen(0))
    }

    /// An extent of data.
    pub fn extent(&self, inode: u32, start: u64, size: u64, dirty: bool, ptr: Ptr) -> Bkey {
        Bkey::extent(Inode(inode), Sector(start + size), Sectors(size), dirty, ptr)
    }

    pub fn image(&self) -> SparseImage {
        let sb = self.superblock();
        let (g, magic) = (*sb.geometry(), sb.set_magic());
        let mut image = SparseImage { chunks: BTreeMap::new(), sectors: self.bucket_sectors * self.nbuckets };
        image.write(Sector(8), &sb.encode());

        let first = g.first_dynamic().0;
        let prio_sectors = Sectors(self.prio_sectors.unwrap_or(g.meta_sectors.0));
        let per_set = format::geometry::prios_in(prio_sectors);
        // Sets of devices too large for a test have a chain that breaks off.
        let chain = g.nbuckets.div_ceil(per_set).min(40);
        for n in 0..chain {
            let entries = per_set.min(g.nbuckets - n * per_set);
            let mut bytes = vec![0; prio_sectors.bytes() as usize];
            let header = PrioHeader { seq: 1, next_bucket: u64::from(first + n + 1) };
            encode_prio_set(&mut bytes, magic, header, &vec![BucketPrio::default(); entries as usize]);
            image.write(g.bucket_start(BucketNr(first + n)), &bytes);
        }

        let uuid = Ptr::new(0, g.bucket_start(BucketNr(first + chain)), Gen(0));
        let mut table = vec![0; g.meta_sectors.bytes() as usize];
        encode_uuid_table(&mut table, &self.slots);
        image.write(uuid.offset(), &table);

        let root = Ptr::new(0, g.bucket_start(BucketNr(first + chain + 1)), Gen(0));
        let mut builder = BsetBuilder::begin(vec![0; g.node_sectors.bytes() as usize], 77, g.block_sectors);
        self.keys.iter().for_each(|key| assert!(builder.push_key(key)));
        let len = builder.finish(magic, root);
        image.write(root.offset(), &builder.into_inner()[..len]);

        let mut at = g.bucket_start(g.journal_bucket(1).unwrap());
        for (seq, last_seq, keys) in &self.entries {
            let mut builder = JsetBuilder::begin(vec![0; 32768], g.block_sectors);
            keys.iter().for_each(|key| assert!(builder.push_key(key)));
            let mut roots = JsetRoots {
                uuid_bucket: Bkey::uuid_bucket(g.meta_sectors, uuid),
                btree_root: Bkey::root(g.node_sectors, root),
                ..JsetRoots::default()
            };
            roots.prio_bucket[0] = u64::from(first);
            let len = builder.finish(magic, JournalSeq(*seq), JournalSeq(*last_seq), &roots);
            image.write(at, &builder.into_inner()[..len]);
            at.0 += len as u64 / 512;
        }
        image
    }
}
