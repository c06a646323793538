//! A request that the volume serves from memory costs the server's thread no heap allocation, once
//! workers, buffers and tables have reached their size.
//!
//! A program of its own, because it counts through the global allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use blockio::{Connection, Driver, DriverOptions};
use export_nbd::codec::wire::{command, option};
use export_nbd::{Exports, Server, ServerOptions, StreamSocket};
use rig::RamVolume;

#[allow(dead_code, reason = "the other test program uses the rest")]
#[path = "it/wire.rs"]
mod wire;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed to the system's allocator unchanged; counting touches a plain cell that
// needs neither initialisation nor a destructor, so it allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from the system's allocator with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const BATCH: u64 = 32;
const BLOCK: u32 = 4096;

/// One batch of reads and writes at queue depth [`BATCH`].
fn batch(client: &mut UnixStream) {
    let data = [0x5a; BLOCK as usize];
    let mut requests = Vec::new();
    for i in 0..BATCH {
        let at = i * u64::from(BLOCK);
        requests.extend(match i % 2 {
            0 => wire::write(0, i, at, &data),
            _ => wire::request(command::READ, 0, i, at, BLOCK),
        });
    }
    client.write_all(&requests).expect("the server receives");
    let (simple, chunk) = (16, 28 + BLOCK as usize);
    let mut replies = vec![0; (BATCH / 2) as usize * (simple + chunk)];
    client.read_exact(&mut replies).expect("the server answers");
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let driver = Driver::new(DriverOptions::default()).expect("a driver");
    let exports = Exports::new();
    exports.add(Rc::new(RamVolume::new("disk", 1 << 20))).expect("a name");
    let server = Server::new(driver.handle(), exports, ServerOptions::default());
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    server.serve_socket(StreamSocket::new(
        Connection::from_fd(driver.reactor(), ours.into()).expect("a socket"),
    ));

    let (warm, wait_warm) = blockio::bridge::oneshot();
    let (count, wait_count) = blockio::bridge::oneshot();
    let client = std::thread::spawn(move || {
        let mut client = theirs;
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        client.write_all(&wire::opening("disk", true, false)).expect("the server receives");
        // Greeting, acknowledgement of structured replies, size, block sizes, acknowledgement.
        let mut answers = vec![0; 18 + 20 + (20 + 12) + (20 + 14) + 20];
        client.read_exact(&mut answers).expect("the server answers");
        assert_eq!(answers[answers.len() - 12..][..8], [0, 0, 0, option::GO as u8, 0, 0, 0, 1]);
        // The order in which requests meet differs from run to run, and with it how many workers and
        // buffers there are at the most: give it time to settle.
        (0..500).for_each(|_| batch(&mut client));
        warm.send(());
        (0..500).for_each(|_| batch(&mut client));
        count.send(());
    });
    let allocations = driver.block_on(async {
        wait_warm.await.expect("the client lives");
        let before = ALLOCATIONS.get();
        wait_count.await.expect("the client lives");
        ALLOCATIONS.get() - before
    });
    client.join().expect("the client ends well");
    driver.block_on(server.stop());
    let requests = 500 * BATCH;
    // A handful may go to a table that still grew; anything per request would be thousands.
    assert!(allocations < 64, "{allocations} allocations for {requests} requests");
}
