//! What a client can make the server hold, and what becomes of clients that go away, over pipes.

use export_nbd::codec::wire::{command, option};
use export_nbd::{ExportError, ServerOptions};
use io::Nanos;
use proptest::prelude::*;

use crate::pipe::PipeListener;
use crate::wire::{choose, client_flags, opening, option_bytes, request, write};
use crate::world::World;
use rig::{RamOp, RamVolume};

fn options() -> ServerOptions {
    ServerOptions {
        max_connections: 3,
        requests_per_connection: 8,
        bytes_per_connection: 2 << 20,
        ..Default::default()
    }
}

#[test]
fn requests_under_way_are_bounded_and_all_are_answered() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::with([&volume], options());
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Read);
    for _ in 0..100 {
        client.post(command::READ, 0, 0, 4096);
    }
    world.run();
    assert_eq!(volume.in_flight(), 8);
    volume.release();
    assert_eq!(client.replies().len(), 100);
}

#[test]
fn bytes_under_way_are_bounded() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    let world = World::with([&volume], options());
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Read);
    volume.hold(RamOp::Write);
    for i in 0..4 {
        client.post(command::READ, 0, i << 20, 1 << 20);
    }
    client.post_write(0, 8 << 20, &vec![1; 5 << 20]);
    world.run();
    assert_eq!(volume.in_flight(), 2, "two pieces of 1 MiB fit into the limit");
    volume.release();
    let replies = client.replies();
    assert_eq!(replies.len(), 5);
    assert!(replies.iter().all(|r| r.error() == 0));
}

#[test]
fn a_request_larger_than_the_limit_is_served_alone() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    let world = World::with([&volume], options());
    let client = world.connect("disk", false, false);
    for i in 0..3 {
        client.post(command::READ, 0, i << 20, 32 << 20);
    }
    assert_eq!(client.replies().len(), 3);
}

#[test]
fn a_client_that_does_not_read_replies_is_not_read_from() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::with([&volume], options());
    let client = world.connect("disk", true, false);
    client.pipe.set_capacity(1);
    for _ in 0..50 {
        client.post(command::READ, 0, 0, 4096);
        world.run();
    }
    assert!(volume.counts().reads <= 8, "{:?}", volume.counts());
    assert!(client.pipe.waiting() <= 4096);
    client.pipe.set_capacity(usize::MAX);
    assert_eq!(client.replies().len(), 50);
}

#[test]
fn too_many_clients_are_turned_away() {
    let world = World::with([&RamVolume::new("disk", 1 << 20).shared()], options());
    let clients: Vec<_> = (0..3).map(|_| world.connect("disk", true, false)).collect();
    let extra = world.connect_raw();
    assert!(extra.is_closed());
    assert_eq!(world.last_event(), "turned away: all 3 connection slots are taken");
    clients[0].pipe.vanish();
    world.run();
    assert_eq!(world.connect("disk", true, false).read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn a_handshake_has_a_time_limit() {
    let world = World::with([&RamVolume::new("disk", 1 << 20).shared()], options());
    let silent = world.connect_raw();
    let slow = world.connect_raw();
    slow.send(&client_flags(3));
    slow.send(&option_bytes(option::LIST, &[]));
    let served = world.connect("disk", true, false);
    world.advance(Nanos::from_secs(9));
    assert!(!silent.is_closed() && !slow.is_closed());
    world.advance(Nanos::from_secs(1));
    assert!(silent.is_closed() && slow.is_closed());
    assert_eq!(world.last_event(), "1 closed: no export was opened in time");
    assert_eq!(served.read(0, 512), Ok(vec![0; 512]), "time does not run for a client that is served");
}

#[test]
fn the_end_of_a_client_is_told_apart() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let c = world.connect("disk", true, false);
    c.post(command::DISCONNECT, 0, 0, 0);
    assert!(c.replies().is_empty() && c.pipe.is_closed());
    assert_eq!(world.last_event(), "0 closed: the client disconnected");

    let c = world.connect("disk", true, false);
    c.pipe.vanish();
    world.run();
    assert_eq!(world.last_event(), "1 closed: the client closed the connection");

    let c = world.connect("disk", true, false);
    c.pipe.send(&write(0, 1, 0, &[0; 4096])[..1000]);
    c.pipe.vanish();
    world.run();
    assert_eq!(world.last_event(), "2 closed: the client closed the connection within a message");

    let c = world.connect("disk", true, false);
    c.pipe.send(&[0xee; 28]);
    world.run();
    assert!(c.pipe.is_closed());
    assert_eq!(world.last_event(), "3 closed: the client broke the protocol: bad request magic 0xeeeeeeee");

    let c = world.connect_raw();
    c.send(&[client_flags(3), choose(option::GO, "nothing", &[]), option_bytes(option::ABORT, &[])].concat());
    world.run();
    assert!(c.is_closed());
    assert_eq!(world.last_event(), "4 closed: no export was opened: the client ended the handshake");
    assert_eq!(world.tasks(), 0);
}

#[test]
fn half_closed_clients_get_their_replies() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Write);
    client.post_write(0, 0, &[1; 512]);
    client.post(command::READ, 0, 4096, 512);
    world.run();
    client.pipe.finish();
    assert_eq!(client.replies().len(), 1);
    volume.release();
    assert_eq!(client.replies().len(), 1);
    assert!(client.pipe.is_closed());
    assert_eq!(volume.contents(0..512), [1; 512]);
    assert_eq!(world.tasks(), 0);
}

