//! No contents make anything panic, or take long.
//!
//! Two kinds of damage: bits flipped anywhere in the metadata, which checksums find, and fields changed
//! with the checksums made right again, which nothing but the rules themselves can find.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::edit::Edit;
use common::{backing_source, cache_source};
use format::{Bkey, Gen, Inode, JournalSeq, Ptr, Sector, Sectors};
use inspect::dump::{self, BtreeQuery, to_json};
use inspect::{
    CheckOptions, ExtractOptions, Extraction, Mode, NodeId, ReadAt, ReadError, SetView, SliceSource,
    StreamSink, Target, check_set,
};
use proptest::prelude::*;

const DIRS: [&str; 5] = [
    "03-writeback-clean-stop",
    "06-volume-and-backing-killed",
    "07-busy-killed",
    "08-synthetic",
    "09-small-buckets-killed",
];

fn edits() -> &'static [Edit] {
    static EDITS: OnceLock<Vec<Edit>> = OnceLock::new();
    EDITS.get_or_init(|| DIRS.map(Edit::new).into())
}

/// An image with some sectors replaced, without a copy of the rest.
struct Patched<'a> {
    base: SliceSource<'a>,
    sectors: BTreeMap<u64, [u8; 512]>,
}

impl Patched<'_> {
    fn change(&mut self, sector: u64, byte: usize, xor: u8) {
        let base = &self.base;
        let bytes = self.sectors.entry(sector).or_insert_with(|| {
            let mut bytes = [0; 512];
            base.read_at(Sector(sector), &mut bytes).unwrap();
            bytes
        });
        bytes[byte] ^= xor;
    }
}

impl ReadAt for Patched<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        self.base.read_at(at, into)?;
        let end = at.0 + into.len() as u64 / 512;
        for (sector, bytes) in self.sectors.range(at.0..end) {
            into[(sector - at.0) as usize * 512..][..512].copy_from_slice(bytes);
        }
        Ok(())
    }
    fn sectors(&self) -> Sectors {
        self.base.sectors()
    }
    fn name(&self) -> &str {
        self.base.name()
    }
}

/// Sectors with metadata: the superblock and all structures, as far as written.
fn metadata(view: &SetView) -> Vec<u64> {
    let g = view.geometry();
    let journal = view.journal.as_ref().unwrap();
    let entries = journal.entries.iter().flat_map(|e| e.sector.0..e.sector.0 + e.sectors.0);
    let prio = view.prio.chain.iter().map(|b| g.bucket_start(*b).0).flat_map(|s| s..s + 8);
    let uuid = view.uuid_bucket.iter().map(|b| g.bucket_start(*b).0).flat_map(|s| s..s + 1);
    let nodes = view.nodes.iter().flat_map(|n| {
        let start = n.key.ptr.offset().0;
        start..start + (n.written.0 + 1).min(n.key.size().0)
    });
    // Of the superblock and the newest structures, more.
    let weight =
        std::iter::repeat_n(8, 40).chain(std::iter::repeat_n(journal.newest_info().unwrap().sector.0, 10));
    weight.chain(entries).chain(prio).chain(uuid).chain(nodes).collect()
}

