//! The volume as an export uses it: the operations of [`BlockVolume`].
//!
//! Owns the checks and counts around each request, and the choice between the cache and pass-through mode, which it
//! makes again when the set fails. Must not know how a path carries out a request.

use std::cell::{Ref, RefMut};
use std::rc::Rc;

use format::{Sector, Sectors};
use io::{BlockVolume, Buffer, Handle, Nanos, RangeStatus, ReadFlags, VolumeError, WriteFlags, ZeroFlags};

use super::again::{Failed, again, handle_failed_set};
use super::cache_failed::{handle_failed_cache, has_lost_set};
use super::direct::Direct;
use super::ranges::Ranges;
use super::request::Read;
use super::write::Write;
use super::writeback_state::WritebackState;
use super::{Volume, backing, direct, read, write};
use crate::canary::{Bug, bug};
use crate::index::Kind;
use crate::policy::bypass::BypassReason;
use crate::stats::{OpKind, Outcome, RequestStats};
use crate::tunables::DeviceTunables;

/// Requests to write zeros that are no longer than this go through the cache like data.
const SMALL_ZEROES: Sectors = Sectors(128);

impl Volume {
    pub(crate) fn rt(&self) -> &Handle {
        &self.rt
    }

    pub(crate) fn ranges(&self) -> &Rc<Ranges> {
        &self.ranges
    }

