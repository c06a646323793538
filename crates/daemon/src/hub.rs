//! The event hub: threads publish events, and clients receive them.
//!
//! Owns the numbers of events, the kinds of events, the last events for `status`, and the rule that publishing never
//! blocks: a listener whose queue is full is dropped. Module `event_log` stores the events. Must not know the causes of events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::event_log::EventLog;
use crate::names::Named;
use crate::wall_clock;

/// Capacity of the queue of a listener, in events.
const QUEUE: usize = 256;
/// Number of events that the hub stores.
const REMEMBERED: usize = 256;
/// Limit of the listeners at a time.
const MOST_LISTENERS: usize = 64;

/// The kind of an event, with its name for clients and its description for the guide.
macro_rules! kinds {
    ($($kind:ident = $name:literal: $meaning:literal,)*) => {
        /// The kind of an event.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Kind {
            $(#[doc = $meaning] $kind,)*
        }

        impl Kind {
            /// The name that clients see.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)*
                }
            }
        }

        /// Every kind of event by the name that clients see, with its meaning; the guide has this table.
        pub const EVENT_KINDS: &[(&str, &str)] = &[$(($name, $meaning)),*];
    };
}

kinds! {
    Message = "message": "A message from the thread of a set, as in the log.",
    Set = "set": "A set is served, has stopped, has failed, or does not answer.",
    Device = "device": "A device waits, fails, was unplugged, does not answer, or answers again.",
    Job = "job": "A job has ended.",
    State = "state": "The state directory cannot be written, or can be written again.",
    Configuration = "configuration": "A tunable or the configuration has changed, or cannot be used.",
    Audit = "audit": "A client made a change or was refused; the event has `change`.",
}

/// An event as clients see it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// Number of the event. It grows, also over restarts of the daemon as long as the log of events is there.
    pub(crate) seq: u64,
    /// Milliseconds since 1970.
    pub(crate) time_ms: u64,
    /// Kind of the event: one of [`EVENT_KINDS`].
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// The set, or the backing device that is served alone, if the event concerns one.
    pub(crate) set: Option<String>,
    /// Its label at that time, if it had one; of a backing device that is served alone and has none, the name of its volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) label: Option<String>,
    /// `error`, `warning` or `info`.
    pub(crate) level: &'static str,
    /// The text of the event.
    pub(crate) text: String,
    /// The client and its change, in an event of kind `audit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) change: Option<Change>,
}

/// The fields of an audit event, besides its text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Change {
    /// User of a client over the unix socket.
    pub(crate) uid: Option<u32>,
    pub(crate) pid: Option<i32>,
    /// Address of a client over TCP.
    pub(crate) address: Option<SocketAddr>,
    /// The client, as text.
    pub(crate) by: String,
    /// The command with its parameters.
    pub(crate) action: String,
    /// The devices that the names in the command resolved to.
    pub(crate) devices: Vec<Named>,
    /// `done`, `begun` or `refused`.
    pub(crate) outcome: &'static str,
    /// Why the change was refused.
    pub(crate) why: Option<String>,
}

#[derive(Default)]
struct Inner {
    seq: u64,
    last: VecDeque<Arc<Event>>,
    listeners: Vec<mpsc::Sender<Arc<Event>>>,
    log: Option<EventLog>,
    /// Labels of sets, and of backing devices that are served alone.
    labels: BTreeMap<String, String>,
}

/// The hub: the last events, and the listeners.
#[derive(Default)]
pub(crate) struct Hub {
    inner: Mutex<Inner>,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Events of this set have this label from now on.
    pub(crate) fn label(&self, set: &str, label: &str) {
        self.lock().labels.insert(set.to_owned(), label.to_owned());
    }

    /// Sends an event to all listeners.
    pub(crate) fn publish(&self, kind: Kind, set: Option<&str>, level: &str, text: &str) {
        self.tell(kind, set, level, text, None);
    }

    /// Sends an audit event of a change or of a refused request to all listeners.
    pub(crate) fn publish_change(&self, text: &str, change: Change) {
        self.tell(Kind::Audit, None, "info", text, Some(change));
    }

    fn tell(&self, kind: Kind, set: Option<&str>, level: &str, text: &str, change: Option<Change>) {
        let level = match level {
            "error" => "error",
            "warning" => "warning",
            _ => "info",
        };
        let inner = &mut *self.lock();
        inner.seq += 1;
        let event = Arc::new(Event {
            seq: inner.seq,
            time_ms: wall_clock::now_ms(),
            kind: kind.name(),
            label: set.and_then(|set| inner.labels.get(set)).filter(|label| !label.is_empty()).cloned(),
            set: set.map(str::to_owned),
            level,
            text: text.to_owned(),
            change,
        });
        if let Some(log) = &inner.log {
            log.store(&*event);
        }
        inner.last.push_back(event.clone());
        if inner.last.len() > REMEMBERED {
            inner.last.pop_front();
        }
        inner.listeners.retain(|l| l.try_send(event.clone()).is_ok());
    }

