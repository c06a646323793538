//! The errors of the engine by kind, each with its place and its source. Bugs are assertions, not errors.

use std::sync::Arc;

use format::{Bkey, BucketNr, Corrupt, Gen, Geometry, JournalSeq, Sector};
use io::{IoError, NoMemory, VolumeError};

use crate::damage::{Damage, Flaw, NodeFlaw};
use crate::refusal::{DeviceRefusal, Refusal};

/// The reason for which an operation was refused or has failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A volume refused or failed a request that bypasses the cache.
    #[error(transparent)]
    Volume(VolumeError),
    /// A structure on the cache device is damaged.
    #[error(transparent)]
    Corrupt(Arc<Damage>),
    /// A superblock is damaged, or is not one of the wanted kind.
    #[error("{device}: sector {sector}: {source}")]
    Superblock {
        /// Name of the device.
        device: Arc<str>,
        /// The sector of the superblock.
        sector: Sector,
        /// The damaged field, with its expected and its found value.
        source: Corrupt,
    },
    /// The operation cannot be carried out as asked, or was given up.
    #[error(transparent)]
    Refused(Arc<Refusal>),
    /// There is no room, and none can be made.
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
    /// Dirty data does not match its checksum, and no other device has it.
    #[error(
        "{volume}: sector {sector}: the cached data is damaged (checksum, {device}, sector {at}) and is not on the backing \
         device yet; overwrite the block to use it again"
    )]
    DamagedData {
        /// The name of the volume.
        volume: Arc<str>,
        /// The position on the volume.
        sector: Sector,
        /// The name of the cache device.
        device: Arc<str>,
        /// The position on the cache device.
        at: Sector,
    },
    /// The set has been disabled by an earlier failure.
    #[error("cache set {set} is disabled: {why}")]
    Disabled {
        /// UUID of the set.
        set: String,
        /// The failure that disabled it.
        #[source]
        why: Arc<EngineError>,
    },
}

/// The place in which there is no room.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoSpace {
    /// The journal has no place for its next entry.
    #[error("{device}: no room in the journal for entry {entry} ({bytes} bytes)")]
    Journal {
        /// The name of the cache device.
        device: Arc<str>,
        /// The number of the entry.
        entry: JournalSeq,
        /// The length of the entry.
        bytes: usize,
    },
    /// Fewer buckets are free than the priorities take.
    #[error("{device}: no {buckets} buckets are free for priorities")]
    Priorities {
        /// The name of the cache device.
        device: Arc<str>,
        /// The number of buckets for priorities.
        buckets: usize,
    },
    /// The set cannot start, because no bucket is empty.
    #[error(
        "{device}: {ready} buckets are empty, {needed} are needed to write priorities: all others hold data or metadata. \
         `ubcache extract` reads the volumes"
    )]
    Start {
        /// The name of the cache device.
        device: Arc<str>,
        /// The number of empty buckets.
        ready: usize,
        /// The number of buckets for priorities.
        needed: usize,
    },
    /// A write has no place in the cache, and no other device to go to.
    #[error("{volume}: every bucket of the cache holds dirty data or metadata")]
    Data {
        /// The name of the volume.
        volume: String,
    },
}

impl EngineError {
    /// Whether the cause is a lack of room on the device or in the set, so that the device has lost no data.
    pub(crate) fn is_out_of_room(&self) -> bool {
        match self {
            EngineError::Io(e) => e.is_out_of_room(),
            EngineError::NoSpace(_) => true,
            EngineError::Disabled { why, .. } => why.is_out_of_room(),
            EngineError::Volume(e) => matches!(e, VolumeError::NoSpace(_)),
            EngineError::Corrupt(_)
            | EngineError::Superblock { .. }
            | EngineError::Refused(_)
            | EngineError::DamagedData { .. } => false,
        }
    }

    /// The error that an export returns to the client.
    pub fn to_volume_error(&self) -> VolumeError {
        match self {
            EngineError::Io(e) => VolumeError::Io(e.clone()),
            EngineError::Volume(e) => e.clone(),
            EngineError::NoSpace(e) => VolumeError::no_space(e.clone()),
            other => VolumeError::failed(other.clone()),
        }
    }
}

