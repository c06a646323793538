//! The moments at which a crash can be aimed.
//!
//! Must not know who recognises them (`disk` does) nor who aims (a plan does).

use serde::{Deserialize, Serialize};

/// Something that the engine does and a crash can be aimed at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Landmark {
    /// A request of a client is answered.
    Answer,
    /// A flush, or a change with FUA, is answered.
    DurableAnswer,
    /// A journal entry is submitted.
    Entry,
    /// A journal entry goes to another bucket of the ring than the one before it.
    RingStep,
    /// That bucket has older entries, which the new one overwrites.
    RingOverwrite,
    /// A journal entry names another prio chain than the one before it.
    ChainSwitch,
    /// A journal entry names another root node.
    RootSwitch,
    /// A journal entry names another UUID table.
    TableSwitch,
    /// A prio set is submitted.
    PrioWrite,
    /// A set of keys is submitted behind others of its node.
    LeafAppend,
    /// A new node is submitted.
    NodeWrite,
    /// A superblock is submitted.
    Superblock,
}

impl Landmark {
    /// All of them.
    pub const ALL: [Landmark; 12] = [
        Landmark::Answer,
        Landmark::DurableAnswer,
        Landmark::Entry,
        Landmark::RingStep,
        Landmark::RingOverwrite,
        Landmark::ChainSwitch,
        Landmark::RootSwitch,
        Landmark::TableSwitch,
        Landmark::PrioWrite,
        Landmark::LeafAppend,
        Landmark::NodeWrite,
        Landmark::Superblock,
    ];
}

/// Where a crash is aimed at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Aim {
    /// At this landmark,
    pub at: Landmark,
    /// when it is reached for the so-manieth time in the boot,
    pub nth: u64,
    /// and so many effects of devices later.
    pub effects: u64,
}
