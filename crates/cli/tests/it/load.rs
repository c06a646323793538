//! Load over NBD that knows what each sector may hold.
//!
//! Owns the oracle: for every sector the write that must be there at least, and the later ones that may be. Random
//! requests come from a seed; a failed write may have reached any of its sectors, a failed read says nothing.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use ubcache_cli::nbd_client::{Ask, Client, NbdReply};

use crate::world::{DEADLINE, SECTOR};

/// Requests under way at a time.
const DEPTH: usize = 24;
const MAX_WRITE_SECTORS: u64 = 128;

/// A write to a sector, by its number; 0 stands for the zeros of the beginning.
pub type Version = u64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Answered,
    /// Answered with an error.
    Failed,
}

#[derive(Clone, Copy)]
struct Later {
    version: Version,
    state: State,
}

pub struct Oracle {
    /// What a crash must leave at least.
    certain: Vec<Version>,
    /// Writes begun since, in order.
    later: BTreeMap<usize, Vec<Later>>,
    /// Writes of zeros.
    zeros: BTreeMap<Version, ()>,
}

impl Oracle {
    fn new(sectors: usize) -> Oracle {
        Oracle { certain: vec![0; sectors], later: BTreeMap::new(), zeros: BTreeMap::new() }
    }

    pub fn sectors(&self) -> usize {
        self.certain.len()
    }

    fn busy(&self, start: usize, count: usize) -> bool {
        let open = |s: usize| self.later.get(&s).is_some_and(|l| l.iter().any(|w| w.state == State::Open));
        (start..start + count).any(open)
    }

    fn begin(&mut self, start: usize, count: usize, version: Version) {
        for s in start..start + count {
            self.later.entry(s).or_default().push(Later { version, state: State::Open });
        }
    }

    fn ended(&mut self, start: usize, count: usize, version: Version, state: State) {
        for s in start..start + count {
            for w in self.later.get_mut(&s).into_iter().flatten().filter(|w| w.version == version) {
                w.state = state;
            }
        }
    }

    /// What a flush covers that begins now.
    fn covered(&self) -> Vec<(usize, Version)> {
        let last = |l: &Vec<Later>| l.iter().rev().find(|w| w.state == State::Answered).map(|w| w.version);
        self.later.iter().filter_map(|(s, l)| Some((*s, last(l)?))).collect()
    }

    fn make_certain(&mut self, sector: usize, version: Version) {
        let Some(list) = self.later.get_mut(&sector) else { return };
        if let Some(at) = list.iter().position(|w| w.version == version) {
            list.drain(..=at);
            self.certain[sector] = version;
        }
        if list.is_empty() {
            self.later.remove(&sector);
        }
    }

    /// What a read may return while the server runs: the newest write that was answered, or any behind it.
    fn readable(&self, sector: usize) -> Vec<Version> {
        let list = self.later.get(&sector).map_or(&[][..], Vec::as_slice);
        match list.iter().rposition(|w| w.state == State::Answered) {
            Some(at) => list[at..].iter().map(|w| w.version).collect(),
            None => [self.certain[sector]].into_iter().chain(list.iter().map(|w| w.version)).collect(),
        }
    }

    fn contents(&self, sector: usize, version: Version) -> [u8; SECTOR] {
        let mut out = [0; SECTOR];
        if version == 0 || self.zeros.contains_key(&version) {
            return out;
        }
        for piece in out.chunks_exact_mut(16) {
            piece[..8].copy_from_slice(&(sector as u64 + 1).to_le_bytes());
            piece[8..].copy_from_slice(&version.to_le_bytes());
        }
        out
    }

    /// Compares everything after a crash and takes what is there as certain.
    #[track_caller]
    pub fn judge(&mut self, found: &[u8], what: &str) {
        assert_eq!(found.len(), self.sectors() * SECTOR, "{what}");
        let mut later = std::mem::take(&mut self.later);
        for (s, bytes) in found.chunks_exact(SECTOR).enumerate() {
            let certain = self.certain[s];
            if *bytes == self.contents(s, certain) {
                continue;
            }
            let list = later.remove(&s).unwrap_or_default();
            let is = list.iter().rev().find(|w| *bytes == self.contents(s, w.version));
            let Some(is) = is else {
                let allowed: Vec<_> = list.iter().map(|w| w.version).collect();
                panic!(
                    "{what}: sector {s}: expected write {certain} or one of {allowed:?}, found {:02x?}",
                    &bytes[..16]
                );
            };
            self.certain[s] = is.version;
        }
    }
}

enum Open {
    Write {
        start: usize,
        count: usize,
        version: Version,
        durable: bool,
    },
    /// What each sector could hold when the read began, and the newest write then.
    Read {
        start: usize,
        held: Vec<Vec<Version>>,
        since: Version,
    },
    Flush(Vec<(usize, Version)>),
}

/// Requests from a seed, and what is known of their outcome.
pub struct Load {
    pub oracle: Oracle,
    pub rng: ::io::Rng,
    version: Version,
    /// What was answered survives what this test does to the server, flushed or not.
    answers_survive: bool,
}

impl Load {
    pub fn new(seed: u64, sectors: usize) -> Load {
        Load { oracle: Oracle::new(sectors), rng: ::io::Rng::new(seed), version: 0, answers_survive: false }
    }

    /// The server is to keep what it has answered, flushed or not.
    pub fn answers_survive(mut self) -> Load {
        self.answers_survive = true;
        self
    }

