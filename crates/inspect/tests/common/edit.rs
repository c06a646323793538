//! Damage to images, made to measure: structures are changed and sealed again, so that exactly one rule
//! is broken and no checksum gives it away.

use format::journal::JsetBuilder;
use format::superblock::SUPERBLOCK_BYTES;
use format::uuid_table::UUID_ENTRY_BYTES;
use format::{
    Bkey, BsetBuilder, BucketNr, BucketPrio, Inode, Jset, PrioHeader, RawSuperblock, Sector, UuidEntry,
    encode_prio_set, parse_entry, parse_node, parse_prio_set,
};
use inspect::view::EntryInfo;
use inspect::{NodeId, SetView};
use zerocopy::IntoBytes;

/// A pair of images to be damaged, with what was on the cache device before. Changing something that
/// earlier damage made unreadable does nothing.
#[derive(Clone)]
pub struct Edit {
    pub cache: Vec<u8>,
    pub backing: Vec<u8>,
    pub view: SetView,
}

fn at(sector: Sector) -> usize {
    usize::try_from(sector.bytes()).unwrap()
}

impl Edit {
    pub fn new(dir: &str) -> Edit {
        let cache = super::cache(dir);
        let view = super::open(&cache);
        Edit { cache, backing: super::backing(dir), view }
    }

    pub fn flip(&mut self, sector: Sector, byte: usize) {
        self.cache[at(sector) + byte] ^= 1;
    }

    fn superblock_in(image: &mut [u8], change: impl FnOnce(&mut RawSuperblock)) {
        let bytes = &mut image[4096..4096 + SUPERBLOCK_BYTES];
        let mut raw = RawSuperblock::from_prefix(bytes).unwrap().clone();
        change(&mut raw);
        if let Some(csum) = raw.computed_csum() {
            raw.csum = csum.into();
        }
        bytes.copy_from_slice(raw.as_bytes());
    }

    pub fn superblock(&mut self, change: impl FnOnce(&mut RawSuperblock)) {
        Edit::superblock_in(&mut self.cache, change);
    }

    pub fn backing_superblock(&mut self, change: impl FnOnce(&mut RawSuperblock)) {
        Edit::superblock_in(&mut self.backing, change);
    }

    /// The newest journal entry.
    pub fn newest(&self) -> EntryInfo {
        *self.view.journal.as_ref().unwrap().newest_info().unwrap()
    }

    /// The n-th entry to be replayed.
    pub fn replayed(&self, n: usize) -> EntryInfo {
        let journal = self.view.journal.as_ref().unwrap();
        *journal.entry(journal.replay[n].seq).unwrap()
    }

    fn write_entry(&mut self, sector: Sector, jset: &Jset) {
        let block = self.view.geometry().block_sectors;
        let mut builder = JsetBuilder::begin(vec![0; 32768], block);
        for key in &jset.keys {
            assert!(builder.push_key(key));
        }
        let magic = self.view.superblock.set_magic();
        let len = builder.finish(magic, jset.seq, jset.last_seq, &jset.roots());
        let start = at(sector);
        self.cache[start..start + len].copy_from_slice(&builder.into_inner()[..len]);
    }

    /// Changes an entry where it stands.
    pub fn entry(&mut self, info: EntryInfo, change: impl FnOnce(&mut Jset)) {
        let (magic, block) = (self.view.superblock.set_magic(), self.view.geometry().block_sectors);
        let Ok((mut jset, _)) = parse_entry(&self.cache[at(info.sector)..], magic, block) else { return };
        change(&mut jset);
        self.write_entry(info.sector, &jset);
    }

    /// Writes one more entry behind the newest.
    pub fn append_entry(&mut self, change: impl FnOnce(&mut Jset)) {
        let newest = self.newest();
        let mut jset = self.view.journal.as_ref().unwrap().replay.last().unwrap().clone();
        jset.keys.clear();
        jset.seq = jset.seq.next();
        change(&mut jset);
        self.write_entry(Sector(newest.sector.0 + newest.sectors.0), &jset);
    }

    /// Changes a set of the prio chain.
    pub fn prio(&mut self, index: usize, change: impl FnOnce(&mut PrioHeader, &mut [BucketPrio])) {
        let (g, magic) = (*self.view.geometry(), self.view.superblock.set_magic());
        let start = at(g.bucket_start(self.view.prio.chain[index]));
        let bytes = &mut self.cache[start..start + usize::try_from(g.meta_sectors.bytes()).unwrap()];
        let first = index as u32 * g.prios_per_bucket;
        let mut entries = vec![BucketPrio::default(); g.prios_per_bucket.min(g.nbuckets - first) as usize];
        let Ok(mut header) = parse_prio_set(bytes, magic, &mut entries) else { return };
        change(&mut header, &mut entries);
        encode_prio_set(bytes, magic, header, &entries);
    }

