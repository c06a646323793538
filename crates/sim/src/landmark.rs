//! The moments at which a crash can be aimed.
//!
//! Owns the list of landmarks. Must not know which module recognises them (`disk`), nor which one aims (a plan does).

use serde::{Deserialize, Serialize};

/// An action of the engine at which a crash can be aimed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Landmark {
    /// A request of a client is answered.
    Answer,
    /// A flush, or a change with FUA, is acknowledged.
    DurableAnswer,
    /// A journal entry is submitted.
    Entry,
    /// A journal entry goes to another bucket of the ring than the entry before it.
    RingStep,
    /// A journal entry goes to another bucket of the ring, and overwrites older entries there.
    RingOverwrite,
    /// A journal entry names another prio chain than the entry before it.
    ChainSwitch,
    /// A journal entry names another root node than the entry before it.
    RootSwitch,
    /// A journal entry names another UUID table than the entry before it.
    TableSwitch,
    /// A prio set is submitted.
    PrioWrite,
    /// A bset is submitted after other bsets of its node.
    LeafAppend,
    /// A new node is submitted.
    NodeWrite,
    /// A superblock is submitted.
    Superblock,
}

impl Landmark {
    /// Every landmark, in order.
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

/// The moment at which a crash is aimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Aim {
    /// The landmark.
    pub at: Landmark,
    /// Number of the occurrence of the landmark in the boot, counted from 1.
    pub nth: u64,
    /// Number of device effects after that occurrence.
    pub effects: u64,
}
