//! Deliberate bugs, and marks of what was reached: for the simulator, which must find every one of the former and
//! reach every one of the latter.
//!
//! Owns the two tables. Without the feature `canary`, which nothing but the simulator's own tests enables, a bug is the
//! constant `false`, a mark is nothing, and no trace of either is in the program; `engine::CANARIES` says which it is.
//! At most one bug is switched on at a time, for the thread that switched it on.

macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($(#[$what:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum $name { $($(#[$what])* $variant,)* }

        #[cfg(feature = "canary")]
        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant,)*];
        }
    };
}

table! {
    /// A deliberate bug.
    Bug {
        /// A flush is answered before the journal is durable.
        FlushBeforeJournal,
        /// A write with FUA is answered before its journal entry is durable.
        FuaBeforeJournal,
        /// The journal entry is written without flushing the data that its keys name.
        JournalBeforeData,
        /// A leaf names copies that are not durable.
        LeafBeforeData,
        /// Keys are marked clean before the backing device was flushed.
        CleanBeforeBackingFlush,
        /// Clean copies go to disk although the backing device failed to flush what they are copies of.
        FailedFlushTrusted,
        /// Clean copies go to disk although the backing device is late with the flush of what they are copies of.
        LateFlushTrusted,
        /// Data is written back although the dirty key may be lost.
        WritebackBeforeDirtyKey,
        /// A change past the cache goes ahead although the dirty keys of its range may be lost.
        DirectBeforeDirtyKey,
        /// A direct write does not wait for writeback of its range.
        WritebackNotAwaited,
        /// Writeback that goes over gaps does not hold the gaps: changes of them go ahead meanwhile.
        BridgeHoldsDirtyOnly,
        /// The superblock says clean before the keys do, durably.
        CleanStateBeforeCleanKeys,
        /// Dirty writes are answered whatever the superblock says.
        DirtyStateForgotten,
        /// An update of a backing superblock whose caller has given up the wait is overtaken by later ones.
        GivenUpUpdateForgotten,
        /// A write in flight makes a stale device dirty.
        DirtyAfterStale,
        /// A device goes on without its cache and does not say so.
        LostButNotStale,
        /// A device that ran alone gets its old slot.
        StaleSlotReused,
        /// A device is detached with dirty data left.
        DetachWithDirtyData,
        /// The first superblock of a set is written as if all of it arrived, or nothing.
        SuperblockInOnePiece,
        /// The buckets of the old prio chain are ready for use before the journal names the new one.
        OldChainReusedEarly,
        /// A bucket of the journal's ring is overwritten by the entry that says that it is not needed.
        RingBucketFreedEarly,
        /// Buckets are reused before their new generation is durable.
        ReuseBeforeGenerations,
        /// A direct write does not wait for the generations of invalidated buckets.
        GenerationsNotAwaited,
        /// What a bucket holds after it was reused is read as if it had not been.
        StaleGenerationRead,
        /// A read miss that a write overlapped is inserted over the newer data.
        MissOverNewerWrite,
        /// A read miss is inserted over a hole whose journal entry is not durable.
        MissOverPendingHole,
        /// Only misses that begin before a write are invalid, not those that begin during it.
        SecondInvalidationSkipped,
        /// A write does not invalidate the misses that are under way.
        FirstInvalidationSkipped,
        /// Changes of one range go on side by side.
        ChangesOverlap,
        /// Clean copies are forgotten in memory only before the backing device changes.
        HoleNotDurable,
        /// What is a hole already is taken for one that is durable.
        HoleTakenForDurable,
        /// Durable zeros over a flash-only volume do not wait for their edges, which are data.
        EdgesNotDurable,
        /// Dirty keys are dropped before what replaces them is durable on the backing device.
        DirtyDroppedBeforeFlush,
        /// The moving garbage collector makes dirty data clean.
        MovedDirtyKeyForgotten,
        /// It moves durable clean copies without a word in the journal.
        MovedCleanNotJournaled,
        /// Replay begins one entry too late.
        ReplayBeginsTooLate,
        /// Replay ignores keys that make holes.
        ReplayDropsHoles,
        /// Replay does not raise generations.
        ReplayRaisesNothing,
        /// A journal entry whose end did not arrive counts as valid.
        TornEntryValid,
        /// The set is opened without making durable what was read.
        OpenWithoutFlush,
        /// What survives the process counts although the cache device failed a request.
        CrashLogAfterError,
        /// A cache device that is older than what its backing devices have seen is believed.
        OlderCacheBelieved,
        /// Keys of a leaf beyond the largest position of the index are left out.
        FarKeyLeftOut,
        /// A flash-only volume may end beyond the largest position of the index.
        LargeVolumeBelieved,
        /// A start keeps the whole index in memory, whatever the limit is.
        LoadIgnoresLimit,
        /// A start wants one empty bucket more than the priorities take.
        StartWantsOneMore,
        /// Journal entries are given up when their keys are on the way to a leaf, not when they are there.
        PinsReleasedEarly,
        /// The keys of new leaves do not reach their parent.
        SplitWithoutParent,
        /// A flush counts for writes that came while it was under way.
        FlushCoversLateWrites,
        /// Nobody who waits until nothing is dirty looks again when a dirty write has failed.
        FailedWriteUnnoticed,
        /// Keys of void slots still count when the leaf that had them is gone.
        InvalidKeysCounted,
        /// Leaves that hold the journal up wait for their turn behind others, which fill it.
        JournalHoldersWait,
        /// Who held the journal up when that was looked at is all there is to write, also if it has a successor.
        ReclaimLooksOnce,
        /// Keys leave the journal no room for what frees it.
        JournalWithoutReserve,
        /// Dirty data is overwritten in its place while an older state of it is written back, which then counts as clean.
        OverwrittenInWriteback,
        /// Dirty data is overwritten in its place while an older state of it is moved elsewhere.
        OverwrittenWhileMoved,
        /// A flush does not cover what was overwritten in its place.
        OverwriteNotFlushed,
        /// A write with FUA in the place of dirty data does not wait for the key of that.
        OverwriteForgetsKeys,
        /// Extents of neighbouring buckets are joined.
        JoinedAcrossBuckets,
        /// Replayed keys do not hold the entries in which they were found.
        ReplayedNotPinned,
    }
}

