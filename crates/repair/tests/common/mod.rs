//! Images of real devices, damage to their structures, and the data that is still there.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, dead_code, reason = "test code")]

#[path = "../../../format/tests/common/fixtures.rs"]
pub mod fixtures;
pub mod salvaged;

use std::ops::{ControlFlow, Range};
use std::path::PathBuf;

use format::{Inode, Sector, Sectors};
use inspect::view::SlotKind;
use inspect::{
    DamagedDirty, ExtractOptions, Extraction, Mode, PieceKind, ReadAt, ReadError, ReadFailure, SetView,
    SliceSource, StreamSink, Target,
};

/// An image set, with what is known about it while it is intact.
pub struct Set {
    pub dir: &'static str,
    pub cache: Vec<u8>,
    pub backing: Vec<u8>,
    pub view: SetView,
    /// The contents of each device that has dirty data, with the dirty sectors.
    pub dirty: Vec<(Inode, Vec<u8>, Vec<u64>)>,
}

impl Set {
    pub fn new(dir: &'static str) -> Set {
        let (cache, backing) = (fixtures::cache(dir), fixtures::backing(dir));
        let view = SetView::open(&SliceSource::new("cache", &cache), Mode::Strict).unwrap();
        let mut set = Set { dir, cache, backing, view, dirty: Vec::new() };
        let (c, b) = (SliceSource::new("cache", &set.cache), SliceSource::new("backing", &set.backing));
        for (inode, slot) in &set.view.slots {
            if slot.kind == SlotKind::Invalidated {
                continue;
            }
            let Some(bytes) = contents(&set.view, *inode, &c, &b) else { continue };
            let first = if slot.is_backing() { 16 } else { 0 };
            let live = set.view.live(*inode).filter(|(_, kind)| *kind == PieceKind::Dirty);
            let sectors = live.flat_map(|(p, _)| p.start.0 - first..p.end().0 - first).collect();
            set.dirty.push((*inode, bytes, sectors));
        }
        set
    }

    /// Dirty sectors of all devices.
    pub fn dirty_sectors(&self) -> usize {
        self.dirty.iter().map(|(_, _, sectors)| sectors.len()).sum()
    }

    /// Dirty sectors that have their bytes in a set on these devices, and sectors of the whole that have other bytes.
    pub fn compare(&self, cache: &dyn ReadAt, backing: &dyn ReadAt) -> (usize, usize) {
        let (mut right, mut wrong) = (0, 0);
        let Ok(view) = SetView::open(cache, Mode::BestEffort) else { return (0, 0) };
        for (inode, good, dirty) in &self.dirty {
            let Some(bytes) = contents(&view, *inode, cache, backing) else { continue };
            let same = |sector: u64| {
                let range = sector as usize * 512..(sector as usize + 1) * 512;
                good.get(range.clone()) == bytes.get(range)
            };
            right += dirty.iter().filter(|s| same(**s)).count();
            wrong += (0..good.len() as u64 / 512).filter(|s| !same(*s)).count();
        }
        (right, wrong)
    }
}

/// The contents of a device of a set; `None` if they cannot be extracted at all.
fn contents(view: &SetView, inode: Inode, cache: &dyn ReadAt, backing: &dyn ReadAt) -> Option<Vec<u8>> {
    let target = match view.slots.get(&inode)?.kind {
        SlotKind::Volume(_) => Target::Volume(inode),
        _ => Target::Cached(backing),
    };
    let options =
        ExtractOptions { best_effort: true, damaged: DamagedDirty::Zeros, ..ExtractOptions::default() };
    let extraction = Extraction::new(view, cache, target, options).ok()?;
    let mut sink = StreamSink::new(Vec::new());
    extraction.run(&mut sink, &mut |_| ControlFlow::Continue(())).ok()?;
    Some(sink.into_inner())
}

/// Bytes that are no structure.
pub fn garbage(bytes: &mut [u8]) {
    let mut x = 0x9E37_79B9_7F4A_7C15_u64;
    for b in bytes {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *b = (x >> 24) as u8;
    }
}

