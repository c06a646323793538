//! The control socket, and the limits of every connection.
//!
//! Owns the peer check (root, the user of this daemon, a group), the limits on connections, headers and bodies, and the
//! deadlines. The connection of a client that sends half a request, or does not read its answer, is closed. Must not know
//! the requests.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serve::Failure;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};

use crate::answer::words;
use crate::audit::{Peer, Strangers};
use crate::hub::Hub;

/// Limit of the connected clients.
const MOST_CLIENTS: usize = 128;
/// Limit of the refused clients that get the error at a time.
const MOST_REFUSED: usize = 16;
/// Time limit of a client for the head of a request, and then for its body.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
/// Time limit of a client to read a part of its answer.
const READS_WITHIN: Duration = Duration::from_secs(10);
const HEADER_LINES: usize = 64;
const HEADER_BYTES: usize = 32 << 10;
/// Limit of the bytes of a request's body.
const BODY_BYTES: usize = 64 << 10;

/// The users who may control the daemon.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    own_uid: u32,
    group: Option<(String, u32)>,
    members: Vec<u32>,
}

impl Access {
    /// Permits root, the user of this process, and the members of a group, which is a name or a number.
    ///
    /// # Errors
    /// If there is no such group.
    pub(crate) fn new(group: Option<&str>) -> Result<Access, Failure> {
        let own_uid = rustix::process::geteuid().as_raw();
        let Some(name) = group else { return Ok(Access { own_uid, group: None, members: Vec::new() }) };
        let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        match group_of(name, &groups, &users) {
            Some((gid, members)) => Ok(Access { own_uid, group: Some((name.to_owned(), gid)), members }),
            None => Err(Failure::Failed(format!("group {name}: there is no such group in /etc/group"))),
        }
    }

    fn allows(&self, uid: u32, gid: u32) -> bool {
        uid == 0
            || uid == self.own_uid
            || self.group.as_ref().is_some_and(|(_, allowed)| gid == *allowed)
            || self.members.contains(&uid)
    }

    fn refusal(&self, uid: u32) -> String {
        let who = match &self.group {
            Some((name, _)) => format!("only root and members of group {name} may"),
            None => "only root may; to permit a group, name it in the configuration".to_owned(),
        };
        format!("user {uid} may not control this daemon: {who}")
    }
}

/// The number of a group and its members, from the texts of `/etc/group` and `/etc/passwd`.
fn group_of(name: &str, groups: &str, users: &str) -> Option<(u32, Vec<u32>)> {
    let uid_of = |user: &str| {
        let mut lines = users.lines().map(|l| l.split(':').collect::<Vec<_>>());
        lines.find(|f| f.first() == Some(&user)).and_then(|f| f.get(2)?.parse::<u32>().ok())
    };
    let lines = groups.lines().map(|l| l.split(':').collect::<Vec<_>>());
    for fields in lines {
        let (Some(group), Some(gid)) = (fields.first(), fields.get(2).and_then(|g| g.parse::<u32>().ok()))
        else {
            continue;
        };
        if *group == name || name.parse() == Ok(gid) {
            let members = fields.get(3).into_iter().flat_map(|m| m.split(','));
            return Some((gid, members.filter_map(uid_of).collect()));
        }
    }
    name.parse().ok().map(|gid| (gid, Vec::new()))
}

/// Binds the socket. Every user can connect; a user without permission gets an error.
///
/// # Errors
/// If another daemon listens there, or the socket cannot be made.
pub(crate) fn bind(path: &Path) -> Result<UnixListener, Failure> {
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty() && !d.exists()) {
        std::fs::create_dir_all(dir).map_err(|e| Failure::at(dir, "cannot be created", e))?;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir, mode)
            .map_err(|e| Failure::at(dir, "its permissions cannot be set", e))?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(Failure::Failed(format!(
                "{}: expected a socket or no file, found another file; remove \
                                                it or choose another path",
                path.display()
            )));
        }
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            return Err(Failure::Failed(format!("{}: another daemon listens there", path.display())));
        }
        // A daemon that was killed has left the socket.
        Ok(_) => std::fs::remove_file(path).map_err(|e| Failure::at(path, "cannot be removed", e))?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(|e| Failure::at(path, "cannot listen", e))?;
    let mode = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(path, mode)
        .map_err(|e| Failure::at(path, "its permissions cannot be set", e))?;
    Ok(listener)
}