    /// Adds to the stored generation of a bucket.
    pub fn advance_gen(&mut self, bucket: BucketNr, by: u8) {
        let per_set = self.view.geometry().prios_per_bucket;
        self.prio((bucket.0 / per_set) as usize, |_, entries| {
            let entry = &mut entries[(bucket.0 % per_set) as usize];
            entry.generation = format::Gen(entry.generation.0.wrapping_add(by));
        });
    }

    /// Changes a slot of the UUID table.
    pub fn slot(&mut self, inode: u32, change: impl FnOnce(&mut UuidEntry)) {
        let bucket = self.view.uuid_bucket.unwrap();
        let start = at(self.view.geometry().bucket_start(bucket)) + inode as usize * UUID_ENTRY_BYTES;
        let bytes: &mut [u8; UUID_ENTRY_BYTES] =
            (&mut self.cache[start..start + UUID_ENTRY_BYTES]).try_into().unwrap();
        let mut entry = UuidEntry::from_bytes(bytes);
        change(&mut entry);
        *bytes = entry.to_bytes();
    }

    /// The first leaf with enough sets; the root if it is one.
    pub fn leaf(&self) -> NodeId {
        let nodes = (0..).map(NodeId).zip(&self.view.nodes);
        nodes.filter(|(_, n)| n.level == 0).max_by_key(|(_, n)| n.bsets.len()).unwrap().0
    }

    /// Changes the keys of a set of a node where it stands. The set must not grow by a block.
    pub fn set(&mut self, node: NodeId, set: usize, change: impl FnOnce(&mut Vec<Bkey>)) {
        let node = self.view.node(node).unwrap().clone();
        let (magic, block) = (self.view.superblock.set_magic(), self.view.geometry().block_sectors);
        let start = at(node.key.ptr.offset());
        let parsed = parse_node(&self.cache[start..], &node.key, magic, block);
        let parsed = parsed.unwrap_or_else(|damage| damage.before);
        let Some(set) = parsed.bsets.get(set) else { return };
        let mut keys = set.keys.clone();
        change(&mut keys);
        self.write_set(&node, set.offset_bytes, &keys);
    }

    /// Appends a set to a node.
    pub fn append_set(&mut self, node: NodeId, keys: &[Bkey]) {
        let node = self.view.node(node).unwrap().clone();
        self.write_set(&node, usize::try_from(node.written.bytes()).unwrap(), keys);
    }

    fn write_set(&mut self, node: &inspect::view::NodeView, offset: usize, keys: &[Bkey]) {
        let room = usize::try_from(node.key.size().bytes()).unwrap() - offset;
        let mut builder = BsetBuilder::begin(vec![0; room], node.seq, self.view.geometry().block_sectors);
        for key in keys {
            assert!(builder.push_key(key));
        }
        let len = builder.finish(self.view.superblock.set_magic(), node.key.ptr);
        let start = at(node.key.ptr.offset()) + offset;
        self.cache[start..start + len].copy_from_slice(&builder.into_inner()[..len]);
    }

    /// Where a byte of a set of a node lies in the image.
    pub fn set_byte(&self, node: NodeId, set: usize, byte: usize) -> usize {
        let node = self.view.node(node).unwrap();
        at(node.key.ptr.offset()) + usize::try_from(node.bsets[set].offset_bytes).unwrap() + byte
    }

    /// A live extent of `inode` of at least `least` sectors, as a key; dirty or clean.
    pub fn extent(&self, inode: u32, dirty: bool, least: u64) -> Bkey {
        let wanted = if dirty { inspect::PieceKind::Dirty } else { inspect::PieceKind::Clean };
        let mut live = self.view.live(Inode(inode));
        let (piece, _) = live.find(|(p, kind)| *kind == wanted && p.len.0 >= least).unwrap();
        Bkey::extent(Inode(inode), piece.end(), piece.len, dirty, piece.ptr.unwrap())
    }

    /// A bucket that nothing uses, so many further on.
    pub fn unused_buckets(&self) -> impl Iterator<Item = BucketNr> + use<> {
        let (usage, _) = inspect::usage::Usage::of(&self.view);
        let g = *self.view.geometry();
        (g.first_dynamic().0..g.nbuckets)
            .map(BucketNr)
            .filter(move |b| usage.get(*b).what == inspect::usage::Use::Unused)
    }
}