    /// The tunables as they are set; [`Volume::tunables`] has the current rate of writeback, too.
    pub(crate) fn settings(&self) -> Ref<'_, DeviceTunables> {
        self.tunables.borrow()
    }

    pub(crate) fn set_cutoff_writeback(&self, percent: u8) {
        self.tunables.borrow_mut().set_cutoff_writeback(percent);
    }

    /// The number of the requests of `op` that were answered, and the sum of their latencies.
    pub fn latency_of(&self, op: OpKind) -> (u64, io::Nanos) {
        self.served.borrow().latencies().total_of(op)
    }

    /// The requests to the backing device that it has not answered; none of a flash-only volume.
    pub fn backing_in_flight(&self) -> io::InFlight {
        self.backing.as_ref().map(|b| b.disk().in_flight()).unwrap_or_default()
    }

    /// The outcomes and latencies of the requests.
    pub(crate) fn served(&self) -> RefMut<'_, RequestStats> {
        self.served.borrow_mut()
    }

    /// Number of dirty writes that have begun and have not inserted all their keys into the index yet.
    pub(crate) fn dirty_in_flight(&self) -> usize {
        self.dirty_in_flight.get()
    }

    pub(crate) fn writeback(&self) -> &WritebackState {
        &self.writeback
    }

    /// Changes the tunables without their checks.
    #[cfg(test)]
    pub(crate) fn settings_mut(&self) -> RefMut<'_, DeviceTunables> {
        self.tunables.borrow_mut()
    }

    #[cfg(test)]
    pub(crate) fn set_dirty_in_flight(&self, writes: usize) {
        self.dirty_in_flight.set(writes);
    }

    /// Whether writeback holds a part of a range: a run holds the gaps between its extents, too, until its batch has ended.
    pub fn is_written_back(&self, sector: Sector, sectors: Sectors) -> bool {
        let start = sector + Sectors(self.offset.0);
        self.ranges.is_written_back(start, start + sectors)
    }

    /// The parts of a range for which the cache has no dirty data, so that a request for them can need the backing device. `None` if a
    /// leaf of the range is not in memory.
    pub fn parts_without_dirty_data(
        &self,
        sector: Sector,
        sectors: Sectors,
    ) -> Option<Vec<(Sector, Sectors)>> {
        let Some((cache, inode)) = self.attached() else { return Some(vec![(sector, sectors)]) };
        let offset = Sectors(self.offset.0);
        let (mut at, end) = (sector + offset, sector + offset + sectors);
        let mut parts = Vec::new();
        while at < end {
            let seg = cache.index.segment(inode, at, end).ok()?;
            if !matches!(seg.kind, Kind::Hit { dirty: true, .. }) {
                parts.push((Sector((at - offset).0), seg.end - at));
            }
            at = seg.end;
        }
        Some(parts)
    }

    /// See [`BlockVolume::read`].
    pub fn read(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)> {
        self.read_as(sector, sectors, buffer, offset_bytes, ReadFlags::default())
    }

    /// See [`BlockVolume::read_as`].
    pub async fn read_as(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: ReadFlags,
    ) -> (Buffer, Result<(), VolumeError>) {
        let _guard = match self.enter(sector, sectors) {
            Ok(g) => g,
            Err(e) => return (buffer, Err(e)),
        };
        if sectors == Sectors::ZERO {
            return (buffer, Ok(()));
        }
        self.count(|c| c.reads.count(sectors));
        if flags.meta {
            self.count(|c| c.count_metadata(sectors));
        }
        let began = self.rt.turn_time();
        let (mut buffer, mut healed) = (buffer, false);
        loop {
            let Some((cache, inode)) = self.attached() else {
                let start = sector + Sectors(self.offset.0);
                let (buffer, result) =
                    backing::read_settled(self, start, sectors, buffer, offset_bytes).await;
                return (buffer, self.passed_through(OpKind::Read, sectors, began, result));
            };
            let losses = self.links.losses();
            let again = if cache.device.is_failed() {
                handle_failed_set(self.target(&cache, inode))
            } else {
                let start = sector + Sectors(self.offset.0);
                let target = self.target(&cache, inode);
                let read = Read::begin(target, (start, start + sectors), offset_bytes, flags.meta);
                let (b, result) = read::read_cached(target, &read, buffer).await;
                buffer = b;
                let Err(error) = result else { return (buffer, Ok(())) };
                let failed = Failed { range: (start, start + sectors), losses, error };
                again(self.target(&cache, inode), failed, &mut healed)
            };
            if let Err(e) = again.await {
                return (buffer, Err(self.unanswered(OpKind::Read, e.to_volume_error())));
            }
        }
    }

    /// See [`BlockVolume::write`].
    pub async fn write(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: WriteFlags,
    ) -> Result<(), VolumeError> {
        let _guard = self.enter(sector, sectors)?;
        if sectors == Sectors::ZERO {
            return Ok(());
        }
        self.count(|c| c.writes.count(sectors));
        if flags.meta {
            self.count(|c| c.count_metadata(sectors));
        }
        let began = self.rt.turn_time();
        let start = sector + Sectors(self.offset.0);
        let WriteFlags { fua, meta } = flags;
        let write = Write { start, end: start + sectors, buffer, offset_bytes, fua, meta };
        let mut healed = false;
        loop {
            let Some((cache, inode)) = self.attached() else {
                let result = write::write_uncached(self, &write).await;
                return self.passed_through(OpKind::Write, sectors, began, result);
            };
            let losses = self.links.losses();
            let again = if cache.device.is_failed() {
                handle_failed_set(self.target(&cache, inode))
            } else {
                match write::write_cached(self.target(&cache, inode), &write).await {
                    Ok(outcome) => {
                        self.answered(OpKind::Write, outcome, sectors, began);
                        return Ok(());
                    }
                    Err(error) => {
                        let failed = Failed { range: write.range(), losses, error };
                        again(self.target(&cache, inode), failed, &mut healed)
                    }
                }
            };
            again.await.map_err(|e| self.unanswered(OpKind::Write, e.to_volume_error()))?;
        }
    }

    /// Counts a request to a volume without a cache, and returns its result.
    fn passed_through(
        &self,
        op: OpKind,
        sectors: Sectors,
        began: Nanos,
        result: Result<(), VolumeError>,
    ) -> Result<(), VolumeError> {
        match result {
            Ok(()) => self.answered(op, Outcome::PassThrough, sectors, began),
            Err(_) => self.served.borrow_mut().failed(op),
        }
        result
    }

    /// See [`BlockVolume::flush`].
    pub async fn flush(self: &Rc<Self>) -> Result<(), VolumeError> {
        let _guard = self.enter(Sector(0), Sectors::ZERO)?;
        self.count(|c| c.flush());
        let began = self.rt.turn_time();
        let result = self.flush_cache_and_backing().await;
        match &result {
            Ok(()) => self.answered(OpKind::Flush, Outcome::Done, Sectors::ZERO, began),
            Err(_) => self.served.borrow_mut().failed(OpKind::Flush),
        }
        result
    }

    /// Makes the keys in the journal and the direct writes to the backing device durable.
    async fn flush_cache_and_backing(self: &Rc<Self>) -> Result<(), VolumeError> {
        loop {
            let backing = self.backing();
            let settle = async {
                match &backing {
                    Some(b) => b.settle_direct_writes().await,
                    None => Ok(()),
                }
            };
            let Some((cache, inode)) = self.attached() else {
                return settle.await.map_err(VolumeError::from);
            };
            let losses = self.links.losses();
            if !cache.device.is_failed() {
                let (journal, direct) = io::sync::join(
                    async {
                        if bug(Bug::FlushBeforeJournal) {
                            return Ok(());
                        }
                        if let Some(mirror) = self.mirror() {
                            // The two journals are written at the same time.
                            let both = io::sync::join(cache.journal.commit_keys(), mirror.commit_keys());
                            let (first, second) = Box::pin(both).await;
                            second.and(first)?;
                        } else {
                            cache.journal.commit_keys().await?;
                        }
                        cache.device.settle_overwrites().await
                    },
                    settle,
                )
                .await;
                direct?;
                match journal {
                    Ok(()) => return Ok(()),
                    Err(e) if !has_lost_set(self, &cache, losses) => return Err(e.to_volume_error()),
                    Err(_) => {}
                }
            }
            handle_failed_cache(self.target(&cache, inode)).await.map_err(|e| e.to_volume_error())?;
        }
    }

    /// See [`BlockVolume::discard`].
    pub async fn discard(self: &Rc<Self>, sector: Sector, sectors: Sectors) -> Result<(), VolumeError> {
        let _guard = self.enter(sector, sectors)?;
        self.count(|c| c.discards.count(sectors));
        self.remove_measured(OpKind::Discard, sector, sectors, Direct::Discard).await
    }

    /// See [`BlockVolume::write_zeroes`].
    pub async fn write_zeroes(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> Result<(), VolumeError> {
        if sectors <= SMALL_ZEROES {
            let zeros = self.rt.pool().zeroed(sectors.bytes() as usize);
            return self
                .write(sector, sectors, zeros, 0, WriteFlags { fua: flags.fua, ..WriteFlags::default() })
                .await;
        }
        let _guard = self.enter(sector, sectors)?;
        self.count(|c| c.writes.count(sectors));
        self.remove_measured(OpKind::Write, sector, sectors, Direct::Zeroes(flags)).await
    }

    async fn remove_measured(
        self: &Rc<Self>,
        op: OpKind,
        sector: Sector,
        sectors: Sectors,
        what: Direct,
    ) -> Result<(), VolumeError> {
        let began = self.rt.turn_time();
        match self.remove(sector, sectors, what).await {
            Ok(outcome) => {
                self.answered(op, outcome, sectors, began);
                Ok(())
            }
            Err(e) => Err(self.unanswered(op, e)),
        }
    }

    /// Discards or zeroes a range; returns the path that the request took.
    async fn remove(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
        op: Direct,
    ) -> Result<Outcome, VolumeError> {
        if sectors == Sectors::ZERO {
            return Ok(Outcome::Done);
        }
        let start = sector + Sectors(self.offset.0);
        let mut healed = false;
        loop {
            let Some((cache, inode)) = self.attached() else {
                return direct::remove_uncached(self, start, sectors, &op)
                    .await
                    .map(|()| Outcome::PassThrough);
            };
            let losses = self.links.losses();
            let again = if cache.device.is_failed() {
                handle_failed_set(self.target(&cache, inode))
            } else {
                let target = self.target(&cache, inode);
                let result = direct::remove_cached(target, start, sectors, &op).await;
                let Err(error) = result else {
                    return Ok(match self.is_flash_only() {
                        true => Outcome::Done,
                        false => Outcome::Bypass(BypassReason::Discard),
                    });
                };
                again(target, Failed { range: (start, start + sectors), losses, error }, &mut healed)
            };
            again.await.map_err(|e| e.to_volume_error())?;
        }
    }

    /// See [`BlockVolume::status`]. Only a flash-only volume reports holes.
    pub async fn status(
        self: &Rc<Self>,
        sector: Sector,
        sectors: Sectors,
    ) -> Result<Vec<RangeStatus>, VolumeError> {
        let _guard = self.enter(sector, sectors)?;
        let data = RangeStatus { sectors, hole: false, zero: false };
        let Some((cache, inode)) = self.attached().filter(|_| self.is_flash_only()) else {
            return Ok(vec![data]);
        };
        let mut runs: Vec<RangeStatus> = Vec::new();
        let (mut at, end) = (sector, sector + sectors);
        // The answer is bounded; the client asks again from its end.
        while at < end && runs.len() < 1024 {
            let seg = cache.index.segment_loaded(inode, at, end).await.map_err(|e| e.to_volume_error())?;
            let hole = matches!(seg.kind, Kind::Hole { .. });
            match runs.last_mut() {
                Some(last) if last.hole == hole => last.sectors += seg.end - at,
                _ => runs.push(RangeStatus { sectors: seg.end - at, hole, zero: hole }),
            }
            at = seg.end;
        }
        Ok(runs)
    }
}

