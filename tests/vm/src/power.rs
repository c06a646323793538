//! Disks with volatile write caches: a power loss loses any part of what was answered and not flushed.
//!
//! Owns an NBD server for each such disk, which QEMU uses in place of the image, and the [`Power`] that disks of one
//! machine share. A write goes to the image at once, and what was there before is remembered until a flush; when the
//! power goes, each sector of each write that no flush covers is kept or undone, in the way of a seed.
//!
//! Invariants: what a flush covers is never undone; of two writes to a sector the later one wins if both are kept.
//! Must not know what is stored.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use export_nbd::codec::wire::{
    EXPORT_NAME_PADDING_BYTES, NBD_MAGIC, REQUEST_HEADER_BYTES, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command,
    transmission_flag,
};

use crate::load::Random;
use crate::load::stamp::SECTOR;
use crate::said::TIMEOUT;

/// Second word of a server that knows one export only and asks nothing ("oldstyle").
const OLDSTYLE_MAGIC: u64 = 0x4202_8186_1253;
/// A discard up to this size may clear what it names; a larger one is taken for the hint that it is.
const MOST_CLEARED: usize = 1 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The power of the disks of a machine: they lose it together, and can be stopped together.
#[derive(Clone, Debug)]
pub struct Power(Arc<(Mutex<PowerState>, Condvar)>);

#[derive(Debug)]
struct PowerState {
    random: Random,
    /// Writes and flushes that were carried out.
    changes: u64,
    /// No more of them than this.
    limit: Option<u64>,
    off: bool,
}

impl Power {
    /// Power that is on. The seed selects what a cut loses.
    pub fn new(seed: u64) -> Power {
        let state = PowerState { random: Random::new(seed), changes: 0, limit: None, off: false };
        Power(Arc::new((Mutex::new(state), Condvar::new())))
    }

    /// Writes and flushes so far, of all disks together.
    pub fn changes(&self) -> u64 {
        lock(&self.0.0).changes
    }

    /// Holds all changes back after this many more writes and flushes of all disks together.
    pub fn stop_after(&self, changes: u64) {
        let mut state = lock(&self.0.0);
        state.limit = Some(state.changes + changes);
    }

    /// Carries out the changes that [`Power::stop_after`] held back, and all later ones.
    pub fn release(&self) {
        lock(&self.0.0).limit = None;
        self.0.1.notify_all();
    }

    /// Whether as many changes were carried out as [`Power::stop_after`] allows.
    pub fn is_used_up(&self) -> bool {
        let state = lock(&self.0.0);
        state.limit.is_some_and(|l| state.changes >= l)
    }

    fn set_off(&self, off: bool) {
        let mut state = lock(&self.0.0);
        state.off = off;
        if off {
            state.limit = None;
        }
        self.0.1.notify_all();
    }

    /// Waits until one more change may be carried out.
    fn take_change(&self) -> io::Result<()> {
        let wait = |s: &mut PowerState| !s.off && s.limit.is_some_and(|l| s.changes >= l);
        let held = self.0.1.wait_while(lock(&self.0.0), wait);
        let mut state = held.unwrap_or_else(PoisonError::into_inner);
        if state.off {
            return Err(io::Error::other("the power is off"));
        }
        state.changes += 1;
        Ok(())
    }

    fn random(&self) -> Random {
        Random::new(lock(&self.0.0).random.below(u64::MAX))
    }
}

/// The old contents below a write that no flush covers.
struct Before {
    at: u64,
    bytes: Vec<u8>,
}

/// The image of a disk, and the writes that a power loss may undo in it.
struct Medium {
    image: File,
    unflushed: Mutex<Vec<Before>>,
    connections: (Mutex<u32>, Condvar),
    detached: Mutex<bool>,
    power: Power,
}

/// A disk's server. Lives as long as the disk.
pub struct VolatileCache {
    medium: Arc<Medium>,
    socket: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl VolatileCache {
    /// Serves the image, on a socket next to it.
    pub(crate) fn start(path: &Path, power: &Power) -> VolatileCache {
        let image = File::options().read(true).write(true).open(path).expect("the image of a disk");
        let socket = path.with_extension("sock");
        let listener = UnixListener::bind(&socket).expect("a socket next to the image");
        let medium = Arc::new(Medium {
            image,
            unflushed: Mutex::default(),
            connections: (Mutex::new(0), Condvar::new()),
            detached: Mutex::new(false),
            power: power.clone(),
        });
        let served = medium.clone();
        let server = std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if *lock(&served.detached) {
                    return;
                }
                served.connected(true);
                // It ends with the machine, in the middle of whatever it does.
                let _ = serve(&served, stream);
                served.connected(false);
            }
        });
        VolatileCache { medium, socket, server: Some(server) }
    }

    /// Where QEMU connects.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The machine begins.
    pub(crate) fn power_on(&self) {
        self.medium.power.set_off(false);
    }

    /// The machine is gone: from now on nothing is carried out any more.
    pub(crate) fn power_off(&self) {
        self.medium.power.set_off(true);
    }

    /// Loses a part of the unflushed writes. The machine must have ended.
    pub(crate) fn forget(&self) {
        let (count, changed) = &self.medium.connections;
        let waited = changed.wait_timeout_while(lock(count), TIMEOUT, |n| *n > 0);
        let late = waited.unwrap_or_else(PoisonError::into_inner).1;
        assert!(!late.timed_out(), "{}: still connected", self.socket.display());
        let unflushed = std::mem::take(&mut *lock(&self.medium.unflushed));
        undo(&self.medium.image, &unflushed, &mut self.medium.power.random()).expect("an image of a disk");
    }
}

