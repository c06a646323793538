//! Clients over TCP: who may come in, and how much of this process they can take.
//!
//! Owns the token, the certificate and the sockets that are listened to. Whoever shows the token may do everything;
//! anybody else gets the pages of the dashboard, which hold no data, the metrics if the configuration says so, and else
//! nothing but the words why not. Those who have not shown it yet have little time, and give way to newcomers when it gets
//! crowded. Neither token nor key is ever said. Must not know what is asked.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serve::{Failure, message};
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::audit::Peer;
use crate::config::{Named, Tcp};
use crate::server;
use crate::shared::Shared;
use crate::web::Meant;

/// Clients of one address at a time.
const MOST_CLIENTS: usize = 128;
/// How long agreeing on keys may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How long a client may stay that has not shown the token.
const STRANGERS_STAY: Duration = Duration::from_secs(30);
/// How often an address is tried that cannot be had. It may come later: this process is there before the network.
const RETRY_EVERY: Duration = Duration::from_secs(2);
/// How often it is said that somebody showed a wrong token.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// Bytes of a token.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// What the configuration says, with what is in the files that it names.
pub(crate) struct Remote {
    listen: Vec<SocketAddr>,
    token: Token,
    tls: Option<Tls>,
    metrics_without_token: bool,
}

/// Not to be shown: it has no `Debug`.
struct Token(Vec<u8>);

struct Tls {
    acceptor: TlsAcceptor,
    /// To tell one from another.
    certificates: Vec<CertificateDer<'static>>,
}

/// Whether a request is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    /// It showed the token.
    Known,
    /// A file of the dashboard, which everybody may see.
    Page,
    /// The metrics, where the configuration lets everybody see them.
    Metrics,
    Missing,
    Wrong,
}

impl Remote {
    /// Reads what the configuration names.
    ///
    /// # Errors
    /// If a file cannot be used, or is open to others; the message names line and file, and nothing of what is in it.
    pub(crate) fn load(tcp: &Tcp) -> Result<Remote, Failure> {
        let token = Token::read(&tcp.token_file)?;
        let tls = tcp.tls.as_ref().map(|(certificate, key)| Tls::read(certificate, key)).transpose()?;
        let metrics_without_token = tcp.metrics_without_token;
        Ok(Remote { listen: tcp.listen.clone(), token, tls, metrics_without_token })
    }

    /// What is other than it was, in words.
    pub(crate) fn differences(old: Option<&Remote>, new: Option<&Remote>) -> Vec<String> {
        let (old, new) = match (old, new) {
            (None, None) => return Vec::new(),
            (Some(_), None) => return vec!["listen: nothing is listened to over TCP any more".into()],
            (None, Some(new)) => return vec![format!("listen: {}", new.in_words())],
            (Some(old), Some(new)) => (old, new),
        };
        let mut said = Vec::new();
        if old.listen != new.listen || old.tls.is_some() != new.tls.is_some() {
            said.push(format!("listen: {}", new.in_words()));
        }
        if old.token.0 != new.token.0 {
            said.push("token_file: there is another token, and the old one is worth nothing any more".into());
        }
        let certificates = |r: &Remote| r.tls.as_ref().map(|t| t.certificates.clone());
        if old.tls.is_some() && new.tls.is_some() && certificates(old) != certificates(new) {
            said.push("tls_certificate: there is another certificate".into());
        }
        if old.metrics_without_token != new.metrics_without_token {
            said.push(format!("metrics_without_token: {}", new.metrics_without_token));
        }
        said
    }

    fn in_words(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let all: Vec<_> = self.listen.iter().map(|a| format!("{scheme}://{a}")).collect();
        all.join(", ")
    }