/// Adds the limits of all clients, over the socket and TCP, to a service.
pub(crate) fn with_limits(router: Router) -> Router {
    router.layer(axum::middleware::from_fn(whole_body))
}

/// Serves clients of the socket until the future is dropped.
pub(crate) async fn serve(listener: UnixListener, router: Router, access: Access, hub: Arc<Hub>) {
    let mut strangers = Strangers::default();
    let router = crate::web::without_tokens(router);
    let (clients, refused) = (Arc::new(Semaphore::new(MOST_CLIENTS)), Arc::new(Semaphore::new(MOST_REFUSED)));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                // The process probably has no free descriptor. Some become free as clients disconnect.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = stream.peer_cred() else { continue };
        let allowed = access.allows(peer.uid(), peer.gid());
        let room = if allowed { &clients } else { &refused };
        let Ok(permit) = room.clone().try_acquire_owned() else { continue };
        let who = Peer::Local { uid: peer.uid(), gid: peer.gid(), pid: peer.pid() };
        let service = if allowed {
            router.clone().layer(Extension(who))
        } else {
            let why = access.refusal(peer.uid());
            strangers.refused(&hub, who, &why);
            no_entry(why)
        };
        tokio::spawn(async move {
            let _permit = permit;
            converse(stream, TowerToHyperService::new(service)).await;
        });
    }
}

/// A service that answers each request with the same error.
fn no_entry(why: String) -> Router {
    Router::new().fallback(move || async move {
        let close = [(axum::http::header::CONNECTION, "close")];
        (StatusCode::FORBIDDEN, close, words(&why)).into_response()
    })
}

/// Answers one client until it disconnects or is disconnected.
pub(crate) async fn converse<C, S>(stream: C, service: S)
where
    C: AsyncRead + AsyncWrite + Unpin,
    S: Service<hyper::Request<Incoming>, Response = Response, Error = Infallible>,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WITHIN)
        .max_headers(HEADER_LINES)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(TokioIo::new(Patient::new(stream)), service);
    // Errors of the connection are not logged. The client has its answer if the answer could be sent.
    let _ = connection.await;
}

/// Reads the whole body of a request before its handler runs.
async fn whole_body(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let refuse = |status: StatusCode, why: &str| (status, words(why)).into_response();
    match tokio::time::timeout(REQUEST_WITHIN, axum::body::to_bytes(body, BODY_BYTES)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(head, Body::from(bytes))).await,
        Ok(Err(_)) => refuse(StatusCode::PAYLOAD_TOO_LARGE, "expected a complete body of at most 64 KiB"),
        Err(_) => refuse(StatusCode::REQUEST_TIMEOUT, "the body did not arrive within 10 seconds"),
    }
}

/// A stream whose writes fail if the peer reads nothing for [`READS_WITHIN`].
struct Patient<C> {
    stream: C,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<C> Patient<C> {
    fn new(stream: C) -> Patient<C> {
        Patient { stream, waiting: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.waiting = None;
            return polled;
        }
        let deadline = Instant::now() + READS_WITHIN;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        match waiting.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Patient<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Patient<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, data);
        self.watch(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_members() {
        let groups = "root:x:0:\ndisk:x:6:alice,bob\nodd line\n";
        let users = "root:x:0:0::/:\nalice:x:1000:1000::/:\nbob:x:1001:1001::/:\n";
        assert_eq!(group_of("disk", groups, users), Some((6, vec![1000, 1001])));
        assert_eq!(group_of("6", groups, users), Some((6, vec![1000, 1001])));
        assert_eq!(group_of("77", groups, users), Some((77, vec![])));
        assert_eq!(group_of("none", groups, users), None);
    }

    #[test]
    fn access_is_for_few() {
        let group = Some(("disk".to_owned(), 6));
        let access = Access { own_uid: 500, group, members: vec![1000] };
        for (uid, gid, allowed) in
            [(0, 0, true), (500, 500, true), (1000, 1000, true), (1001, 6, true), (1001, 1001, false)]
        {
            assert_eq!(access.allows(uid, gid), allowed, "{uid} {gid}");
        }
        assert!(access.refusal(1001).contains("group disk"));
    }
}