impl std::fmt::Debug for VolatileCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("VolatileCache").field(&self.socket).finish()
    }
}

impl Drop for VolatileCache {
    fn drop(&mut self) {
        *lock(&self.medium.detached) = true;
        self.power_off();
        // Wakes the server.
        if UnixStream::connect(&self.socket).is_ok()
            && let Some(server) = self.server.take()
        {
            let _ = server.join();
        }
    }
}

/// Decides for each sector of each write, the newest first, whether it had arrived.
fn undo(image: &File, unflushed: &[Before], random: &mut Random) -> io::Result<()> {
    // Now and then nothing has arrived, now and then everything.
    let kept_of_eight = [0, 2, 5, 8][random.below(4) as usize];
    let mut settled = std::collections::BTreeSet::new();
    for before in unflushed.iter().rev() {
        // Most writes arrive whole or not at all.
        let (whole, torn) = (random.below(8) < kept_of_eight, random.below(4) == 0);
        for (at, bytes) in (before.at..).step_by(SECTOR).zip(before.bytes.chunks(SECTOR)) {
            let kept = if torn { random.below(8) < kept_of_eight } else { whole };
            if settled.contains(&at) {
                continue;
            }
            if kept {
                settled.insert(at);
            } else {
                image.write_all_at(bytes, at)?;
            }
        }
    }
    Ok(())
}

impl Medium {
    fn connected(&self, yes: bool) {
        let mut count = lock(&self.connections.0);
        *count = if yes { *count + 1 } else { *count - 1 };
        self.connections.1.notify_all();
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.power.take_change()?;
        let mut unflushed = lock(&self.unflushed);
        let mut before = vec![0; bytes.len()];
        self.image.read_exact_at(&mut before, at)?;
        unflushed.push(Before { at, bytes: before });
        self.image.write_all_at(bytes, at)
    }

    fn flush(&self) -> io::Result<()> {
        self.power.take_change()?;
        lock(&self.unflushed).clear();
        Ok(())
    }
}

fn serve(medium: &Medium, mut stream: UnixStream) -> io::Result<()> {
    let flags = transmission_flag::HAS_FLAGS
        | transmission_flag::SEND_FLUSH
        | transmission_flag::SEND_TRIM
        | transmission_flag::SEND_WRITE_ZEROES;
    let mut greeting = Vec::new();
    greeting.extend(NBD_MAGIC.to_be_bytes());
    greeting.extend(OLDSTYLE_MAGIC.to_be_bytes());
    greeting.extend(medium.image.metadata()?.len().to_be_bytes());
    greeting.extend(u32::from(flags).to_be_bytes());
    greeting.resize(greeting.len() + EXPORT_NAME_PADDING_BYTES, 0);
    stream.write_all(&greeting)?;
    let mut random = medium.power.random();
    let mut data = Vec::new();
    loop {
        let request = request(&mut stream)?;
        let len = request.bytes;
        let mut answer = Vec::with_capacity(16);
        answer.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
        answer.extend(0u32.to_be_bytes());
        answer.extend(request.cookie);
        match request.command {
            command::READ => {
                data.resize(len, 0);
                medium.image.read_exact_at(&mut data, request.at)?;
                answer.extend(&data);
            }
            command::WRITE => {
                data.resize(len, 0);
                stream.read_exact(&mut data)?;
                medium.write(request.at, &data)?;
            }
            command::FLUSH => medium.flush()?,
            command::WRITE_ZEROES => medium.write(request.at, &vec![0; len])?,
            command::TRIM if len <= MOST_CLEARED && random.below(2) == 0 => {
                medium.write(request.at, &vec![0; len])?;
            }
            command::TRIM => {}
            command::DISCONNECT => return Ok(()),
            other => return Err(io::Error::other(format!("NBD command {other}"))),
        }
        stream.write_all(&answer)?;
    }
}

struct Request {
    command: u16,
    cookie: [u8; 8],
    at: u64,
    bytes: usize,
}

