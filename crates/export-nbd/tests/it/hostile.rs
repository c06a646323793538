//! Clients that mean harm: those that ask for gigabytes and go, those that take memory, those that take connection slots.
//!
//! What is judged are the budget's figures and the requests that reach the volume, not time.

use export_nbd::codec::wire::{command, command_flag as flag};
use export_nbd::{PeerId, ServerOptions};
use io::{MemoryBudget, Nanos};

use crate::wire::{Reply, client_flags};
use crate::world::{Client, World, assemble};
use rig::{RamOp, RamVolume};

const MIB: u64 = 1 << 20;
const MALLORY: PeerId = PeerId::User(1000);
const ALICE: PeerId = PeerId::User(1001);

fn budget(bytes: u64) -> (MemoryBudget, ServerOptions) {
    let memory = MemoryBudget::new(bytes);
    (memory.clone(), ServerOptions { memory, ..ServerOptions::default() })
}

/// Asks for 128 reads of 32 MiB and reads none of it.
fn ask_for_4_gib(client: &Client<'_>) {
    client.pipe.set_capacity(1);
    for _ in 0..128 {
        client.post(command::READ, 0, 0, 32 << 20);
    }
}

/// A client asks for 128 times 32 MiB and goes away. The server had read all 4 GiB for it.
#[test]
fn a_client_that_has_gone_is_not_read_for() {
    for structured in [true, false] {
        let volume = RamVolume::new("disk", 64 << 20).shared();
        let (memory, options) = budget(64 * MIB);
        let world = World::with([&volume], options);
        let client = world.connect("disk", structured, false);
        ask_for_4_gib(&client);
        world.run();
        let before = volume.counts().reads;
        assert!(before <= 16, "a connection has 16 MiB under way: {before} pieces");
        client.pipe.vanish();
        world.run();
        let after = volume.counts().reads;
        assert!(after <= before + 4, "{after} of 4096 pieces, {before} of them while the client was there");
        assert_eq!((world.tasks(), world.server.connections()), (0, 0));
        assert_eq!(memory.used(), 0, "everything was given back");
        assert!(memory.figures().peak <= 18 * MIB, "{:?}", memory.figures());
    }
}

/// The client goes while its reads are in the volume: those that wait for a worker are not begun.
#[test]
fn queued_requests_of_a_disconnected_client_are_not_begun() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    let options = ServerOptions { requests_per_connection: 2, ..ServerOptions::default() };
    let world = World::with([&volume], options);
    let client = world.connect("disk", false, false);
    client.pipe.set_capacity(1);
    // Its reply cannot be sent while the client is there, and fails when it goes.
    client.post(command::READ, 0, 0, 512);
    world.run();
    volume.hold(RamOp::Read);
    client.post(command::READ, 0, 0, 4 << 20);
    world.run();
    assert_eq!((volume.in_flight(), volume.counts().reads), (2, 1), "two workers, four pieces");
    client.pipe.vanish();
    world.run();
    volume.release();
    world.run();
    assert_eq!(volume.counts().reads, 3);
    assert_eq!(world.tasks(), 0);
}

/// The connection is lost while pieces of a write wait for a worker. The client sends the write again over a new connection and,
/// once that is answered, a newer one to the same place. The old pieces used to follow, and older data replaced newer data.
#[test]
fn a_write_of_a_lost_connection_does_not_follow_newer_ones() {
    const BYTES: usize = 4 << 20;
    for a_reply_waits in [true, false] {
        let volume = RamVolume::new("disk", 64 << 20).shared();
        let options = ServerOptions { requests_per_connection: 2, ..ServerOptions::default() };
        let world = World::with([&volume], options);
        let old = world.connect("disk", false, false);
        if a_reply_waits {
            // It cannot be sent while the client is there, and fails when it goes.
            old.pipe.set_capacity(1);
            old.post(command::READ, 0, 0, 512);
            world.run();
        }
        volume.hold(RamOp::Write);
        old.post_write(0, 0, &vec![1; BYTES]);
        world.run();
        assert_eq!(volume.counts().writes, 0, "two workers, four pieces, none of them done");
        old.pipe.vanish();
        world.run();
        volume.release();
        world.run();
        let writes = volume.counts().writes;
        assert_eq!(writes, 2, "the pieces that were begun, and no other; a reply waits: {a_reply_waits}");
    }
}

