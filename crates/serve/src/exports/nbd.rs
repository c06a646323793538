//! `--export nbd=SOCKET|HOST:PORT`: every volume is an NBD export with its name.
//!
//! Owns the server of one endpoint, and the messages about its clients. Errors that clients cause are logged a few times a
//! minute, and counted beyond that. Must not know the protocol.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use engine::VolumeRef;
use export_nbd::codec::HandshakeEnd;
use export_nbd::{
    ConnectionEnd, ConnectionEvent, Endpoint, Exports, Joining, Observer, Server, ServerOptions, uri,
};

use super::spec::SpecError;
use super::{
    Context, Export, Force, Kind, NbdAccess, Occupied, Opens, Place, Sharing, Spec, Way, WayKind, Work,
};
use crate::failure::{Failure, failed};
use crate::message;
use crate::quiet::Quiet;

pub(super) const KIND: Kind = Kind {
    name: "nbd",
    forms: &[
        ("nbd=SOCKET", "An NBD server on a unix socket; each volume is an export with its name."),
        ("nbd=HOST:PORT", "An NBD server on a TCP port; each volume is an export with its name."),
    ],
    ways: &[&WAY],
    parse,
    #[cfg(test)]
    example: |dir| Ok(super::listening_on(&dir.join("vol.sock"))),
};

pub(super) static WAY: WayKind = WayKind { name: "nbd", opens: Opens::Connection };

failed!(export_nbd::EndpointError, export_nbd::ExportError, export_nbd::JoinError);

fn parse(text: &str) -> Option<Result<Spec, SpecError>> {
    let endpoint = Endpoint::from_export_option(text)?;
    Some(endpoint.map(|endpoint| Spec::new(Listening(endpoint))).map_err(SpecError::place))
}

/// The endpoint on which the volumes are NBD exports.
#[derive(Debug)]
struct Listening(Endpoint);

impl fmt::Display for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Place for Listening {
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>> {
        Box::pin(async { Ok(Box::new(start(&self.0, context)?) as Box<dyn Export>) })
    }

    fn check(&self, nbd: &NbdAccess) -> Result<(), Failure> {
        nbd.check(&self.0)
    }

    fn overlaps(&self, other: &dyn Place) -> bool {
        (other as &dyn Any).downcast_ref::<Listening>().is_some_and(|other| self.0.overlaps(&other.0))
    }

    fn shares(&self, other: &dyn Place) -> bool {
        (other as &dyn Any).downcast_ref::<Listening>().is_some_and(|other| self.0.is_same(&other.0))
    }

    fn endpoint(&self) -> Option<&Endpoint> {
        Some(&self.0)
    }
}

/// A running NBD server.
pub(super) struct Nbd {
    server: Server<VolumeRef>,
    address: blockio::Address,
    encrypted: bool,
    log: Rc<Log>,
}

/// Starts a server on an endpoint.
pub(crate) fn start(endpoint: &Endpoint, context: &Context<'_>) -> Result<Nbd, Failure> {
    let access = &context.nbd;
    access.check(endpoint)?;
    let exports = Exports::new();
    for volume in context.volumes {
        exports.add(Rc::new(VolumeRef(volume.clone())))?;
    }
    let log = Rc::new(Log::default());
    let observer: Observer = Rc::new({
        let log = log.clone();
        move |event| log.take(event)
    });
    let memory = access.memory.clone();
    let options = ServerOptions { observer: Some(observer), memory, ..ServerOptions::default() };
    let server = Server::new(context.driver.handle(), exports, options);
    // A unix socket is protected by its mode.
    let tls = access.tls.clone().filter(|_| matches!(endpoint, Endpoint::Tcp { .. }));
    let encrypted = tls.is_some();
    let reactor = context.driver.reactor();
    if context.sharing != Sharing::Alone {
        let owns_default = context.sharing == Sharing::Owner;
        let joining = Joining { reach: access.reach(), tls, owns_default };
        let address = server.serve_shared(&access.hubs, endpoint, reactor, joining)?;
        return Ok(Nbd { server, address, encrypted, log });
    }
    let listener = endpoint.bind(reactor, access.reach())?;
    let address = listener.address().clone();
    match tls {
        Some(tls) => server.serve_listener_with_tls(listener, tls),
        None => server.serve_listener(listener),
    }
    Ok(Nbd { server, address, encrypted, log })
}

impl Export for Nbd {
    fn ways(&self, volume: &str) -> Vec<Way> {
        vec![Way { kind: &WAY, address: uri(&self.address, volume, self.encrypted) }]
    }

    fn clients(&self) -> Option<String> {
        let n = self.server.connections();
        (n > 0).then(|| format!("{n} client connection{} to {}", if n == 1 { "" } else { "s" }, self.address))
    }

