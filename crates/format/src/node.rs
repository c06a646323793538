//! Btree nodes as they are on the device: logs of bsets.
//!
//! Owns the reading of a node: where bsets begin and end, which are valid, and what a failure means.
//! What the keys mean together (extents overwriting each other, children and freed nodes) belongs to
//! the btree.
//!
//! *Invariant:* a node is accepted only as a whole. A bset with the node's `seq` behind the end of the log
//! proves that a bset before it was lost. Only damage to the *last* bset may be an append that never
//! completed; nothing depends on such an append. It has its own kind ([`DamageKind::TornLastBset`]),
//! because a parser cannot distinguish it from later damage to a complete bset. The operator, not the
//! parser, decides whether the bsets before it are used.

use std::fmt;
use std::mem::offset_of;

use zerocopy::FromBytes;

use crate::bset::{BSET_HEADER_BYTES, BSET_VERSION, RawBset, bset_csum};
use crate::bytes::{as_u64, block_bytes, pad_to_block, u64_at};
use crate::error::{Corrupt, Structure, Value};
use crate::key::{Bkey, Keys, Ptr, WORD_BYTES};
use crate::magic::SetMagic;
use crate::units::Sectors;

/// A bset whose header and checksum are right.
#[derive(Clone, Debug)]
pub struct BsetView<'a> {
    /// Number of the bset in its node, from 0.
    pub index: usize,
    /// Where the bset begins, in bytes from the start of the node.
    pub offset_bytes: usize,
    /// Version of the bset.
    pub version: u32,
    /// The bytes of the bset's keys.
    pub key_bytes: &'a [u8],
}

impl<'a> BsetView<'a> {
    /// The keys of the bset.
    pub fn keys(&self) -> Keys<'a> {
        let at = self.offset_bytes.saturating_add(BSET_HEADER_BYTES);
        Keys::inside(self.key_bytes, Structure::Bset, as_u64(at))
    }
}

/// A bset of a node, with its keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bset {
    /// Where the bset begins, in bytes from the start of the node.
    pub offset_bytes: usize,
    /// Version of the bset.
    pub version: u32,
    /// The keys in stored order.
    pub keys: Vec<Bkey>,
}

/// A node, with all keys.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Node {
    /// Random number that all bsets of the node share.
    pub seq: u64,
    /// The bsets, oldest first.
    pub bsets: Vec<Bset>,
    /// Bytes that the bsets take; the next bset is appended at this offset.
    pub written_bytes: usize,
}

/// What [`for_each_bset`] returns about a node whose keys it passed to `visit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeSummary {
    /// Random number that all bsets of the node share.
    pub seq: u64,
    /// How many bsets there are.
    pub bsets: usize,
    /// Bytes that the bsets take; the next bset is appended at this offset.
    pub written_bytes: usize,
}

/// What kind of damage a node has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DamageKind {
    /// The last bset is damaged and no bset with the node's `seq` follows it.
    ///
    /// Either an append did not complete, or a complete bset was damaged later. A node's first bset never has
    /// this kind, because it is complete before anything points to the node.
    TornLastBset,
    /// Any other damage: bsets that were once complete are missing or unreadable.
    Other,
}

/// A node that cannot be used as a whole.
///
/// `T` is [`Node`] from [`parse_node`] and [`NodeSummary`] from [`for_each_bset`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeDamage<T = Node> {
    /// The kind of damage.
    pub kind: DamageKind,
    /// The first rule that is broken.
    pub error: Corrupt,
    /// The intact bsets before the damage. If a bset was lost, all bsets before the lost one.
    pub before: T,
}

impl<T> fmt::Display for NodeDamage<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)?;
        match self.kind {
            DamageKind::TornLastBset => f.write_str(" (in the last bset of the node)"),
            DamageKind::Other => Ok(()),
        }
    }
}

impl<T: fmt::Debug> std::error::Error for NodeDamage<T> {}

/// Reads a node.
///
/// `bytes` begin where `node_key` points and are at least as long as its size. Bytes behind that size are
/// ignored.
///
/// # Errors
/// If the key does not fit `bytes` or any bset is damaged. The error contains the intact bsets before the
/// damage.
pub fn parse_node(
    bytes: &[u8],
    node_key: &Bkey,
    set_magic: SetMagic,
    block_sectors: Sectors,
) -> Result<Node, Box<NodeDamage>> {
    let mut bsets = Vec::new();
    let walked = walk(bytes, node_key, set_magic, block_sectors, &mut |view| {
        let keys = view.keys().collect::<Result<_, _>>()?;
        bsets.push(Bset { offset_bytes: view.offset_bytes, version: view.version, keys });
        Ok(())
    });
    match walked {
        Ok(s) => Ok(Node { seq: s.seq, bsets, written_bytes: s.written_bytes }),
        Err(d) => Err(Box::new(NodeDamage {
            kind: d.kind,
            error: d.error,
            before: Node { seq: d.before.seq, bsets, written_bytes: d.before.written_bytes },
        })),
    }
}

