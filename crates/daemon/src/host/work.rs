//! Jobs on the volumes of one thread: detach, drain, scrub and wipe.
//!
//! Owns their progress and their cancellation. Must not know the list of jobs.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use engine::Volume;
use format::{counted, form};
use io::Nanos;
use io::sync::{Either, select};
use serve::snapshot::Scrubbed;
use serve::{Failure, plain};

use super::Host;
use super::disabled::{self, Needs};
use crate::jobs::{End, Job, RunningJob};
use crate::order::Progress;
use crate::why::SharedFailure;

/// Interval at which a job reports its progress and checks for cancellation.
const JOB_TICK: Nanos = Nanos::from_ms(100);

impl Host<'_> {
    pub(super) async fn detach(&self, name: &str, wipe: bool, job: &Job) -> Result<End, Failure> {
        let set = self.session.needs_set()?;
        let volume = self.session.volume(name)?;
        disabled::refuse(self, &Needs::Detach(&volume))?;
        let total = volume.dirty_sectors().bytes();
        let left = || volume.dirty_sectors().bytes();
        let Some(drained) = self.watched(job, total, left, set.begin_detach(&volume)).await else {
            return Ok(End::Cancelled);
        };
        let why = |e| disabled::refuse(self, &Needs::Detach(&volume)).err().unwrap_or(Failure::from(e));
        let guard = match drained {
            Err(e) if self.is_stopped(&volume) => {
                return Ok(overtaken(left(), std::error::Error::source(&e)));
            }
            drained => drained.map_err(why)?,
        };
        set.detach(&volume).await.map_err(why)?;
        drop(guard);
        if !wipe {
            return Ok(End::Done);
        }
        self.session.log_events();
        let why = match self.wipe(job).await {
            Ok(End::Cancelled) => {
                let typed = plain::typed(&set.status().label, &set.uuid().to_string()).to_owned();
                format!("the wipe was cancelled: run `ubcache wipe {typed}`")
            }
            Err(e) => e.message().unwrap_or("the wipe failed").to_owned(),
            done => return done,
        };
        Err(serve::not_wiped(why))
    }

    /// Overwrites the space on the cache device that no volume needs.
    pub(super) async fn wipe(&self, job: &Job) -> Result<End, Failure> {
        let set = self.session.needs_set()?;
        disabled::refuse(self, &Needs::Cache)?;
        let status = set.status();
        let bytes = |buckets: u32| status.bucket_sectors.bytes().saturating_mul(u64::from(buckets));
        let total = bytes(status.nbuckets);
        let left = || total.saturating_sub(bytes(set.wipe_progress().0));
        match self.watched(job, total, left, Box::pin(set.wipe())).await {
            None => Ok(End::Cancelled),
            Some(wiped) => {
                let wiped = serve::Wiped::from(wiped.map_err(Failure::from)?);
                job.reports(serde_json::json!({"wiped": wiped}));
                Ok(End::Done)
            }
        }
    }

    /// Reads all cached data and compares it with its checksums. The job fails if data is damaged, and its report says how much.
    pub(super) async fn scrub(&self, job: &Job) -> Result<End, Failure> {
        let set = self.session.needs_set()?;
        disabled::refuse(self, &Needs::Cache)?;
        let progress = || set.scrub_figures();
        // A scrub that the schedule has begun ends first.
        let total = set.status().cached_sectors.bytes();
        let left = || {
            let now = progress();
            now.total.bytes().saturating_sub(now.done.bytes()).min(total)
        };
        let scrubbed = match self.watched(job, total, left, Box::pin(set.scrub())).await {
            None => return Ok(End::Cancelled),
            Some(scrubbed) => Scrubbed::from(scrubbed.map_err(Failure::from)?),
        };
        job.reports(serde_json::json!({"scrubbed": scrubbed}));
        match has_failed(&scrubbed, plain::typed(&set.status().label, &set.uuid().to_string())) {
            None => Ok(End::Done),
            Some(why) => Err(Failure::Failed(why)),
        }
    }

    pub(super) async fn flush(&self, name: Option<&str>, job: &Job) -> Result<End, Failure> {
        let volumes = match name {
            Some(name) => vec![self.session.volume(name)?],
            None => self.session.volumes(),
        };
        let dirty = || {
            let cached = volumes.iter().filter(|v| !v.is_flash_only());
            cached.map(|v| v.dirty_sectors().bytes()).sum::<u64>()
        };
        let needs = Needs::Drain(name.and(volumes.first()));
        disabled::refuse(self, &needs)?;
        // The drains run concurrently, because the devices are independent.
        let parts = volumes.iter().map(|v| Box::pin(v.drained())).collect();
        match self.watched(job, dirty(), dirty, all(parts)).await {
            None => Ok(End::Cancelled),
            Some(Err(e)) if name.is_some() && volumes.iter().all(|volume| self.is_stopped(volume)) => {
                Ok(overtaken(dirty(), std::error::Error::source(&e)))
            }
            Some(drained) => {
                let why = |e| disabled::refuse(self, &needs).err().unwrap_or(Failure::from(e));
                drained.map_err(why)?;
                match name {
                    None => self.nothing_stays_dirty().map(|()| End::Done),
                    Some(_) => Ok(End::Done),
                }
            }
        }
    }

    /// Fails if the cache has dirty data of backing devices that are not registered: writeback needs the device.
    fn nothing_stays_dirty(&self) -> Result<(), Failure> {
        let Ok(set) = self.session.needs_set() else { return Ok(()) };
        let left = set.dirty_without_volume();
        if left.is_empty() {
            return Ok(());
        }
        let bytes: u64 = left.iter().map(|(_, sectors)| sectors.bytes()).sum();
        let devices: Vec<String> =
            left.into_iter().map(|(device, _)| plain::label(&device).into_owned()).collect();
        Err(Failure::Failed(format!(
            "{} stay dirty, of backing devices that are not registered: {}; register them and drain again",
            serve::amount::human(bytes),
            devices.join(", ")
        )))
    }

    /// Whether another command has stopped the volume, or is stopping it and has ended its exports.
    fn is_stopped(&self, volume: &Rc<Volume>) -> bool {
        self.with(volume, |served| served.stopped) != Some(false)
    }

    /// Runs `work`, reports its progress, and drops it on cancellation.
    async fn watched<T>(
        &self,
        job: &Job,
        total: u64,
        left: impl Fn() -> u64,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = pin!(work);
        job.progress(0, total);
        loop {
            match select(work.as_mut(), self.driver.handle().sleep(JOB_TICK)).await {
                Either::Left(done) => return Some(done),
                Either::Right(()) => {
                    job.progress(total.saturating_sub(left()), total);
                    if job.is_cancelled() || self.stopping.get() {
                        return None;
                    }
                }
            }
        }
    }
}

