//! Stopping a set: nothing new, what is under way ends, everything that is not on disk goes there.
//!
//! Dirty data stays dirty. There is no mark of cleanliness on disk: a stopped set looks like a crashed one whose
//! journal has nothing left to replay.

use super::CacheSet;
use crate::error::EngineError;
use crate::journal::Urgency;

impl CacheSet {
    /// Stops the volumes and the set. Everything that was written is durable afterwards.
    ///
    /// # Errors
    /// If something could not be written; what a flush acknowledged is durable all the same.
    pub async fn stop(&self) -> Result<(), EngineError> {
        let core = &self.core;
        core.wiper.stop();
        let mut stopped = Ok(());
        for v in self.volumes() {
            stopped = stopped.and(v.stop().await);
        }
        // Misses being inserted.
        core.cache.tasks.all_ended().await;
        // One that cannot be flushed does not keep what others wrote from becoming durable.
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
        // Volumes and set hold each other.
        core.clear();
        stopped.and(result)
    }

    /// Gives the set up where it stands, as the death of the process does: nothing is written, nothing is waited
    /// for. The caller has dropped the runtime's tasks; this drops what would keep itself alive.
    pub fn abandon(self) {
        for v in self.core.volumes() {
            v.detached();
        }
        self.core.clear();
    }
}