/// 64 clients that each want as much as they can get: together they had 4.7 GB.
#[test]
fn all_clients_together_stay_within_the_budget_and_all_are_served() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    volume.fill(0, &vec![7; 12 << 20]);
    let (memory, options) = budget(128 * MIB);
    let world = World::with([&volume], options);
    let clients: Vec<_> =
        (0..64).map(|n| world.connect_as(PeerId::User(n % 4), "disk", n % 2 == 0)).collect();
    let reads = |client: &Client<'_>| {
        client.pipe.set_capacity(1);
        [0, 4 << 20].map(|at| (at, client.post(command::READ, 0, at, 8 << 20)))
    };
    let asked: Vec<_> = clients.iter().map(reads).collect();
    world.run();
    let figures = memory.figures();
    assert!(figures.peak > 120 * MIB && figures.peak <= 128 * MIB, "{figures:?}");
    assert!(figures.refusals > 0, "the budget was exhausted: {figures:?}");
    for (client, asked) in clients.iter().zip(asked) {
        client.pipe.set_capacity(usize::MAX);
        let replies = client.replies();
        for (at, cookie) in asked {
            let data = assemble(&replies, cookie, at, 8 << 20).expect("nobody reads ENOMEM");
            assert!(data == vec![7; 8 << 20]);
        }
    }
    assert!(memory.figures().peak <= 128 * MIB, "{:?}", memory.figures());
    drop(clients);
}

/// A newcomer for whom there is no memory is turned away with figures, and comes in when there is some.
#[test]
fn a_client_without_memory_is_turned_away() {
    let (memory, options) = budget(4 * MIB);
    let world = World::with([&RamVolume::new("disk", 8 << 20).shared()], options);
    let clients: Vec<_> = (0..2).map(|_| world.connect("disk", true, false)).collect();
    let refused = world.connect_raw();
    assert!(refused.is_closed());
    let said = world.last_event();
    assert!(said.starts_with("turned away: ") && said.ends_with("of 4194304 bytes are in use"), "{said}");
    assert_eq!(clients[0].read(0, 4 << 20), Ok(vec![0; 4 << 20]), "piece by piece");
    clients[0].pipe.vanish();
    world.run();
    world.connect("disk", true, false);
    assert!(memory.figures().peak <= 4 * MIB);
}

/// 64 sessions that do nothing had locked everyone else out for good.
#[test]
fn idle_sessions_of_one_peer_leave_places_for_others() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let idle: Vec<_> = (0..64).map(|_| world.connect_raw_as(MALLORY)).collect();
    assert_eq!(idle.iter().filter(|c| !c.is_closed()).count(), 48);
    assert_eq!(world.last_event(), "turned away: it has all 48 connection slots that one peer may have");
    let alice = world.connect_as(ALICE, "disk", true);
    assert_eq!(alice.read(0, 512), Ok(vec![0; 512]));
    world.advance(Nanos::from_secs(10));
    assert!(idle.iter().all(super::pipe::PipeClient::is_closed), "none of them chose an export");
}

/// A client with a file system on it may be idle for days. It keeps its connection slot as long as no other client needs it. It
/// gives the slot neither to a peer that has more slots already, nor while another client has been idle for longer.
#[test]
fn an_idle_client_gives_way_only_when_slots_are_short() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let mounted = world.connect_as(ALICE, "disk", true);
    assert_eq!(mounted.read(0, 512), Ok(vec![0; 512]));
    world.advance(Nanos::from_secs(1_000_000));
    let sessions: Vec<_> = (0..48).map(|_| world.connect_as(MALLORY, "disk", true)).collect();
    assert!(sessions.iter().all(|c| c.read(0, 512).is_ok()));
    world.advance(Nanos::from_secs(299));
    assert!(world.connect_raw_as(MALLORY).is_closed());
    world.advance(Nanos::from_secs(1));
    assert_eq!(sessions[1].read(0, 512), Ok(vec![0; 512]));
    let next = world.connect_as(MALLORY, "disk", true);
    assert!(sessions[0].pipe.is_closed(), "it has been idle for the longest of this peer");
    assert!(world.events().iter().any(|e| e.contains("closed to make room for another client")));
    assert!(!sessions[1].pipe.is_closed() && !mounted.pipe.is_closed());
    assert_eq!(next.read(0, 512), Ok(vec![0; 512]));

    // 15 more users fill the last slots; the next one gets that of the peer with the most.
    let users: Vec<_> = (0..15).map(|n| world.connect_as(PeerId::User(n), "disk", true)).collect();
    assert_eq!(world.server.connections(), 64);
    let last = world.connect_as(PeerId::User(99), "disk", true);
    assert_eq!(last.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(world.server.connections(), 64);
    assert!(!mounted.pipe.is_closed() && users.iter().all(|u| !u.pipe.is_closed()));
    assert!(sessions[2].pipe.is_closed());
}

/// A session that never asked for anything gives way long before one that did.
#[test]
fn a_session_without_requests_gives_way_first() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let working = world.connect_as(MALLORY, "disk", true);
    assert_eq!(working.read(0, 512), Ok(vec![0; 512]));
    let unused: Vec<_> = (0..47).map(|_| world.connect_as(MALLORY, "disk", true)).collect();
    world.advance(Nanos::from_secs(10));
    let next = world.connect_as(MALLORY, "disk", true);
    assert_eq!(next.read(0, 512), Ok(vec![0; 512]));
    assert!(unused[0].pipe.is_closed() && !unused[1].pipe.is_closed() && !working.pipe.is_closed());
}

