//! The audit: one line in the log and one event for each change by a client, and for each refused request.
//!
//! Owns the identity of a client, and the time of the line: after the answer is decided, even if the client has
//! disconnected. A client of the unix socket and a process that writes to the sysfs view are identified by the credentials that
//! the kernel reports. A client over TCP is
//! identified by its address, after it has shown the token. Must not know what a request does.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use serve::{message, plain};

use crate::answer::Why;
use crate::asked::{Asked, Presence};
use crate::hub::{Change, Hub};
use crate::names::Named;

/// Limit of the lines about refused clients in a [`WINDOW`]: every user of the host can cause such lines.
const MOST_STRANGERS: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Limit of the characters of a request that a line repeats.
const MAX_REQUEST_CHARS: usize = 300;

/// The client of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Peer {
    /// A client of the unix socket.
    Local { uid: u32, gid: u32, pid: Option<i32> },
    /// A process that writes to a file of the sysfs view.
    View { uid: u32, gid: u32, pid: Option<i32> },
    /// A client over TCP that has shown the token.
    Remote(SocketAddr),
    /// A sender that is no client; the text names it.
    Other(&'static str),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Peer::Local { uid, gid, pid: Some(pid) } => write!(f, "uid {uid} gid {gid} pid {pid}"),
            Peer::Local { uid, gid, pid: None } => write!(f, "uid {uid} gid {gid}"),
            Peer::View { uid, gid, pid } => write!(f, "{} by the sysfs view", Peer::Local { uid, gid, pid }),
            Peer::Remote(address) => write!(f, "{address} with the token"),
            Peer::Other(who) => write!(f, "{who}"),
        }
    }
}

/// Writes the audit line and publishes the event.
pub(crate) fn tell(hub: &Hub, peer: Peer, action: &str, on: &[Named], result: Result<&'static str, &str>) {
    let action: String = plain::escaped(action).chars().take(MAX_REQUEST_CHARS).collect();
    let devices: Vec<String> = on.iter().map(ToString::to_string).collect();
    let to = if devices.is_empty() { String::new() } else { format!(" on {}", devices.join(" and ")) };
    let (outcome, why) = match result {
        Ok(outcome) => (outcome, None),
        Err(why) => ("refused", Some(plain::escaped(why).into_owned())),
    };
    let because = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let text = format!("audit: {peer}: {action}{to}: {outcome}{because}");
    message::note(&text);
    let (uid, pid, address) = match peer {
        Peer::Local { uid, pid, .. } | Peer::View { uid, pid, .. } => (Some(uid), pid, None),
        Peer::Remote(address) => (None, None, Some(address)),
        Peer::Other(_) => (None, None, None),
    };
    let by = peer.to_string();
    let change = Change { uid, pid, address, by, action, devices: on.to_vec(), outcome, why };
    hub.publish_change(&text, change);
}

/// The record of a request, which its handler fills in.
#[derive(Clone, Default)]
pub(crate) struct Audit {
    record: Arc<Mutex<Record>>,
    client: Presence,
}

#[derive(Default)]
struct Record {
    action: String,
    on: Vec<Named>,
}

impl Audit {
    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The action and its client, for messages to clients whose commands wait for this one.
    pub(crate) fn asked(&self) -> Asked {
        Asked { what: self.lock().action.clone(), client: self.client.clone() }
    }

    /// Sets the action, with the names in the request.
    pub(crate) fn does(&self, action: impl Into<String>) {
        self.lock().action = action.into();
    }

    /// Adds a device of the action. If its volume changes during the request, the last name counts.
    pub(crate) fn on(&self, named: &Named) {
        let on = &mut self.lock().on;
        let same = |n: &Named| (&n.device, &n.uuid) == (&named.device, &named.uuid) && n.uuid.is_some();
        match on.iter_mut().find(|n| *n == named || same(n)) {
            Some(before) => before.clone_from(named),
            None => on.push(named.clone()),
        }
    }
}

/// Writes the audit line of every request that may change something.
///
/// Such a request is carried out to its end even if its client disconnects.
pub(crate) async fn log_changes(State(hub): State<Arc<Hub>>, mut request: Request, next: Next) -> Response {
    // Dropped with this future, when the client disconnects.
    let (_here, client) = Presence::new();
    let audit = Audit { client, ..Audit::default() };
    request.extensions_mut().insert(audit.clone());
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return next.run(request).await;
    }
    let peer = request.extensions().get::<Peer>().copied().unwrap_or(Peer::Other("unknown client"));
    audit.does(format!("{} {}", request.method(), request.uri().path()));
    let work = tokio::spawn(async move {
        let response = next.run(request).await;
        let record = audit.lock();
        let why = response.extensions().get::<Why>().map(|why| why.0.clone());
        let result = match response.status() {
            StatusCode::ACCEPTED => Ok("begun"),
            status if status.is_success() => Ok("done"),
            status => Err(why.unwrap_or_else(|| status.to_string())),
        };
        let result = result.as_ref().map(|outcome| *outcome).map_err(String::as_str);
        tell(&hub, peer, &record.action, &record.on, result);
        drop(record);
        response
    });
    match work.await {
        Ok(response) => response,
        Err(e) => crate::answer::internal_error(&e),
    }
}

/// Limits the lines about refused clients: [`MOST_STRANGERS`] in a [`WINDOW`], then a count of the others.
#[derive(Default)]
pub(crate) struct Strangers {
    window: Option<Instant>,
    count: u32,
}

impl Strangers {
    /// Records that a client was refused.
    pub(crate) fn refused(&mut self, hub: &Hub, peer: Peer, why: &str) {
        if self.window.is_none_or(|began| began.elapsed() >= WINDOW) {
            let left_out = self.count.saturating_sub(MOST_STRANGERS);
            if left_out > 0 {
                message::note(format!("audit: {} refused besides", format::counted(left_out, "client")));
            }
            (self.window, self.count) = (Some(Instant::now()), 0);
        }
        self.count += 1;
        if self.count <= MOST_STRANGERS {
            tell(hub, peer, "connect", &[], Err(why));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_do_not_fill_the_log() {
        let (hub, mut strangers) = (Hub::default(), Strangers::default());
        let peer = Peer::Local { uid: 65534, gid: 65534, pid: Some(7) };
        (0..100).for_each(|_| strangers.refused(&hub, peer, "may not"));
        let entries = hub.last(200, |e| e.kind == "audit");
        assert_eq!(entries.len(), MOST_STRANGERS as usize);
        assert_eq!(entries[0].text, "audit: uid 65534 gid 65534 pid 7: connect: refused: may not");
    }

    #[test]
    fn a_line_stays_one_line() {
        let hub = Hub::default();
        let named =
            Named { name: Some("bcache0".into()), label: "x\naudit: forged".into(), ..Named::default() };
        tell(&hub, Peer::Other("a test"), "set label=\n\u{1b}[2J", &[named], Err("not\nso"));
        let entry = &hub.last(1, |_| true)[0];
        assert!(!entry.text.contains(['\n', '\u{1b}']), "{:?}", entry.text);
        assert!(entry.text.ends_with("refused: not\\nso"), "{}", entry.text);
    }
}