impl From<Refusal> for EngineError {
    fn from(refusal: Refusal) -> EngineError {
        EngineError::Refused(Arc::new(refusal))
    }
}

impl From<VolumeError> for EngineError {
    fn from(e: VolumeError) -> EngineError {
        match e {
            VolumeError::Io(e) => EngineError::Io(e),
            other => EngineError::Volume(other),
        }
    }
}

/// Names the device and the set in errors about damage.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) device: Arc<str>,
    pub(crate) set: String,
}

impl Place {
    /// The refusal of a set for a table of which the system has no memory.
    pub(crate) fn no_memory(&self, geometry: &Geometry, source: NoMemory) -> EngineError {
        let Geometry { nbuckets: buckets, bucket_sectors, .. } = *geometry;
        let (wanted_bytes, source) = (source.bytes, source.into());
        DeviceRefusal::Memory { buckets, bucket_sectors, wanted_bytes, source }.of(&self.device).into()
    }

    pub(crate) fn damage(&self, sector: Sector, flaw: Flaw) -> EngineError {
        self.damage_at(sector, None, Vec::new(), flaw)
    }

    pub(crate) fn corrupt(&self, sector: Sector, corrupt: &Corrupt) -> EngineError {
        self.damage(sector, Flaw::Field(*corrupt))
    }

    pub(crate) fn damage_at(
        &self,
        sector: Sector,
        bucket: Option<(BucketNr, Option<Gen>)>,
        path: Vec<BucketNr>,
        flaw: Flaw,
    ) -> EngineError {
        let (device, set) = (self.device.clone(), self.set.clone());
        EngineError::Corrupt(Arc::new(Damage { device, set, sector, bucket, path, flaw }))
    }

    pub(crate) fn bad_node(
        &self,
        key: &Bkey,
        path: Vec<BucketNr>,
        bucket: BucketNr,
        flaw: NodeFlaw,
    ) -> EngineError {
        let (sector, generation) =
            key.pointer().map_or((Sector(0), None), |p| (p.offset(), Some(p.generation())));
        self.damage_at(sector, Some((bucket, generation)), path, Flaw::Node(flaw))
    }
}

#[cfg(test)]
mod tests {
    use format::RawSuperblock;

    use crate::refusal::Cause;

    use super::*;

    fn full() -> EngineError {
        NoSpace::Data { volume: "v".into() }.into()
    }

    fn io_error(errno: i32) -> IoError {
        let request = io::Request {
            op: io::Op::Flush,
            sector: Sector(0),
            sectors: format::Sectors(0),
            buffer: None,
            buffer_offset_bytes: 0,
        };
        IoError::of(&"ssd".into(), &request, errno)
    }

    fn place() -> Place {
        Place { device: "ssd".into(), set: "a-set".into() }
    }

    /// Errors for lack of room, also as the cause of a disabled set, and their conversion for exports.
    #[test]
    fn missing_room_is_no_loss() {
        let disabled = |why: EngineError| EngineError::Disabled { set: "a-set".into(), why: Arc::new(why) };
        for (error, is_out_of_room) in [
            (EngineError::Io(io_error(28)), true),
            (EngineError::Io(io_error(5)), false),
            (full(), true),
            (Refusal::Cancelled.into(), false),
            (place().damage(Sector(1), Flaw::NoRoot), false),
        ] {
            assert_eq!(error.is_out_of_room(), is_out_of_room, "{error}");
            assert_eq!(disabled(error.clone()).is_out_of_room(), is_out_of_room, "{error}");
        }
        let text = |e: &VolumeError| format!("{e:?}");
        assert_eq!(
            text(&EngineError::Io(io_error(5)).to_volume_error()),
            text(&VolumeError::Io(io_error(5)))
        );
        let why = "v: every bucket of the cache holds dirty data or metadata";
        let answer = full().to_volume_error();
        let VolumeError::NoSpace(source) = &answer else { panic!("{answer:?}") };
        assert!(source.downcast_ref::<NoSpace>().is_some() && answer.to_string() == why, "{answer:?}");
        // What a volume answered reaches the client as it was.
        for answer in
            [VolumeError::no_space("full"), VolumeError::Stopped("v".into()), VolumeError::Io(io_error(28))]
        {
            let error = EngineError::from(answer.clone());
            assert_eq!(text(&error.to_volume_error()), text(&answer));
            assert_eq!(error.is_out_of_room(), !matches!(answer, VolumeError::Stopped(_)), "{error}");
        }
        let answer = disabled(full()).to_volume_error();
        let VolumeError::Failed(source) = &answer else { panic!("{answer:?}") };
        assert!(matches!(source.downcast_ref(), Some(EngineError::Disabled { .. })), "{source:?}");
        assert_eq!(answer.to_string(), format!("cache set a-set is disabled: {why}"));
    }

