//! The orders that the thread of a set takes, and the plan that it is started with.
//!
//! Owns these types alone, which both the sender of an order and the thread name. An order with an answer carries the
//! channel for its answer. Must not know how an order is carried out.

use std::path::PathBuf;
use std::sync::Arc;

use blockio::bridge::Reply;
use engine::figures::{BucketFigures, BucketMap};
use format::Uuid;
use io::TraceFigures;
use serde::Deserialize;
use serve::room::Room;
use serve::{Answer, Command, Failure};

use crate::jobs::{End, Job, RunningJob};

/// The devices that one thread serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// Identifier of the thread: UUID of the set, or of the backing device that is served alone.
    pub(crate) id: String,
    /// Cache device.
    pub(crate) cache: Option<PathBuf>,
    /// Backing device that is served alone; `None` if there is a cache device.
    pub(crate) alone: Option<PathBuf>,
    /// The group of the set. Its sets are served by one thread, because a volume has its dirty data in two of them.
    pub(crate) group: Option<String>,
}

impl Plan {
    /// The set or device that the thread serves, as text.
    pub(crate) fn title(&self) -> String {
        match &self.alone {
            Some(device) => format!("backing device {} ({})", self.id, device.display()),
            None => format!("set {}", self.id),
        }
    }

    /// The answer to a command that the thread does not carry out, or not to its end, because it stops. `title` is the set or
    /// device as messages name it.
    pub(crate) fn ends_before(&self, title: &str, command: Progress, daemon_stops: bool) -> String {
        let what = match command {
            Progress::Waiting => {
                format!(
                    "{title} is not served any more: this command was not carried out, and nothing was changed"
                )
            }
            Progress::Running => {
                format!("{title} was stopped before this command was done, and a part of it may be done")
            }
        };
        let next = match (daemon_stops, self.cache.as_ref().or(self.alone.as_ref())) {
            (false, Some(device)) => {
                format!("to serve it again, run `ubcache register {}`, then this command", device.display())
            }
            _ => "run this command again after the next start of the daemon".to_owned(),
        };
        format!("{what}; {next}")
    }
}

/// How far a command had come when the thread stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// It had not begun.
    Waiting,
    /// It was under way.
    Running,
}

impl Order {
    /// Whether the order is to be carried out. A change is not, if its sender does not wait for it any more.
    pub(crate) fn is_wanted(&self) -> bool {
        match self {
            Order::Add(_, _, reply)
            | Order::StopVolume(_, reply)
            | Order::DeleteVolume(_, reply)
            | Order::Label(_, reply)
            | Order::HandOver(reply)
            | Order::StopIfFree(reply) => reply.is_awaited(),
            Order::Group(order) => order.is_wanted(),
            Order::Create(_, reply) => reply.is_awaited(),
            Order::StartVolume(_, reply) => reply.is_awaited(),
            _ => true,
        }
    }

    /// Answers an order that is not carried out.
    pub(crate) fn refuse(self, why: String) {
        let why = Failure::Failed(why);
        match self {
            Order::Do(_, reply) => reply.send(Err(why)),
            Order::Figures(reply) => reply.send(Err(why)),
            Order::Buckets(reply) => reply.send(Err(why)),
            Order::BucketMap(_, reply) => reply.send(Err(why)),
            Order::DiskTrace(_, _, reply) => reply.send(Err(why)),
            Order::Create(_, reply) => reply.send(Err(why)),
            Order::Users(_, reply) => reply.send(Err(why)),
            Order::Holders(reply) => reply.send(Err(why)),
            Order::Group(order) => order.refuse(why),
            Order::Slot(_, reply) => reply.send(Err(why)),
            Order::StartVolume(_, reply) => reply.send(Err(why)),
            Order::ExportAgain(reply) => reply.send(Err(why)),
            Order::Label(_, reply)
            | Order::ClearDeviceStats(reply)
            | Order::Add(_, _, reply)
            | Order::DeleteVolume(_, reply)
            | Order::StopVolume(_, reply)
            | Order::HandOver(reply)
            | Order::StopIfFree(reply) => reply.send(Err(why)),
            Order::Detach(_, _, job) | Order::Wipe(job) | Order::Scrub(job) | Order::Flush(_, job) => {
                job.0.ended(End::Failed(why.into()));
            }
            Order::Stop | Order::Force => {}
            #[cfg(test)]
            Order::Panic | Order::Hang(_) | Order::StopWaits(_) => {}
        }
    }
}

/// Whether the set of a backing device is the one that gets the order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OwnSet {
    Here,
    Missing,
}

