//! `--export nbd=SOCKET|HOST:PORT`: every volume is an export of its name.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use engine::VolumeRef;
use export_nbd::{
    ConnectionEnd, ConnectionEvent, Endpoint, Exports, Observer, Reach, Server, ServerOptions, uri,
};

use super::{Context, Way};
use crate::failure::Failure;
use crate::message;

/// A server that runs.
pub struct Nbd {
    server: Server<VolumeRef>,
    address: blockio::Address,
}

/// Listens on an endpoint.
pub(crate) fn start(endpoint: &Endpoint, context: &Context<'_>) -> Result<Nbd, Failure> {
    let exports = Exports::new();
    for volume in context.volumes {
        exports.add(Rc::new(VolumeRef(volume.clone())))?;
    }
    let log = Log::default();
    let observer: Observer = Rc::new(move |event| log.take(event));
    let options = ServerOptions { observer: Some(observer), ..ServerOptions::default() };
    let server = Server::new(context.driver.handle(), exports, options);
    let reach = if context.remote { Reach::Anywhere } else { Reach::Loopback };
    let listener = endpoint.bind(context.driver.reactor(), reach).map_err(|e| match e {
        export_nbd::EndpointError::NotLoopback(_) => Failure::Failed(format!("{e} (--allow-remote)")),
        other => other.into(),
    })?;
    let address = listener.address().clone();
    server.serve_listener(listener);
    Ok(Nbd { server, address })
}

impl Nbd {
    pub(crate) fn way(&self, volume: &str) -> Way {
        Way { kind: "nbd", address: uri(&self.address, volume) }
    }

    pub(crate) fn clients(&self) -> Option<String> {
        let n = self.server.connections();
        (n > 0).then(|| format!("{n} client connection{} to {}", if n == 1 { "" } else { "s" }, self.address))
    }

    pub(crate) async fn stop(self) {
        self.server.stop().await;
    }
}

/// How long it is not said again that clients cannot be accepted: near the limit each that leaves makes room for one.
const SAID_WITHIN: Duration = Duration::from_secs(10);

/// Says what an operator should know; that clients come and go is not.
#[derive(Default)]
struct Log {
    /// It was said that no client can be accepted, which is tried ten times a second, and that has not changed since.
    refusing: Cell<bool>,
    /// When it was said last.
    refused: Cell<Option<Instant>>,
}

impl Log {
    fn take(&self, event: &ConnectionEvent) {
        match event {
            ConnectionEvent::TurnedAway => message::warn("nbd: a client was turned away: there are too many"),
            ConnectionEvent::AcceptFailed(e) => {
                let lately = self.refused.get().is_some_and(|said| said.elapsed() < SAID_WITHIN);
                if !self.refusing.get() && !lately {
                    self.refusing.set(true);
                    self.refused.set(Some(Instant::now()));
                    message::warn(format!("nbd: a client could not be accepted and has to wait: {e}"));
                }
            }
            ConnectionEvent::Accepted { .. } => {
                if self.refusing.replace(false) {
                    message::note("nbd: clients are accepted again");
                }
            }
            ConnectionEvent::Closed {
                id,
                end: end @ (ConnectionEnd::Violation(_) | ConnectionEnd::Socket(_)),
            } => {
                message::warn(format!("nbd: connection {id}: {end}"));
            }
            ConnectionEvent::Opened { .. } | ConnectionEvent::Closed { .. } => {}
        }
    }
}