    /// A caller reaches the typed cause of an error, and so an error number or the damaged field.
    #[test]
    fn an_error_keeps_its_cause() {
        use std::error::Error;
        let short = RawSuperblock::from_prefix(&[0; 8]).err().expect("it is too short");
        let damaged = place().corrupt(Sector(8), &short);
        assert_eq!(damaged.to_string(), format!("ssd (cache set a-set): sector 8: {short}"));
        let field = damaged.source().and_then(Error::source).and_then(|s| s.downcast_ref::<Corrupt>());
        assert_eq!(field, Some(&short));
        let source = Some(Cause::of(Arc::new(EngineError::Io(io_error(5)))));
        let (volume, left) = ("hdd".to_owned(), format::Sectors(8));
        let drained: EngineError = Refusal::NotWrittenBack { volume, left, source }.into();
        let message = format!("hdd: 8 dirty sectors could not be written back: {}", io_error(5));
        assert_eq!(drained.to_string(), message);
        let cause = drained.source().and_then(Error::source).and_then(|s| s.downcast_ref::<EngineError>());
        assert!(matches!(cause, Some(EngineError::Io(e)) if e.errno == 5), "{cause:?}");
        let wrong =
            crate::tunables::SetTunables::default().set("io_error_limit", "many").expect_err("no number");
        let refused: EngineError = Refusal::from(wrong.clone()).into();
        assert_eq!(refused.to_string(), wrong.to_string());
        let EngineError::Refused(refusal) = refused else { panic!("{refused}") };
        assert!(matches!(&*refusal, Refusal::Tunable(e) if *e == wrong), "{refusal}");
    }

    /// The message has each known part of the place of a damage.
    #[test]
    fn damage_says_where_it_is() {
        let at = |bucket, path: &[u32]| {
            place()
                .damage_at(Sector(9), bucket, path.iter().map(|n| BucketNr(*n)).collect(), Flaw::NoRoot)
                .to_string()
        };
        assert_eq!(at(None, &[]), "ssd (cache set a-set): sector 9: btree: no root");
        assert_eq!(
            at(Some((BucketNr(3), None)), &[]),
            "ssd (cache set a-set): sector 9, bucket 3: btree: no root"
        );
        let with_path = at(Some((BucketNr(3), Some(Gen(7)))), &[1, 2]);
        assert_eq!(with_path, "ssd (cache set a-set): sector 9, bucket 3 gen 7, path 1→2: btree: no root");
        let key = |key: Bkey| {
            place().bad_node(&key, vec![BucketNr(5)], BucketNr(3), NodeFlaw::OwnAncestor).to_string()
        };
        let hole = Bkey::hole(format::Inode(0), Sector(8), format::Sectors(8));
        assert_eq!(
            key(hole),
            "ssd (cache set a-set): sector 0, bucket 3, path 5: btree node: expected a bucket that is not its own ancestor"
        );
        let ptr = format::Ptr::new(0, Sector(96), Gen(7));
        let extent = Bkey::extent(format::Inode(0), Sector(8), format::Sectors(8), false, ptr);
        assert_eq!(
            key(extent),
            "ssd (cache set a-set): sector 96, bucket 3 gen 7, path 5: btree node: expected a bucket that is not its own ancestor"
        );
    }
}
