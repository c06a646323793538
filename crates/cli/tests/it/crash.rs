//! `kill -9` of `up` at random moments under load, again and again on the same devices.
//!
//! An oracle knows for every sector what it may hold after a crash: the last write that a completed flush covers, or a
//! later one that was begun. After each crash the set is checked and extracted as it lies there, then started again,
//! and everything is read: extract and server must agree, every sector must hold something that is allowed, and what it
//! holds then is what it must go on to hold.
//!
//! `UBCACHE_CRASH_SEED` chooses the load and the moments, `UBCACHE_CRASH_ROUNDS` how many.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use ubcache_cli::nbd_client::{Ask, Client};

use crate::world::*;

const SECTORS: usize = (24 << 20) / SECTOR - 16;
const DEPTH: usize = 24;
const MAX_WRITE_SECTORS: u64 = 128;

/// A write to a sector, by its number; 0 stands for the zeros of the beginning.
type Version = u64;

#[derive(Clone, Copy)]
struct Later {
    version: Version,
    answered: bool,
}

struct Oracle {
    /// What a crash must leave at least.
    certain: Vec<Version>,
    /// Writes begun since, in order.
    later: BTreeMap<usize, Vec<Later>>,
    /// Sectors of writes of zeros, by version.
    zeros: BTreeMap<Version, ()>,
}

impl Oracle {
    fn new() -> Oracle {
        Oracle { certain: vec![0; SECTORS], later: BTreeMap::new(), zeros: BTreeMap::new() }
    }

    fn busy(&self, start: usize, count: usize) -> bool {
        let open = |s: usize| self.later.get(&s).is_some_and(|l| l.iter().any(|w| !w.answered));
        (start..start + count).any(open)
    }

    fn begin(&mut self, start: usize, count: usize, version: Version) {
        for s in start..start + count {
            self.later.entry(s).or_default().push(Later { version, answered: false });
        }
    }

    fn answered(&mut self, start: usize, count: usize, version: Version, durable: bool) {
        for s in start..start + count {
            for w in self.later.get_mut(&s).into_iter().flatten().filter(|w| w.version == version) {
                w.answered = true;
            }
            if durable {
                self.make_certain(s, version);
            }
        }
    }

