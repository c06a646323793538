//! A server over pipes in memory, with virtual time and a schedule of choice.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use export_nbd::codec::wire::command;
use export_nbd::{ConnectionEvent, Exports, PeerId, Server, ServerOptions};
use io::{Clock, Fifo, JoinHandle, Nanos, Rng, Runtime, Schedule};

use crate::pipe::{PipeClient, PipeSocket, pipe, pipe_from};
use crate::wire::{Fields, Reply, opening, option_replies, replies, request, take_greeting, write};
use rig::RamVolume;

struct TestClock(Cell<u64>);

impl Clock for TestClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }

    fn wall_seconds(&self) -> u64 {
        0
    }
}

struct Shuffled(Rng);

impl Schedule for Shuffled {
    fn pick(&mut self, ready: usize) -> usize {
        self.0.below(ready as u64) as usize
    }
}

pub struct World {
    rt: Runtime,
    clock: Rc<TestClock>,
    schedule: RefCell<Box<dyn Schedule>>,
    pub server: Server<RamVolume>,
    events: Rc<RefCell<Vec<String>>>,
}

impl World {
    pub fn new<'v>(volumes: impl IntoIterator<Item = &'v Rc<RamVolume>>) -> World {
        World::with(volumes, ServerOptions::default())
    }

    pub fn with<'v>(volumes: impl IntoIterator<Item = &'v Rc<RamVolume>>, options: ServerOptions) -> World {
        let clock = Rc::new(TestClock(Cell::new(1)));
        let rt = Runtime::new(clock.clone(), 0);
        let exports = Exports::new();
        for v in volumes {
            exports.add(v.clone()).expect("names differ");
        }
        let events = Rc::new(RefCell::new(Vec::new()));
        let parsed = events.clone();
        let observer = move |event: &ConnectionEvent| {
            let text = match event {
                ConnectionEvent::Accepted { id, .. } => format!("{id} accepted"),
                ConnectionEvent::TurnedAway { why, .. } => format!("turned away: {why}"),
                ConnectionEvent::AcceptFailed(e) => format!("accept failed: {e}"),
                ConnectionEvent::Opened { id, export } => format!("{id} opened {export}"),
                ConnectionEvent::Closed { id, end, .. } => format!("{id} closed: {end}"),
            };
            parsed.borrow_mut().push(text);
        };
        let options = ServerOptions { observer: Some(Rc::new(observer)), ..options };
        let server = Server::new(rt.handle(), exports, options);
        World { rt, clock, schedule: RefCell::new(Box::new(Fifo)), server, events }
    }

    /// Runs tasks in an order that depends on `seed`.
    pub fn shuffle(&self, seed: u64) {
        *self.schedule.borrow_mut() = Box::new(Shuffled(Rng::new(seed)));
    }

    /// Runs until nothing is ready.
    pub fn run(&self) {
        let polls = self.rt.run(&mut **self.schedule.borrow_mut(), 10_000_000);
        assert!(polls < 10_000_000, "tasks run without end");
    }

    pub fn advance(&self, span: Nanos) {
        self.clock.0.set(self.clock.0.get() + span.0);
        self.rt.fire_timers();
        self.run();
    }

    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let handle = self.rt.handle().spawn(future);
        self.run();
        handle
    }

    /// A client that has not said anything yet.
    pub fn connect_raw(&self) -> PipeClient {
        self.meet(pipe())
    }

    /// A client of `peer` that has not said anything yet.
    pub fn connect_raw_as(&self, peer: PeerId) -> PipeClient {
        self.meet(pipe_from(peer))
    }

    fn meet(&self, (socket, client): (PipeSocket, PipeClient)) -> PipeClient {
        self.server.serve_socket(socket);
        self.run();
        client
    }

    /// A client that has opened an export.
    pub fn connect(&self, name: &str, structured: bool, block_status: bool) -> Client<'_> {
        self.open(self.connect_raw(), name, structured, block_status)
    }

    /// A client of `peer` that has opened an export.
    pub fn connect_as(&self, peer: PeerId, name: &str, structured: bool) -> Client<'_> {
        self.open(self.connect_raw_as(peer), name, structured, false)
    }

    fn open(&self, pipe: PipeClient, name: &str, structured: bool, block_status: bool) -> Client<'_> {
        pipe.send(&opening(name, structured, block_status));
        self.run();
        let bytes = pipe.received();
        let mut fields = Fields(&bytes);
        take_greeting(&mut fields);
        let last = option_replies(fields).pop().expect("an answer");
        assert_eq!((last.0, last.1), (7, 1), "GO is acknowledged");
        Client { world: self, pipe, next_cookie: Cell::new(1), reads: RefCell::default() }
    }

    pub fn events(&self) -> Vec<String> {
        self.events.borrow().clone()
    }

    pub fn last_event(&self) -> String {
        self.events.borrow().last().cloned().unwrap_or_default()
    }

    /// Tasks of the server that have not ended.
    pub fn tasks(&self) -> usize {
        self.rt.live_tasks()
    }
}