    fn entry(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Entry {
        let mut shown = headers.get_all(header::AUTHORIZATION).iter();
        let first = shown.next();
        // Two of them: it is not said which one counts.
        let only = first.filter(|_| shown.next().is_none());
        if only.and_then(|value| bearer(value.as_bytes())).is_some_and(|token| self.token.is(token)) {
            return Entry::Known;
        }
        let path = uri.path();
        let looks = *method == Method::GET || *method == Method::HEAD;
        if looks && (path == "/" || path.starts_with("/assets/")) {
            return Entry::Page;
        }
        if looks && path == "/metrics" && self.metrics_without_token {
            return Entry::Metrics;
        }
        if first.is_some() { Entry::Wrong } else { Entry::Missing }
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

impl Token {
    fn read(file: &Named) -> Result<Token, Failure> {
        let bytes = secret("token_file", file)?;
        let token = bytes.trim_ascii();
        let wanted = TOKEN_BYTES.contains(&token.len()) && token.iter().all(u8::is_ascii_graphic);
        if !wanted {
            return Err(in_line(
                "token_file",
                file,
                format!(
                    "expected one line of {} to {} visible ASCII characters, such as `openssl rand -hex 32` makes",
                    TOKEN_BYTES.start(),
                    TOKEN_BYTES.end()
                ),
            ));
        }
        Ok(Token(token.to_vec()))
    }

    /// Takes as long for one that is nearly right as for one that is not.
    fn is(&self, shown: &[u8]) -> bool {
        self.0.ct_eq(shown).into()
    }
}

impl Tls {
    fn read(certificate: &Named, key: &Named) -> Result<Tls, Failure> {
        let of_certificate = |e: String| in_line("tls_certificate", certificate, e);
        let pem = serve::secret::read_public(&certificate.path).map_err(of_certificate)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let certificates =
            chain.map_err(|e| of_certificate(format!("expected certificates in PEM form: {e}")))?;
        if certificates.is_empty() {
            return Err(of_certificate("expected certificates in PEM form, found none".into()));
        }
        // What is wrong with a key is said without any of it.
        let no_key = |_| in_line("tls_key", key, "expected a private key in PEM form".into());
        let private = PrivateKeyDer::from_pem_slice(&secret("tls_key", key)?).map_err(no_key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(Failure::of)?
            .with_no_client_auth()
            .with_single_cert(certificates.clone(), private);
        let mut config =
            config.map_err(|e| in_line("tls_key", key, format!("does not fit tls_certificate: {e}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), certificates })
    }
}

pub(crate) fn in_line(key: &str, file: &Named, what: String) -> Failure {
    Failure::Failed(format!("line {}: {key}: {}: {what}", file.line, file.path.display()))
}

/// The contents of a file that nobody else may know.
fn secret(key: &str, file: &Named) -> Result<Vec<u8>, Failure> {
    serve::secret::read_private(&file.path).map_err(|e| in_line(key, file, e))
}

/// Listens as is wanted at the moment, until nobody is left to want anything. Whoever came in by what held before has to
/// come again.
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

/// Listens, as soon as that can be done; why it cannot is said once for each reason.
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
            shared.hub.publish("configuration", None, "error", &failed);
            last = failed;
        }
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

/// One that is connected.
struct Client {
    /// It has shown the token.
    known: Arc<AtomicBool>,
    talk: AbortHandle,
}

/// Room for one more, if need be at the cost of who has been here longest without a word that counts.
fn make_room(clients: &mut VecDeque<Client>, most: usize) -> bool {
    clients.retain(|c| !c.talk.is_finished());
    if clients.len() < most {
        return true;
    }
    let oldest = clients.iter().position(|c| !c.known.load(Ordering::Relaxed));
    let gone = oldest.and_then(|at| clients.remove(at));
    gone.map(|c| c.talk.abort()).is_some()
}

async fn accept(listener: TcpListener, remote: Arc<Remote>, router: Router) {
    let mut clients = VecDeque::new();
    let mut talks = JoinSet::new();
    let said = Arc::new(Mutex::new(None));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                // Out of descriptors, most likely: some of them will be free again.
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

/// One client's stay.
struct Visit {
    remote: Arc<Remote>,
    peer: SocketAddr,
    known: Arc<AtomicBool>,
    /// When it was last said that somebody showed a wrong token.
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
                // No browser has rights here that another page could make use of: they come with the token alone.
                request.extensions_mut().insert(Meant);
            } else {
                // It is not the right one, and vouches for nothing.
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

    /// The answer to those who may not ask; it is their last.
    fn refusal(&self, entry: Entry) -> Option<Response> {
        let why = match entry {
            Entry::Known => {
                self.known.store(true, Ordering::Relaxed);
                return None;
            }
            Entry::Page | Entry::Metrics => return None,
            Entry::Missing => {
                "this daemon wants its token: send it as \"Authorization: Bearer TOKEN\" (with ubcache: --token-file)"
            }
            Entry::Wrong => {
                self.say_wrong();
                "this is not the token of this daemon"
            }
        };
        let heads = [(header::WWW_AUTHENTICATE, "Bearer realm=\"ubcache\""), (header::CONNECTION, "close")];
        Some((StatusCode::UNAUTHORIZED, heads, server::words(why)).into_response())
    }

    /// Somebody may be guessing.
    fn say_wrong(&self) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|at| at.elapsed() >= SAY_EVERY) {
            *said = Some(Instant::now());
            message::warn(format!("{}: showed a wrong token and was refused", self.peer.ip()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const TOKEN: &str = "0123456789abcdef";

    fn remote(metrics_without_token: bool) -> Remote {
        Remote { listen: Vec::new(), token: Token(TOKEN.into()), tls: None, metrics_without_token }
    }

    fn entry(remote: &Remote, method: Method, path: &str, shown: &[&str]) -> Entry {
        let mut headers = HeaderMap::new();
        for value in shown {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        remote.entry(&method, &path.parse().unwrap(), &headers)
    }

    #[test]
    fn who_may_come_in() {
        let right = format!("Bearer {TOKEN}");
        let remote = remote(false);
        for (shown, wanted) in [
            (&[&*right][..], Entry::Known),
            (&["bearer   0123456789abcdef "], Entry::Known),
            (&[], Entry::Missing),
            (&[""], Entry::Wrong),
            (&["Bearer"], Entry::Wrong),
            (&["Bearer "], Entry::Wrong),
            (&["Bearer 0123456789abcde"], Entry::Wrong),
            (&["Bearer 0123456789abcdef0"], Entry::Wrong),
            (&["Bearer 0123456789abcdeg"], Entry::Wrong),
            (&["Basic 0123456789abcdef"], Entry::Wrong),
            (&[TOKEN], Entry::Wrong),
            (&[&*right, &*right], Entry::Wrong),
            (&["Bearer nothing at all", &*right], Entry::Wrong),
        ] {
            assert_eq!(entry(&remote, Method::GET, "/v1/status", shown), wanted, "{shown:?}");
        }
    }

    #[test]
    fn what_is_open_to_everybody() {
        for (method, path, metrics, wanted) in [
            (Method::GET, "/", false, Entry::Page),
            (Method::HEAD, "/assets/chart.js", false, Entry::Page),
            (Method::POST, "/assets/chart.js", false, Entry::Missing),
            (Method::GET, "/assets", false, Entry::Missing),
            (Method::GET, "//v1/status", false, Entry::Missing),
            (Method::GET, "/v1/openapi.json", false, Entry::Missing),
            (Method::GET, "http://x/v1/status", false, Entry::Missing),
            (Method::GET, "/nowhere", false, Entry::Missing),
            (Method::GET, "/metrics", false, Entry::Missing),
            (Method::GET, "/metrics", true, Entry::Metrics),
            (Method::GET, "/metrics/", true, Entry::Missing),
        ] {
            assert_eq!(entry(&remote(metrics), method, path, &[]), wanted, "{path}");
        }
        assert_eq!(entry(&remote(false), Method::GET, "/", &["Bearer wrong"]), Entry::Page);
    }

    #[test]
    fn what_is_secret_is_kept_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Named { path, line: 7 }
        };
        let refused = |named: &Named| Token::read(named).err().unwrap().message().unwrap().to_owned();
        assert!(Token::read(&file("good", &format!("{TOKEN}\n"), 0o640)).unwrap().is(TOKEN.as_bytes()));
        for mode in [0o604, 0o602, 0o644] {
            let said = refused(&file("open", TOKEN, mode));
            assert!(said.starts_with("line 7: token_file: ") && said.contains("open to everybody"), "{said}");
        }
        for text in ["short", "", "0123456789abcde fg", "0123456789abcdef\n0123456789abcdef", "ééééééééééé"]
        {
            let said = refused(&file("strange", text, 0o600));
            assert!(said.contains("visible ASCII"), "{said}");
            assert!(text.is_empty() || !said.contains(text), "{said}");
        }
        assert!(refused(&Named { path: dir.path().into(), line: 7 }).contains("expected a file"));
        let none = Named { path: dir.path().join("none"), line: 7 };
        assert!(refused(&none).contains("cannot be opened"));
        let text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
        let said = Tls::read(&file("certificate", text, 0o644), &file("key", text, 0o600)).err().unwrap();
        assert!(said.message().unwrap().contains("found none"), "{said:?}");
    }

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
