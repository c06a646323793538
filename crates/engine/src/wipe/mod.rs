//! Wiping: overwriting data on the cache device that no volume of the set needs, so that it can no longer be read.
//!
//! Owns the order of the steps, and the report. A wipe overwrites with zeros every sector behind the journal that has
//! neither data of a volume of the set nor metadata: data of detached devices, data that was overwritten, discarded or
//! evicted, and the rest of buckets behind the end of metadata. So a wipe need not know which data belonged to which
//! device, and it can be repeated.
//!
//! A wipe first marks every bucket. A bucket that is taken into use later gets only data of volumes of the set, so it
//! needs no mark. The mark of a bucket is removed when its unneeded sectors are zeros:
//!
//! * *ready* buckets are taken out of the list, overwritten, and put back;
//! * buckets with *data*, or with nothing: a survey of the index finds the live sectors in them ([`live`]). All other
//!   sectors stay dead, because no data is placed in a full or closed bucket before its generation changes. Dead
//!   sectors are overwritten after the journal is durable, so that no crash can bring back a key that points to them.
//!   The bucket is pinned meanwhile;
//! * *open* buckets are closed, and are overwritten after the writes to them have ended;
//! * *metadata*: the rest of the bucket behind the end of a btree node, of the UUID table or of a prio set. Writes of
//!   these structures wait meanwhile.
//!
//! A read may have looked up a key before its data became dead, and read zeros. It finds a different
//! [`ReadEpoch`](crate::device::ReadEpoch) then, and looks the key up again.
//!
//! A discard does not wipe data: a device may still return the old data.

mod live;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use format::{BucketNr, Gen, Sector, Sectors};
use io::sync::Mutex;
use io::{Nanos, Op};

use self::live::Live;
use crate::alloc::Use;
use crate::error::EngineError;
use crate::index::NodeId;
use crate::refusal::{Cause, Refusal};
use crate::volume::Cache;

/// The largest number of requests under way, so that requests of clients do not wait too long.
const AT_ONCE: usize = 16;
/// The largest number of buckets that are pinned, or taken from the allocator, at a time.
const MOST_HELD: usize = 16;
/// The time to wait for other tasks when a pass has finished no bucket.
const RECHECK_INTERVAL: Nanos = Nanos::from_ms(20);

/// The state of the wipes of a set.
#[derive(Default)]
pub(crate) struct Wiper {
    /// Held during a wipe: there is one at a time.
    lock: Mutex,
    /// The number of finished buckets, and of all buckets of the wipe.
    progress: Cell<(u32, u32)>,
    stopping: Cell<bool>,
}

impl Wiper {
    /// The number of buckets that the wipe under way has finished, and of all its buckets.
    pub(crate) fn progress(&self) -> (u32, u32) {
        self.progress.get()
    }

    /// Ends the wipe under way, because the set is being stopped.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
    }
}

/// The report of a wipe.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Wiped {
    /// Buckets that have only zeros now.
    pub whole_buckets: u64,
    /// Buckets that have data of volumes or metadata, and zeros elsewhere.
    pub shared_buckets: u64,
    /// Sectors that were overwritten.
    pub zeroed: Sectors,
}

/// Overwrites with zeros all sectors that no volume of the set needs, durably: see the module head. Dropping the future
/// cancels the wipe; the sectors that were overwritten stay so.
///
/// # Errors
/// If the device fails a request, or the set fails or is stopped: some of the data is left, and another wipe removes
/// it.
pub(crate) async fn wipe(cache: &Rc<Cache>, wiper: &Rc<Wiper>) -> Result<Wiped, EngineError> {
    let cancelled = Rc::new(Cancelled::default());
    let _request = Request(cancelled.clone());
    let (theirs, wiper) = (cache.clone(), wiper.clone());
    // The wipe is a separate task, which ends only after its requests: a sector must not become free while it is being
    // overwritten.
    let task = cache.rt.spawn(async move {
        Wipe { cache: &theirs, wiper: &wiper, cancelled, done: Wiped::default() }.run().await
    });
    task.await
}

/// Tells the task of a wipe that its caller was dropped.
#[derive(Default)]
struct Cancelled(Cell<bool>);

/// Sets the flag when the future of the caller is dropped.
struct Request(Rc<Cancelled>);

impl Drop for Request {
    fn drop(&mut self) {
        self.0.0.set(true);
    }
}

/// A wipe that is under way.
struct Wipe<'a> {
    cache: &'a Rc<Cache>,
    wiper: &'a Wiper,
    cancelled: Rc<Cancelled>,
    done: Wiped,
}

