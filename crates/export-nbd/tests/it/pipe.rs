//! A stream socket in memory: the server's end is a [`Socket`], the test's end is driven by hand.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use ::io::Buffer;
use ::io::sync::{Event, Queue};

use export_nbd::{Listen, Part, PeerId, Socket};

struct State {
    to_server: RefCell<VecDeque<u8>>,
    to_client: RefCell<Vec<u8>>,
    /// Bytes that wait for the client before the server's send waits.
    capacity: Cell<usize>,
    /// Most bytes that one receive yields.
    grain: Cell<usize>,
    client_done: Cell<bool>,
    client_closed: Cell<bool>,
    server_done: Cell<bool>,
    changed: Event,
    sends: Cell<usize>,
    peer: PeerId,
}

/// The server's end.
pub struct PipeSocket(Rc<State>);

/// The test's end.
pub struct PipeClient(Rc<State>);

pub fn pipe() -> (PipeSocket, PipeClient) {
    pipe_from(PeerId::Unknown)
}

/// A pipe whose client is `peer`.
pub fn pipe_from(peer: PeerId) -> (PipeSocket, PipeClient) {
    let state = Rc::new(State {
        to_server: RefCell::default(),
        to_client: RefCell::default(),
        capacity: Cell::new(usize::MAX),
        grain: Cell::new(usize::MAX),
        client_done: Cell::new(false),
        client_closed: Cell::new(false),
        server_done: Cell::new(false),
        changed: Event::default(),
        sends: Cell::new(0),
        peer,
    });
    (PipeSocket(state.clone()), PipeClient(state))
}

impl Socket for PipeSocket {
    async fn recv(&self, mut buffer: Buffer, range: Range<usize>) -> (Buffer, io::Result<usize>) {
        assert!(!range.is_empty(), "receiving nothing looks like the end");
        let s = &self.0;
        let ready = || !s.to_server.borrow().is_empty() || s.client_done.get() || s.server_done.get();
        s.changed.wait_until(ready).await;
        let mut from = s.to_server.borrow_mut();
        let n = range.len().min(from.len()).min(s.grain.get());
        for (to, byte) in buffer.as_mut()[range].iter_mut().zip(from.drain(..n)) {
            *to = byte;
        }
        (buffer, Ok(n))
    }

    async fn send(&self, mut parts: Vec<Part>) -> (Vec<Part>, io::Result<()>) {
        let s = &self.0;
        s.sends.set(s.sends.get() + 1);
        for part in parts.drain(..) {
            for piece in part.buffer.as_slice()[part.range].chunks(4096) {
                let gone = || s.client_closed.get() || s.server_done.get();
                s.changed.wait_until(|| gone() || s.to_client.borrow().len() < s.capacity.get()).await;
                if gone() {
                    // The rest of the parts is dropped with the iterator.
                    return (Vec::new(), Err(io::ErrorKind::BrokenPipe.into()));
                }
                s.to_client.borrow_mut().extend(piece);
            }
        }
        (parts, Ok(()))
    }

    fn peer(&self) -> PeerId {
        self.0.peer
    }

    fn shutdown(&self) {
        self.0.server_done.set(true);
        self.0.changed.notify_all();
    }
}

impl Drop for PipeSocket {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl PipeClient {
    pub fn send(&self, bytes: &[u8]) {
        self.0.to_server.borrow_mut().extend(bytes);
        self.0.changed.notify_all();
    }

    /// Everything that came since the last call.
    pub fn received(&self) -> Vec<u8> {
        let bytes = std::mem::take(&mut *self.0.to_client.borrow_mut());
        self.0.changed.notify_all();
        bytes
    }

    /// How many bytes wait for [`PipeClient::received`].
    pub fn waiting(&self) -> usize {
        self.0.to_client.borrow().len()
    }

    /// The server's sends wait while this many bytes are not received.
    pub fn set_capacity(&self, bytes: usize) {
        self.0.capacity.set(bytes);
        self.0.changed.notify_all();
    }

    /// One receive of the server yields at most this.
    pub fn set_grain(&self, bytes: usize) {
        self.0.grain.set(bytes);
    }

    /// Closes the sending half.
    pub fn finish(&self) {
        self.0.client_done.set(true);
        self.0.changed.notify_all();
    }

    /// Goes away: the server gets the end of the stream, and errors when it sends.
    pub fn vanish(&self) {
        self.0.client_closed.set(true);
        self.finish();
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.0.server_done.get()
    }

    /// How often the server has sent.
    pub fn sends(&self) -> usize {
        self.0.sends.get()
    }
}

/// A listener whose connections are made by hand.
#[derive(Clone, Default)]
pub struct PipeListener {
    waiting: Rc<Queue<io::Result<PipeSocket>>>,
}

impl PipeListener {
    pub fn connect(&self) -> PipeClient {
        let (socket, client) = pipe();
        self.waiting.push(Ok(socket));
        client
    }

    pub fn fail(&self, kind: io::ErrorKind) {
        self.waiting.push(Err(kind.into()));
    }
}

impl Listen for PipeListener {
    type Socket = PipeSocket;

    async fn accept(&self) -> io::Result<PipeSocket> {
        self.waiting.pop().await.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))
    }
}
