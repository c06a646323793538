//! Overwriting what no volume of the set needs any more, so that nobody can read it on the cache device.
//!
//! Owns the order in which that is safe, and the report. A wipe overwrites with zeros every sector behind the journal
//! that holds neither data of a volume of the set nor metadata: data of devices that were detached, what was
//! overwritten, discarded or evicted, and what is left behind the end of metadata. So it need not know whose data was
//! where, and can be run again.
//!
//! Every bucket is marked first. A bucket that is taken into use later gets data of volumes of the set alone, so it needs
//! no mark. A mark goes when the bucket's unneeded sectors are zeros:
//!
//! * *ready* buckets are taken out of the list, and put back;
//! * buckets with *data*, or nothing: the index is surveyed for what is live in them ([`live`]). What is not, is dead for
//!   good: nothing is placed in a bucket that is full or closed before its generation changes. Dead sectors are
//!   overwritten once the journal is durable: a crash must not bring back a key that names them. The bucket is pinned
//!   meanwhile;
//! * *open* buckets are closed, and wait until what is on its way to them has arrived;
//! * *metadata*: what is behind the end of a btree node, of the UUID table, of a prio set. Whoever writes these waits.
//!
//! A reader may have looked a key up before it died, and read zeros. Its [`Turn`](crate::device::Turn) tells it: it looks again.
//!
//! Discard is no way to wipe: a device may return the old data for ever.

mod live;

use std::cell::Cell;
use std::rc::Rc;

use format::{BucketNr, Gen, Sector, Sectors};
use io::sync::Mutex;
use io::{Nanos, Op};

use self::live::Live;
use crate::alloc::Use;
use crate::error::EngineError;
use crate::index::NodeId;
use crate::volume::Cache;

/// Requests under way at most, so that those of clients find room between them.
const AT_ONCE: usize = 16;
/// Buckets that are pinned, or kept from the allocator, at a time.
const MOST_HELD: usize = 16;
/// How long to wait for others when there was nothing to do.
const RECHECK_INTERVAL: Nanos = Nanos::from_ms(20);

/// What a set knows about its wipes.
#[derive(Default)]
pub(crate) struct Wiper {
    /// One at a time.
    lock: Mutex,
    /// Buckets that are done, and all of them.
    progress: Cell<(u32, u32)>,
    stopping: Cell<bool>,
}

impl Wiper {
    /// How many buckets the wipe that is under way has done, and how many there are.
    pub(crate) fn progress(&self) -> (u32, u32) {
        self.progress.get()
    }

    /// The set is being stopped: a wipe ends where it is.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
    }
}

/// What a wipe has done.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Wiped {
    /// Buckets that hold nothing but zeros now.
    pub whole_buckets: u64,
    /// Buckets that hold data of volumes or metadata, and zeros elsewhere.
    pub shared_buckets: u64,
    /// What was overwritten.
    pub zeroed: Sectors,
}

/// Overwrites with zeros whatever no volume of the set needs, durably: see the module head. Dropping the future gives it up;
/// what is done stays done.
///
/// # Errors
/// If the device refuses, or the set fails or is stopped: some of the data is still there, and another wipe removes it.
pub(crate) async fn wipe(cache: &Rc<Cache>, wiper: &Rc<Wiper>) -> Result<Wiped, EngineError> {
    let given_up = Rc::new(GivenUp::default());
    let _request = Request(given_up.clone());
    let (theirs, wiper) = (cache.clone(), wiper.clone());
    // A task of its own: a sector that is being overwritten must not become free before that has ended.
    let task = cache.rt.spawn(async move {
        Wipe { cache: &theirs, wiper: &wiper, given_up, done: Wiped::default() }.run().await
    });
    task.await
}

#[derive(Default)]
struct GivenUp(Cell<bool>);

struct Request(Rc<GivenUp>);

impl Drop for Request {
    fn drop(&mut self) {
        self.0.0.set(true);
    }
}

struct Wipe<'a> {
    cache: &'a Rc<Cache>,
    wiper: &'a Wiper,
    given_up: Rc<GivenUp>,
    done: Wiped,
}

