//! On-disk structures of bcache. Pure: no I/O, no clock, no threads.
//!
//! One file per structure. Every parser takes bytes as a device returned them. It returns either a value
//! whose invariants hold or a [`Corrupt`] that names structure, field, expected value and found value.
//! The caller adds device and sector to the error. Every structure that is parsed here can also be written here.
//!
//! *Invariant:* no input makes a parser panic, loop or allocate more than a small multiple of its
//! input. *Not here:* I/O, recovery policy, anything that lives only in memory.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::arithmetic_side_effects
    )
)]

pub mod bset;
pub mod checksum;
pub mod count;
pub mod error;
pub mod footer;
pub mod geometry;
pub mod journal;
pub mod key;
pub mod magic;
pub mod mirror;
pub mod node;
pub mod prio;
pub mod replay;
pub mod superblock;
pub mod units;
pub mod uuid_table;

mod bytes;
mod key_buffer;

pub use bset::{BsetBuilder, BsetKind, check_bset_order};
pub use count::{counted, form};
pub use error::{Corrupt, Family, Structure, Value};
pub use footer::{BlockSums, FooterId, FooterKey, FooterLayout, encode_footer, parse_footer};
pub use geometry::Geometry;
pub use journal::{
    BucketScan, Jset, JsetBuilder, JsetRoots, MAX_BTREE_LEVEL, ScanStop, parse_bucket, parse_entry,
};
pub use key::{Bkey, Keys, Ptr};
pub use magic::SetMagic;
pub use mirror::SlotRole;
pub use node::{Bset, BsetView, DamageKind, Node, NodeDamage, NodeSummary, for_each_bset, parse_node};
pub use prio::{BucketPrio, PRIO_INITIAL, PRIO_METADATA, PrioHeader, encode_prio_set, parse_prio_set};
pub use replay::{Replay, select_replay};
pub use superblock::{
    BackingState, BackingSuper, CacheMode, CacheSuper, Identity, RawSuperblock, Replacement, ScrubState,
    identify,
};
pub use units::{
    BucketNr, CopyNr, Gen, Inode, JournalSeq, ParseUuidError, RegistrationNr, SECTOR_BYTES, Sector, Sectors,
    Uuid,
};
pub use uuid_table::{INVALID_UUID, UuidEntry};