/// Whether the volumes of a set that is to leave its group need another set of the group now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Others {
    AreNeeded,
    /// One joins before.
    Join,
}

/// When a set stays in its group although it was to leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stay {
    IfCancelled,
    /// Its leave takes a cancelled command back.
    Never,
}

/// How much of the dirty data of a group is in two of its sets.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct CopyProgress {
    pub(crate) total_bytes: u64,
    pub(crate) copied_bytes: u64,
    /// The number of volumes without a complete copy.
    pub(crate) missing: usize,
    /// Why a copy cannot be made now.
    pub(crate) failure: Option<String>,
}

/// An order about the group of a set.
pub(crate) enum GroupOrder {
    /// Write the group of the set to its cache device.
    SetGroup(Option<Uuid>, Reply<Result<(), Failure>>),
    /// Return how much of the dirty data of the group is in two sets.
    Copies(Reply<Result<CopyProgress, Failure>>),
    /// Refuse if the set cannot leave its group.
    MayLeave(Others, Reply<Result<(), Failure>>),
    /// Give the volumes and the copies of the set to the other sets of the group, and report the progress to the job.
    Vacate(Arc<Job>, Stay, Reply<Result<End, Failure>>),
    /// End the membership of the set in its group. The answer is false if its cache device cannot record that.
    LeaveGroup(Reply<Result<bool, Failure>>),
}

impl GroupOrder {
    fn is_wanted(&self) -> bool {
        match self {
            GroupOrder::SetGroup(_, reply) => reply.is_awaited(),
            GroupOrder::Vacate(_, _, reply) => reply.is_awaited(),
            GroupOrder::LeaveGroup(reply) => reply.is_awaited(),
            GroupOrder::Copies(_) | GroupOrder::MayLeave(..) => true,
        }
    }

    fn refuse(self, why: Failure) {
        match self {
            GroupOrder::SetGroup(_, reply) | GroupOrder::MayLeave(_, reply) => reply.send(Err(why)),
            GroupOrder::Copies(reply) => reply.send(Err(why)),
            GroupOrder::Vacate(_, _, reply) => reply.send(Err(why)),
            GroupOrder::LeaveGroup(reply) => reply.send(Err(why)),
        }
    }
}

/// An order to the thread of a set.
pub(crate) enum Order {
    /// A command for the session.
    Do(Command, Reply<Result<Answer, Failure>>),
    /// Return all figures of the engine, with histograms.
    Figures(Reply<Result<metrics::Figures, Failure>>),
    /// Return the contents of the buckets of the set.
    Buckets(Reply<Result<BucketFigures, Failure>>),
    /// Return the contents of the buckets, for this many parts of the device.
    BucketMap(u32, Reply<Result<BucketMap, Failure>>),
    /// Return the recorded requests to the backing device of a volume; the first one has this number.
    DiskTrace(String, u64, Reply<Result<DiskTrace, Failure>>),
    /// Write this label of the set to its cache device.
    Label(String, Reply<Result<(), Failure>>),
    /// Reset the counters of the cache device.
    ClearDeviceStats(Reply<Result<(), Failure>>),
    /// Serve this backing device, too; one whose own set is missing only if the set has a copy of its dirty data.
    Add(PathBuf, OwnSet, Reply<Result<(), Failure>>),
    /// Give every volume to the set of the group that has a copy of its dirty data.
    HandOver(Reply<Result<(), Failure>>),
    /// Change the group of the set, or say something of it.
    Group(GroupOrder),
    /// Return the slot that the set has for the backing device with this UUID; `None` in the answer means no slot.
    Slot(String, Reply<Result<Option<KnownSlot>, Failure>>),
    /// Make a flash-only volume, and serve it.
    Create(NewVolume, Reply<Result<CreatedVolume, Failure>>),
    /// Destroy a flash-only volume with its data, unless it is in use.
    DeleteVolume(String, Reply<Result<(), Failure>>),
    /// Return the users of the block device of this volume, or of all volumes; `None` in the answer means no users.
    Users(Option<String>, Reply<Result<Option<InUse>, Failure>>),
    /// Return the volumes in use for which the stop of the thread waits.
    Holders(Reply<Result<Vec<Holder>, Failure>>),
    /// Stop a volume and release its backing device without writing dirty data back.
    StopVolume(String, Reply<Result<(), Failure>>),
    /// Serve a stopped flash-only volume again.
    StartVolume(String, Reply<Result<StartedVolume, Failure>>),
    /// Try every configured export again that is not up; the answer says of each volume what came of it.
    ExportAgain(Reply<Result<Vec<String>, Failure>>),
    /// Write all dirty data of a volume back and detach its backing device; if the flag is true, wipe afterwards.
    Detach(String, bool, RunningJob),
    /// Overwrite the space on the cache device that no volume needs.
    Wipe(RunningJob),
    /// Read all cached data and compare it with its checksums.
    Scrub(RunningJob),
    /// Write all dirty data back, of this volume or of all volumes.
    Flush(Option<String>, RunningJob),
    /// Stop everything and end, unless a volume is in use. The answer comes when all exports have ended.
    StopIfFree(Reply<Result<(), Failure>>),
    /// Stop everything and end, after waiting for users of volumes.
    Stop,
    /// Stop without waiting for users of volumes.
    Force,
    /// Panic, as a bug would.
    #[cfg(test)]
    Panic,
    /// Block the thread until the sender is dropped, as a system call that hangs would.
    #[cfg(test)]
    Hang(std::sync::mpsc::Receiver<()>),
    /// Begin a stop of everything that waits until the sender is dropped, as one for a device that does not answer.
    #[cfg(test)]
    StopWaits(blockio::bridge::Answer<()>),
}