/// The end of a job whose volume was stopped, with the dirty data that it leaves, and the last error of writeback if there was one.
fn overtaken(left_bytes: u64, error: Option<&dyn std::error::Error>) -> End {
    let left = serve::amount::human(left_bytes);
    let error = error.map(|e| format!("; the last error of writeback: {e}")).unwrap_or_default();
    End::Overtaken(format!(
        "the volume was stopped before all was written back; {left} of dirty data stay in the cache{error}"
    ))
}

/// Why a scrub has failed; `None` if it has not. Damaged clean data alone is no failure, because the disk has it.
fn has_failed(scrubbed: &Scrubbed, set: &str) -> Option<String> {
    let Scrubbed {
        damaged_dirty_blocks: dirty,
        unreadable_blocks: unreadable,
        damaged_clean_blocks: clean,
        ..
    } = *scrubbed;
    let mut found = Vec::new();
    if dirty > 0 {
        found.push(format!("{} of dirty data {} damaged", counted(dirty, "block"), form(dirty, "is", "are")));
    }
    if unreadable > 0 {
        found.push(format!(
            "{} could not be read from the cache device, and the disk has what is clean of {}",
            counted(unreadable, "block"),
            form(unreadable, "it", "them")
        ));
    }
    if found.is_empty() {
        return None;
    }
    if clean > 0 {
        let were = form(clean, "was", "were");
        found.push(format!("{} of clean data {were} damaged and dropped", counted(clean, "block")));
    }
    let next = match dirty {
        0 => "ubcache events --since 1d".to_owned(),
        _ => format!("ubcache damaged {set}"),
    };
    Some(format!("{}; run `{next}`", found.join("; ")))
}

/// Ends a job. If it ended because its set stops and the daemon does not, it has failed: no client has cancelled it.
pub(super) fn end_of(host: &Host<'_>, job: &RunningJob, result: Result<End, Failure>) {
    let is_cut = !job.0.is_cancelled() && host.stopping.get() && !host.shared.is_stopping();
    job.0.ended(match result {
        Ok(End::Cancelled) if is_cut => {
            End::Failed(SharedFailure::of_words(host.ends_before(Progress::Running)))
        }
        Ok(end) => end,
        Err(e) => End::Failed(e.into()),
    });
}

/// Waits for all parts, and returns the first error.
async fn all<E>(mut parts: Vec<Pin<Box<impl Future<Output = Result<(), E>>>>>) -> Result<(), E> {
    let mut result = Ok(());
    poll_fn(|cx| {
        parts.retain_mut(|part| match part.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(())) => false,
            Poll::Ready(Err(e)) => {
                if result.is_ok() {
                    result = Err(e);
                }
                false
            }
        });
        if parts.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of a scrub that had failed left out what was dropped, and called blocks that cannot be read damaged.
    #[test]
    fn the_failure_of_a_scrub_counts_each_kind_of_blocks() {
        let scrubbed = |damaged_dirty_blocks, unreadable_blocks, damaged_clean_blocks| {
            let report = Scrubbed {
                damaged_dirty_blocks,
                unreadable_blocks,
                damaged_clean_blocks,
                ..Scrubbed::default()
            };
            has_failed(&report, "fast")
        };
        assert_eq!(scrubbed(0, 0, 3), None);
        assert_eq!(
            scrubbed(1, 0, 2).unwrap(),
            "1 block of dirty data is damaged; 2 blocks of clean data were damaged and dropped; run `ubcache damaged fast`"
        );
        assert_eq!(
            scrubbed(0, 4, 1).unwrap(),
            "4 blocks could not be read from the cache device, and the disk has what is clean of them; 1 block of clean data was \
             damaged and dropped; run `ubcache events --since 1d`"
        );
        assert!(
            scrubbed(2, 1, 0)
                .unwrap()
                .starts_with("2 blocks of dirty data are damaged; 1 block could not be read ")
        );
    }
}