    /// The events from now on; `None` if there are too many listeners.
    pub(crate) fn listen(&self) -> Option<mpsc::Receiver<Arc<Event>>> {
        let inner = &mut *self.lock();
        inner.listeners.retain(|l| !l.is_closed());
        if inner.listeners.len() >= MOST_LISTENERS {
            return None;
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        inner.listeners.push(sender);
        Some(receiver)
    }

    /// Stores the events from now on in this log, and continues its numbers.
    pub(crate) fn store_in(&self, log: EventLog) {
        let inner = &mut *self.lock();
        inner.seq = inner.seq.max(log.last_seq());
        inner.log = Some(log);
    }

    /// Stops storing events, after the last ones are written. It waits, so the control thread calls it at its end only.
    pub(crate) fn close_log(&self) {
        let log = self.lock().log.take();
        if let Some(log) = log {
            log.close();
        }
    }

    /// The events since this time (milliseconds since 1970), the oldest first, also those of earlier runs of the daemon.
    /// Waits for the disk.
    pub(crate) fn since(&self, time_ms: u64) -> Vec<Value> {
        let reader = self.lock().log.as_ref().map(EventLog::reader);
        // Events that are not written yet are in memory. They are taken first, so that none is missed.
        let recent = self.last(REMEMBERED, |e| e.time_ms >= time_ms);
        let mut events = reader.map(|reader| reader.since(time_ms)).unwrap_or_default();
        let stored: BTreeSet<u64> = events.iter().filter_map(|e| e["seq"].as_u64()).collect();
        events.extend(recent.iter().filter(|e| !stored.contains(&e.seq)).map(|e| json!(**e)));
        events.sort_by_key(|e| e["seq"].as_u64());
        events
    }

    /// The last events for which `wanted` is true, the oldest first; at most `most`.
    pub(crate) fn last(&self, most: usize, wanted: impl Fn(&Event) -> bool) -> Vec<Arc<Event>> {
        let inner = self.lock();
        let mut found: Vec<_> = inner.last.iter().rev().filter(|e| wanted(e)).take(most).cloned().collect();
        found.reverse();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_does_not_read_is_dropped_alone() {
        let hub = Hub::default();
        let mut slow = hub.listen().unwrap();
        let mut fast = hub.listen().unwrap();
        for n in 1..=QUEUE as u64 + 10 {
            hub.publish(Kind::Message, None, "", "x");
            assert_eq!(fast.try_recv().unwrap().seq, n);
        }
        assert_eq!(hub.lock().listeners.len(), 1);
        let mut got = 0;
        while let Some(event) = slow.blocking_recv() {
            got = event.seq;
        }
        assert_eq!(got, QUEUE as u64, "what it had is still its own, and then it ends");
        assert_eq!(hub.last(3, |_| true).len(), 3);
        assert_eq!(hub.lock().last.len(), REMEMBERED);
    }

    /// Before, the events of the last run of the daemon were gone, and numbers began at 1 again.
    #[test]
    fn events_are_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let hub = Hub::default();
        hub.publish(Kind::Message, None, "", "before the log is open");
        hub.store_in(EventLog::open(dir.path()).unwrap());
        hub.publish(Kind::Set, Some("s"), "error", "first");
        hub.close_log();
        let hub = Hub::default();
        hub.store_in(EventLog::open(dir.path()).unwrap());
        hub.publish(Kind::Set, None, "", "second");
        let events = hub.since(0);
        let found: Vec<_> = events.iter().map(|e| (e["seq"].as_u64().unwrap(), &e["text"])).collect();
        assert_eq!(found, [(2, &json!("first")), (3, &json!("second"))]);
        assert_eq!(events[0]["type"], "set");
        assert!(hub.since(u64::MAX).is_empty());
        hub.close_log();
        hub.publish(Kind::Set, None, "", "third");
        assert_eq!(hub.since(0).len(), 2, "from memory");
    }

    /// Clients are generated from the OpenAPI document.
    #[test]
    fn the_document_has_every_kind() {
        let document: serde_json::Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
        let kinds = &document["components"]["schemas"]["Event"]["properties"]["type"]["enum"];
        let described: Vec<&str> = kinds.as_array().unwrap().iter().map(|k| k.as_str().unwrap()).collect();
        assert_eq!(described, EVENT_KINDS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }

    #[test]
    fn there_are_not_too_many() {
        let hub = Hub::default();
        let all: Vec<_> = (0..MOST_LISTENERS).map(|_| hub.listen().unwrap()).collect();
        assert!(hub.listen().is_none());
        drop(all);
        assert!(hub.listen().is_some());
    }
}
