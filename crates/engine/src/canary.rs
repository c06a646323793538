//! Deliberate bugs, which the simulator must find, and marks of code, which the simulator must reach.
//!
//! Owns the two tables. Only the tests of the simulator enable the feature `canary`. Without it a bug is the constant
//! `false` and a mark has no effect, so neither leaves a trace in the program; `engine::CANARIES` tells whether the
//! feature is enabled. At most one bug is switched on at a time, for the thread that switched it on.

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
        /// A read relies on data that the backing device may have dropped when it failed a flush.
        FailedFlushIgnoredByReads,
        /// Clean copies go to disk although the backing device is late with the flush of what they are copies of.
        LateFlushTrusted,
        /// A leaf waits for the flush of a backing device for as long as the device takes.
        HungFlushAwaited,
        /// A write over dirty data waits until writeback of its range has ended.
        WriteAwaitsWriteback,
        /// After a failed flush, a read waits for writeback of dirty data that it reads from the cache.
        ReadAwaitsWriteback,
        /// A read that looks up again and again still inserts missing data, which evicts what others read.
        ReadsEvictEachOther,
        /// Data is written back although the dirty key may be lost.
        WritebackBeforeDirtyKey,
        /// A write or a flush is acknowledged although the keys of the second set are not durable.
        AcknowledgedAfterOneCopy,
        /// Data becomes clean in the first set while the second one still has it as dirty.
        SecondCopyOutlivesFirst,
        /// The journals of two sets with the same dirty data do not wait for each other.
        JournalsRunApart,
        /// Data becomes clean in the first set before it is durable that the second one has no dirty data there.
        DroppedCopyNotDurable,
        /// The state clean is durable before it is durable that the second set has no dirty data.
        CleanStateBeforeSecond,
        /// A change past the cache leaves the clean copies that the second set has.
        CleanCopyOfSecondKept,
        /// Data is written back although the dirty key of the second set, which hides an older clean one, may be lost.
        WritebackBeforeSecondKey,
        /// The second set has clean copies of data that the backing device has not flushed, and does not know it.
        SecondLeafBeforeBacking,
        /// A copy that is not complete is read, or gets clean data.
        IncompleteCopyRead,
        /// A set that takes a clean device over at a start trusts its clean data, although a kernel may have changed the device.
        CleanDataOfLostSetTrusted,
        /// Clients wait for a cache device that does not answer, although another set has the data.
        SlowSetAwaited,
        /// A cache device that does not answer is given up although no other one has some dirty data.
        OnlyDataGivenUp,
        /// A change past the cache drops dirty data from the first set only.
        DropInFirstSetOnly,
        /// Dirty data is overwritten in place although a second set has it.
        OverwriteWithCopy,
        /// Dirty data is copied to the second set while it changes.
        CopyRangeNotHeld,
        /// The superblock of the backing device names a copy that is not durable.
        CopyNamedBeforeDurable,
        /// The superblock of the backing device names a copy although the same keys of the first set are not durable.
        CopyNewerThanPrimary,
        /// The second set serves a device before the superblock of the device names that set.
        TakenOverUnrecorded,
        /// A request that waited while the second set took over goes past the cache.
        TakenOverSetBypassed,
        /// A start forgets which ranges of two sets may differ, because it writes to the journal before it stores them.
        UnsettledForgotten,
        /// A start serves a device whose two sets may differ.
        CopiesNotSettled,
        /// The superblock of the backing device does not say that the second set has no copy any more.
        LossNotRecorded,
        /// A copy is trusted that is not the newest one.
        OldCopyTrusted,
        /// A copy is trusted that was restored from a backup.
        RestoredCopyTrusted,
        /// A copy is trusted although another program has used the first set alone.
        OtherUseIgnored,
        /// A change past the cache goes ahead although the dirty keys of its range may be lost.
        DirectBeforeDirtyKey,
        /// A direct write does not wait for writeback of its range.
        WritebackNotAwaited,
        /// Writeback that goes over gaps does not hold the gaps: changes of them go ahead meanwhile.
        BridgeHoldsDirtyOnly,
        /// The state clean is durable in the superblock before the clean keys are durable.
        CleanStateBeforeCleanKeys,
        /// Dirty writes are answered although the state in the superblock is not dirty.
        DirtyStateForgotten,
        /// A later update of a backing superblock overtakes one whose caller has dropped its future.
        GivenUpUpdateForgotten,
        /// A write in flight makes a stale device dirty.
        DirtyAfterStale,
        /// A device is served without its cache, but its superblock does not have the state stale.
        FailedButNotStale,
        /// A device that was served without its cache gets its old slot.
        StaleSlotReused,
        /// A device is detached with dirty data left.
        DetachWithDirtyData,
        /// The first superblock of a set is written as if a write could not be torn.
        SuperblockInOnePiece,
        /// The buckets of the old prio chain are ready for use before the journal names the new one.
        OldChainReusedEarly,
        /// A bucket of the journal's ring is overwritten by the entry that says that it is not needed.
        RingBucketFreedEarly,
        /// Buckets are reused before their new generation is durable.
        ReuseBeforeGenerations,
        /// A direct write does not wait for the generations of invalidated buckets.
        GenerationsNotAwaited,
        /// A footer is written although dirty data that was overwritten in place is not durable.
        FooterBeforeOverwrite,
        /// Dirty data is overwritten in place although the bucket has a footer.
        FooterLeftAtOverwrite,
        /// Data that does not match its checksum is packed, and gets a new checksum.
        MovedUnverified,
        /// Data is written back although it does not match its checksum.
        WrittenBackUnverified,
        /// A footer is written over data that a kernel has put into its place.
        FooterOverData,
        /// Data that was dropped and wiped during its read counts as damaged.
        WipedTakenForDamaged,
        /// Copies of a backing device are kept although a flush by writeback has failed.
        WritebackFlushUnknownToCopies,
        /// Copies do not wait for a flush of what a failed writeback has written.
        FailedWritebackNotFlushed,
        /// Writeback fills a gap with a clean copy of data that the backing device has dropped.
        DroppedCopyBridged,
        /// A device that leaves the set is flushed only if clients have written to it directly.
        ReleaseFlushesClientsOnly,
        /// A flush of the cache device that fails after its caller has given up does not make the set fail.
        FlushWithoutWaiterTrusted,
        /// A read does not notice a change that begins and ends while it looks its pieces up.
        ChangeDuringLookUpUnnoticed,
        /// A footer that the device does not return counts as durably absent.
        MissingFooterTakenForAbsent,
        /// A footer is written although the generation of its bucket is not durable.
        FooterBeforeGeneration,
        /// A read uses the data of a bucket that was reused during the read.
        StaleGenerationRead,
        /// A read miss that a write overlapped is inserted over the newer data.
        MissOverNewerWrite,
        /// A read miss is inserted over a hole whose journal entry is not durable.
        MissOverPendingHole,
        /// Misses that begin during a write are not invalidated.
        SecondInvalidationSkipped,
        /// A write does not invalidate the misses that are under way.
        FirstInvalidationSkipped,
        /// Changes of overlapping ranges run at the same time.
        ChangesOverlap,
        /// Clean copies are invalidated in memory only, and not durably, before the backing device changes.
        HoleNotDurable,
        /// A hole counts as durable although its journal entry is not.
        HoleTakenForDurable,
        /// Durable zeros over a flash-only volume do not wait for their edges, which are data.
        EdgesNotDurable,
        /// Dirty keys are removed before the data that replaces theirs is durable on the backing device.
        DirtyDroppedBeforeFlush,
        /// The moving garbage collector makes dirty data clean.
        MovedDirtyKeyForgotten,
        /// The moving garbage collector moves durable clean copies without journaling the new keys.
        MovedCleanNotJournaled,
        /// Replay begins one entry too late.
        ReplayBeginsTooLate,
        /// Replay ignores keys that make holes.
        ReplayDropsHoles,
        /// Replay does not raise generations.
        ReplayRaisesNothing,
        /// A journal entry whose end did not arrive counts as valid.
        TornEntryValid,
        /// The set is opened without a flush that makes the structures that were read durable.
        OpenWithoutFlush,
        /// The crash log is replayed although the cache device failed a request.
        CrashLogAfterError,
        /// The crash log is replayed onto a cache device that lacks journal entries before it.
        CrashLogOfNewerState,
        /// A leaf that is read again may have fewer bsets than were written.
        ShorterLeafBelieved,
        /// A cache device that is older than the last registration of a backing device is accepted.
        OlderCacheBelieved,
        /// Dirty data of a slot that was never used is no damage.
        OwnerlessDataIgnored,
        /// Clean copies behind the end of a device that was truncated stay.
        CopiesBehindEndKept,
        /// Keys of a leaf beyond the largest position of the index are left out.
        FarKeyLeftOut,
        /// A flash-only volume may end beyond the largest position of the index.
        LargeVolumeBelieved,
        /// A start keeps the whole index in memory, whatever the limit is.
        LoadIgnoresLimit,
        /// A replay keeps every leaf that it changes in memory, whatever the limit is.
        ReplayIgnoresLimit,
        /// A leaf that the replay has changed and that is read again lacks its unwritten keys.
        UnloadedKeysForgotten,
        /// A start wants one empty bucket more than the priorities take.
        StartWantsOneMore,
        /// Journal entries are released when their keys are being written to a leaf, not when the write has ended.
        PinsReleasedEarly,
        /// The keys of new leaves do not reach their parent.
        SplitWithoutParent,
        /// A flush covers writes that ended while it was under way.
        FlushCoversLateWrites,
        /// A failed dirty write does not wake the tasks that wait until nothing is dirty.
        FailedWriteUnnoticed,
        /// Keys of invalid slots are still counted after the leaf that had them was replaced.
        InvalidKeysCounted,
        /// Leaves that pin the oldest journal entries are replaced in turn, after others that fill the journal.
        JournalHoldersWait,
        /// The reclaim task writes only the leaves that it found first, and not the successor of a leaf that was
        /// replaced meanwhile.
        ReclaimLooksOnce,
        /// The reserve of the journal is at most half of the ring, also if more leaves are pinned.
        ReserveOfHalfARing,
        /// Keys leave no room in the journal for the entries that free it.
        JournalWithoutReserve,
        /// A read whose volume was detached meanwhile looks up in the former slot of the volume.
        ReadOutlastsDetach,
        /// A release does not wait for an update of the backing superblock whose caller has given up.
        ReleaseOvertakesUpdate,
        /// Keys that a crash log records leave no reserve if the process crashes before their entry is durable.
        CrashLogWithoutReserve,
        /// Dirty data is overwritten in place while an older state of it is written back, and then becomes clean.
        OverwrittenInWriteback,
        /// Dirty data is overwritten in place while an older state of it is moved to another bucket.
        OverwrittenWhileMoved,
        /// A flush does not cover data that was overwritten in place.
        OverwriteNotFlushed,
        /// A write with FUA that overwrites dirty data in place does not wait for the key of that data.
        OverwriteForgetsKeys,
        /// Extents of neighbouring buckets are joined.
        JoinedAcrossBuckets,
        /// Replayed keys do not pin the entries in which they were found.
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
        /// A set is refused whose journal has no entry, lacks needed entries, or has invalid ones.
        BadJournal,
        /// A set is refused whose prio sets are damaged.
        BadPrios,
        /// A set is refused whose UUID table is damaged.
        BadUuids,
        /// A set is refused with a damaged node in its index.
        BadNode,
        /// A set is refused that has no bucket left to write priorities with.
        NoBuckets,
        /// A journal entry is replayed.
        Replayed,
        /// A key is replayed from the crash log.
        ReplayedCrashLog,
        /// Dirty data is overwritten in place.
        OverwrittenInPlace,
        /// There is nothing to replay.
        NothingToReplay,
        /// A key of the journal makes a hole.
        ReplayedHole,
        /// A key of the journal points to a bucket that was reused.
        ReplayedStale,
        /// A key of the journal raises a generation above that in the prio sets.
        ReplayRaised,
        /// The newest entry does not end at the end of its bucket.
        TailAfterNewest,
        /// A torn entry follows the last entry of a bucket.
        TornEntry,
        /// A torn set at the end of a leaf is dropped.
        TornBset,
        /// An index of several levels is loaded.
        TreeLoaded,
        /// A slot of the UUID table is invalid.
        InvalidSlot,
        /// Dirty data of a slot that no device has becomes invalid.
        UnreachableDirty,
        /// A flash-only volume comes up.
        FlashVolume,
        /// A device comes up in its slot.
        KnownSlot,
        /// A device comes up in its slot with dirty data.
        KnownDirty,
        /// The state in the superblock is clean, but there are dirty keys.
        DirtyKeysOfClean,
        /// The state in the superblock is dirty, but there is no dirty key.
        DirtyWithoutKeys,
        /// The slot of a device in the state stale or none becomes invalid.
        SlotOfStale,
        /// A device gets a new slot.
        NewSlot,
        /// A device is refused whose superblock is invalid.
        RefusedSuperblock,
        /// A device is refused by a disabled set.
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
        /// A device that was truncated loses its clean copies behind the end.
        CopiesBehindEnd,
        /// A device with dirty data is refused to be served without its cache.
        AloneRefused,
        /// A device that was attached is served without its cache, and gets the state stale.
        AloneStale,
        /// A device of no set is served without a cache.
        AloneFree,
        /// The cache of a clean device is lost.
        CacheFailedClean,
        /// The cache of a device with dirty data is lost.
        CacheFailedDirty,
        /// The cache is lost while the device is being detached.
        CacheFailedDetached,
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

    /// The marks that were reached on this thread.
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

/// Whether the bug is switched on; always false without the feature.
#[cfg(not(feature = "canary"))]
pub(crate) const fn bug(_: Bug) -> bool {
    false
}

/// Records a mark; has no effect without the feature.
#[cfg(not(feature = "canary"))]
pub(crate) const fn mark(_: Mark) {}