pub struct Client<'a> {
    world: &'a World,
    pub pipe: PipeClient,
    next_cookie: Cell<u64>,
    /// Lengths of reads by cookie, for simple replies.
    reads: RefCell<BTreeMap<u64, usize>>,
}

impl Client<'_> {
    fn cookie(&self) -> u64 {
        let cookie = self.next_cookie.get();
        self.next_cookie.set(cookie + 1);
        cookie
    }

    /// Sends a request without payload; nothing runs yet.
    pub fn post(&self, kind: u16, flags: u16, offset: u64, bytes: u32) -> u64 {
        let cookie = self.cookie();
        if kind == command::READ {
            self.reads.borrow_mut().insert(cookie, bytes as usize);
        }
        self.pipe.send(&request(kind, flags, cookie, offset, bytes));
        cookie
    }

    pub fn post_write(&self, flags: u16, offset: u64, data: &[u8]) -> u64 {
        let cookie = self.cookie();
        self.pipe.send(&write(flags, cookie, offset, data));
        cookie
    }

    /// Runs, and returns the replies that came.
    pub fn replies(&self) -> Vec<Reply> {
        self.world.run();
        let reads = self.reads.borrow();
        replies(&self.pipe.received(), |cookie| reads.get(&cookie).copied().unwrap_or(0))
    }

    /// Sends a request and returns its only reply.
    pub fn ask(&self, kind: u16, flags: u16, offset: u64, bytes: u32) -> Reply {
        let cookie = self.post(kind, flags, offset, bytes);
        self.only_reply(cookie)
    }

    pub fn ask_write(&self, flags: u16, offset: u64, data: &[u8]) -> Reply {
        let cookie = self.post_write(flags, offset, data);
        self.only_reply(cookie)
    }

    fn only_reply(&self, cookie: u64) -> Reply {
        let mut replies = self.replies();
        assert_eq!(replies.len(), 1, "{replies:?}");
        let reply = replies.remove(0);
        assert_eq!(reply.cookie(), cookie);
        assert!(reply.is_final());
        reply
    }

    /// Reads through as many chunks as it takes; the error number if it fails.
    pub fn read(&self, offset: u64, bytes: u32) -> Result<Vec<u8>, u32> {
        let cookie = self.post(command::READ, 0, offset, bytes);
        assemble(&self.replies(), cookie, offset, bytes as usize)
    }
}

/// Puts the data of the reply to a read together and checks that they cover it exactly.
pub fn assemble(replies: &[Reply], cookie: u64, offset: u64, bytes: usize) -> Result<Vec<u8>, u32> {
    let mut data = vec![0; bytes];
    let mut missing = bytes;
    let mut done = false;
    for reply in replies.iter().filter(|r| r.cookie() == cookie) {
        assert!(!done, "nothing comes after the last chunk");
        done = reply.is_final();
        match reply {
            Reply::Data { offset: at, data: piece, .. } => {
                let at = (at - offset) as usize;
                data[at..at + piece.len()].copy_from_slice(piece);
                missing -= piece.len();
            }
            Reply::SimpleData { data: all, .. } => {
                data.copy_from_slice(all);
                missing -= all.len();
            }
            Reply::Done { .. } => {}
            other => return Err(other.error()),
        }
    }
    assert!(done, "the reply ends");
    assert_eq!(missing, 0, "the data cover the request");
    Ok(data)
}