/// Everything that can be done with a set.
fn everything(cache: &dyn ReadAt, backing: &dyn ReadAt) {
    let begin = Instant::now();
    let _ = dump::superblock(cache);
    let strict = SetView::open(cache, Mode::Strict);
    let report = check_set(cache, &[backing], CheckOptions::METADATA);
    assert!(!report.to_string().is_empty() || report.findings.is_empty());
    to_json(&report);
    if strict.is_err() {
        assert!(!report.is_ok(), "refused, but nothing is wrong: {report}");
    }
    if let Ok(view) = SetView::open(cache, Mode::BestEffort) {
        let query = BtreeQuery { keys: true, ..BtreeQuery::default() };
        let _ = dump::btree(&view, cache, &query).map(|doc| doc.to_string());
        let _ = dump::journal(&view).map(|doc| doc.to_string());
        let _ = (dump::buckets(&view).to_string(), dump::uuids(&view).to_string());
        let _ = dump::extents(&view, None).to_string();
        let slots = view.slots.keys().flat_map(|&slot| [Target::Volume(slot), Target::without_backing(slot)]);
        for target in slots.chain([Target::Cached(backing)]) {
            let options = ExtractOptions { best_effort: true, ..ExtractOptions::default() };
            let Ok(x) = Extraction::new(&view, cache, target, options) else { continue };
            // A volume may claim any size; stop after as much as the images have.
            let mut sink = StreamSink::new(std::io::sink());
            let _ = x.run(&mut sink, &mut |p| {
                if p.done.0 > 1 << 18 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
        }
    }
    assert!(begin.elapsed() < Duration::from_secs(30), "took {:?}", begin.elapsed());
}

/// One change of a field, sealed again.
#[derive(Clone, Debug)]
enum Change {
    Superblock(u8, u64),
    BackingFlags(u64),
    Entry(u16, u8, u64),
    EntryKey(u16, u16, u8, u8),
    Prio(u16, u16, u64),
    Slot(u8, u8, u64),
    SetKey(u16, u16, u16, u8, u8),
    AppendSet(u16, Vec<(u8, u32, u16, u8, u64)>),
}

/// Numbers with teeth: small, around powers of two, or anything.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..20,
        0u64..140_000,
        (0u32..64, -2i64..3).prop_map(|(shift, add)| (1u64 << shift).wrapping_add_signed(add)),
        any::<u64>(),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    let keys = prop::collection::vec((0u8..4, 0u32..50_000, any::<u16>(), any::<u8>(), number()), 1..40);
    prop_oneof![
        1 => (0u8..9, number()).prop_map(|(f, n)| Change::Superblock(f, n)),
        1 => number().prop_map(Change::BackingFlags),
        3 => (any::<u16>(), 0u8..8, number()).prop_map(|(e, f, n)| Change::Entry(e, f, n)),
        3 => (any::<u16>(), any::<u16>(), 0u8..3, 0u8..64).prop_map(|(e, k, w, b)| Change::EntryKey(e, k, w, b)),
        1 => (any::<u16>(), any::<u16>(), number()).prop_map(|(i, e, n)| Change::Prio(i, e, n)),
        1 => (0u8..3, 0u8..4, number()).prop_map(|(s, f, n)| Change::Slot(s, f, n)),
        6 => (any::<u16>(), any::<u16>(), any::<u16>(), 0u8..3, 0u8..64)
            .prop_map(|(n, s, k, w, b)| Change::SetKey(n, s, k, w, b)),
        3 => (any::<u16>(), keys).prop_map(|(n, keys)| Change::AppendSet(n, keys)),
    ]
}

fn flip_key(keys: &mut [Bkey], key: u16, word: u8, bit: u8) {
    let len = keys.len().max(1);
    let Some(key) = keys.get_mut(usize::from(key) % len) else { return };
    let bit = 1u64 << bit;
    match word {
        0 => key.high ^= bit,
        1 => key.low ^= bit,
        _ => key.ptr.0 ^= bit,
    }
}

fn apply(e: &mut Edit, change: &Change) {
    let journal = e.view.journal.clone().unwrap();
    match change.clone() {
        Change::Superblock(field, n) => e.superblock(|sb| match field {
            0 => sb.version = n.into(),
            1 => sb.nbuckets = n.into(),
            2 => sb.block_size = (n as u16).into(),
            3 => sb.bucket_size = (n as u16).into(),
            4 => sb.first_bucket = (n as u16).into(),
            5 => sb.keys = (n as u16).into(),
            6 => sb.flags = n.into(),
            7 => sb.nr_this_dev = (n as u16).into(),
            _ => sb.set_uuid[0] ^= n as u8,
        }),
        Change::BackingFlags(n) => e.backing_superblock(|sb| sb.flags = n.into()),
        Change::Entry(entry, field, n) => {
            // Mostly the newest, as only its roots count.
            let last = journal.replay.len() - 1;
            let info = e.replayed(if entry % 4 == 0 { usize::from(entry) % (last + 1) } else { last });
            e.entry(info, |jset| match field {
                0 => jset.seq = JournalSeq(n),
                1 => jset.last_seq = JournalSeq(n),
                2 => jset.btree_level = n as u16,
                3 => jset.prio_bucket[0] = n,
                4 => jset.btree_root.ptr = Ptr::new(0, Sector(n), Gen(n as u8)),
                5 => jset.uuid_bucket.ptr = Ptr::new(0, Sector(n & !127), Gen(n as u8)),
                6 => jset.btree_root.set_size(Sectors(n & 0xffff)),
                _ => jset.uuid_bucket.set_size(Sectors(n & 0xffff)),
            });
        }
        Change::EntryKey(entry, key, word, bit) => {
            let info = e.replayed(usize::from(entry) % journal.replay.len());
            e.entry(info, |jset| flip_key(&mut jset.keys, key, word, bit));
        }
        Change::Prio(index, entry, n) => {
            let index = usize::from(index) % e.view.prio.chain.len();
            e.prio(index, |header, entries| {
                let at = usize::from(entry) % entries.len();
                entries[at].generation = Gen(n as u8);
                if entry % 5 == 0 {
                    header.next_bucket = n;
                }
            });
        }
        Change::Slot(slot, field, n) => e.slot(u32::from(slot), |slot| match field {
            0 => slot.uuid.0[..8].copy_from_slice(&n.to_le_bytes()),
            1 => slot.flags = n as u32,
            2 => slot.sectors = Sectors(n),
            _ => slot.uuid = format::INVALID_UUID,
        }),
        Change::SetKey(node, set, key, word, bit) => {
            let node = NodeId(u32::from(node) % e.view.nodes.len() as u32);
            let set = usize::from(set) % e.view.node(node).unwrap().bsets.len();
            e.set(node, set, |keys| flip_key(keys, key, word, bit));
        }
        Change::AppendSet(node, keys) => {
            let node = NodeId(u32::from(node) % e.view.nodes.len() as u32);
            let room = e.view.node(node).unwrap();
            if room.key.size().0 < room.written.0 + 8 {
                return;
            }
            let keys: Vec<Bkey> = keys
                .iter()
                .map(|&(kind, end, size, generation, n)| {
                    let (end, size) = (Sector(u64::from(end)), Sectors(u64::from(size)));
                    let ptr = Ptr::new((n >> 60) as u16 % 2, Sector(n % (1 << 44)), Gen(generation));
                    match kind {
                        0 => Bkey::hole(Inode(u32::from(generation) % 3), end, size),
                        1 => Bkey::freeing(ptr, size),
                        _ => Bkey::extent(Inode(u32::from(generation) % 3), end, size, kind == 2, ptr),
                    }
                })
                .collect();
            e.append_set(node, &keys);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn flipped_bits(
        image in 0usize..DIRS.len(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0usize..512, 1u8..=255), 1..12),
    ) {
        let e = &edits()[image];
        let places = metadata(&e.view);
        let mut cache = Patched { base: cache_source(&e.cache), sectors: BTreeMap::new() };
        for (place, byte, xor) in flips {
            cache.change(*place.get(&places), byte, xor);
        }
        everything(&cache, &backing_source(&e.backing));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn changed_fields(image in 0usize..DIRS.len(), changes in prop::collection::vec(change(), 1..5)) {
        let mut e = edits()[image].clone();
        for change in &changes {
            apply(&mut e, change);
        }
        everything(&cache_source(&e.cache), &backing_source(&e.backing));
    }
}