    fn range(&mut self) -> (usize, usize) {
        // Mostly small, now and then large; some parts of the device are hot.
        let most = if self.rng.below(8) == 0 { MAX_WRITE_SECTORS } else { 16 };
        let count = 1 + self.rng.below(most) as usize;
        let room = (self.oracle.sectors() - count) as u64;
        let start = if self.rng.below(3) == 0 { self.rng.below(room / 16) } else { self.rng.below(room) };
        (start as usize, count)
    }

    fn data(&self, start: usize, count: usize, version: Version) -> Vec<u8> {
        (start..start + count).flat_map(|s| self.oracle.contents(s, version)).collect()
    }

    /// Compares all that a server has with what may be there, and takes it as certain.
    #[track_caller]
    pub fn judge_served(&mut self, socket: &str, what: &str) {
        let served = read_all(socket, self.oracle.sectors());
        self.oracle.judge(&served, what);
    }
}

/// Everything that a server has.
#[track_caller]
pub fn read_all(socket: &str, sectors: usize) -> Vec<u8> {
    let mut client = Client::connect(Path::new(socket), "").expect("a server");
    client.set_timeout(Some(DEADLINE)).expect("a socket");
    let mut served = Vec::with_capacity(sectors * SECTOR);
    for s in (0..sectors).step_by(2048) {
        let count = (sectors - s).min(2048);
        served.extend(client.read((s * SECTOR) as u64, (count * SECTOR) as u32).expect("a read"));
    }
    served
}

/// A client that keeps many requests under way.
pub struct Traffic {
    client: Client,
    open: BTreeMap<u64, Open>,
    tag: u64,
}

impl Traffic {
    pub fn connect(socket: &str) -> Traffic {
        let client = Client::connect(Path::new(socket), "").expect("a server");
        client.set_timeout(Some(DEADLINE)).expect("a socket");
        Traffic { client, open: BTreeMap::new(), tag: 0 }
    }

    /// Sends requests until enough are under way.
    pub fn top_up(&mut self, load: &mut Load) -> io::Result<()> {
        let mut tries = 0;
        while self.client.pending() < DEPTH && tries < 4 * DEPTH {
            tries += 1;
            self.ask(load)?;
        }
        Ok(())
    }

    fn ask(&mut self, load: &mut Load) -> io::Result<()> {
        self.tag += 1;
        let tag = self.tag;
        let (start, count) = load.range();
        let (offset, bytes) = ((start * SECTOR) as u64, (count * SECTOR) as u32);
        let kind = load.rng.below(100);
        if kind < 6 {
            self.open.insert(tag, Open::Flush(load.oracle.covered()));
            return self.client.ask(Ask::Flush, 0, tag);
        }
        if load.oracle.busy(start, count) {
            return Ok(());
        }
        if kind < 25 {
            let held = (start..start + count).map(|s| load.oracle.readable(s)).collect();
            self.open.insert(tag, Open::Read { start, held, since: load.version });
            return self.client.ask(Ask::Read(bytes), offset, tag);
        }
        load.version += 1;
        let version = load.version;
        let durable = kind < 30;
        load.oracle.begin(start, count, version);
        self.open.insert(tag, Open::Write { start, count, version, durable });
        if kind >= 97 {
            load.oracle.zeros.insert(version, ());
            return self.client.ask(Ask::WriteZeroes(bytes), offset, tag);
        }
        self.client.ask_write(offset, &load.data(start, count, version), durable, tag)
    }

    /// Waits for an answer and judges it; the error of the protocol in it, 0 for none.
    pub fn answer(&mut self, load: &mut Load) -> io::Result<u32> {
        let reply = self.client.receive()?;
        let request = self.open.remove(&reply.tag).expect("a request of ours");
        take(load, request, &reply);
        Ok(reply.error)
    }

    /// So many answers under load, all of them without errors.
    #[track_caller]
    pub fn run(&mut self, load: &mut Load, answers: u64) {
        for _ in 0..answers {
            self.top_up(load).expect("a server");
            assert_eq!(self.answer(load).expect("a server"), 0);
        }
    }

    /// Answers to everything that is under way; how many were errors.
    #[track_caller]
    pub fn settle(&mut self, load: &mut Load) -> u64 {
        let mut errors = 0;
        while self.client.pending() > 0 {
            errors += u64::from(self.answer(load).expect("a server") != 0);
        }
        errors
    }
}

fn take(load: &mut Load, request: Open, reply: &NbdReply) {
    let oracle = &mut load.oracle;
    match request {
        Open::Write { start, count, version, .. } if reply.error != 0 => {
            oracle.ended(start, count, version, State::Failed);
        }
        Open::Write { start, count, version, durable } => {
            oracle.ended(start, count, version, State::Answered);
            if durable || load.answers_survive {
                (start..start + count).for_each(|s| oracle.make_certain(s, version));
            }
        }
        Open::Flush(_) | Open::Read { .. } if reply.error != 0 => {}
        Open::Flush(covered) => {
            for (s, version) in covered {
                oracle.make_certain(s, version);
            }
        }
        Open::Read { start, held, since } => {
            for ((s, held), bytes) in (start..).zip(held).zip(reply.data.chunks_exact(SECTOR)) {
                // Writes that began while the read was under way may or may not be seen.
                let began = oracle.later.get(&s).into_iter().flatten().map(|w| w.version);
                let began = began.chain([oracle.certain[s]]).filter(|v| *v > since);
                let allowed: Vec<Version> = began.chain(held).collect();
                assert!(
                    allowed.iter().any(|v| *bytes == oracle.contents(s, *v)),
                    "a read of sector {s}: expected one of the writes {allowed:?}, found {:02x?}",
                    &bytes[..16]
                );
            }
        }
    }
}

/// A number that the environment may give.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().expect("a number"))
}
