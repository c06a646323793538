//! The commands of a running set, and the function that carries them out.
//!
//! Commands and answers are plain values that another thread may send. Must not know the syntax of a command, nor the client.

use format::{Inode, Sector, Sectors};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::session::{Session, new_uuid};
use crate::snapshot::{DamagedFigures, Scrubbed, Snapshot};
use crate::tunables::{Beyond, Setting};

/// A command for the thread of a set.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Returns all figures.
    Stats,
    /// Changes a tunable of the set, or of every cached device.
    Set {
        /// The tunable and its value.
        setting: Setting,
        /// What becomes of a number out of range.
        #[serde(default)]
        beyond: Beyond,
    },
    /// Changes a tunable of one volume.
    SetVolume {
        /// Name of the volume.
        volume: String,
        /// Name of the tunable.
        key: String,
        /// Its value, as text.
        value: String,
        /// What becomes of a number out of range.
        #[serde(default)]
        beyond: Beyond,
    },
    /// Writes all dirty data of a volume back and releases its backing device, which is served alone afterwards.
    Detach {
        /// Name of the volume.
        volume: String,
        /// Then overwrites the device's data on the cache device, as [`Command::Wipe`] does.
        #[serde(default)]
        wipe: bool,
    },
    /// Overwrites with zeros the data on the cache device that no volume of the set needs.
    Wipe,
    /// Reads all cached data and compares it with its checksums.
    Scrub,
    /// Lists damaged dirty data.
    Damaged {
        /// Name of the volume; `None` for all volumes, also those whose device is not registered.
        volume: Option<String>,
    },
    /// Accepts or drops damaged dirty data.
    ResolveDamaged {
        /// Name of the volume; `None` for all volumes.
        volume: Option<String>,
        /// The first sector and the number of sectors; `None` for all damaged data.
        range: Option<(u64, u64)>,
        /// The decision.
        decision: Resolve,
    },
    /// Writes all dirty data back; the volume stays attached and served.
    Flush {
        /// Name of the volume; `None` for all volumes.
        volume: Option<String>,
    },
    /// Makes a flash-only volume.
    Create {
        /// Its size, in sectors of 512 bytes.
        size_sectors: u64,
        /// Its label, at most 32 bytes.
        label: String,
    },
    /// Collects garbage now.
    Gc,
    /// Resets the totals of the statistics.
    ClearStats {
        /// Name of the volume; `None` for the set.
        volume: Option<String>,
    },
}

/// A decision about damaged dirty data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resolve {
    /// The damaged bytes become valid.
    Accept,
    /// The data is dropped from the cache.
    Drop,
}

impl Resolve {
    /// Name of the decision.
    pub fn name(self) -> &'static str {
        match self {
            Resolve::Accept => "accept",
            Resolve::Drop => "drop",
        }
    }
}

/// The answer to a command.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The command succeeded.
    Done,
    /// The figures.
    Stats(Box<Snapshot>),
    /// The command succeeded, and this was overwritten.
    Wiped(Wiped),
    /// The result of a scrub.
    Scrubbed(Scrubbed),
    /// Damaged dirty data.
    Damaged(Vec<DamagedFigures>),
    /// So many sectors were accepted or dropped.
    Resolved {
        /// Number of sectors.
        sectors: u64,
    },
}

/// The result of a wipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Wiped {
    /// Overwritten bytes.
    pub zeroed_bytes: u64,
    /// Number of overwritten buckets without live data.
    pub whole_buckets: u64,
    /// Number of partly overwritten buckets, which also have data of other volumes or metadata.
    pub shared_buckets: u64,
}

impl From<engine::Wiped> for Wiped {
    fn from(w: engine::Wiped) -> Wiped {
        let engine::Wiped { whole_buckets, shared_buckets, zeroed } = w;
        Wiped { zeroed_bytes: zeroed.bytes(), whole_buckets, shared_buckets }
    }
}

/// Carries out a command.
///
/// If the future is dropped, a change of the set continues to its end, and a flush stops.
///
/// # Errors
/// If the command is refused or fails; the set is still served.
pub async fn obey(session: &Session, command: &Command) -> Result<Answer, Failure> {
    match command {
        Command::Stats => return Ok(Answer::Stats(Box::new(Snapshot::of(session)))),
        Command::Set { setting, beyond } => session.apply(setting, *beyond).await?,
        Command::SetVolume { volume, key, value, beyond } => {
            let volume = session.volume(volume)?;
            if *beyond == Beyond::Refused {
                volume.tunables().check(key, value).map_err(Failure::bad_value)?;
            }
            volume.set(key, value).await?;
        }
        Command::Detach { volume, wipe } => {
            let set = session.needs_set()?;
            set.detach(&session.volume(volume)?).await?;
            if *wipe {
                let wiped = set.wipe().await.map_err(not_wiped)?;
                return Ok(Answer::Wiped(wiped.into()));
            }
        }
        Command::Wipe => return Ok(Answer::Wiped(session.needs_set()?.wipe().await?.into())),
        Command::Scrub => return Ok(Answer::Scrubbed(session.needs_set()?.scrub().await?.into())),
        Command::Damaged { volume } => {
            let slot = slot_of(session, volume.as_deref())?;
            let ranges = session.needs_set()?.damaged().into_iter();
            let wanted = ranges.filter(|r| slot.is_none_or(|slot| slot == r.inode));
            return Ok(Answer::Damaged(wanted.map(DamagedFigures::from).collect()));
        }
        Command::ResolveDamaged { volume, range, decision } => {
            let slot = slot_of(session, volume.as_deref())?;
            let range = range.map(|(sector, sectors)| (Sector(sector), Sectors(sectors)));
            let decision = match decision {
                Resolve::Accept => engine::Resolution::Accepted,
                Resolve::Drop => engine::Resolution::Dropped,
            };
            let resolved = session.needs_set()?.resolve_damaged(slot, range, decision).await?;
            return Ok(Answer::Resolved { sectors: resolved.0 });
        }
        Command::Flush { volume } => flush(session, volume.as_deref()).await?,
        Command::Create { size_sectors, label } => {
            let size = Sectors(*size_sectors);
            session.needs_set()?.create_volume(new_uuid(), size, label).await?;
        }
        Command::Gc => session.needs_set()?.gc().await?,
        Command::ClearStats { volume: Some(volume) } => session.volume(volume)?.clear_stats(),
        Command::ClearStats { volume: None } => session.needs_set()?.clear_stats(),
    }
    Ok(Answer::Done)
}

/// The slot of a volume that is attached; `None` for all volumes.
fn slot_of(session: &Session, volume: Option<&str>) -> Result<Option<Inode>, Failure> {
    let Some(name) = volume else { return Ok(None) };
    let slot = session.volume(name)?.inode();
    slot.map(Some)
        .ok_or_else(|| Failure::Failed(format!("{name} is not attached, so it has no data in the cache")))
}

/// The failure of a wipe after its volume was detached. `why` names the cause and the next step.
pub fn not_wiped(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::because("the volume is detached, and its data may still be on the cache device", why)
}

async fn flush(session: &Session, volume: Option<&str>) -> Result<(), Failure> {
    let volumes = match volume {
        Some(name) => vec![session.volume(name)?],
        None => session.volumes(),
    };
    for volume in volumes {
        volume.drained().await?;
    }
    Ok(())
}