/// The slot of a backing device in the table of its set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KnownSlot {
    /// Dirty data of the device in the cache.
    pub(crate) dirty_bytes: u64,
}

/// A volume that keeps a stop waiting, because it is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Holder {
    /// Name of the volume.
    pub(crate) name: String,
    /// Its label; empty if there is none.
    pub(crate) label: String,
    /// Its users, as text.
    pub(crate) users: String,
    /// The command that ends the first use, or shows it.
    pub(crate) command: String,
}

/// The users of a volume, or of all volumes of a thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct InUse {
    /// The users, as text.
    pub(crate) users: String,
    /// The command that ends the first use, or shows it; `None` if all users are clients of a connection.
    pub(crate) command: Option<String>,
}

/// A flash-only volume that is wanted.
#[derive(Clone, Debug)]
pub(crate) struct NewVolume {
    pub(crate) sectors: u64,
    pub(crate) label: String,
    /// Only find out whether there is room.
    pub(crate) dry_run: bool,
}

/// A flash-only volume that was made.
pub(crate) struct CreatedVolume {
    /// Its name; `None` if nothing was to be made.
    pub(crate) name: Option<String>,
    /// Why it cannot be reached as configured.
    pub(crate) not_exported: Option<String>,
    /// The room before it was made.
    pub(crate) room: Room,
}

/// A volume that is served again.
pub(crate) struct StartedVolume {
    /// Whether it was served before.
    pub(crate) already: bool,
    /// Why it cannot be reached as configured.
    pub(crate) not_exported: Option<String>,
}

/// The recorded requests to a backing device, from the thread of its set.
pub(crate) struct DiskTrace {
    /// Name of the device.
    pub(crate) device: String,
    /// Its size in sectors.
    pub(crate) size_sectors: u64,
    pub(crate) trace: TraceFigures,
}

/// Formats devices as a client orders it.
pub type Make = fn(&MakeOrder) -> Result<MadeDevices, Failure>;

/// The devices that a client wants formatted, with the options of `make`.
#[derive(Clone, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MakeOrder {
    /// The cache device of a new cache set.
    pub cache: Option<PathBuf>,
    /// Backing devices.
    pub backing: Vec<PathBuf>,
    /// Size of the buckets, with a unit.
    pub bucket: Option<String>,
    /// Whether the cache mode of the backing devices is writeback.
    pub writeback: bool,
    /// Label of the backing device.
    pub label: String,
    /// Label of the cache set.
    pub set_label: String,
    /// Whether superblocks of bcache are overwritten.
    pub wipe: bool,
    /// Whether whatever is on the devices is overwritten, except dirty data.
    pub force: bool,
    /// Devices whose dirty data is lost. Each is named on its own, because such data exists nowhere else.
    pub lose_dirty_data_of: Vec<PathBuf>,
    /// Whether nothing is written.
    pub dry_run: bool,
    /// The group that the new set joins.
    #[serde(skip)]
    pub join: Option<JoinOrder>,
}

/// The group that a new set joins.
#[derive(Clone, Debug)]
pub struct JoinOrder {
    /// UUID of the group.
    pub group: Uuid,
    /// A cache device of the group, whose sizes the new one gets.
    pub like: PathBuf,
}

/// The devices that `make` has formatted, or would format in a dry run.
#[derive(Debug)]
pub struct MadeDevices {
    /// The report, as `make --json` prints it.
    pub report: serde_json::Value,
    /// The report as `make` prints it, and its warnings.
    pub lines: Vec<String>,
}
