//! Stopping a set: it takes no new requests, requests under way end, and all unwritten state is written to disk.
//!
//! Dirty data stays dirty. The format has no mark of a clean stop: a stopped set looks like a crashed set whose journal
//! has nothing left to replay. So the last entry of a stop has no keys and needs no older entry. A start that replays
//! keys therefore follows a crash, a stop by a kernel, or a stop whose journal had no room for that entry.
//!
//! Two sets with the same dirty data can be stopped in any order: the first stop ends the writes to both.

use super::components::Components;
use crate::error::EngineError;
use crate::journal::Urgency;
use crate::volume::uncouple_stopped;

/// Stops the volumes and the set; see [`CacheSet::stop`](super::CacheSet::stop).
pub(super) async fn stop(components: &Components) -> Result<(), EngineError> {
    let Components { cache, members, .. } = components;
    cache.device.begin_leaving();
    components.wiper.stop();
    components.scrubber.stop();
    cache.gc.stop_packing();
    let mut stopped = Ok(());
    // Volumes of other sets write their dirty data to this set, too.
    let volumes: Vec<_> = members.volumes().into_iter().chain(members.copies()).collect();
    for v in &volumes {
        stopped = stopped.and(v.stop().await);
    }
    // Insertions of misses, promotions and packing end, so no key changes any more.
    cache.tasks.all_ended().await;
    // A device that cannot be flushed must not keep the data of other devices from becoming durable.
    for b in cache.backings.all() {
        stopped = stopped.and(b.settle_direct_writes().await.map_err(EngineError::from));
    }
    let result = async {
        cache.device.check()?;
        cache.data.write_all_footers().await;
        cache.index.write_all_leaves().await?;
        cache.journal.commit_keys().await?;
        cache.device.settle_overwrites().await?;
        if cache.journal.wants_last_entry() {
            cache.journal.commit_roots(|| Urgency::Frees, |_| ()).await?;
        }
        Ok(())
    };
    let result = result.await;
    // A change of the UUID table that has begun ends first: it needs the journal.
    let _table = cache.uuids.lock().await;
    if result.is_ok() {
        // Otherwise the other set takes over, or records the loss.
        volumes.iter().for_each(|v| uncouple_stopped(v));
    }
    cache.device.stop();
    cache.journal.stop();
    components.wake_all();
    // Volumes and set have references to each other.
    members.clear();
    stopped.and(result)
}

/// Ends the set as a process crash does; see [`CacheSet::abandon`](super::CacheSet::abandon).
pub(super) fn abandon(components: &Components) {
    for v in components.members.volumes() {
        v.detached();
    }
    components.members.clear();
}
