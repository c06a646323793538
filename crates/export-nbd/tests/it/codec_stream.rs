//! The request stream's state machine on its own: what is accepted, what is refused with which error,
//! and what no bytes can do.

use export_nbd::codec::wire::{command, command_flag as flag};
use export_nbd::codec::{
    Action, Command, Errno, ExportInfo, Refusal, RequestStream, Session, StreamError, StreamStep,
};
use proptest::prelude::*;

use crate::wire::{request, write};

const SIZE: u64 = 64 << 20;

fn session(structured: bool, block_status: bool, read_only: bool) -> Session {
    let export = ExportInfo {
        name: "disk".into(),
        description: String::new(),
        size_bytes: SIZE,
        read_only,
        preferred_block_bytes: 4096,
    };
    Session { export, structured, block_status }
}

/// What came out of a stream.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Parsed {
    Begin(Command),
    Payload(Vec<u8>),
    Refuse(Refusal),
    Disconnect,
    Violation(StreamError),
}

/// Feeds `input` in pieces of the given lengths, then the rest; payload of one write is put together.
fn feed(session: &Session, input: &[u8], cuts: &[usize]) -> Vec<Parsed> {
    let mut stream = RequestStream::new(session);
    let mut parsed = Vec::new();
    let mut at = 0;
    let mut cuts = cuts.iter();
    while at < input.len() {
        let end = cuts.next().map_or(input.len(), |n| (at + n).min(input.len()));
        while at < end {
            let before = stream.payload_left();
            let (used, step) = match stream.step(&input[at..end]) {
                Ok(step) => step,
                Err(e) => {
                    parsed.push(Parsed::Violation(e));
                    return parsed;
                }
            };
            assert!(used > 0, "progress");
            let bytes = &input[at..at + used];
            at += used;
            match step {
                StreamStep::Nothing => {}
                StreamStep::Begin(command) => {
                    let expected =
                        if matches!(command.action, Action::Write { .. }) { command.bytes } else { 0 };
                    assert_eq!(stream.payload_left(), expected);
                    parsed.push(Parsed::Begin(command));
                }
                StreamStep::Payload => {
                    assert_eq!(stream.payload_left(), before - used as u32);
                    match parsed.last_mut() {
                        Some(Parsed::Payload(p)) => p.extend(bytes),
                        _ => parsed.push(Parsed::Payload(bytes.to_vec())),
                    }
                }
                StreamStep::Refuse(refusal) => parsed.push(Parsed::Refuse(refusal)),
                StreamStep::Disconnect => parsed.push(Parsed::Disconnect),
            }
        }
    }
    parsed
}

