//! Clients over TCP: the sockets, and the limits of their connections.
//!
//! Owns the listening sockets. A client that shows the token may do everything. Any other client gets the files of the
//! dashboard, which have no data of the host, and the metrics if the configuration permits this; else it gets an error. A
//! client that has not shown the token is disconnected after 30 s, and earlier when its place is needed. Must not know the
//! requests.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;
use serve::message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::answer::words;
use crate::audit::Peer;
use crate::hub::Kind;
use crate::remote::{Entry, Remote};
use crate::server;
use crate::shared::Shared;
use crate::web::Meant;

/// Limit of the clients of one address.
const MOST_CLIENTS: usize = 128;
/// Time limit of the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Time limit of a client without the token.
const STRANGERS_STAY: Duration = Duration::from_secs(30);
/// Interval between attempts to bind an address that is not available: the daemon can start before the network.
const RETRY_EVERY: Duration = Duration::from_secs(2);
/// Time between two warnings about wrong tokens.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// Listens as the present configuration says, until the daemon ends. A change of the configuration disconnects all clients.
pub(crate) async fn serve(router: Router, shared: Arc<Shared>) {
    let mut wanted = shared.remote.subscribe();
    loop {
        let mut doors = JoinSet::new();
        if let Some(remote) = wanted.borrow_and_update().clone() {
            for address in remote.listen.clone() {
                let (remote, router, shared) = (remote.clone(), router.clone(), shared.clone());
                doors.spawn(async move {
                    let listener = bound(address, &remote, &shared).await;
                    accept(listener, remote, router).await;
                });
            }
        }
        if changed(&mut wanted).await.is_none() {
            return;
        }
        doors.shutdown().await;
    }
}

async fn changed(wanted: &mut watch::Receiver<Option<Arc<Remote>>>) -> Option<()> {
    wanted.changed().await.ok()
}

/// Binds the address as soon as this succeeds; each distinct error is logged once.
async fn bound(address: SocketAddr, remote: &Remote, shared: &Shared) -> TcpListener {
    let mut last = String::new();
    loop {
        let failed = match TcpListener::bind(address).await {
            Ok(listener) => {
                let scheme = if remote.tls.is_some() { "https" } else { "http" };
                let at = listener.local_addr().unwrap_or(address);
                message::note(format!("listens on {scheme}://{at}"));
                return listener;
            }
            Err(e) => format!("listen: {address}: cannot listen yet: {e}"),
        };
        if failed != last {
            message::message("error", &failed);
            shared.hub.publish(Kind::Configuration, None, "error", &failed);
            last = failed;
        }
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

/// A connected client.
struct Client {
    /// Whether the client has shown the token.
    known: Arc<AtomicBool>,
    talk: AbortHandle,
}

/// Makes room for one more client: closes the oldest connection that has not shown the token if all places are taken.
fn make_room(clients: &mut VecDeque<Client>, most: usize) -> bool {
    clients.retain(|c| !c.talk.is_finished());
    if clients.len() < most {
        return true;
    }
    let oldest = clients.iter().position(|c| !c.known.load(Ordering::Relaxed));
    let oldest = oldest.and_then(|at| clients.remove(at));
    oldest.map(|c| c.talk.abort()).is_some()
}

async fn accept(listener: TcpListener, remote: Arc<Remote>, router: Router) {
    let mut clients = VecDeque::new();
    let mut talks = JoinSet::new();
    let said = Arc::new(Mutex::new(None));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                // The process probably has no free descriptor. Some become free as clients disconnect.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while talks.try_join_next().is_some() {}
        if !make_room(&mut clients, MOST_CLIENTS) {
            continue;
        }
        let known = Arc::new(AtomicBool::new(false));
        let visit = Visit { remote: remote.clone(), peer, known: known.clone(), said: said.clone() };
        let talk = talks.spawn(visit.talk(stream, router.clone()));
        clients.push_back(Client { known, talk });
    }
}

/// The connection of one client.
struct Visit {
    remote: Arc<Remote>,
    peer: SocketAddr,
    known: Arc<AtomicBool>,
    /// Time of the last warning about a wrong token.
    said: Arc<Mutex<Option<Instant>>>,
}

impl Visit {
    async fn talk(self, stream: TcpStream, router: Router) {
        let remote = self.remote.clone();
        let known = self.known.clone();
        let _ = stream.set_nodelay(true);
        let talk = async {
            match &remote.tls {
                None => self.converse(stream, router).await,
                Some(tls) => {
                    let agreed = tokio::time::timeout(HANDSHAKE_WITHIN, tls.acceptor.accept(stream)).await;
                    if let Ok(Ok(stream)) = agreed {
                        self.converse(stream, router).await;
                    }
                }
            }
        };
        let too_long = async {
            tokio::time::sleep(STRANGERS_STAY).await;
            if known.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = talk => {}
            () = too_long => {}
        }
    }

    async fn converse<S>(&self, stream: S, router: Router)
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        let inner = TowerToHyperService::new(router);
        let service = service_fn(|mut request: Request<Incoming>| {
            let entry = self.remote.entry(request.method(), request.uri(), request.headers());
            request.extensions_mut().insert(Peer::Remote(self.peer));
            if matches!(entry, Entry::Known | Entry::Page) {
                // A page of another origin cannot use the rights of a browser here, because only the token gives rights.
                request.extensions_mut().insert(Meant);
            } else {
                // The token is not the right one, so the request must not count as a request with a token.
                request.headers_mut().remove(header::AUTHORIZATION);
            }
            let refusal = self.refusal(entry);
            let inner = &inner;
            async move {
                match refusal {
                    Some(refusal) => Ok::<_, Infallible>(refusal),
                    None => inner.call(request.map(Body::new)).await,
                }
            }
        });
        server::converse(stream, service).await;
    }

    /// The answer to a client without permission; `None` with permission. The connection is closed after the answer.
    fn refusal(&self, entry: Entry) -> Option<Response> {
        let why = match entry {
            Entry::Known => {
                self.known.store(true, Ordering::Relaxed);
                return None;
            }
            Entry::Page | Entry::Metrics => return None,
            Entry::Missing => {
                "token required: send it as \"Authorization: Bearer TOKEN\" (with ubcache: --token-file)"
            }
            Entry::Wrong => {
                self.say_wrong();
                "wrong token: expected the token of this daemon"
            }
        };
        let heads = [(header::WWW_AUTHENTICATE, "Bearer realm=\"ubcache\""), (header::CONNECTION, "close")];
        Some((StatusCode::UNAUTHORIZED, heads, words(why)).into_response())
    }

    /// Warns that a client may be guessing the token.
    fn say_wrong(&self) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|at| at.elapsed() >= SAY_EVERY) {
            *said = Some(Instant::now());
            message::warn(format!("{}: refused: wrong token", self.peer.ip()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn strangers_give_way() {
        let mut all = JoinSet::new();
        let mut one = |known: bool| Client {
            known: Arc::new(AtomicBool::new(known)),
            talk: all.spawn(std::future::pending::<()>()),
        };
        let mut clients: VecDeque<Client> = [one(true), one(false), one(false)].into();
        assert!(make_room(&mut clients, 4));
        assert_eq!(clients.len(), 3, "nobody has to go");
        assert!(make_room(&mut clients, 3));
        assert!(make_room(&mut clients, 2));
        assert_eq!(clients.len(), 1);
        assert!(!make_room(&mut clients, 1), "who has shown the token stays");
        clients[0].talk.abort();
        all.join_next().await;
        while !clients[0].talk.is_finished() {
            all.join_next().await;
        }
        assert!(make_room(&mut clients, 1));
    }
}
