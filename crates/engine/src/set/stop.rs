//! Stopping a set: it takes no new requests, requests under way end, and all unwritten state is written to disk.
//!
//! Dirty data stays dirty. The format has no mark of a clean stop: a stopped set looks like a crashed set whose journal
//! has nothing left to replay.

use super::CacheSet;
use crate::error::EngineError;
use crate::journal::Urgency;

impl CacheSet {
    /// Stops the volumes and the set. Every answered write is durable afterwards.
    ///
    /// # Errors
    /// If a write or flush failed; data whose flush was answered before is durable in this case, too.
    pub async fn stop(&self) -> Result<(), EngineError> {
        let core = &self.core;
        core.wiper.stop();
        let mut stopped = Ok(());
        for v in self.volumes() {
            stopped = stopped.and(v.stop().await);
        }
        // Waits for misses that are being inserted.
        core.cache.tasks.all_ended().await;
        // A device that cannot be flushed does not keep the data of others from becoming durable.
        for b in core.cache.backings.all() {
            stopped = stopped.and(b.settle_direct_writes().await.map_err(EngineError::from));
        }
        let result = async {
            core.cache.device.check()?;
            core.cache.index.write_all_leaves().await?;
            core.cache.journal.commit_keys().await?;
            core.cache.device.settle_overwrites().await?;
            if core.cache.journal.can_advance() {
                core.cache.journal.commit_roots(|| Urgency::Frees, |_| ()).await?;
            }
            Ok(())
        };
        let result = result.await;
        core.cache.device.stop();
        core.cache.journal.stop();
        core.wake_all();
        // Volumes and set have references to each other.
        core.clear();
        stopped.and(result)
    }

    /// Ends the set as a process crash does: writes nothing and waits for nothing. The caller has dropped the tasks of
    /// the runtime; this function drops the references that would keep the set alive.
    pub fn abandon(self) {
        for v in self.core.volumes() {
            v.detached();
        }
        self.core.clear();
    }
}