/// An [`Rc<Volume>`] in the form that an export takes. It returns the futures of the volume unchanged, because each
/// further layer costs every request.
#[derive(Clone)]
pub struct VolumeRef(pub Rc<Volume>);

impl BlockVolume for VolumeRef {
    fn name(&self) -> String {
        self.0.name()
    }

    fn sectors(&self) -> Sectors {
        self.0.size()
    }

    fn logical_block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }

    fn physical_block_bytes(&self) -> u32 {
        self.0.physical_block_bytes()
    }

    fn optimal_io_bytes(&self) -> u32 {
        self.0.optimal_io_bytes()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)> {
        self.0.read(sector, sectors, buffer, offset_bytes)
    }

    fn read_as(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: ReadFlags,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)> {
        self.0.read_as(sector, sectors, buffer, offset_bytes, flags)
    }

    fn write(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: WriteFlags,
    ) -> impl Future<Output = Result<(), VolumeError>> {
        self.0.write(sector, sectors, buffer, offset_bytes, flags)
    }

    fn flush(&self) -> impl Future<Output = Result<(), VolumeError>> {
        self.0.flush()
    }

    fn discard(&self, sector: Sector, sectors: Sectors) -> impl Future<Output = Result<(), VolumeError>> {
        self.0.discard(sector, sectors)
    }

    fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<(), VolumeError>> {
        self.0.write_zeroes(sector, sectors, flags)
    }

    fn status(
        &self,
        sector: Sector,
        sectors: Sectors,
    ) -> impl Future<Output = Result<Vec<RangeStatus>, VolumeError>> {
        self.0.status(sector, sectors)
    }
}