/// A client that leaves its replies unread is as idle as one that asks for nothing.
#[test]
fn a_client_that_does_not_take_its_replies_gives_way() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let options =
        ServerOptions { max_connections: 2, max_connections_per_peer: 2, ..ServerOptions::default() };
    let world = World::with([&volume], options);
    let stuck = world.connect_as(MALLORY, "disk", true);
    stuck.pipe.set_capacity(1);
    stuck.post(command::READ, 0, 0, 1 << 20);
    let busy = world.connect_as(MALLORY, "disk", true);
    volume.hold(RamOp::Flush);
    busy.post(command::FLUSH, 0, 0, 0);
    world.run();
    world.advance(Nanos::from_secs(299));
    assert!(world.connect_raw_as(MALLORY).is_closed());
    world.advance(Nanos::from_secs(1));
    let next = world.connect_as(MALLORY, "disk", true);
    assert!(stuck.pipe.is_closed() && !busy.pipe.is_closed(), "the volume is at work for the other");
    assert_eq!(next.read(0, 512), Ok(vec![0; 512]));
}

/// A long read in a simple reply: what was sent cannot be taken back, so only a failure at its beginning is an error reply.
#[test]
fn a_long_simple_read_that_fails_late_ends_the_connection() {
    let volume = RamVolume::new("disk", 32 << 20).shared();
    let (memory, options) = budget(64 * MIB);
    let world = World::with([&volume], options);
    volume.fail(0..1, 5);
    volume.fail(40_000..40_001, 5);
    let client = world.connect("disk", false, false);
    assert_eq!(client.read(0, 16 << 20), Err(5), "the first piece failed");
    assert_eq!(client.read(1 << 20, 4 << 20), Ok(vec![0; 4 << 20]), "the connection still works");
    client.post(command::READ, 0, 1 << 20, 31 << 20);
    world.run();
    assert!(client.pipe.is_closed());
    let said = world.last_event();
    assert!(said.contains("a read failed after a part of its data was sent (error 5)"), "{said}");
    assert!(client.pipe.received().len() < 31 << 20);
    assert_eq!((world.tasks(), memory.used()), (0, 0));
    assert!(memory.figures().peak <= 12 * MIB, "{:?}", memory.figures());
}

/// A read in one chunk fails in its middle: the gap is filled with zeros, and the error ends the reply.
#[test]
fn a_long_read_in_one_chunk_that_fails_late_ends_with_the_error() {
    let volume = RamVolume::new("disk", 32 << 20).shared();
    volume.fill(0, &vec![9; 32 << 20]);
    volume.fail(40_000..40_001, 5);
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    let other = client.post(command::READ, 0, 0, 512);
    let cookie = client.post(command::READ, flag::DF, 0, 32 << 20);
    let after = client.post(command::READ, 0, 512, 512);
    let replies = client.replies();
    assert_eq!(replies.iter().map(Reply::cookie).collect::<Vec<_>>(), [other, cookie, cookie, after]);
    let Reply::Data { done: false, offset: 0, data, .. } = &replies[1] else { panic!("one chunk") };
    let gap = 40_000 * 512 / MIB as usize * MIB as usize;
    assert!(data[..gap].iter().all(|b| *b == 9) && data[gap + MIB as usize..].iter().all(|b| *b == 9));
    assert!(data[gap..gap + MIB as usize].iter().all(|b| *b == 0), "nothing of other clients' memory");
    assert_eq!(replies[2].error(), 5);
}

/// A list of the runs of 4 GiB can be longer than all memory of a connection.
#[test]
fn status_is_asked_for_in_parts() {
    let volume = RamVolume::new("disk", 1 << 30).shared();
    volume.fill(100 << 20, &[1; 64 << 10]);
    let world = World::new([&volume]);
    let client = world.connect("disk", true, true);
    let Reply::Extents { extents, .. } = client.ask(command::BLOCK_STATUS, 0, 0, 1 << 30) else {
        panic!("extents");
    };
    let after = (1 << 30) - (100 << 20) - (64 << 10);
    assert_eq!(extents, [(100 << 20, 3), (64 << 10, 0), (after, 3)]);
    let Reply::Extents { extents, .. } = client.ask(command::BLOCK_STATUS, flag::REQ_ONE, 0, 1 << 30) else {
        panic!("extents");
    };
    assert_eq!(extents, [(100 << 20, 3)]);
    assert_eq!(volume.counts().largest_status_bytes, 16 << 20);
}

#[test]
fn a_handshake_holds_memory_only_as_long_as_it_lasts() {
    let (memory, options) = budget(64 * MIB);
    let world = World::with([&RamVolume::new("disk", 1 << 20).shared()], options);
    let silent = world.connect_raw();
    silent.send(&client_flags(3));
    world.run();
    assert!(memory.used() > 0);
    world.advance(Nanos::from_secs(10));
    assert_eq!((memory.used(), silent.is_closed()), (0, true));
}