    /// What a flush covers that begins now.
    fn covered(&self) -> Vec<(usize, Version)> {
        let last = |l: &Vec<Later>| l.iter().rev().find(|w| w.answered).map(|w| w.version);
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

    /// The newest write, which is what a read must return while the server runs.
    fn newest(&self, sector: usize) -> Version {
        self.later.get(&sector).and_then(|l| l.last()).map_or(self.certain[sector], |w| w.version)
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
    fn judge(&mut self, found: &[u8], what: &str) {
        assert_eq!(found.len(), SECTORS * SECTOR, "{what}");
        let mut later = std::mem::take(&mut self.later);
        for (s, bytes) in found.chunks_exact(SECTOR).enumerate() {
            let certain = self.certain[s];
            if *bytes == self.contents(s, certain) {
                continue;
            }
            let list = later.remove(&s).unwrap_or_default();
            let is = list.iter().rev().find(|w| *bytes == self.contents(s, w.version));
            let Some(is) = is else {
                let allowed: Vec<_> = list.iter().map(|w| (w.version, w.answered)).collect();
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
    /// What each sector held when the read began, and the newest write then.
    Read {
        start: usize,
        held: Vec<Version>,
        since: Version,
    },
    Flush(Vec<(usize, Version)>),
}

struct World {
    oracle: Oracle,
    rng: io::Rng,
    version: Version,
}

impl World {
    fn range(&mut self) -> (usize, usize) {
        // Mostly small, now and then large; some parts of the device are hot.
        let most = if self.rng.below(8) == 0 { MAX_WRITE_SECTORS } else { 16 };
        let count = 1 + self.rng.below(most) as usize;
        let room = (SECTORS - count) as u64;
        let start = if self.rng.below(3) == 0 { self.rng.below(room / 16) } else { self.rng.below(room) };
        (start as usize, count)
    }

    fn data(&self, start: usize, count: usize, version: Version) -> Vec<u8> {
        (start..start + count).flat_map(|s| self.oracle.contents(s, version)).collect()
    }

    /// One more request.
    fn ask(&mut self, client: &mut Client, open: &mut BTreeMap<u64, Open>, tag: u64) -> std::io::Result<()> {
        let (start, count) = self.range();
        let (offset, bytes) = ((start * SECTOR) as u64, (count * SECTOR) as u32);
        let kind = self.rng.below(100);
        if kind < 6 {
            open.insert(tag, Open::Flush(self.oracle.covered()));
            return client.ask(Ask::Flush, 0, tag);
        }
        if self.oracle.busy(start, count) {
            return Ok(());
        }
        if kind < 25 {
            let held = (start..start + count).map(|s| self.oracle.newest(s)).collect();
            open.insert(tag, Open::Read { start, held, since: self.version });
            return client.ask(Ask::Read(bytes), offset, tag);
        }
        self.version += 1;
        let version = self.version;
        let durable = kind < 30;
        self.oracle.begin(start, count, version);
        open.insert(tag, Open::Write { start, count, version, durable });
        if kind >= 97 {
            self.oracle.zeros.insert(version, ());
            return client.ask(Ask::WriteZeroes(bytes), offset, tag);
        }
        client.ask_write(offset, &self.data(start, count, version), durable, tag)
    }

    fn answer(&mut self, reply: &ubcache_cli::nbd_client::Reply, open: &mut BTreeMap<u64, Open>) {
        assert_eq!(reply.error, 0, "request {}", reply.tag);
        match open.remove(&reply.tag).expect("a request of ours") {
            Open::Write { start, count, version, durable } => {
                self.oracle.answered(start, count, version, durable);
            }
            Open::Flush(covered) => {
                for (s, version) in covered {
                    self.oracle.make_certain(s, version);
                }
            }
            Open::Read { start, held, since } => {
                for ((s, held), bytes) in (start..).zip(held).zip(reply.data.chunks_exact(SECTOR)) {
                    // Writes that began while the read was under way may or may not be seen.
                    let began = self.oracle.later.get(&s).into_iter().flatten().map(|w| w.version);
                    let began = began.chain([self.oracle.certain[s]]).filter(|v| *v > since);
                    let allowed: Vec<Version> = began.chain([held]).collect();
                    assert!(
                        allowed.iter().any(|v| *bytes == self.oracle.contents(s, *v)),
                        "a read of sector {s}: expected one of the writes {allowed:?}, found {:02x?}",
                        &bytes[..16]
                    );
                }
            }
        }
    }

    /// Load until so many answers have come, then the crash. Answers that were on their way still count.
    fn load_and_kill(&mut self, up: &Up, socket: &str, answers: u64) {
        let mut client = Client::connect(Path::new(socket), "").expect("a server");
        client.set_timeout(Some(PATIENCE)).expect("a socket");
        let mut open = BTreeMap::new();
        let (mut tag, mut seen, mut killed) = (0u64, 0u64, false);
        loop {
            let mut tries = 0;
            while !killed && client.pending() < DEPTH && tries < 4 * DEPTH {
                tag += 1;
                tries += 1;
                if self.ask(&mut client, &mut open, tag).is_err() {
                    killed = true;
                }
            }
            match client.receive() {
                Ok(reply) => self.answer(&reply, &mut open),
                Err(e) => {
                    assert!(killed, "the server went away by itself: {e}: {}", up.said());
                    return;
                }
            }
            seen += 1;
            if seen == answers {
                signal(up.pid(), Signal::KILL);
                killed = true;
            }
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().expect("a number"))
}

#[test]
fn killed_again_and_again() {
    killed(1, 12 << 20, &["--bucket", "16k"]);
}

/// Most requests are less than a block then.
#[test]
fn killed_with_large_blocks() {
    killed(2, 16 << 20, &["--bucket", "64k", "--block", "4k", "--cache-replacement-policy", "fifo"]);
}

fn killed(seed: u64, cache_bytes: u64, options: &[&str]) {
    let seed = number("UBCACHE_CRASH_SEED", seed);
    let rounds = number("UBCACHE_CRASH_ROUNDS", 25);
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", cache_bytes), dir.sparse("hdd", 24 << 20));
    run(&[&["make", "-C", &ssd, "-B", &hdd, "--writeback"], options].concat()).ok();
    let mut world = World { oracle: Oracle::new(), rng: io::Rng::new(seed), version: 0 };
    let (socket, out) = (dir.path("sock"), dir.path("out"));
    let export = format!("--export=nbd={socket}");
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let mode = ["writeback", "writeback", "writeback", "writethrough", "writearound"]
            [world.rng.below(5) as usize];
        let mode = format!("--set=cache_mode={mode}");
        let cutoff = ["--set=sequential_cutoff=0", "--set=sequential_cutoff=4M"][world.rng.below(2) as usize];
        let percent = format!("--set=writeback_percent={}", [0, 10, 40][world.rng.below(3) as usize]);
        let delay = format!("--set=writeback_delay={}", world.rng.below(2));
        let args = ["-C", &ssd, "-B", &hdd, &export, &mode, cutoff, &percent, &delay];
        if world.rng.below(5) == 0 {
            // A crash while the last one is being recovered from.
            kill_while_starting(&args, world.rng.below(3_000_000));
        }
        let up = Up::start(&dir, 1, &args);
        // By tens, hundreds and thousands.
        let magnitude = 1 + world.rng.below(3) as u32 + u32::from(round % 4 == 0);
        let answers = 1 + world.rng.below(10u64.pow(magnitude));
        world.load_and_kill(&up, &socket, answers);
        up.ended();

        run(&["check", "--quick", &ssd, &hdd]).ok();
        run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]).ok();
        let extracted = read(&out);
        world.oracle.judge(&extracted, &format!("{what}: extracted"));
        // Served again, without writeback, so that the crash is what is seen.
        let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
        let mut client = Client::connect(Path::new(&socket), "").expect("a server");
        let served: Vec<u8> = (0..SECTORS)
            .step_by(2048)
            .flat_map(|s| {
                let count = (SECTORS - s).min(2048);
                client.read((s * SECTOR) as u64, (count * SECTOR) as u32).expect("a read")
            })
            .collect();
        for (s, (a, b)) in extracted.chunks_exact(SECTOR).zip(served.chunks_exact(SECTOR)).enumerate() {
            assert!(a == b, "{what}: sector {s}: extracted {:02x?}, served {:02x?}", &a[..16], &b[..16]);
        }
        drop(client);
        if world.rng.below(2) == 0 { up.kill() } else { drop(up.stop()) }
    }
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
    run(&["check", &ssd, &hdd]).ok();
    world.oracle.judge(&read(&hdd)[DATA_OFFSET as usize..], "the backing device alone");
}

/// Starts a server and kills it some way into its start.
fn kill_while_starting(args: &[&str], spins: u64) {
    let mut child = Command::new(program())
        .arg("up")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program");
    for _ in 0..spins {
        std::hint::spin_loop();
    }
    child.kill().expect("a child of ours");
    child.wait().expect("a child of ours");
}
