//! The violations that end a run: what a check of the simulator expected, and what it found.
//!
//! Owns their kinds and their messages. Must not know when a check is made.

use std::sync::Arc;

use engine::EngineError;
use format::{BucketNr, Gen, Sectors};
use inspect::extract::Lost;
use inspect::{ExtractError, Finding, OpenError, SetReport};

use crate::plan::{OperatorAction, Substitute};
use crate::stamp::{Content, WrongContents};

/// A check of the simulator that failed.
#[derive(Debug, thiserror::Error)]
pub enum Violation {
    /// A sector has contents that the oracle does not allow.
    #[error(transparent)]
    Contents(#[from] Box<WrongContents>),
    /// A backing device has wrong contents after everything was written back.
    #[error("backing device alone: {0}")]
    BackingAlone(#[source] Box<WrongContents>),
    /// The engine reads other contents than a judge that does not know the engine.
    #[error(
        "volume {volume} sector {sector}: extraction before the start found {expected:?}, the engine reads {found:?}"
    )]
    ReadBack {
        /// The number of the volume.
        volume: usize,
        /// The sector.
        sector: u64,
        /// The contents by the judge.
        expected: Content,
        /// The contents by the engine.
        found: Content,
    },
    /// The check of the structures found an error, or data that is wrong.
    #[error(
        "{differing} clean extents differ from the backing device, {damaged} extents do not match their checksums; {report}"
    )]
    Structures {
        /// The number of clean extents that differ from the backing device.
        differing: u64,
        /// The number of extents that do not have their checksums.
        damaged: u64,
        /// The report of the check.
        report: Box<SetReport>,
    },
    /// A footer is on the device, and the generation of its bucket is not durable.
    #[error(
        "bucket {bucket}: the footer has generation {footer:?}, the prio chain {stored:?}, which is older"
    )]
    FooterAhead {
        /// The bucket.
        bucket: BucketNr,
        /// The generation of the footer.
        footer: Gen,
        /// The generation in the prio chain.
        stored: Gen,
    },
    /// A superblock says clean, and the cache has dirty data of the device.
    #[error("{sectors} dirty sectors of a device that says clean; {report}")]
    DirtyButClean {
        /// The number of dirty sectors.
        sectors: u64,
        /// The report of the check.
        report: Box<SetReport>,
    },
    /// A judge cannot open the set.
    #[error(transparent)]
    Unopened(#[from] Box<OpenError>),
    /// A judge found damage.
    #[error("{0}")]
    Damaged(Box<Finding>),
    /// A judge cannot extract a volume.
    #[error(transparent)]
    NotExtracted(#[from] Box<ExtractError>),
    /// An extraction has no data for some sectors.
    #[error("extraction lost {sectors} sectors: {lost:?}")]
    LostInExtraction {
        /// The number of sectors.
        sectors: u64,
        /// The ranges.
        lost: Vec<Lost>,
    },
    /// The set does not open.
    #[error("opening failed: {0}")]
    Opening(#[source] Box<EngineError>),
    /// The set is disabled, although no device has failed.
    #[error("the set has failed: {0}")]
    SetFailed(#[source] Box<EngineError>),
    /// An action of the operator fails.
    #[error("{action:?}: {source}")]
    Action {
        /// The action.
        action: Box<OperatorAction>,
        /// The error of the engine.
        source: Box<EngineError>,
    },
    /// A device does not become clean.
    #[error("{device}: not drained: {source}")]
    NotDrained {
        /// The name of the device.
        device: Arc<str>,
        /// The error of the engine.
        source: Box<EngineError>,
    },
    /// A drained device has dirty data.
    #[error("{device}: {sectors} dirty sectors after draining")]
    DirtyAfterDrain {
        /// The name of the device.
        device: Arc<str>,
        /// The number of dirty sectors.
        sectors: Sectors,
    },
    /// The superblock of a drained device says dirty.
    #[error("{device}: the state is dirty after draining")]
    StateAfterDrain {
        /// The name of the device.
        device: Arc<str>,
    },
    /// A volume or the set does not stop.
    #[error("stop: {0}")]
    Stop(#[source] Box<EngineError>),
    /// A request waits for a device that it does not need.
    #[error(
        "a request waits for a device that it does not need: volume {volume}: {request} for {seconds} s, while device \
         {device} hangs: {state}"
    )]
    WaitsInVain {
        /// The number of the volume.
        volume: usize,
        /// The request.
        request: String,
        /// Its age.
        seconds: u64,
        /// The number of the device that hangs.
        device: usize,
        /// The state of the device and of the set.
        state: String,
    },
    /// The engine broke the contract of devices.
    #[error("a request broke the contract of devices: {disk}")]
    Misuse {
        /// The state of the device.
        disk: String,
    },
    /// The engine waits for ever.
    #[error("{why}")]
    Stuck {
        /// What every task waits for.
        why: String,
    },
    /// The power was cut where the plan has no cut.
    #[error("the power was cut")]
    PowerLoss,
    /// The engine reacts to a substituted cache device in another way than expected.
    #[error("{substitute:?}: {source}")]
    Substitute {
        /// The substitute.
        substitute: Substitute,
        /// The reaction.
        source: Box<Violation>,
    },
    /// The engine opens a set that it must refuse.
    #[error("expected a refusal, was opened")]
    NotRefused,
    /// The engine refuses a cache device and changes it.
    #[error("the device was refused and changed")]
    ChangedDespiteRefusal,
    /// The engine registers a dirty device with a cache device that does not have its data.
    #[error("{device}: expected a refusal, a dirty device was registered")]
    DirtyRegistered {
        /// The name of the device.
        device: Arc<str>,
    },
    /// The engine does not register a device.
    #[error("{device}: {source}")]
    NotRegistered {
        /// The name of the device.
        device: Arc<str>,
        /// The error of the engine.
        source: Box<EngineError>,
    },
    /// An assertion of the engine or of the simulator failed.
    #[error("{message}")]
    Panicked {
        /// The message, with its place.
        message: String,
    },
}

impl Violation {
    /// The first line of the message, cut off after `most` characters.
    pub fn first_line(&self, most: usize) -> String {
        self.to_string().lines().next().unwrap_or_default().chars().take(most).collect()
    }
}