fn request(stream: &mut UnixStream) -> io::Result<Request> {
    let mut header = [0; REQUEST_HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let mut rest = &header[..];
    let magic = u32::from_be_bytes(field(&mut rest)?);
    let (_flags, command) = (field::<2>(&mut rest)?, u16::from_be_bytes(field(&mut rest)?));
    let (cookie, at) = (field(&mut rest)?, u64::from_be_bytes(field(&mut rest)?));
    let bytes = u32::from_be_bytes(field(&mut rest)?) as usize;
    if magic != REQUEST_MAGIC {
        return Err(io::Error::other("not a request of NBD"));
    }
    Ok(Request { command, cookie, at, bytes })
}

fn field<const N: usize>(from: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Dir;

    const BLOCK: usize = 8 * SECTOR;

    /// What a machine would do: connect, write blocks, flush some of them.
    struct Client(UnixStream);

    impl Client {
        fn connect(cache: &VolatileCache) -> Client {
            cache.power_on();
            let mut stream = UnixStream::connect(cache.socket()).unwrap();
            stream.read_exact(&mut [0; 28 + EXPORT_NAME_PADDING_BYTES]).unwrap();
            Client(stream)
        }

        fn send(&mut self, command: u16, at: u64, len: usize, data: &[u8]) {
            let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
            bytes.extend([0, 0]);
            bytes.extend(command.to_be_bytes());
            bytes.extend(7u64.to_be_bytes());
            bytes.extend(at.to_be_bytes());
            bytes.extend((len as u32).to_be_bytes());
            bytes.extend(data);
            self.0.write_all(&bytes).unwrap();
        }

        fn ask(&mut self, command: u16, at: u64, len: usize, data: &[u8]) -> Vec<u8> {
            self.send(command, at, len, data);
            self.0.read_exact(&mut [0; 16]).unwrap();
            let mut answer = vec![0; if command == command::READ { len } else { 0 }];
            self.0.read_exact(&mut answer).unwrap();
            answer
        }

        fn write(&mut self, block: u64, value: u8) {
            self.ask(command::WRITE, block * BLOCK as u64, BLOCK, &[value; BLOCK]);
        }
    }

    #[test]
    fn a_cut_loses_what_was_not_flushed_and_nothing_else() {
        let (mut lost, mut kept, mut torn) = (0, 0, 0);
        for seed in 0..20 {
            let dir = Dir::new();
            let disk = dir.disk("disk", 1 << 20).volatile(&Power::new(seed));
            let cache = disk.cache.as_ref().unwrap();
            let mut client = Client::connect(cache);
            (0..16).for_each(|b| client.write(b, 1));
            client.ask(command::FLUSH, 0, 0, &[]);
            (8..24).for_each(|b| client.write(b, 2));
            (12..14).for_each(|b| client.write(b, 3));
            let now = client.ask(command::READ, 12 * BLOCK as u64, BLOCK, &[]);
            assert_eq!(now, [3; BLOCK], "until then it reads as written");
            drop(client);
            cache.power_off();
            cache.forget();
            let image = std::fs::read(&disk.path).unwrap();
            for (block, bytes) in image.chunks(BLOCK).enumerate() {
                let allowed: &[u8] = match block {
                    0..8 => &[1],
                    12..14 => &[1, 2, 3],
                    8..16 => &[1, 2],
                    16..24 => &[0, 2],
                    _ => &[0],
                };
                for sector in bytes.chunks(SECTOR) {
                    assert!(
                        sector.iter().all(|b| *b == sector[0]) && allowed.contains(&sector[0]),
                        "{block}"
                    );
                }
                if (16..24).contains(&block) {
                    let whole = bytes.iter().all(|b| *b == bytes[0]);
                    lost += u32::from(whole && bytes[0] == 0);
                    kept += u32::from(whole && bytes[0] == 2);
                    torn += u32::from(!whole);
                }
            }
        }
        assert!(lost > 20 && kept > 20 && torn > 5, "{lost} {kept} {torn}");
    }

    #[test]
    fn disks_stand_still_together() {
        let dir = Dir::new();
        let power = Power::new(1);
        let disks = ["one", "two"].map(|n| dir.disk(n, 1 << 20).volatile(&power));
        let [mut one, mut two] = disks.each_ref().map(|d| Client::connect(d.cache.as_ref().unwrap()));
        power.stop_after(2);
        one.write(0, 1);
        assert!(!power.is_used_up());
        two.ask(command::FLUSH, 0, 0, &[]);
        assert!(power.is_used_up() && power.changes() == 2);
        one.send(command::WRITE, 0, BLOCK, &[2; BLOCK]);
        // Reads are answered meanwhile, by the other disk at least.
        assert_eq!(two.ask(command::READ, 0, BLOCK, &[]), [0; BLOCK]);
        power.release();
        one.0.read_exact(&mut [0; 16]).unwrap();
        assert_eq!(one.ask(command::READ, 0, BLOCK, &[]), [2; BLOCK]);
    }
}