impl Wipe<'_> {
    async fn run(mut self) -> Result<Wiped, EngineError> {
        let cache = self.cache;
        let _one = self.wiper.lock.lock().await;
        let _background = cache.tasks.begin();
        cache.alloc.mark_for_wipe();
        let all = cache.alloc.buckets().to_wipe();
        self.wiper.progress.set((0, all));
        let mut left = all;
        while left > 0 {
            cache.alloc.close_marked();
            let result = self.pass().await;
            let now = cache.alloc.buckets().to_wipe();
            result.map_err(|e| self.unfinished(&e))?;
            if now == left {
                cache.rt.sleep(RECHECK_INTERVAL).await;
            }
            left = now;
        }
        cache.device.flush(cache.device.latest_write()).await.map_err(|e| self.unfinished(&e))?;
        Ok(self.done)
    }

    /// Wipes the marked buckets that can be wiped now.
    async fn pass(&mut self) -> Result<(), EngineError> {
        self.wipe_ready().await?;
        self.wipe_data().await?;
        self.wipe_metadata().await
    }

    fn check(&self) -> Result<(), EngineError> {
        let cache = self.cache;
        cache.device.check()?;
        if self.cancelled.0.get() || self.wiper.stopping.get() || cache.device.is_stopping() {
            return Err(Refusal::Cancelled.into());
        }
        Ok(())
    }

    /// Records that a bucket is finished: its unneeded sectors are zeros.
    fn wiped(&self, b: BucketNr) {
        self.cache.alloc.wiped(b);
        let (done, all) = self.wiper.progress.get();
        self.wiper.progress.set((done + 1, all));
    }

    fn unfinished(&self, why: &EngineError) -> EngineError {
        let left = self.cache.alloc.buckets().to_wipe();
        let device = self.cache.device.place().device.clone();
        Refusal::WipeUnfinished { device, buckets: left, source: Cause::of(Arc::new(why.clone())) }.into()
    }

    /// Wipes ready buckets. No prio sets are written meanwhile, because the buckets that are taken out may include the
    /// reserve for them.
    async fn wipe_ready(&mut self) -> Result<(), EngineError> {
        let cache = self.cache;
        loop {
            self.check()?;
            let prios = cache.alloc.hold_prios().await;
            let taken = cache.alloc.take_ready(MOST_HELD, |b| cache.alloc.buckets().is_to_wipe(b));
            if taken.is_empty() {
                return Ok(());
            }
            let size = cache.geometry.bucket_sectors;
            let whole: Vec<_> = taken.iter().map(|b| (cache.geometry.bucket_start(*b), size)).collect();
            let result = self.zero(&whole).await;
            if result.is_ok() {
                taken.iter().for_each(|b| self.wiped(*b));
                self.done.whole_buckets += taken.len() as u64;
            }
            cache.alloc.put_ready(taken);
            drop(prios);
            result?;
            cache.rt.yield_now().await;
        }
    }

    /// Wipes the dead sectors of buckets with data or with nothing.
    async fn wipe_data(&mut self) -> Result<(), EngineError> {
        let cache = self.cache;
        let chosen = {
            let buckets = cache.alloc.buckets();
            let idle = |b: &BucketNr| {
                buckets.is_to_wipe(*b) && buckets.used(*b) == Use::Data && buckets.pins(*b) == 0
            };
            let most = live::most_buckets(&cache.geometry);
            buckets.all().filter(idle).map(|b| (b, buckets.generation(b))).take(most).collect::<Vec<_>>()
        };
        if chosen.is_empty() {
            return Ok(());
        }
        let live = live::survey(cache, &chosen).await?;
        // After this commit no crash brings back a key that points to sectors that are dead.
        cache.journal.commit_keys().await?;
        cache.device.next_read_epoch();
        let most = (cache.geometry.nbuckets as usize / 64).clamp(1, MOST_HELD);
        for group in chosen.chunks(most) {
            self.check()?;
            self.wipe_dead(group, &live).await?;
            cache.rt.yield_now().await;
        }
        Ok(())
    }

    /// Overwrites the dead sectors of some buckets, except buckets that have changed since the survey.
    async fn wipe_dead(&mut self, group: &[(BucketNr, Gen)], live: &Live) -> Result<(), EngineError> {
        let cache = self.cache;
        let mut held = Vec::with_capacity(group.len());
        held.extend(
            group.iter().filter(|(b, generation)| cache.alloc.pin_idle(*b, *generation)).map(|(b, _)| *b),
        );
        let dead: Vec<_> = held.iter().flat_map(|b| live.dead_in(*b)).collect();
        let result = self.zero(&dead).await;
        for b in held {
            cache.alloc.unpin_idle(b);
            if result.is_ok() {
                self.wiped(b);
                if live.is_empty(b) {
                    self.done.whole_buckets += 1;
                } else {
                    self.done.shared_buckets += 1;
                }
            }
        }
        cache.alloc.recheck();
        result
    }

    /// Wipes the rest of buckets behind the end of metadata.
    async fn wipe_metadata(&mut self) -> Result<(), EngineError> {
        let cache = self.cache;
        let marked: Vec<NodeId> = {
            let (tree, buckets) = (cache.index.tree(), cache.alloc.buckets());
            let is_marked = |id: &NodeId| buckets.is_to_wipe(buckets.bucket_of(tree.node(*id).ptr));
            tree.ids().filter(is_marked).collect()
        };
        for id in marked {
            self.check()?;
            self.wipe_behind_node(id).await?;
        }
        {
            let _config = cache.uuids.lock().await;
            let key = cache.journal.roots().uuid_bucket;
            if let Some(p) = key.pointer() {
                self.wipe_behind(p.offset() + key.size()).await?;
            }
        }
        let _prios = cache.alloc.hold_prios().await;
        // Prio sets that were read at the start may have another size than those that this engine writes.
        cache.alloc.own_prios().await?;
        for b in cache.alloc.prio_chain() {
            self.wipe_behind(cache.geometry.bucket_start(b) + cache.geometry.meta_sectors).await?;
        }
        Ok(())
    }

    /// Wipes the rest of the bucket of a node, which is neither written nor replaced meanwhile.
    async fn wipe_behind_node(&mut self, id: NodeId) -> Result<(), EngineError> {
        let cache = self.cache;
        let Some(node) = cache.index.claim_node(id).await? else { return Ok(()) };
        self.wipe_behind(node.end).await
    }

    /// Wipes the rest of a bucket behind `end`, the end of the metadata in it.
    async fn wipe_behind(&mut self, end: Sector) -> Result<(), EngineError> {
        let cache = self.cache;
        let size = cache.geometry.bucket_sectors.0;
        let bucket = BucketNr(((end.0 - 1) / size) as u32);
        if !cache.alloc.buckets().is_to_wipe(bucket) {
            return Ok(());
        }
        let rest = Sector((u64::from(bucket.0) + 1) * size) - end;
        if rest > Sectors::ZERO {
            self.zero(&[(end, rest)]).await?;
        }
        self.wiped(bucket);
        self.done.shared_buckets += 1;
        Ok(())
    }

    /// Overwrites ranges with zeros. All requests have ended when this returns.
    async fn zero(&mut self, ranges: &[(Sector, Sectors)]) -> Result<(), EngineError> {
        let cache = self.cache;
        for some in ranges.chunks(AT_ONCE) {
            let tasks: Vec<_> = some
                .iter()
                .map(|(at, size)| {
                    let (cache, at, size) = (cache.clone(), *at, *size);
                    cache.rt.clone().spawn(async move { erase(&cache, at, size).await })
                })
                .collect();
            let mut result = Ok(());
            for (t, (_, size)) in tasks.into_iter().zip(some) {
                match t.await {
                    Ok(()) => self.done.zeroed += *size,
                    Err(e) => result = Err(e),
                }
            }
            cache.device.wrote();
            result?;
        }
        Ok(())
    }
}