/// Reads a node and passes every key to `visit` with the number of its bset, without allocating.
///
/// `visit` gets the keys of a bset only after the whole bset was found valid. A later bset may still be
/// damaged.
///
/// # Errors
/// If the key does not fit `bytes` or any bset is damaged. `visit` has then seen the keys of exactly the
/// bsets counted in `before.bsets`.
pub fn for_each_bset(
    bytes: &[u8],
    node_key: &Bkey,
    set_magic: SetMagic,
    block_sectors: Sectors,
    mut visit: impl FnMut(usize, Bkey),
) -> Result<NodeSummary, Box<NodeDamage<NodeSummary>>> {
    walk(bytes, node_key, set_magic, block_sectors, &mut |view| {
        for key in view.keys() {
            key?;
        }
        for key in view.keys().flatten() {
            visit(view.index, key);
        }
        Ok(())
    })
    .map_err(Box::new)
}

type Damaged = NodeDamage<NodeSummary>;

fn walk(
    bytes: &[u8],
    node_key: &Bkey,
    set_magic: SetMagic,
    block_sectors: Sectors,
    accept: &mut dyn FnMut(BsetView<'_>) -> Result<(), Corrupt>,
) -> Result<NodeSummary, Damaged> {
    let mut done = NodeSummary::default();
    let log = match NodeLog::of(bytes, node_key, set_magic, block_sectors) {
        Ok(log) => log,
        Err(error) => return Err(NodeDamage { kind: DamageKind::Other, error, before: done }),
    };
    let node = log.bytes;
    done.seq = seq_at(node, 0).unwrap_or(0);
    if done.seq == 0 {
        let at = offset_of!(RawBset, seq);
        let error = bad(Structure::BtreeNode, "seq", at, Value::AtLeast(1), Value::Num(0));
        return Err(NodeDamage { kind: DamageKind::Other, error, before: done });
    }
    while seq_at(node, done.written_bytes) == Some(done.seq) {
        let at = done.written_bytes;
        let damage = match log.read_bset(at, done.bsets) {
            Ok((view, padded)) => match accept(view) {
                Ok(()) => {
                    done.bsets = done.bsets.saturating_add(1);
                    done.written_bytes = at.saturating_add(padded);
                    continue;
                }
                // The checksum is right, so the bset was written like this.
                Err(error) => (DamageKind::Other, error),
            },
            Err(BadBset::AsWritten(error)) => (DamageKind::Other, error),
            Err(BadBset::Damaged(error)) => {
                let follows = log.find_seq(at.saturating_add(log.block_bytes), done.seq);
                let torn = at > 0 && follows.is_none();
                (if torn { DamageKind::TornLastBset } else { DamageKind::Other }, error)
            }
        };
        return Err(NodeDamage { kind: damage.0, error: damage.1, before: done });
    }
    // A bset of this node behind the end of the log proves that the bsets between were lost.
    if let Some(at) = log.find_seq(done.written_bytes, done.seq) {
        let error = bad(
            Structure::BtreeNode,
            "lost bset (seq)",
            at.saturating_add(offset_of!(RawBset, seq)),
            Value::Text("no bset behind the last one"),
            Value::Hex(done.seq),
        );
        return Err(NodeDamage { kind: DamageKind::Other, error, before: done });
    }
    Ok(done)
}

/// Why a bset with the node's seq is not accepted.
enum BadBset {
    /// The bytes of the bset are not those that were written.
    Damaged(Corrupt),
    /// The checksum of the bset is right, so the bset was written like this.
    AsWritten(Corrupt),
}

/// The bytes of a node and the values that the checks of its bsets need.
struct NodeLog<'a> {
    bytes: &'a [u8],
    /// The node's pointer, from which the checksums of its bsets start.
    ptr: Ptr,
    set_magic: SetMagic,
    block_sectors: Sectors,
    block_bytes: usize,
}

