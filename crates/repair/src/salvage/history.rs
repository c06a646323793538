//! Journal entries that are not needed any more, as evidence about the leaves.
//!
//! Owns the comparison of old entries with the leaves. The keys of an entry go to leaves before the entry is given up, so a leaf that
//! does not know them has lost its last bset: the format does not say how many bsets a node has, and a destroyed last one looks like
//! the end of the node. The ring keeps old entries until it has gone round. Some keys are inserted without the journal, such as those
//! of reads, so a leaf may have a newer key than an old entry says. Then both lead to the same bytes; if they do not, the leaf has lost
//! something.

use std::collections::BTreeSet;

use format::{Inode, Sector, Sectors, parse_entry};
use inspect::view::NodeView;
use inspect::{ExtentMap, NodeId, Origin, Piece, ReadAt, SetView};

/// Sectors that are compared at a time.
const CHUNK: u64 = 128;

/// A set and the devices of one of its disks.
#[derive(Clone, Copy)]
pub(super) struct Devices<'a> {
    pub(super) view: &'a SetView,
    pub(super) cache: &'a dyn ReadAt,
    /// `None` for a flash-only volume.
    pub(super) backing: Option<&'a dyn ReadAt>,
}

/// The leaves that do not have what old journal entries wrote to them, for keys of a slot.
pub(super) fn torn_leaves(devices: Devices<'_>, slot: Inode) -> BTreeSet<NodeId> {
    let Devices { view, cache, .. } = devices;
    let Some(history) = history(view, cache, slot) else { return BTreeSet::new() };
    let leaves = LeafIndex::of(view);
    let mut torn: BTreeSet<NodeId> = BTreeSet::new();
    let mut pieces = view.extents.of_inode(slot).peekable();
    for old in history.of_inode(slot) {
        let mut at = old.start;
        while pieces.peek().is_some_and(|piece| piece.end() <= old.start) {
            pieces.next();
        }
        while at < old.end() {
            let next = pieces.peek().filter(|piece| piece.start < old.end());
            let until = next.map_or(old.end(), |piece| piece.start);
            if at < until {
                if view.kind(old).is_live() && !devices.is_same(old, None, (at, until)) {
                    torn.extend(leaves.at(slot, at));
                }
                at = until;
                continue;
            }
            let Some(piece) = next else { break };
            let end = piece.end().min(old.end());
            if matches!(piece.origin, Origin::Node(_)) && !devices.is_same(old, Some(piece), (at, end)) {
                torn.extend(leaves.at(slot, at));
            }
            at = end;
            if piece.end() <= old.end() {
                pieces.next();
            }
        }
    }
    torn
}

/// The state of a slot as the entries say that follow each other up to the first one that is still needed.
fn history(view: &SetView, cache: &dyn ReadAt, slot: Inode) -> Option<ExtentMap> {
    let journal = view.journal.as_ref()?;
    let mut next = journal.replay.first()?.seq;
    let mut infos = Vec::new();
    for info in journal.entries.iter().rev().filter(|e| e.seq < next).collect::<Vec<_>>() {
        if info.seq.next() != next {
            break;
        }
        next = info.seq;
        infos.push(*info);
    }
    let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
    let mut history = ExtentMap::default();
    for info in infos.iter().rev() {
        let mut bytes = vec![0; usize::try_from(info.sectors.bytes()).unwrap_or(0)];
        cache.read_at(info.sector, &mut bytes).ok()?;
        let Ok((jset, _)) = parse_entry(&bytes, magic, block) else { continue };
        for key in jset.keys.iter().filter(|key| key.inode() == slot) {
            if let Some(piece) = Piece::of(key, Origin::Journal(jset.seq)) {
                history.insert(slot, piece);
            }
        }
    }
    Some(history)
}

impl Devices<'_> {
    /// Whether an old key and a piece of a leaf, or none, lead to the same bytes in a range that both have.
    fn is_same(&self, old: &Piece, piece: Option<&Piece>, (from, to): (Sector, Sector)) -> bool {
        let place = |piece: &Piece| {
            let cut = piece.cut(from, to).filter(|_| self.view.kind(piece).is_live())?;
            Some(cut.ptr?.offset())
        };
        let (ours, theirs) = (piece.and_then(place), place(old));
        if ours == theirs {
            return true;
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < to.0.saturating_sub(from.0) {
            let n = CHUNK.min(to.0 - from.0 - done);
            let at = |place: Option<Sector>| place.map(|place| Sector(place.0.saturating_add(done)));
            let position = Sector(from.0 + done);
            let is_read =
                self.read(at(ours), position, n, &mut a) && self.read(at(theirs), position, n, &mut b);
            if !is_read || a != b {
                return false;
            }
            done += n;
        }
        true
    }

    /// Reads the bytes at a place in the cache, or those that the disk has without one.
    fn read(&self, place: Option<Sector>, position: Sector, sectors: u64, into: &mut Vec<u8>) -> bool {
        into.clear();
        into.resize(usize::try_from(Sectors(sectors).bytes()).unwrap_or(0), 0);
        match (place, self.backing) {
            (Some(place), _) => self.cache.read_at(place, into).is_ok(),
            (None, Some(backing)) => backing.read_at(position, into).is_ok(),
            (None, None) => true,
        }
    }
}

/// The leaves, by their keys.
struct LeafIndex<'v>(Vec<(NodeId, &'v NodeView)>);

impl<'v> LeafIndex<'v> {
    fn of(view: &'v SetView) -> LeafIndex<'v> {
        let mut leaves: Vec<_> =
            (0..).map(NodeId).zip(&view.nodes).filter(|(_, node)| node.level == 0).collect();
        leaves.sort_by_key(|(_, node)| node.key.position());
        LeafIndex(leaves)
    }

    /// The leaf for keys at a position.
    fn at(&self, slot: Inode, at: Sector) -> Option<NodeId> {
        let last = (slot, Sector(at.0.saturating_add(1)));
        let n = self.0.partition_point(|(_, node)| node.key.position() < last);
        self.0.get(n).filter(|(_, node)| node.after < last).map(|(id, _)| *id)
    }
}
