//! What clients ask and what they get, over pipes.

use export_nbd::codec::wire::{command, command_flag as flag};
use proptest::prelude::*;

use crate::wire::{Reply, opening, request, write};
use crate::world::{World, assemble};
use rig::{RamOp, RamVolume};

const MIB: usize = 1 << 20;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

#[test]
fn a_write_is_read_back() {
    for (structured, grain) in [(true, usize::MAX), (false, usize::MAX), (true, 7), (false, 1000)] {
        let volume = RamVolume::new("disk", 8 << 20).shared();
        let world = World::new([&volume]);
        let client = world.connect("disk", structured, false);
        client.pipe.set_grain(grain);
        let data = pattern(8192, 1);
        let reply = client.ask_write(0, 4096, &data);
        assert_eq!(reply, Reply::ok(1));
        assert_eq!(client.read(4096, 8192), Ok(data.clone()));
        assert_eq!(client.read(0, 4096), Ok(vec![0; 4096]));
        assert_eq!(volume.contents(4096..4096 + 8192), data);
    }
}

#[test]
fn the_first_request_may_come_with_the_handshake() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    let world = World::new([&volume]);
    let pipe = world.connect_raw();
    let both = [opening("disk", true, false), write(0, 1, 0, &[7; 512])].concat();
    pipe.send(&both);
    world.run();
    assert_eq!(volume.contents(0..512), [7; 512]);
}

#[test]
fn large_requests_are_cut_into_pieces() {
    for structured in [true, false] {
        let volume = RamVolume::new("disk", 64 << 20).shared();
        let world = World::new([&volume]);
        let client = world.connect("disk", structured, false);
        let data = pattern(32 * MIB, 3);
        // Not at a multiple of a piece, so that there is one more.
        assert_eq!(client.ask_write(flag::FUA, 512, &data), Reply::ok(1));
        let counts = volume.counts();
        assert_eq!((counts.writes, counts.durable), (33, 33));
        assert_eq!(counts.largest_bytes, MIB as u64);
        assert!(volume.contents(512..512 + data.len()) == data);
        assert!(client.read(512, data.len() as u32).expect("a read") == data);
        assert_eq!(volume.counts().reads, 33);
    }
}

#[test]
fn a_read_that_must_not_be_fragmented_is_one_chunk() {
    let volume = RamVolume::new("disk", 64 << 20).shared();
    volume.fill(0, &pattern(5 * MIB, 9));
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    let cookie = client.post(command::READ, flag::DF, 512, 4 << 20);
    let replies = client.replies();
    assert!(matches!(&replies[..], [Reply::Data { done: true, offset: 512, .. }]), "one chunk");
    let data = assemble(&replies, cookie, 512, 4 << 20).expect("a read");
    assert!(data == pattern(5 * MIB, 9)[512..512 + (4 << 20)]);
}

#[test]
fn commands_reach_the_volume_with_their_flags() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    volume.fill(0, &[1; 4 * MIB]);
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    let ok = |kind, flags, offset, bytes| assert_eq!(client.ask(kind, flags, offset, bytes).error(), 0);
    ok(command::FLUSH, 0, 0, 0);
    assert_eq!(volume.counts().flushes, 1);
    ok(command::TRIM, 0, 0, 1 << 20);
    assert_eq!((volume.counts().discards, volume.counts().flushes), (1, 1));
    ok(command::TRIM, flag::FUA, 0, 1 << 20);
    assert_eq!((volume.counts().discards, volume.counts().flushes), (2, 2), "durable when answered");
    ok(command::WRITE_ZEROES, 0, 1 << 20, 1 << 20);
    ok(command::WRITE_ZEROES, flag::NO_HOLE | flag::FUA, 2 << 20, 1 << 20);
    let counts = volume.counts();
    assert_eq!((counts.zeroes, counts.unmaps, counts.durable), (2, 1, 1));
    ok(command::CACHE, 0, 0, 5 << 20);
    assert_eq!(volume.counts().reads, 5, "the range was read for the cache's sake");
    assert_eq!(volume.contents(0..3 * MIB), vec![0; 3 * MIB]);
    assert_eq!(volume.contents(3 * MIB..3 * MIB + MIB), vec![1; MIB]);
}