/// Makes a range read as zeros.
async fn erase(cache: &Cache, at: Sector, size: Sectors) -> Result<(), EngineError> {
    // Zeros would take room in a sparse file, and the file system may not have room for all buckets.
    if cache.device.disk().info().sparse
        && cache.device.disk().info().discard
        && makes_hole(cache, at, size).await
    {
        return Ok(());
    }
    let done = cache.device.disk().start_plain(Op::WriteZeroes { may_unmap: true }, at, size).await;
    cache.device.observe_data(&done.result);
    Ok(done.result?)
}

/// Discards a range; returns whether it reads as zeros afterwards.
async fn makes_hole(cache: &Cache, at: Sector, size: Sectors) -> bool {
    /// The size of each read.
    const PART: Sectors = Sectors(2048);
    if let Err(e) = cache.device.disk().discard(at, size).await {
        cache.device.discard_failed(&e);
        return false;
    }
    let end = at + size;
    let mut from = at;
    while from < end {
        let part = PART.min(end - from);
        let buffer = cache.rt.pool().take(part.bytes() as usize);
        let (buffer, result) = cache.device.disk().read(from, buffer).await;
        cache.device.observe_data(&result);
        if result.is_err() || buffer.as_slice().iter().any(|b| *b != 0) {
            return false;
        }
        from += part;
    }
    true
}

#[cfg(test)]
mod tests;