table! {
    /// A case of registration, replay or loss that recovery code decides.
    Mark {
        /// A new set is initialised.
        Initialised,
        /// A set is refused whose superblock was never written.
        NoSuperblock,
        /// A set is refused whose journal has no entry, or not all that are needed, or says what cannot be.
        BadJournal,
        /// A set is refused whose priorities cannot be right.
        BadPrios,
        /// A set is refused whose UUID table cannot be right.
        BadUuids,
        /// A set is refused with a damaged node in its index.
        BadNode,
        /// A set is refused that has no bucket left to write priorities with.
        NoBuckets,
        /// A journal entry is replayed.
        Replayed,
        /// A key of the journal survived only in memory.
        ReplayedCrashLog,
        /// Dirty data is overwritten in its place.
        OverwrittenInPlace,
        /// There is nothing to replay.
        NothingToReplay,
        /// A key of the journal makes a hole.
        ReplayedHole,
        /// A key of the journal points to a bucket that was reused.
        ReplayedStale,
        /// A key of the journal raises a generation beyond what the priorities say.
        ReplayRaised,
        /// Something that is no entry follows the newest one in its bucket.
        TailAfterNewest,
        /// It was to be one: its end did not arrive.
        TornEntry,
        /// A torn set at the end of a leaf is dropped.
        TornSet,
        /// An index of several levels is loaded.
        TreeLoaded,
        /// A slot of the table is void.
        InvalidSlot,
        /// Dirty data of a slot that nobody can reach is void.
        UnreachableDirty,
        /// A flash-only volume comes up.
        FlashVolume,
        /// A device comes up in its slot.
        KnownSlot,
        /// A device comes up in its slot with dirty data.
        KnownDirty,
        /// The superblock says clean, but there are dirty keys.
        DirtyKeysOfClean,
        /// The superblock says dirty, but there is no dirty key.
        DirtyWithoutKeys,
        /// The slot of a device that says stale, or detached, is void.
        SlotOfStale,
        /// A device gets a new slot.
        NewSlot,
        /// A device is refused whose superblock cannot be right.
        RefusedSuperblock,
        /// A device is refused by a set that has failed.
        RefusedByFailedSet,
        /// A device with smaller blocks than the set's is refused.
        RefusedBlockSize,
        /// A device is refused by a set without a free slot.
        RefusedNoSlot,
        /// A device of another set is refused.
        RefusedOtherSet,
        /// A device with dirty data that the cache does not know is refused.
        RefusedUnknownDirty,
        /// A device that is attached already is refused.
        RefusedTwice,
        /// A device that is too small for its dirty data is refused.
        RefusedTruncated,
        /// A device with dirty data is not served alone.
        AloneRefused,
        /// A device that was attached is served alone, and says stale.
        AloneStale,
        /// A device that belongs nowhere is served alone.
        AloneFree,
        /// The cache of a clean device is lost.
        LostClean,
        /// The cache of a device with dirty data is lost.
        LostDirty,
        /// The cache is lost while the device is being detached.
        LostDetached,
    }
}

#[cfg(feature = "canary")]
mod on {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;

    use super::{Bug, Mark};

    thread_local! {
        static BUG: Cell<Option<Bug>> = const { Cell::new(None) };
        static REACHED: RefCell<BTreeSet<Mark>> = const { RefCell::new(BTreeSet::new()) };
    }

    /// Switches a bug on for this thread, or off.
    pub fn set_bug(bug: Option<Bug>) {
        BUG.set(bug);
    }

    /// Marks that were reached on this thread.
    pub fn reached() -> BTreeSet<Mark> {
        REACHED.with(|r| r.borrow().clone())
    }

    pub(crate) fn bug(bug: Bug) -> bool {
        BUG.get() == Some(bug)
    }

    pub(crate) fn mark(mark: Mark) {
        REACHED.with(|r| r.borrow_mut().insert(mark));
    }
}

#[cfg(feature = "canary")]
pub(crate) use on::{bug, mark};
#[cfg(feature = "canary")]
pub use on::{reached, set_bug};

/// Whether the bug is switched on: never in the product.
#[cfg(not(feature = "canary"))]
pub(crate) const fn bug(_: Bug) -> bool {
    false
}

/// Nothing in the product.
#[cfg(not(feature = "canary"))]
pub(crate) const fn mark(_: Mark) {}