impl<'a> NodeLog<'a> {
    /// The part of `bytes` that the node's key covers.
    fn of(
        bytes: &'a [u8],
        node_key: &Bkey,
        set_magic: SetMagic,
        block_sectors: Sectors,
    ) -> Result<NodeLog<'a>, Corrupt> {
        let node = Structure::BtreeNode;
        let Some(ptr) = node_key.pointer() else {
            let none = Value::Num(0);
            return Err(bad(node, "pointers of the node's key", 0, Value::Num(1), none));
        };
        let size = node_key.size();
        let Some(bytes) =
            usize::try_from(size.bytes()).ok().filter(|&len| len > 0).and_then(|len| bytes.get(..len))
        else {
            let most = Value::Range(1, as_u64(bytes.len()) / crate::units::SECTOR_BYTES);
            return Err(bad(node, "size in the node's key", 0, most, Value::Num(size.0)));
        };
        match block_bytes(block_sectors) {
            Some(block_bytes) => Ok(NodeLog { bytes, ptr, set_magic, block_sectors, block_bytes }),
            None => Err(bad(node, "block size", 0, Value::AtLeast(1), Value::Num(0))),
        }
    }

    /// Reads the bset at byte `at`; returns it with its padded length.
    fn read_bset(&self, at: usize, index: usize) -> Result<(BsetView<'a>, usize), BadBset> {
        let rest = self.bytes.get(at..).unwrap_or_default();
        let err = |field, within: usize, expected, found| {
            bad(Structure::Bset, field, at.saturating_add(within), expected, found)
        };
        let Ok((header, keys)) = RawBset::ref_from_prefix(rest) else {
            let expected = Value::AtLeast(as_u64(BSET_HEADER_BYTES));
            return Err(BadBset::Damaged(err("length", 0, expected, Value::Num(as_u64(rest.len())))));
        };
        let words = header.keys.get();
        let size = usize::try_from(words)
            .ok()
            .and_then(|words| words.checked_mul(WORD_BYTES))
            .and_then(|len| {
                Some((len, pad_to_block(len.checked_add(BSET_HEADER_BYTES)?, self.block_sectors)?))
            })
            .filter(|&(_, padded)| padded <= rest.len());
        let Some((len, padded)) = size else {
            let most = Value::AtMost(as_u64(keys.len() / WORD_BYTES));
            let found = Value::Num(u64::from(words));
            return Err(BadBset::Damaged(err("keys (words)", offset_of!(RawBset, keys), most, found)));
        };
        let key_bytes = keys.get(..len).unwrap_or_default();
        let covered = rest.get(8..len.saturating_add(BSET_HEADER_BYTES)).unwrap_or_default();
        let version = header.version.get();
        let csum = bset_csum(version, self.ptr, covered);
        let intact = csum == header.csum.get();
        if version > BSET_VERSION {
            let (most, found) = (Value::AtMost(u64::from(BSET_VERSION)), Value::Num(u64::from(version)));
            let at_version = offset_of!(RawBset, version);
            let error = err("version", at_version, most, found);
            return Err(if intact {
                let error = Corrupt { family: crate::error::Family::Unsupported, ..error };
                BadBset::AsWritten(error)
            } else {
                BadBset::Damaged(error)
            });
        }
        let magic = header.magic.get();
        if magic != self.set_magic.bset() {
            let (expected, found) = (Value::Hex(self.set_magic.bset()), Value::Hex(magic));
            let error = err("magic", offset_of!(RawBset, magic), expected, found);
            return Err(if intact { BadBset::AsWritten(error) } else { BadBset::Damaged(error) });
        }
        if !intact {
            let found = Value::Hex(header.csum.get());
            return Err(BadBset::Damaged(err("checksum", 0, Value::Hex(csum), found)));
        }
        if words == 0 && at != 0 {
            let keys_at = offset_of!(RawBset, keys);
            let error = err("keys (words)", keys_at, Value::AtLeast(1), Value::Num(0));
            return Err(BadBset::AsWritten(error));
        }
        Ok((BsetView { index, offset_bytes: at, version, key_bytes }, padded))
    }

    /// The first block boundary from `from` on at which the bytes have `seq` where a bset's header has it.
    fn find_seq(&self, from: usize, seq: u64) -> Option<usize> {
        let mut starts = (from..self.bytes.len()).step_by(self.block_bytes.max(1));
        starts.find(|&at| seq_at(self.bytes, at) == Some(seq))
    }
}

/// The `seq` field of a bset at byte `at`, if the node is long enough to hold one.
fn seq_at(node: &[u8], at: usize) -> Option<u64> {
    u64_at(node, at.checked_add(offset_of!(RawBset, seq))?)
}

fn bad(structure: Structure, field: &'static str, at: usize, expected: Value, found: Value) -> Corrupt {
    Corrupt::new(structure, field, as_u64(at), expected, found)
}