#[test]
fn empty_requests_succeed() {
    for structured in [true, false] {
        let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
        let client = world.connect("disk", structured, false);
        let read = client.ask(command::READ, 0, 512, 0);
        assert_eq!(read, if structured { Reply::Done { cookie: 1 } } else { Reply::ok(1) });
        for kind in [command::TRIM, command::WRITE_ZEROES, command::CACHE, command::WRITE] {
            assert_eq!(client.ask(kind, 0, 512, 0).error(), 0);
        }
    }
}

#[test]
fn status_shows_holes() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    volume.fill(128 << 10, &[1; 64 << 10]);
    let world = World::new([&volume]);
    let client = world.connect("disk", true, true);
    let extents = |flags, bytes| match client.ask(command::BLOCK_STATUS, flags, 64 << 10, bytes) {
        Reply::Extents { extents, .. } => extents,
        other => panic!("{other:?}"),
    };
    assert_eq!(extents(0, 960 << 10), [(64 << 10, 3), (64 << 10, 0), (832 << 10, 3)]);
    assert_eq!(extents(flag::REQ_ONE, 960 << 10), [(64 << 10, 3)]);
    assert_eq!(extents(0, 512), [(512, 3)]);

    let without = world.connect("disk", true, false);
    assert_eq!(without.ask(command::BLOCK_STATUS, 0, 0, 512).error(), 22);
}

#[test]
fn errors_answer_their_request_and_the_connection_goes_on() {
    for structured in [true, false] {
        let volume = RamVolume::new("disk", 8 << 20).shared();
        volume.fail(100..101, 5);
        volume.fail(200..201, 28);
        let world = World::new([&volume]);
        let client = world.connect("disk", structured, false);
        assert_eq!(client.read(100 * 512, 512), Err(5));
        assert_eq!(client.ask_write(0, 200 * 512, &[0; 512]).error(), 28);
        assert_eq!(client.ask_write(0, 8 << 20, &[0; 512]).error(), 28, "beyond the end");
        assert_eq!(client.read(8 << 20, 512), Err(22), "beyond the end");
        assert_eq!(client.ask(99, 0, 0, 0).error(), 22);
        if structured {
            let Reply::Error { message, .. } = client.ask(command::READ, 0, 100 * 512, 512) else {
                panic!("an error chunk")
            };
            assert!(message.contains("ram") && message.contains("sector 100"), "{message}");
        }
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    }
}

#[test]
fn a_read_that_fails_in_the_middle_ends_with_the_error() {
    for (flags, structured) in [(0, true), (flag::DF, true), (0, false)] {
        // The bad sector is in the first, a middle, and the last piece.
        for bad in [0, 2048 * 2, 2048 * 4 - 1] {
            let volume = RamVolume::new("disk", 8 << 20).shared();
            volume.fail(bad..bad + 1, 5);
            let world = World::new([&volume]);
            world.shuffle(bad);
            let client = world.connect("disk", structured, false);
            let cookie = client.post(command::READ, flags, 0, 4 << 20);
            let replies = client.replies();
            assert_eq!(replies.last().map(Reply::error), Some(5));
            assert_eq!(replies.iter().filter(|r| r.is_final()).count(), 1);
            assert!(replies.iter().all(|r| r.cookie() == cookie));
            assert_eq!(client.read(4 << 20, 4 << 20), Ok(vec![0; 4 * MIB]), "memory was given back");
        }
    }
}

#[test]
fn a_write_that_fails_in_the_middle_is_answered_once() {
    let volume = RamVolume::new("disk", 8 << 20).shared();
    volume.fail(5000..5001, 5);
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    assert_eq!(client.ask_write(0, 0, &vec![1; 4 * MIB]).error(), 5);
    assert_eq!(client.read(0, 512), Ok(vec![1; 512]));
}

#[test]
fn a_stopped_volume_answers_shutdown() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.set_stopped();
    assert_eq!(client.read(0, 512), Err(108));
}

#[test]
fn a_flush_does_not_wait_for_what_was_not_answered() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    volume.hold(RamOp::Write);
    client.post_write(0, 0, &[1; 512]);
    let flush = client.post(command::FLUSH, 0, 0, 0);
    assert_eq!(client.replies(), [Reply::ok(flush)]);
    volume.release();
    assert_eq!(client.replies().len(), 1);
}