#[test]
fn requests_of_a_disconnected_client_are_completed() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Write);
    volume.hold(RamOp::Read);
    client.post_write(0, 0, &[1; 512]);
    client.post(command::READ, 0, 0, 4 << 20);
    world.run();
    let begun = volume.in_flight();
    assert!(begun > 1);
    client.pipe.vanish();
    world.run();
    assert_eq!(volume.in_flight(), begun, "nothing is dropped half-way");
    assert_eq!(world.server.connections(), 1);
    volume.release();
    world.run();
    assert_eq!((volume.in_flight(), world.tasks(), world.server.connections()), (0, 0, 0));
    assert_eq!(volume.contents(0..512), [1; 512]);
}

#[test]
fn a_write_cut_short_writes_whole_pieces_at_most() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    client.pipe.send(&write(0, 1, 0, &vec![9; 3 << 20])[..28 + (5 << 19)]);
    client.pipe.vanish();
    world.run();
    assert_eq!(world.tasks(), 0);
    let writes = volume.counts().writes as usize;
    assert!(writes <= 2, "{writes} pieces");
    assert_eq!(volume.contents(0..3 << 20), [vec![9; writes << 20], vec![0; (3 - writes) << 20]].concat());
}

#[test]
fn names_are_checked() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let add = |name: &str| world.server.exports().add(RamVolume::new(name, 1 << 20).shared());
    assert_eq!(add("disk"), Err(ExportError::Duplicate("disk".into())));
    for bad in ["", "a\0b", &"x".repeat(4097)] {
        assert_eq!(add(bad), Err(ExportError::BadName(bad.to_string())));
    }
    assert_eq!(add("other"), Ok(()));
    assert_eq!(world.server.exports().names(), ["disk", "other"]);
}

#[test]
fn a_listener_outlives_a_shortage_of_descriptors() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let listener = PipeListener::default();
    world.server.serve_listener(listener.clone());
    listener.fail(std::io::ErrorKind::OutOfMemory);
    world.run();
    assert!(world.last_event().starts_with("accept failed"), "{}", world.last_event());
    let client = listener.connect();
    world.run();
    assert_eq!(client.waiting(), 0, "not at once");
    world.advance(Nanos::from_ms(100));
    assert!(client.waiting() > 0, "greeted");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a client sends and whenever it goes: the volume's operations end and nothing stays behind.
    #[test]
    fn any_client_can_vanish_at_any_byte(
        requests in prop::collection::vec((0u16..9, 0u16..16, 0u64..40, prop_oneof![Just(512u32), 0u32..3_000_000]), 0..10),
        structured: bool,
        cut in 0.0f64..1.2,
        seed: u64,
        capacity in prop_oneof![Just(usize::MAX), 1usize..100_000],
    ) {
        let volume = RamVolume::new("disk", 16 << 20).shared();
        volume.fail(2048..2049, 5);
        let world = World::with([&volume], options());
        world.shuffle(seed);
        let client = world.connect_raw();
        client.set_capacity(capacity);
        let mut input = opening("disk", structured, true);
        for (i, (kind, flags, offset, bytes)) in requests.into_iter().enumerate() {
            let bytes = if bytes % 3 > 0 { bytes / 512 * 512 } else { bytes };
            input.extend(request(kind, flags, i as u64, offset << 16, bytes));
            if kind == command::WRITE {
                input.extend(vec![kind as u8; bytes as usize]);
            }
        }
        input.truncate((input.len() as f64 * cut) as usize);
        client.send(&input);
        world.run();
        client.vanish();
        world.run();
        // The handshake may stand still for want of a reader.
        world.advance(Nanos::from_secs(10));
        prop_assert_eq!(world.tasks(), 0, "{:?}", world.events());
        prop_assert_eq!(volume.in_flight(), 0);
        prop_assert_eq!(world.server.connections(), 0);
    }
}
