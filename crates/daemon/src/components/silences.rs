//! Devices that have requests and answer none of them.
//!
//! Owns the times at which each device answered last, by the samples of the figures, and the events when a device stops to
//! answer and when it answers again. A request has no cost for this. Must not know how figures are sampled.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use format::{counted, form};
use metrics::DeviceLoad;
use serve::{message, plain};

use crate::hub::{Hub, Kind};

/// Time without an answer to any request after which a device does not answer. Requests to a healthy device that is busy end
/// sooner.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(10);

/// A device that does not answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Silent {
    /// Identifier of the thread that serves it.
    pub(crate) thread: String,
    /// Name of its volume; `None` for a cache device.
    pub(crate) volume: Option<String>,
    pub(crate) device: String,
    /// Label of its volume or set; empty if there is none.
    pub(crate) label: String,
    /// The requests in flight.
    pub(crate) requests: u64,
    /// The time since the last answer, or since the oldest of these requests if that is shorter.
    pub(crate) seconds: u64,
}

impl Silent {
    /// The device and its label, the time, and the requests that wait.
    pub(crate) fn in_words(&self) -> String {
        format!(
            "{} has not answered for {} s: {} to it {}",
            plain::named(&self.label, &self.device),
            self.seconds,
            counted(self.requests, "request"),
            form(self.requests, "waits", "wait")
        )
    }
}

struct LastAnswer {
    answered: u64,
    /// The time of the first sample with this number of answers.
    since: Instant,
    /// The present silence, whose begin was published.
    silent: Option<Silent>,
}

/// The devices of all threads.
pub(crate) struct Silences {
    hub: Arc<Hub>,
    answers: Mutex<BTreeMap<(String, String), LastAnswer>>,
}

impl Silences {
    pub(crate) fn new(hub: Arc<Hub>) -> Silences {
        Silences { hub, answers: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, String), LastAnswer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The devices that do not answer, by the last sample.
    pub(crate) fn all(&self) -> Vec<Silent> {
        self.lock().values().filter_map(|last| last.silent.clone()).collect()
    }

    /// Forgets the devices of threads that have ended.
    pub(crate) fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.lock().retain(|(thread, _), _| is_there(thread));
    }

    /// Takes a sample of a thread: the requests of all its devices. Publishes what has changed.
    pub(crate) fn take(&self, thread: &str, load: &[DeviceLoad], now: Instant) {
        // The log can wait for its reader, so it is written without the lock.
        for (before, silent) in self.changes(thread, load, now) {
            self.publish(before.as_ref(), silent.as_ref());
        }
    }

    /// Stores a sample. Returns the silence of each device before and now.
    fn changes(
        &self,
        thread: &str,
        load: &[DeviceLoad],
        now: Instant,
    ) -> Vec<(Option<Silent>, Option<Silent>)> {
        let mut changes = Vec::new();
        let answers = &mut *self.lock();
        answers.retain(|(of, device), _| of != thread || load.iter().any(|one| one.device == *device));
        for one in load {
            let fresh = || LastAnswer { answered: one.answered, since: now, silent: None };
            let of_device = answers.entry((thread.to_owned(), one.device.clone())).or_insert_with(fresh);
            if of_device.answered != one.answered {
                (of_device.answered, of_device.since) = (one.answered, now);
            }
            let oldest = Duration::from_nanos(one.in_flight.oldest.0);
            let time = now.saturating_duration_since(of_device.since).min(oldest);
            let is_silent = one.in_flight.requests > 0 && time >= SILENT_AFTER;
            let silent = is_silent.then(|| Silent {
                thread: thread.to_owned(),
                volume: one.volume.clone(),
                device: one.device.clone(),
                label: one.label.clone(),
                requests: one.in_flight.requests,
                seconds: time.as_secs(),
            });
            changes.push((std::mem::replace(&mut of_device.silent, silent.clone()), silent));
        }
        changes
    }

    /// Publishes the begin or the end of a silence.
    fn publish(&self, before: Option<&Silent>, now: Option<&Silent>) {
        let (one, level, text) = match (before, now) {
            (None, Some(silent)) => (silent, "error", silent.in_words()),
            (Some(was), None) => {
                let name = plain::named(&was.label, &was.device);
                (was, "info", format!("{name} answers again, after more than {} s", was.seconds))
            }
            _ => return,
        };
        message::message(if level == "info" { "" } else { level }, &text);
        self.hub.publish(Kind::Device, Some(&one.thread), level, &text);
    }
}

#[cfg(test)]
mod tests {
    use io::{InFlight, Nanos};

    use super::*;

    fn load(answered: u64, requests: u64, oldest_s: u64) -> DeviceLoad {
        let in_flight = InFlight { requests, oldest: Nanos::from_secs(oldest_s) };
        let device = "/dev/hdd".to_owned();
        DeviceLoad { device, volume: Some("bcache0".into()), label: "one".into(), answered, in_flight }
    }

    /// A device that hung was in no status, no event and no metric, however long requests of clients waited for it.
    #[test]
    fn a_device_without_an_answer_is_silent_until_it_answers() {
        let hub = Arc::new(Hub::default());
        let silences = Silences::new(hub.clone());
        let start = Instant::now();
        let sample = |seconds, one: DeviceLoad| {
            silences.take("s", &[one], start + Duration::from_secs(seconds));
            silences.all().pop().map(|silent| (silent.requests, silent.seconds))
        };
        let events = || hub.last(9, |_| true).iter().map(|e| (e.level, e.text.clone())).collect::<Vec<_>>();
        assert_eq!(sample(0, load(7, 1, 0)), None);
        assert_eq!(sample(9, load(7, 2, 9)), None, "a busy device");
        assert_eq!(sample(10, load(8, 2, 10)), None, "it answers others");
        assert_eq!((sample(20, load(8, 2, 4)), events().len()), (None, 0), "it had no request before");
        assert_eq!(sample(26, load(8, 2, 10)), Some((2, 10)));
        assert_eq!(sample(40, load(8, 3, 24)), Some((3, 24)));
        let began = "one, /dev/hdd has not answered for 10 s: 2 requests to it wait".to_owned();
        assert_eq!(events(), [("error", began)]);
        assert_eq!(sample(41, load(11, 0, 0)), None);
        let ended = "one, /dev/hdd answers again, after more than 24 s".to_owned();
        assert_eq!(events().last(), Some(&("info", ended)));
        sample(60, load(11, 1, 12));
        silences.retain(|thread| thread != "s");
        assert_eq!(silences.all(), [], "its thread has ended");
    }
}
