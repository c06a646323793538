//! Stopping a server or an export while clients are at it, over pipes.

use export_nbd::ServerOptions;
use export_nbd::codec::wire::{command, option, option_reply};
use io::Nanos;

use crate::pipe::PipeListener;
use crate::wire::{Fields, Reply, choose, client_flags, option_replies, take_greeting};
use crate::world::World;
use rig::{RamOp, RamVolume};

#[test]
fn idle_clients_are_closed_at_once() {
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let listener = PipeListener::default();
    world.server.serve_listener(listener.clone());
    let client = world.connect("disk", true, false);
    let half_way = world.connect_raw();
    let server = world.server.clone();
    let stopped = world.spawn(async move { server.stop().await });
    assert!(stopped.try_take().is_some());
    assert!(client.pipe.is_closed() && half_way.is_closed());
    assert_eq!(world.tasks(), 0, "the listener is gone too");
    assert!(world.events().contains(&"0 closed: the server was stopped".to_string()));
    assert!(world.connect_raw().is_closed(), "nobody is served any more");
}

#[test]
fn requests_under_way_are_answered_and_new_ones_refused() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Write);
    let under_way = client.post_write(0, 0, &[1; 512]);
    world.run();
    let server = world.server.clone();
    let stopped = world.spawn(async move { server.stop().await });
    let late = client.post(command::READ, 0, 0, 512);
    let late_write = client.post_write(0, 0, &[2; 100_000]);
    let refused: Vec<(u64, u32)> = client.replies().iter().map(|r| (r.cookie(), r.error())).collect();
    assert_eq!(refused, [(late, 108), (late_write, 108)]);
    assert!(stopped.try_take().is_none() && !client.pipe.is_closed());
    volume.release();
    assert_eq!(client.replies(), [Reply::ok(under_way)]);
    assert!(client.pipe.is_closed());
    assert!(stopped.try_take().is_some());
    assert_eq!(volume.contents(0..512), [1; 512]);
    assert_eq!(world.tasks(), 0);
}

#[test]
fn a_write_that_has_begun_is_received_to_its_end() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    let bytes = crate::wire::write(0, 1, 0, &[5; 8192]);
    client.pipe.send(&bytes[..5000]);
    world.run();
    let server = world.server.clone();
    let stopped = world.spawn(async move { server.stop().await });
    assert!(stopped.try_take().is_none());
    client.pipe.send(&bytes[5000..]);
    assert_eq!(client.replies(), [Reply::ok(1)]);
    assert!(stopped.try_take().is_some());
    assert_eq!(volume.contents(0..8192), [5; 8192]);
}

#[test]
fn a_client_that_takes_no_replies_is_cut_off_in_time_but_not_its_requests() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    let options = ServerOptions { stop_timeout: Nanos::from_secs(3), ..Default::default() };
    let world = World::with([&volume], options);
    let client = world.connect("disk", true, false);
    client.pipe.set_capacity(1);
    client.post(command::READ, 0, 0, 4 << 20);
    world.run();
    volume.hold(RamOp::Write);
    client.post_write(0, 0, &[1; 512]);
    world.run();
    let server = world.server.clone();
    let stopped = world.spawn(async move { server.stop().await });
    world.advance(Nanos::from_secs(2));
    assert!(!client.pipe.is_closed());
    world.advance(Nanos::from_secs(1));
    assert!(client.pipe.is_closed());
    assert!(stopped.try_take().is_none(), "the write is still under way");
    volume.release();
    world.run();
    assert!(stopped.try_take().is_some());
    assert_eq!(volume.contents(0..512), [1; 512]);
    assert_eq!(world.tasks(), 0);
}

#[test]
fn a_long_hint_does_not_delay_the_stop() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Read);
    client.post(command::CACHE, 0, 0, 64 << 20);
    world.run();
    let server = world.server.clone();
    let stopped = world.spawn(async move { server.stop().await });
    volume.release();
    world.run();
    assert!(stopped.try_take().is_some());
    assert_eq!(volume.counts().reads, 1);
}

#[test]
fn an_export_can_be_removed_while_others_go_on() {
    let (a, b) = (RamVolume::new("a", 1 << 20).shared(), RamVolume::new("b", 1 << 20).shared());
    let world = World::new([&a, &b]);
    let (on_a, on_b) = (world.connect("a", true, false), world.connect("b", true, false));
    a.hold(RamOp::Read);
    let read = on_a.post(command::READ, 0, 0, 512);
    world.run();
    let server = world.server.clone();
    let removed = world.spawn(async move { server.remove_export("a").await });
    assert!(removed.try_take().is_none(), "a read is under way");
    a.release();
    assert_eq!(on_a.replies()[0].cookie(), read);
    let volume = removed.try_take().expect("removed").expect("it was there");
    // Ours and the one that was handed back.
    drop(volume);
    assert_eq!(std::rc::Rc::strong_count(&a), 1);
    assert!(on_a.pipe.is_closed());
    assert_eq!(on_b.read(0, 512), Ok(vec![0; 512]));

    let late = world.connect_raw();
    late.send(&[client_flags(3), choose(option::GO, "a", &[]), choose(option::GO, "", &[])].concat());
    world.run();
    let bytes = late.received();
    let mut fields = Fields(&bytes);
    take_greeting(&mut fields);
    let kinds: Vec<u32> = option_replies(fields).iter().map(|r| r.1).collect();
    assert_eq!(kinds[0], option_reply::ERR_UNKNOWN);
    assert_eq!(kinds.last(), Some(&option_reply::ACK), "b is the only one now");
    let server = world.server.clone();
    let none = world.spawn(async move { server.remove_export("a").await });
    assert!(none.try_take().expect("at once").is_none());
}

#[test]
fn an_export_that_comes_back_does_not_delay_the_end_of_the_old_one() {
    let old = RamVolume::new("a", 1 << 20).shared();
    let world = World::new([&old]);
    let on_old = world.connect("a", true, false);
    old.hold(RamOp::Read);
    on_old.post(command::READ, 0, 0, 512);
    world.run();
    let server = world.server.clone();
    let removed = world.spawn(async move { server.remove_export("a").await });
    world.server.exports().add(RamVolume::new("a", 2 << 20).shared()).expect("the name is free again");
    let on_new = world.connect("a", true, false);
    old.release();
    world.run();
    assert!(removed.try_take().is_some());
    assert_eq!(on_new.read(1 << 20, 512), Ok(vec![0; 512]));
}

#[test]
fn a_volume_that_comes_later_is_served() {
    let world = World::new([]);
    world.server.exports().add(RamVolume::new("late", 1 << 20).shared()).expect("a new name");
    assert_eq!(world.connect("", true, false).read(0, 512), Ok(vec![0; 512]));
}
