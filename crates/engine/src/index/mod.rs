//! The index of what is cached: extents by (inode, sector).
//!
//! In memory a tree of leaves with chunked extent lists ([`tree`], [`extents`]); on disk bcache's btree, a log of
//! bsets in each node. Changes are made in memory and journaled; leaves are written behind (`append`), replaced when
//! they are full (`rewrite`) and read when they are needed (`load`).

mod append;
mod change;
mod copies;
mod dirty;
mod entry;
mod extents;
mod load;
mod merged;
mod node;
mod rewrite;
mod tree;

pub(crate) use change::{Blocked, Change, How, Progress};
pub(crate) use entry::MAX_POSITION;
pub(crate) use load::{READ_AHEAD, Reader, account_tree, claim_metadata, load_tree, names_data};
pub(crate) use node::{Bound, NodeId};
pub(crate) use tree::{Kind, NotLoaded, Segment, Tree, Via};

pub(crate) use append::{evict_task, leaf_writer_task, reclaim_task, write_old_leaves_task};