    fn stop(self: Box<Self>, _force: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async move {
            self.end().await;
            Ok(())
        })
    }

    /// Clients of NBD are used to reconnecting, so they keep nothing.
    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            self.end().await;
            Ok(())
        })
    }

    fn can_be_handed_over(&self) -> bool {
        true
    }

    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async move {
            self.end().await;
            None
        })
    }
}

impl Nbd {
    async fn end(self) {
        self.server.stop().await;
        self.log.end();
    }
}

/// Shortest time between two messages that clients cannot be accepted. Near the limit, each client that leaves makes room
/// for one.
const SAID_WITHIN: Duration = Duration::from_secs(10);

/// Limit of the lines of a kind that clients can cause, in a minute.
const LINES_A_MINUTE: u32 = 5;

/// Logs the events that an operator should know. Clients that connect and disconnect are not logged.
struct Log {
    /// Whether the last message was that no client can be accepted. The server tries that ten times a second.
    refusing: Cell<bool>,
    /// Time of the last such message.
    refused: Cell<Option<Instant>>,
    turned_away: Quiet,
    failed: Quiet,
}

impl Default for Log {
    fn default() -> Log {
        let quiet = || Quiet::new(LINES_A_MINUTE, Duration::from_secs(60));
        Log { refusing: Cell::new(false), refused: Cell::new(None), turned_away: quiet(), failed: quiet() }
    }
}

impl Log {
    fn take(&self, event: &ConnectionEvent) {
        match event {
            ConnectionEvent::TurnedAway { peer, why } => {
                say(&self.turned_away, || format!("nbd: a client was refused ({peer}): {why}"));
            }
            ConnectionEvent::AcceptFailed(e) => {
                let lately = self.refused.get().is_some_and(|said| said.elapsed() < SAID_WITHIN);
                if !self.refusing.get() && !lately {
                    self.refusing.set(true);
                    self.refused.set(Some(Instant::now()));
                    message::warn(format!(
                        "nbd: new clients wait, because a connection cannot be accepted: {e}"
                    ));
                }
            }
            ConnectionEvent::Accepted { .. } => {
                if self.refusing.replace(false) {
                    message::note("nbd: clients are accepted again");
                }
            }
            ConnectionEvent::Closed { id, peer, end } if is_failure(end) => {
                say(&self.failed, || format!("nbd: connection {id} ({peer}): {end}"));
            }
            ConnectionEvent::Opened { .. } | ConnectionEvent::Closed { .. } => {}
        }
    }

    /// Logs how many messages were omitted since the last line.
    fn end(&self) {
        let left_out = self.turned_away.left_out() + self.failed.left_out();
        if left_out > 0 {
            message::warn(format!("nbd: {left_out} more warnings about clients were omitted"));
        }
    }
}

/// Whether an operator should know of this end of a connection.
fn is_failure(end: &ConnectionEnd) -> bool {
    match end {
        ConnectionEnd::Violation(_)
        | ConnectionEnd::Socket(_)
        | ConnectionEnd::Tls(_)
        | ConnectionEnd::NoMemory
        | ConnectionEnd::BrokenReply(_)
        | ConnectionEnd::GaveWay => true,
        ConnectionEnd::Handshake(e) => {
            matches!(e, HandshakeEnd::WithoutTls | HandshakeEnd::PlainAfterStartTls)
        }
        ConnectionEnd::Goodbye
        | ConnectionEnd::ClientClosed
        | ConnectionEnd::Truncated
        | ConnectionEnd::HandshakeTimeout
        | ConnectionEnd::HandedOver
        | ConnectionEnd::Stopped => false,
    }
}

fn say(quiet: &Quiet, line: impl FnOnce() -> String) {
    match quiet.admit(Instant::now()) {
        None => {}
        Some(0) => message::warn(line()),
        Some(left_out) => message::warn(format!("{} ({left_out} more like it were omitted before)", line())),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use export_nbd::{PeerId, TurnedAway};

    use super::*;

    /// Without the limit, thousands of failing clients fill the log.
    #[test]
    fn a_flood_of_failing_clients_does_not_fill_the_log() {
        let heard: Rc<RefCell<Vec<String>>> = Rc::default();
        let sink = heard.clone();
        message::listen(move |_, text| sink.borrow_mut().push(text.to_owned()));
        let log = Log::default();
        let peer = PeerId::User(1000);
        for id in 0..1000 {
            let end = ConnectionEnd::Handshake(HandshakeEnd::WithoutTls);
            log.take(&ConnectionEvent::Closed { id, peer, end });
            log.take(&ConnectionEvent::TurnedAway { peer, why: TurnedAway::Slots { limit: 64 } });
            log.take(&ConnectionEvent::Closed { id, peer, end: ConnectionEnd::Goodbye });
        }
        assert_eq!(heard.borrow().len(), 10);
        assert_eq!(
            heard.borrow()[1],
            "nbd: a client was refused (user 1000): all 64 connection slots are taken"
        );
        log.end();
        assert_eq!(heard.borrow()[10], "nbd: 1990 more warnings about clients were omitted");
    }
}