impl Wipe<'_> {
    async fn run(mut self) -> Result<Wiped, EngineError> {
        let cache = self.cache;
        let _one = self.wiper.lock.lock().await;
        let _background = cache.tasks.begin();
        cache.alloc.buckets_mut().mark_for_wipe();
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
        cache.device.flush(cache.device.gate().latest()).await.map_err(|e| self.unfinished(&e))?;
        Ok(self.done)
    }

    /// What can be done now.
    async fn pass(&mut self) -> Result<(), EngineError> {
        self.wipe_ready().await?;
        self.wipe_data().await?;
        self.wipe_metadata().await
    }

    fn check(&self) -> Result<(), EngineError> {
        let cache = self.cache;
        cache.device.check()?;
        if self.given_up.0.get() || self.wiper.stopping.get() || cache.device.is_stopping() {
            return Err(EngineError::Invalid("given up before its end".into()));
        }
        Ok(())
    }

    /// What is not needed in a bucket is zeros.
    fn wiped(&self, b: BucketNr) {
        self.cache.alloc.buckets_mut().wiped(b);
        let (done, all) = self.wiper.progress.get();
        self.wiper.progress.set((done + 1, all));
    }

    fn unfinished(&self, why: &EngineError) -> EngineError {
        let left = self.cache.alloc.buckets().to_wipe();
        EngineError::Invalid(format!(
            "{}: wipe: {left} buckets may still hold data that nothing refers to: {why}: run `ubcache wipe` for this set",
            self.cache.device.place().device
        ))
    }

    /// Buckets that are ready for use. Nobody writes prio sets meanwhile: their reserve may be among those taken out.
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

    /// Buckets that hold data, or nothing.
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
        // No crash brings back a key that names what is dead now.
        cache.journal.commit_keys().await?;
        cache.device.next_turn();
        let most = (cache.geometry.nbuckets as usize / 64).clamp(1, MOST_HELD);
        for group in chosen.chunks(most) {
            self.check()?;
            self.wipe_dead(group, &live).await?;
            cache.rt.yield_now().await;
        }
        Ok(())
    }

    /// Overwrites what is dead in a few buckets that are as they were when that was looked at.
    async fn wipe_dead(&mut self, group: &[(BucketNr, Gen)], live: &Live) -> Result<(), EngineError> {
        let cache = self.cache;
        let mut held = Vec::with_capacity(group.len());
        {
            let buckets = &mut *cache.alloc.buckets_mut();
            for (b, generation) in group.iter().copied() {
                let same = buckets.generation(b) == generation && buckets.used(b) == Use::Data;
                if same && buckets.pins(b) == 0 {
                    buckets.pin(b);
                    held.push(b);
                }
            }
        }
        let dead: Vec<_> = held.iter().flat_map(|b| live.dead_in(*b)).collect();
        let result = self.zero(&dead).await;
        for b in held {
            cache.alloc.buckets_mut().unpin(b);
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

    /// What lies behind the end of metadata.
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
        // Sets that were found at start may be of another size.
        cache.alloc.own_prios().await?;
        for b in cache.alloc.prio_chain() {
            self.wipe_behind(cache.geometry.bucket_start(b) + cache.geometry.meta_sectors).await?;
        }
        Ok(())
    }

    /// The node is neither written nor replaced meanwhile.
    async fn wipe_behind_node(&mut self, id: NodeId) -> Result<(), EngineError> {
        let cache = self.cache;
        let Some(node) = cache.index.claim_node(id).await? else { return Ok(()) };
        self.wipe_behind(node.end).await
    }

    /// The rest of the bucket in which `end` is the end of metadata.
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

    /// Overwrites ranges. All requests have ended when this returns.
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
            cache.device.gate().wrote();
            result?;
        }
        Ok(())
    }
}

/// Makes a range read as zeros.
async fn erase(cache: &Cache, at: Sector, size: Sectors) -> Result<(), EngineError> {
    // Zeros would take room in a file with holes, which may have more buckets than there is room for.
    if cache.device.disk().info().sparse
        && cache.device.disk().info().discard
        && makes_hole(cache, at, size).await
    {
        return Ok(());
    }
    let done = cache.device.disk().start_plain(Op::WriteZeroes, at, size).await;
    cache.device.observe_data(&done.result);
    Ok(done.result?)
}

/// Discards a range, and looks whether that has made it zeros.
async fn makes_hole(cache: &Cache, at: Sector, size: Sectors) -> bool {
    /// What is looked at at a time.
    const PART: Sectors = Sectors(2048);
    if cache.device.disk().discard(at, size).await.is_err() {
        return false;
    }
    let end = at + size;
    let mut from = at;
    while from < end {
        let part = PART.min(end - from);
        let buffer = cache.rt.pool().take(part.bytes() as usize);
        let (buffer, result) = cache.device.disk().read(from, buffer).await;
        if result.is_err() || buffer.as_slice().iter().any(|b| *b != 0) {
            return false;
        }
        from += part;
    }
    true
}
