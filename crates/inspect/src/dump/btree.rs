//! The btree as a document: nodes with their paths, bsets and keys.
//!
//! Owns the document and the syntax of paths. A path is the list of buckets from the root to a node. Every message about a
//! node has its path, and [`BtreeQuery`] takes such a path to show that node.

use std::fmt;

use format::{counted, parse_node};
use serde::Serialize;
use thiserror::Error;

use super::KeyDoc;
use crate::SCHEMA_VERSION;
use crate::finding::path_text;
use crate::source::{ReadAt, ReadError};
use crate::view::{NodeId, NodeView, SetView};

/// Selection of nodes and keys.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BtreeQuery {
    /// Only the node with this path, and those below it.
    pub path: Vec<u32>,
    /// Whether to list the keys of all bsets. Otherwise only their number is shown.
    pub keys: bool,
}

/// Nodes of the btree.
#[derive(Clone, Debug, Serialize)]
pub struct BtreeDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Cache device.
    pub device: String,
    /// Level of the root.
    pub root_level: u16,
    /// Nodes in the whole tree.
    pub node_count: u64,
    /// Nodes that a key names and that could not be read.
    pub missing_nodes: u64,
    /// The selected nodes, in key order, parents first.
    pub nodes: Vec<NodeDoc>,
}

/// A node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeDoc {
    /// Buckets from the root to this node.
    pub path: Vec<u32>,
    /// Level; leaves have 0.
    pub level: u16,
    /// The key that points to the node.
    pub key: KeyDoc,
    /// Inode and sector after which the node's keys lie.
    pub after: (u32, u64),
    /// Random number that the node's bsets share, in hexadecimal.
    pub seq: String,
    /// Sectors that the node's bsets take.
    pub written_sectors: u64,
    /// Whether some of the node's bsets could not be read.
    pub damaged: bool,
    /// Number of children; in a leaf, number of ranges with keys.
    pub live: u64,
    /// The node's bsets, oldest first.
    pub bsets: Vec<BsetDoc>,
}

/// A bset of keys.
#[derive(Clone, Debug, Serialize)]
pub struct BsetDoc {
    /// Start of the bset, in bytes from the start of the node.
    pub offset_bytes: u64,
    /// Version of the bset.
    pub version: u32,
    /// Number of keys.
    pub key_count: u64,
    /// The keys, if the query asks for keys.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyDoc>,
}

/// A text that is not a path.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("path: expected bucket numbers separated by → or /, found {found:?}")]
pub struct PathError {
    /// The part that is not a number.
    pub found: String,
}

/// Reads a path as messages print it, or with slashes: `12→88→160`, `12/88/160`.
///
/// # Errors
/// If a part is not a number.
pub fn parse_path(text: &str) -> Result<Vec<u32>, PathError> {
    let parts = text.split(['→', '/', ',']).map(str::trim);
    parts.map(|part| part.parse().map_err(|_| PathError { found: part.to_owned() })).collect()
}

/// Dumps nodes of the btree of `view`, which was opened from `source`.
///
/// # Errors
/// If the query asks for keys and a node cannot be read.
pub fn btree(view: &SetView, source: &dyn ReadAt, query: &BtreeQuery) -> Result<BtreeDoc, ReadError> {
    let mut nodes = Vec::new();
    for (id, node) in (0..).map(NodeId).zip(&view.nodes) {
        let path = view.path(id);
        if path.starts_with(&query.path) {
            nodes.push(node_doc(view, source, node, path, query.keys)?);
        }
    }
    Ok(BtreeDoc {
        schema_version: SCHEMA_VERSION,
        device: view.device.clone(),
        root_level: view.btree.root_level,
        node_count: view.btree.nodes,
        missing_nodes: view.btree.missing,
        nodes,
    })
}

fn node_doc(
    view: &SetView,
    source: &dyn ReadAt,
    node: &NodeView,
    path: Vec<u32>,
    keys: bool,
) -> Result<NodeDoc, ReadError> {
    let mut bsets: Vec<BsetDoc> = node
        .bsets
        .iter()
        .map(|bset| BsetDoc {
            offset_bytes: bset.offset_bytes,
            version: bset.version,
            key_count: bset.keys,
            keys: Vec::new(),
        })
        .collect();
    if keys {
        let mut bytes = vec![0; usize::try_from(node.key.size().bytes()).unwrap_or(0)];
        source.read_at(node.key.ptr.offset(), &mut bytes)?;
        let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
        // Of a damaged node, only the bsets are shown that were readable when the view was opened.
        let read = parse_node(&bytes, &node.key, magic, block).unwrap_or_else(|damage| damage.before);
        for (doc, bset) in bsets.iter_mut().zip(&read.bsets) {
            doc.keys = bset.keys.iter().map(|key| KeyDoc::of(view, key)).collect();
        }
    }
    Ok(NodeDoc {
        path,
        level: node.level,
        key: KeyDoc::of(view, &node.key),
        after: (node.after.0.0, node.after.1.0),
        seq: format!("{:#018x}", node.seq),
        written_sectors: node.written.0,
        damaged: node.damaged,
        live: node.live,
        bsets,
    })
}

impl fmt::Display for BtreeDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, root at level {}", counted(self.node_count, "node"), self.root_level)?;
        if self.missing_nodes > 0 {
            writeln!(f, "{} more nodes are referenced and cannot be read", self.missing_nodes)?;
        }
        for n in &self.nodes {
            writeln!(f, "node {}: level {}, keys up to {}", path_text(&n.path), n.level, n.key)?;
            let what = if n.level == 0 { "ranges" } else { "children" };
            write!(f, "  seq {}, {} of {} sectors written", n.seq, n.written_sectors, n.key.size)?;
            writeln!(f, ", {} {what}{}", n.live, if n.damaged { ", DAMAGED" } else { "" })?;
            for (i, bset) in n.bsets.iter().enumerate() {
                writeln!(f, "  bset {i} at byte {}: {}", bset.offset_bytes, counted(bset.key_count, "key"))?;
                for key in &bset.keys {
                    writeln!(f, "    {key}")?;
                }
            }
        }
        Ok(())
    }
}