/// A structure of a set: its place on the cache device or on the backing device.
#[derive(Clone)]
pub struct Structure {
    pub name: &'static str,
    pub on_cache: bool,
    pub range: std::ops::Range<usize>,
    /// A byte of the part that is in use.
    pub used: usize,
}

fn at(sector: Sector) -> usize {
    sector.bytes() as usize
}

/// The structures of a set, each of which is damaged alone.
pub fn structures(set: &Set) -> Vec<Structure> {
    let view = &set.view;
    let g = view.geometry();
    let superblock = |name, on_cache| Structure { name, on_cache, range: 4096..8192, used: 4096 + 100 };
    let mut all = vec![superblock("cache superblock", true), superblock("backing superblock", false)];
    let journal = view.journal.as_ref().unwrap();
    let mut entry = |name, seq| {
        let info = journal.entry(seq).unwrap();
        let range = at(info.sector)..at(Sector(info.sector.0 + info.sectors.0));
        all.push(Structure { name, on_cache: true, used: range.start + 50, range });
    };
    if journal.replay.len() > 2 {
        entry("journal entry that is needed", journal.replay[journal.replay.len() / 2].seq);
    }
    entry("newest journal entry", journal.newest);
    let meta = g.meta_sectors.bytes() as usize;
    let prio = at(g.bucket_start(view.prio.chain[0]));
    all.push(Structure { name: "prio set", on_cache: true, range: prio..prio + meta, used: prio + 400 });
    let table = at(g.bucket_start(view.uuid_bucket.unwrap()));
    all.push(Structure { name: "UUID table", on_cache: true, range: table..table + meta, used: table + 2 });
    let mut node = |name, n: Option<&inspect::view::NodeView>| {
        let Some(n) = n else { return };
        let start = at(n.key.ptr.offset());
        let range = start..start + n.key.size().bytes() as usize;
        all.push(Structure { name, on_cache: true, used: start + 18, range });
    };
    node("root node above leaves", view.nodes.first().filter(|n| n.level > 0));
    node("leaf", view.nodes.iter().find(|n| n.level == 0 && n.live > 0));
    all
}

/// The names of the structures, in the order of the tables.
pub const ORDER: [&str; 8] = [
    "cache superblock",
    "backing superblock",
    "journal entry that is needed",
    "newest journal entry",
    "prio set",
    "UUID table",
    "root node above leaves",
    "leaf",
];

/// The kinds of damage, in the order of the tables.
pub const DAMAGES: [&str; 3] = ["zeros", "garbage", "one bit"];

/// Damages the bytes of a structure, of which that at `used` is in use.
pub fn damaged(bytes: &mut [u8], used: usize, damage: &str) {
    match damage {
        "nothing" => {}
        "zeros" => bytes.fill(0),
        "garbage" => garbage(bytes),
        _ => bytes[used] ^= 0x10,
    }
}

/// Compares a table with the one of this name in docs/repair.md, or writes it there if `UBCACHE_REPAIR=write`.
pub fn check_table(name: &str, table: &str) {
    println!("{table}");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/repair.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
    let (before, rest) = page.split_once(&begin).unwrap();
    let (old, after) = rest.split_once(&end).unwrap();
    if std::env::var("UBCACHE_REPAIR").is_ok_and(|v| v == "write") {
        std::fs::write(&path, format!("{before}{begin}{table}{end}{after}")).unwrap();
    } else {
        assert_eq!(old, table, "run with UBCACHE_REPAIR=write");
    }
}

/// A device that fails every read of some sectors.
pub struct Unreadable<'a> {
    pub image: SliceSource<'a>,
    pub sectors: Range<u64>,
}

impl ReadAt for Unreadable<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        let end = at.0 + into.len() as u64 / 512;
        if at.0 < self.sectors.end && self.sectors.start < end {
            let reason = ReadFailure::Io(std::io::ErrorKind::Other.into());
            let sectors = Sectors::from_bytes_ceil(into.len() as u64);
            return Err(ReadError { device: self.name().to_owned(), at, sectors, reason });
        }
        self.image.read_at(at, into)
    }

    fn sectors(&self) -> Sectors {
        self.image.sectors()
    }

    fn name(&self) -> &str {
        self.image.name()
    }
}