fn judge(session: &Session, kind: u16, flags: u16, offset: u64, bytes: u32) -> Result<Action, Errno> {
    let mut parsed = feed(session, &request(kind, flags, 7, offset, bytes), &[]);
    match parsed.pop() {
        Some(Parsed::Begin(c)) => {
            assert_eq!((c.cookie, c.offset, c.bytes), (7, offset, bytes));
            Ok(c.action)
        }
        Some(Parsed::Refuse(r)) => {
            assert_eq!(r.cookie, 7);
            assert!(!r.message.is_empty());
            Err(r.errno)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_command_and_its_flags() {
    let full = session(true, true, false);
    let ok = |kind, flags| judge(&full, kind, flags, 4096, 512);
    assert_eq!(ok(command::READ, 0), Ok(Action::Read { whole: false }));
    assert_eq!(ok(command::READ, flag::DF | flag::FUA), Ok(Action::Read { whole: true }));
    assert_eq!(ok(command::WRITE, 0), Ok(Action::Write { fua: false }));
    assert_eq!(ok(command::WRITE, flag::FUA), Ok(Action::Write { fua: true }));
    assert_eq!(ok(command::TRIM, flag::FUA), Ok(Action::Trim { fua: true }));
    assert_eq!(ok(command::CACHE, 0), Ok(Action::Cache));
    assert_eq!(ok(command::WRITE_ZEROES, 0), Ok(Action::WriteZeroes { fua: false, no_hole: false }));
    let zeroes = ok(command::WRITE_ZEROES, flag::NO_HOLE | flag::FUA);
    assert_eq!(zeroes, Ok(Action::WriteZeroes { fua: true, no_hole: true }));
    assert_eq!(ok(command::BLOCK_STATUS, flag::REQ_ONE), Ok(Action::BlockStatus { one: true }));
    assert_eq!(judge(&full, command::FLUSH, 0, 0, 0), Ok(Action::Flush));

    // Flags where they do not belong, and unknown commands.
    let refused = [
        (command::READ, flag::NO_HOLE),
        (command::READ, flag::REQ_ONE),
        (command::TRIM, flag::NO_HOLE),
        (command::WRITE_ZEROES, flag::DF),
        // Fast zeroes were not offered.
        (command::WRITE_ZEROES, 1 << 4),
        (command::BLOCK_STATUS, flag::DF),
        (command::CACHE, 1 << 15),
        (8, 0),
        (u16::MAX, 0),
    ];
    for (kind, flags) in refused {
        assert_eq!(ok(kind, flags), Err(Errno::Inval), "command {kind} flags {flags:#x}");
    }
}

#[test]
fn a_command_that_was_not_negotiated_is_refused() {
    let plain = session(false, false, false);
    assert_eq!(judge(&plain, command::READ, flag::DF, 0, 512), Err(Errno::Inval));
    assert_eq!(judge(&plain, command::BLOCK_STATUS, 0, 0, 512), Err(Errno::Inval));
    let read_only = session(true, true, true);
    for kind in [command::TRIM, command::WRITE_ZEROES] {
        assert_eq!(judge(&read_only, kind, 0, 0, 512), Err(Errno::Perm));
    }
    for kind in [command::READ, command::CACHE, command::BLOCK_STATUS] {
        assert!(judge(&read_only, kind, 0, 0, 512).is_ok());
    }
    assert_eq!(judge(&read_only, command::FLUSH, 0, 0, 0), Ok(Action::Flush));
}

#[test]
fn ranges_are_judged() {
    let full = session(true, true, false);
    let errno = |kind, offset, bytes| judge(&full, kind, 0, offset, bytes).err();
    assert_eq!(errno(command::READ, SIZE - 512, 512), None);
    assert_eq!(errno(command::READ, SIZE, 0), None, "an empty range at the end");
    assert_eq!(errno(command::READ, SIZE - 512, 1024), Some(Errno::Inval));
    assert_eq!(errno(command::READ, u64::MAX - 511, 512), Some(Errno::Inval));
    assert_eq!(errno(command::TRIM, SIZE, 512), Some(Errno::Inval));
    assert_eq!(errno(command::WRITE_ZEROES, SIZE, 512), Some(Errno::NoSpace));
    assert_eq!(errno(command::READ, 1, 512), Some(Errno::Inval));
    assert_eq!(errno(command::READ, 0, 511), Some(Errno::Inval));
    assert_eq!(errno(command::READ, 0, 32 << 20), None);
    assert_eq!(errno(command::READ, 0, (32 << 20) + 512), Some(Errno::Inval));
    assert_eq!(errno(command::TRIM, 0, SIZE as u32), None, "without payload any length will do");
    assert_eq!(errno(command::FLUSH, 0, 512), Some(Errno::Inval));
    assert_eq!(errno(command::FLUSH, 512, 0), Some(Errno::Inval));
    assert_eq!(errno(command::BLOCK_STATUS, 0, 0), Some(Errno::Inval));
}

#[test]
fn the_payload_of_a_refused_write_is_skipped() {
    let full = session(true, false, false);
    // (offset, bytes, error)
    let cases = [
        (SIZE, 512, Errno::NoSpace),
        (1, 512, Errno::Inval),
        (0, 100, Errno::Inval),
        (0, 33 << 20, Errno::Inval),
    ];
    for (offset, bytes, errno) in cases {
        let mut input = write(0, 1, offset, &vec![0x25; bytes]);
        input.extend(request(command::FLUSH, 0, 2, 0, 0));
        let parsed = feed(&full, &input, &[]);
        assert!(
            matches!(&parsed[0], Parsed::Refuse(r) if r.cookie == 1 && r.errno == errno),
            "{:?}",
            parsed[0]
        );
        assert!(matches!(&parsed[1], Parsed::Begin(c) if c.cookie == 2), "the stream continues");
    }
    let read_only = session(true, false, true);
    let parsed = feed(&read_only, &write(0, 1, 0, &[0; 512]), &[]);
    assert!(matches!(&parsed[..], [Parsed::Refuse(r)] if r.errno == Errno::Perm));
}

#[test]
fn after_the_word_of_the_end_requests_are_refused_and_a_write_goes_on() {
    let mut stream = RequestStream::new(&session(true, false, false));
    let input = [write(0, 1, 0, &[9; 1024]), request(command::FLUSH, 0, 2, 0, 0), write(0, 3, 0, &[9; 512])];
    let input = input.concat();
    let (used, step) = stream.step(&input).expect("a write");
    assert!(matches!(step, StreamStep::Begin(_)));
    stream.shut_down();
    let mut at = used;
    let mut steps = Vec::new();
    while at < input.len() {
        let (used, step) = stream.step(&input[at..]).expect("fine");
        at += used;
        steps.push(step);
    }
    assert_eq!(steps[0], StreamStep::Payload);
    let refused: Vec<_> = steps
        .iter()
        .filter_map(|s| if let StreamStep::Refuse(r) = s { Some((r.cookie, r.errno)) } else { None })
        .collect();
    assert_eq!(refused, [(2, Errno::Shutdown), (3, Errno::Shutdown)]);
}

#[test]
fn payload_may_bypass_the_parser() {
    let mut stream = RequestStream::new(&session(true, false, false));
    stream.step(&request(command::WRITE, 0, 1, 0, 4096)).expect("a write");
    assert!(!stream.at_boundary());
    stream.payload_received(4000);
    assert_eq!(stream.payload_left(), 96);
    stream.payload_received(u32::MAX);
    assert_eq!(stream.payload_left(), 0);
    assert!(stream.at_boundary());
}

#[test]
fn goodbye_and_garbage_end_the_stream() {
    let full = session(true, false, false);
    let mut input = request(command::DISCONNECT, 0, 0, 0, 0);
    input.extend([1; 100]);
    assert_eq!(feed(&full, &input, &[]), [Parsed::Disconnect]);
    let garbage = [0x11; 28];
    assert_eq!(feed(&full, &garbage, &[]), [Parsed::Violation(StreamError::BadMagic(0x1111_1111))]);
}

fn a_request() -> impl Strategy<Value = Vec<u8>> {
    let offset = prop_oneof![0u64..200, (0u64..200).prop_map(|s| s * 512), Just(SIZE), any::<u64>()];
    let flags = prop_oneof![Just(0u16), Just(1), 0u16..32, any::<u16>()];
    prop_oneof![
        4 => (0u16..10, flags.clone(), any::<u64>(), offset.clone(), prop_oneof![Just(512u32), 0u32..9000])
            .prop_filter("writes have payload", |r| r.0 != command::WRITE && r.0 != command::DISCONNECT)
            .prop_map(|(kind, flags, cookie, offset, bytes)| request(kind, flags, cookie, offset, bytes)),
        4 => (flags, any::<u64>(), offset, prop::collection::vec(any::<u8>(), 0..2000), any::<bool>())
            .prop_map(|(flags, cookie, offset, mut data, whole)| {
                if whole {
                    data.truncate(data.len() / 512 * 512);
                }
                write(flags, cookie, offset, &data)
            }),
        1 => Just(request(command::DISCONNECT, 0, 0, 0, 0)),
    ]
}

proptest! {
    #[test]
    fn cutting_the_bytes_differently_changes_nothing(
        requests in prop::collection::vec(a_request(), 0..12),
        cuts in prop::collection::vec(1usize..700, 0..80),
        structured: bool,
        read_only: bool,
    ) {
        let session = session(structured, structured, read_only);
        let input = requests.concat();
        prop_assert_eq!(feed(&session, &input, &cuts), feed(&session, &input, &[]));
    }

    #[test]
    fn no_bytes_do_any_harm(
        mut input in prop::collection::vec(any::<u8>(), 0..400),
        magic: bool,
        cuts in prop::collection::vec(1usize..40, 0..20),
    ) {
        if magic && input.len() >= 4 {
            input[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
        }
        let parsed = feed(&session(true, true, false), &input, &cuts);
        // What comes out is inside the export and aligned.
        for s in parsed {
            if let Parsed::Begin(c) = s {
                prop_assert!(c.offset + u64::from(c.bytes) <= SIZE);
                prop_assert!(c.offset % 512 == 0 && c.bytes % 512 == 0);
            }
        }
    }
}