#[test]
fn replies_that_are_ready_together_go_out_together() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    let world = World::new([&volume]);
    let client = world.connect("disk", true, false);
    let before = client.pipe.sends();
    for i in 0..32 {
        client.post(command::READ, 0, i * 4096, 4096);
    }
    assert_eq!(client.replies().len(), 32);
    assert_eq!(client.pipe.sends() - before, 1);
}

#[test]
fn a_flush_on_one_connection_covers_another() {
    let volume = RamVolume::new("disk", 1 << 20).shared();
    let world = World::new([&volume]);
    let (a, b) = (world.connect("disk", true, false), world.connect("", true, false));
    assert_eq!(a.ask_write(0, 0, &[3; 512]).error(), 0);
    assert_eq!(b.ask(command::FLUSH, 0, 0, 0).error(), 0);
    assert_eq!(b.read(0, 512), Ok(vec![3; 512]));
    assert_eq!(volume.counts().flushes, 1, "one volume behind both");
}

#[derive(Clone, Debug)]
enum Op {
    Write { len: usize, seed: usize, fua: bool },
    Read { len: usize, whole: bool },
    Zero { len: usize },
    Trim { len: usize },
}

const SLOT: usize = 3 * MIB;

fn an_op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![
        4 => (1usize..17).prop_map(|n| n * 512),
        2 => (100usize..300).prop_map(|n| n * 512),
        1 => (2000usize..6144).prop_map(|n| n * 512),
    ];
    prop_oneof![
        (len.clone(), any::<u16>(), any::<bool>()).prop_map(|(len, seed, fua)| Op::Write {
            len,
            seed: seed.into(),
            fua
        }),
        (len.clone(), any::<bool>()).prop_map(|(len, whole)| Op::Read { len, whole }),
        len.clone().prop_map(|len| Op::Zero { len }),
        len.prop_map(|len| Op::Trim { len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Batches of requests on disjoint ranges, in any order of tasks and any cut of the stream, do to the
    /// volume what they do to an array of bytes.
    #[test]
    fn requests_do_what_they_say(
        batches in prop::collection::vec(prop::collection::vec((an_op(), 0usize..2048), 1..6), 1..8),
        seed: u64,
        structured: bool,
        grain in prop_oneof![Just(usize::MAX), 1000usize..200_000],
    ) {
        let volume = RamVolume::new("disk", 5 * SLOT as u64).shared();
        let world = World::new([&volume]);
        world.shuffle(seed);
        let client = world.connect("disk", structured, false);
        client.pipe.set_grain(grain);
        let mut model = vec![0u8; 5 * SLOT];
        for batch in batches {
            let mut reads = Vec::new();
            let mut expected = 0;
            for (slot, (op, shift)) in batch.into_iter().enumerate() {
                let at = |len: usize| slot * SLOT + (shift * 512).min(SLOT - len);
                expected += 1;
                match op {
                    Op::Write { len, seed, fua } => {
                        let data = pattern(len, seed);
                        model[at(len)..at(len) + len].copy_from_slice(&data);
                        client.post_write(u16::from(fua), at(len) as u64, &data);
                    }
                    Op::Read { len, whole } => {
                        let flags = if whole && structured { flag::DF } else { 0 };
                        let cookie = client.post(command::READ, flags, at(len) as u64, len as u32);
                        reads.push((cookie, at(len), len));
                    }
                    Op::Zero { len } | Op::Trim { len } => {
                        let kind = if matches!(op, Op::Zero { .. }) { command::WRITE_ZEROES } else { command::TRIM };
                        model[at(len)..at(len) + len].fill(0);
                        client.post(kind, 0, at(len) as u64, len as u32);
                    }
                }
            }
            let replies = client.replies();
            prop_assert_eq!(replies.iter().filter(|r| r.is_final()).count(), expected);
            prop_assert!(replies.iter().all(|r| r.error() == 0));
            for (cookie, at, len) in reads {
                let data = assemble(&replies, cookie, at as u64, len);
                prop_assert!(data.as_deref() == Ok(&model[at..at + len]));
            }
        }
        prop_assert!(volume.contents(0..model.len()) == model);
        client.pipe.send(&request(command::DISCONNECT, 0, 0, 0, 0));
        world.run();
        prop_assert_eq!(world.tasks(), 0);
        prop_assert_eq!(world.last_event(), "0 closed: the client disconnected");
    }
}
