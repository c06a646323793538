//! Putting into the cache what a read found missing.
//!
//! Happens behind the reader's back. The data was read from the backing device under a *miss* range: if a change
//! overlapped it, the copy may be old and is dropped (`cache_miss_collisions`). The key goes to its leaf only, not
//! to the journal: losing it costs a miss.

use std::rc::Rc;

use format::{Inode, Sector, Sectors};
use io::Buffer;

use super::{RangeGuard, Volume};
use crate::alloc::{Purpose, Stream};
use crate::canary::{Bug, bug};
use crate::index::{Blocked, How, Kind, Segment};
use crate::set::Core;

/// Inserts under way at most, and how much memory their data may hold; beyond that a miss is just answered.
const MAX_BACKGROUND: usize = 128;
const MAX_BACKGROUND_BYTES: usize = 16 << 20;

impl Volume {
    /// Starts inserting `[start, end)`, whose data is in `data` from byte `skip` on. `meta`: it is a file system's metadata.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn insert_miss(
        self: &Rc<Self>,
        core: &Rc<Core>,
        inode: Inode,
        (start, end): (Sector, Sector),
        data: Buffer,
        skip: usize,
        miss: RangeGuard,
        meta: bool,
    ) {
        // Whole blocks only.
        let block = core.geometry.block_sectors.0;
        let first = Sector(start.0.next_multiple_of(block));
        let last = Sector(end.0 / block * block);
        let held_bytes = core.inserting_bytes.get() + data.capacity();
        if first >= last || core.background.get() >= MAX_BACKGROUND || held_bytes > MAX_BACKGROUND_BYTES {
            return;
        }
        let skip = skip + (first - start).bytes() as usize;
        let again = core.reuse().is_some_and(|mut reuse| reuse.miss(inode, start));
        let stream = match (meta, again) {
            (true, _) => Stream::Meta,
            (false, true) => Stream::Kept,
            (false, false) => Stream::Clean,
        };
        let (volume, core) = (self.clone(), core.clone());
        let background = core.background();
        core.inserting_bytes.set(held_bytes);
        let bytes = data.capacity();
        self.rt.spawn(async move {
            volume.insert_pieces(&core, stream, inode, first, last, data, skip, miss).await;
            core.inserting_bytes.set(core.inserting_bytes.get() - bytes);
            drop(background);
        });
    }

    #[allow(clippy::too_many_arguments)]
    async fn insert_pieces(
        self: &Rc<Self>,
        core: &Rc<Core>,
        stream: Stream,
        inode: Inode,
        start: Sector,
        end: Sector,
        data: Buffer,
        skip: usize,
        miss: RangeGuard,
    ) {
        let mut at = start;
        // Nothing of a device that was detached may reach the cache device: a wipe may have passed.
        while at < end && self.is_attached_as(core, inode) {
            let Some(placed) = core.try_place(stream, (inode, at), end - at) else {
                // Nobody waits for this, so it can wait for buckets; not for dirty data to go away, though.
                let give_up = || core.is_stopping() || core.alloc.starved.get();
                if miss.is_valid() && !give_up() {
                    core.alloc.wait(Purpose::Data, give_up).await;
                    continue;
                }
                self.not_cached(end - at);
                return;
            };
            let offset = skip + (at - start).bytes() as usize;
            let done = core.write_data(placed.ptr.offset(), placed.size, data.clone(), offset).await;
            core.observe_cache_io(&done.result);
            let ok = done.result.is_ok();
            let tick = core.gate.wrote();
            let piece_end = at + placed.size;
            if ok {
                self.insert_where_hole(core, inode, (at, piece_end), placed.ptr, How::LeafOnly(tick), &miss)
                    .await;
            }
            core.release(placed);
            if !ok {
                return;
            }
            at = piece_end;
        }
    }

    /// Inserts a clean copy where the index still has a hole and nothing changed the range.
    async fn insert_where_hole(
        self: &Rc<Self>,
        core: &Rc<Core>,
        inode: Inode,
        (start, end): (Sector, Sector),
        ptr: format::Ptr,
        how: How,
        miss: &RangeGuard,
    ) {
        let mut at = start;
        let mut collided = false;
        while at < end {
            // Everything up to the change itself is looked at anew after each wait.
            let mine = self.is_attached_as(core, inode);
            if !mine || core.is_stopping() || !(miss.is_valid() || bug(Bug::MissOverNewerWrite)) {
                collided = true;
                break;
            }
            let blocked = match core.segment(inode, at, end) {
                Err(e) => e.into(),
                Ok(Segment { kind: Kind::Hole { seq: Some(seq) }, .. })
                    if seq > core.journal.durable() && !bug(Bug::MissOverPendingHole) =>
                {
                    // The hole hides an older key until its entry is durable, and the copy would hide the entry: a
                    // durable write past the cache must find it and wait for it.
                    Blocked::NotDurable(seq)
                }
                Ok(seg) if matches!(seg.kind, Kind::Hole { .. }) || bug(Bug::MissOverNewerWrite) => {
                    let here = ptr.advanced(at - start);
                    match core.try_change(inode, at, seg.end, Some((here, false)), how) {
                        Ok((done, _)) => {
                            at = done;
                            continue;
                        }
                        Err(b) => b,
                    }
                }
                Ok(seg) => {
                    collided = true;
                    at = seg.end;
                    continue;
                }
            };
            if core.unblock(blocked).await.is_err() {
                return;
            }
        }
        if collided {
            self.stats.borrow_mut().miss_collision();
            core.stats.borrow_mut().miss_collision();
        }
    }

    /// Inserts clean copies that a write-through has just written to both devices. The caller holds the range.
    pub(super) async fn insert_written(
        &self,
        core: &Rc<Core>,
        inode: Inode,
        start: Sector,
        size: Sectors,
        ptr: format::Ptr,
    ) -> Result<(), crate::error::EngineError> {
        let tick = core.gate.wrote();
        core.change(inode, start, start + size, Some((ptr, false)), How::LeafOnly(tick)).await?;
        Ok(())
    }
}
