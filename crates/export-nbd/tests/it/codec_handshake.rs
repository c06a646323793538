//! The handshake's state machine on its own: what each option is answered, and what no bytes can do.

use export_nbd::codec::wire::{info, option, option_reply, transmission_flag as flag};
use export_nbd::codec::{
    Catalogue, ExportInfo, HandshakeEnd, HandshakeStep, MAX_OPTION_BYTES, MAX_OPTIONS,
    MAX_SKIPPED_OPTION_BYTES, Negotiation, Session,
};
use proptest::prelude::*;

use crate::wire::{
    Fields, OptionReply, choose, client_flags, contexts, option_bytes, option_replies, take_greeting,
};

struct Fixed {
    exports: Vec<ExportInfo>,
    shutting_down: bool,
}

impl Catalogue for Fixed {
    fn list(&self) -> Vec<ExportInfo> {
        self.exports.clone()
    }

    fn find(&self, name: &[u8]) -> Option<ExportInfo> {
        match (name, &self.exports[..]) {
            (b"", [only]) => Some(only.clone()),
            _ => self.exports.iter().find(|e| e.name.as_bytes() == name).cloned(),
        }
    }

    fn shutting_down(&self) -> bool {
        self.shutting_down
    }
}

fn export(name: &str) -> ExportInfo {
    ExportInfo {
        name: name.to_string(),
        description: format!("the disk {name}"),
        size_bytes: 1 << 20,
        read_only: name == "ro",
        preferred_block_bytes: 4096,
    }
}

fn catalogue(names: &[&str]) -> Fixed {
    Fixed { exports: names.iter().map(|n| export(n)).collect(), shutting_down: false }
}

/// How a handshake went.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Outcome {
    out: Vec<u8>,
    verdict: Option<Result<Session, HandshakeEnd>>,
    /// Bytes of the input that were used.
    used: usize,
}

/// Feeds `input` in pieces of the given lengths, then the rest.
fn feed(exports: &Fixed, input: &[u8], cuts: &[usize]) -> Outcome {
    let mut out = Vec::new();
    let mut negotiation = Negotiation::begin(&mut out);
    let (mut at, mut used, mut verdict) = (0, 0, None);
    let mut cuts = cuts.iter();
    while at < input.len() && verdict.is_none() {
        let end = cuts.next().map_or(input.len(), |n| (at + n).min(input.len()));
        while verdict.is_none() {
            let (n, step) = negotiation.step(&input[at..end], exports, &mut out);
            at += n;
            used += n;
            match step {
                HandshakeStep::NeedMore => {
                    assert_eq!(at, end, "all input was used");
                    break;
                }
                HandshakeStep::Continue => {}
                HandshakeStep::StartTls => panic!("there is no TLS"),
                HandshakeStep::Agreed(session) => verdict = Some(Ok(session)),
                HandshakeStep::Ended(end) => verdict = Some(Err(end)),
            }
        }
    }
    Outcome { out, verdict, used }
}

fn run(exports: &Fixed, options: &[Vec<u8>]) -> (Vec<OptionReply>, Option<Result<Session, HandshakeEnd>>) {
    let mut input = client_flags(3);
    input.extend(options.concat());
    let outcome = feed(exports, &input, &[]);
    let mut fields = Fields(&outcome.out);
    take_greeting(&mut fields);
    (option_replies(fields), outcome.verdict)
}

fn kinds(replies: &[OptionReply]) -> Vec<u32> {
    replies.iter().map(|r| r.1).collect()
}

#[test]
fn go_describes_the_export_and_opens_it() {
    let exports = catalogue(&["disk", "other"]);
    let (replies, verdict) =
        run(&exports, &[choose(option::GO, "disk", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 99])]);
    assert_eq!(kinds(&replies), [3, 3, 3, 3, 1]);
    let mut size = Fields(&replies[0].2);
    assert_eq!((size.u16(), size.u64()), (info::EXPORT, 1 << 20));
    let flags = size.u16();
    assert_eq!(flags & (flag::SEND_DF | flag::READ_ONLY), 0, "no structured replies, no read-only");
    let offered = flag::HAS_FLAGS
        | flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::SEND_TRIM
        | flag::SEND_WRITE_ZEROES
        | flag::CAN_MULTI_CONN
        | flag::SEND_CACHE;
    assert_eq!(flags, offered);
    let mut sizes = Fields(&replies[1].2);
    assert_eq!(sizes.u16(), info::BLOCK_SIZE);
    assert_eq!((sizes.u32(), sizes.u32(), sizes.u32()), (512, 4096, 32 << 20));
    assert_eq!(replies[2].2, [&[0, 1][..], b"disk"].concat());
    assert_eq!(replies[3].2, [&[0, 2][..], b"the disk disk"].concat());
    let session = verdict.expect("decided").expect("agreed");
    assert_eq!(session, Session { export: export("disk"), structured: false, block_status: false });
}

#[test]
fn info_describes_without_opening() {
    let exports = catalogue(&["disk"]);
    let (replies, verdict) = run(&exports, &[choose(option::INFO, "disk", &[])]);
    assert_eq!(kinds(&replies), [3, 3, 1]);
    assert_eq!(verdict, None);
}

#[test]
fn the_empty_name_is_the_only_export() {
    let (replies, verdict) = run(&catalogue(&["disk"]), &[choose(option::GO, "", &[info::NAME])]);
    assert_eq!(replies[2].2, [&[0, 1][..], b"disk"].concat(), "the export is named");
    assert_eq!(verdict.expect("decided").expect("agreed").export.name, "disk");

    for exports in [catalogue(&["disk", "other"]), catalogue(&[])] {
        let (replies, verdict) = run(&exports, &[choose(option::GO, "", &[])]);
        assert_eq!(kinds(&replies), [option_reply::ERR_UNKNOWN]);
        assert_eq!(verdict, None, "the client may try another");
    }
}

#[test]
fn a_read_only_export_says_so() {
    let structured = option_bytes(option::STRUCTURED_REPLY, &[]);
    let (replies, _) = run(&catalogue(&["ro"]), &[structured, choose(option::GO, "ro", &[])]);
    let mut size = Fields(&replies[1].2[10..]);
    let flags = size.u16();
    assert_ne!(flags & flag::READ_ONLY, 0);
    assert_ne!(flags & flag::SEND_DF, 0, "offered with structured replies");
}

#[test]
fn exports_are_listed() {
    let exports = catalogue(&["disk", "other"]);
    let (replies, _) = run(&exports, &[option_bytes(option::LIST, &[])]);
    assert_eq!(kinds(&replies), [2, 2, 1]);
    let mut entry = Fields(&replies[1].2);
    let len = entry.u32() as usize;
    assert_eq!(entry.bytes(len), b"other");
    assert_eq!(entry.0, b"the disk other");
    let (replies, _) = run(&exports, &[option_bytes(option::LIST, b"x")]);
    assert_eq!(kinds(&replies), [option_reply::ERR_INVALID]);
}

#[test]
fn the_old_way_of_opening_works_with_and_without_padding() {
    let exports = catalogue(&["disk"]);
    for (flags, padding) in [(0, 124), (1, 124), (3, 0)] {
        let mut input = client_flags(flags);
        input.extend(option_bytes(option::EXPORT_NAME, b"disk"));
        input.extend(b"next");
        let outcome = feed(&exports, &input, &[]);
        let mut fields = Fields(&outcome.out);
        take_greeting(&mut fields);
        assert_eq!(fields.u64(), 1 << 20);
        assert_ne!(fields.u16() & flag::HAS_FLAGS, 0);
        assert_eq!(fields.0, vec![0; padding]);
        assert_eq!(outcome.used, input.len() - 4, "requests are left alone");
        assert!(matches!(outcome.verdict, Some(Ok(_))));
    }
    let (_, verdict) = run(&exports, &[option_bytes(option::EXPORT_NAME, b"nothing")]);
    assert_eq!(verdict, Some(Err(HandshakeEnd::NoSuchExport("nothing".into()))));
}

#[test]
fn contexts_are_selected_for_one_export() {
    let exports = catalogue(&["disk", "other"]);
    let structured = option_bytes(option::STRUCTURED_REPLY, &[]);
    let set = |name, queries: &[&str]| contexts(option::SET_META_CONTEXT, name, queries);
    // (selections, opened, selected)
    let cases: [(&[Vec<u8>], &str, bool); 6] = [
        (&[set("disk", &["base:allocation"])], "disk", true),
        (&[set("disk", &["x:y", "base:allocation"])], "disk", true),
        (&[set("disk", &["base:"])], "disk", false),
        (&[set("other", &["base:allocation"])], "disk", false),
        (&[set("disk", &["base:allocation"]), set("disk", &[])], "disk", false),
        (&[set("disk", &["base:allocation"]), set("nothing", &["base:allocation"])], "disk", false),
    ];
    for (selections, name, selected) in cases {
        let mut options = vec![structured.clone()];
        options.extend_from_slice(selections);
        options.push(choose(option::GO, name, &[]));
        let (_, verdict) = run(&exports, &options);
        let session = verdict.expect("decided").expect("agreed");
        assert_eq!(session.block_status, selected, "{selections:?}");
    }
}

#[test]
fn contexts_are_listed_and_need_structured_replies() {
    let exports = catalogue(&["disk"]);
    let structured = option_bytes(option::STRUCTURED_REPLY, &[]);
    let list = |queries: &[&str]| contexts(option::LIST_META_CONTEXT, "disk", queries);
    let (replies, _) = run(&exports, &[structured.clone(), list(&[])]);
    assert_eq!(kinds(&replies), [1, 4, 1]);
    assert_eq!(replies[1].2, b"\0\0\0\0base:allocation");
    let (replies, _) = run(&exports, &[structured.clone(), list(&["base:"])]);
    assert_eq!(kinds(&replies), [1, 4, 1]);
    let (replies, _) = run(&exports, &[structured, list(&["qemu:"])]);
    assert_eq!(kinds(&replies), [1, 1]);
    let (replies, _) = run(&exports, &[list(&[])]);
    assert_eq!(kinds(&replies), [option_reply::ERR_INVALID]);
}

#[test]
fn an_unknown_option_is_refused_and_the_handshake_continues() {
    let exports = catalogue(&["disk"]);
    let options = [
        option_bytes(option::STARTTLS, &[]),
        option_bytes(11, &[]),
        option_bytes(4711, b"data"),
        option_bytes(option::STRUCTURED_REPLY, b"x"),
        option_bytes(option::GO, b"x"),
        option_bytes(option::INFO, &vec![0; MAX_OPTION_BYTES as usize + 1]),
        option_bytes(option::ABORT, &[]),
    ];
    let (replies, verdict) = run(&exports, &options);
    let expected = [
        option_reply::ERR_UNSUP,
        option_reply::ERR_UNSUP,
        option_reply::ERR_UNSUP,
        option_reply::ERR_INVALID,
        option_reply::ERR_INVALID,
        option_reply::ERR_TOO_BIG,
        option_reply::ACK,
    ];
    assert_eq!(kinds(&replies), expected);
    assert_eq!(verdict, Some(Err(HandshakeEnd::Aborted)));
}

#[test]
fn violations_end_the_handshake() {
    let exports = catalogue(&["disk"]);
    let ends = |input: Vec<u8>| feed(&exports, &input, &[]).verdict.expect("decided").expect_err("ended");
    assert_eq!(ends(client_flags(4)), HandshakeEnd::UnknownFlags(4));
    assert_eq!(
        ends([client_flags(3), vec![b'x'; 16]].concat()),
        HandshakeEnd::BadMagic(0x7878_7878_7878_7878)
    );
    let mut oversized = [client_flags(3), option_bytes(option::LIST, &[])].concat();
    let bytes = MAX_SKIPPED_OPTION_BYTES + 1;
    oversized[16..].copy_from_slice(&bytes.to_be_bytes());
    assert_eq!(ends(oversized), HandshakeEnd::Oversized { option: option::LIST, bytes });
    let many = option_bytes(option::LIST, &[]).repeat(MAX_OPTIONS as usize + 1);
    assert_eq!(ends([client_flags(3), many].concat()), HandshakeEnd::TooManyOptions);
}

#[test]
fn a_server_that_stops_says_so() {
    let exports = Fixed { shutting_down: true, ..catalogue(&["disk"]) };
    let (replies, verdict) =
        run(&exports, &[choose(option::GO, "disk", &[]), option_bytes(option::LIST, &[])]);
    assert_eq!(kinds(&replies), [option_reply::ERR_SHUTDOWN; 2]);
    assert_eq!(verdict, None);
    let (_, verdict) = run(&exports, &[option_bytes(option::EXPORT_NAME, b"disk")]);
    assert_eq!(verdict, Some(Err(HandshakeEnd::ShuttingDown)));
}

/// Options as a client might send them, sane or not.
fn an_option() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![Just("disk"), Just(""), Just("other"), Just("nothing")];
    let query = prop_oneof![Just("base:allocation"), Just("base:"), Just("x:y"), Just("")];
    prop_oneof![
        (0u32..13, prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(n, d)| option_bytes(n, &d)),
        (6u32..8, name.clone(), prop::collection::vec(0u16..5, 0..4)).prop_map(|(n, e, k)| choose(n, e, &k)),
        (9u32..11, name, prop::collection::vec(query, 0..4)).prop_map(|(n, e, q)| contexts(n, e, &q)),
        Just(option_bytes(option::STRUCTURED_REPLY, &[])),
        Just(option_bytes(option::LIST, &[])),
        Just(option_bytes(option::INFO, &vec![7; MAX_OPTION_BYTES as usize + 1])),
        prop::collection::vec(any::<u8>(), 0..40),
    ]
}

proptest! {
    #[test]
    fn cutting_the_bytes_differently_changes_nothing(
        options in prop::collection::vec(an_option(), 0..12),
        flags in prop_oneof![Just(0u32), Just(1), Just(3), any::<u32>()],
        cuts in prop::collection::vec(1usize..60, 0..60),
    ) {
        let exports = catalogue(&["disk", "other"]);
        let input = [client_flags(flags), options.concat()].concat();
        prop_assert_eq!(feed(&exports, &input, &cuts), feed(&exports, &input, &[]));
    }

    #[test]
    fn no_bytes_do_any_harm(input in prop::collection::vec(any::<u8>(), 0..600), cuts in prop::collection::vec(1usize..9, 0..99)) {
        let exports = catalogue(&["disk"]);
        let outcome = feed(&exports, &input, &cuts);
        prop_assert!(outcome.used <= input.len());
        // One option per 16 bytes at most, each with a short answer.
        prop_assert!(outcome.out.len() <= 18 + (input.len() / 16 + 1) * 400);
    }
}

/// One step of a handshake that wants TLS, with all of `input`.
fn step(negotiation: &mut Negotiation, input: &[u8]) -> (HandshakeStep, Vec<OptionReply>) {
    let exports = catalogue(&["disk"]);
    let (mut at, mut out) = (0, Vec::new());
    loop {
        let (used, step) = negotiation.step(&input[at..], &exports, &mut out);
        at += used;
        if step != HandshakeStep::Continue {
            return (step, option_replies(Fields(&out)));
        }
    }
}

#[test]
fn without_tls_a_client_learns_nothing_where_it_is_wanted() {
    let mut negotiation = Negotiation::begin_with_tls(&mut Vec::new());
    let options = [
        client_flags(3),
        option_bytes(option::LIST, &[]),
        option_bytes(option::STRUCTURED_REPLY, &[]),
        contexts(option::SET_META_CONTEXT, "disk", &["base:allocation"]),
        choose(option::INFO, "disk", &[]),
        choose(option::GO, "disk", &[]),
        option_bytes(4711, b"data"),
    ];
    let (step, replies) = step(&mut negotiation, &options.concat());
    assert_eq!(step, HandshakeStep::NeedMore);
    assert_eq!(kinds(&replies), [option_reply::ERR_TLS_REQD; 6]);
}

#[test]
fn without_tls_the_old_way_to_choose_an_export_ends_the_handshake() {
    let mut negotiation = Negotiation::begin_with_tls(&mut Vec::new());
    let input = [client_flags(3), option_bytes(option::EXPORT_NAME, b"disk")].concat();
    let (step, replies) = step(&mut negotiation, &input);
    assert_eq!((step, replies.len()), (HandshakeStep::Ended(HandshakeEnd::WithoutTls), 0));
    let mut negotiation = Negotiation::begin_with_tls(&mut Vec::new());
    let input = [client_flags(3), option_bytes(option::ABORT, &[])].concat();
    assert_eq!(self::step(&mut negotiation, &input).0, HandshakeStep::Ended(HandshakeEnd::Aborted));
}

/// What came in plain text must not count under TLS: a man in the middle could have put it there.
#[test]
fn starttls_comes_once_and_forgets_what_was_before() {
    let mut negotiation = Negotiation::begin_with_tls(&mut Vec::new());
    let start = option_bytes(option::STARTTLS, &[]);
    let (with_data, replies) =
        step(&mut negotiation, &[client_flags(3), option_bytes(option::STARTTLS, b"x")].concat());
    assert_eq!((with_data, kinds(&replies)), (HandshakeStep::NeedMore, vec![option_reply::ERR_INVALID]));
    let (started, replies) = step(&mut negotiation, &start);
    assert_eq!((started, kinds(&replies)), (HandshakeStep::StartTls, vec![option_reply::ACK]));
    negotiation.encrypted();
    let (again, replies) = step(&mut negotiation, &start);
    assert_eq!((again, kinds(&replies)), (HandshakeStep::NeedMore, vec![option_reply::ERR_INVALID]));
    let HandshakeStep::Agreed(session) = step(&mut negotiation, &choose(option::GO, "disk", &[])).0 else {
        panic!("the export is opened");
    };
    assert!(!session.structured && !session.block_status);
}

#[test]
fn plain_text_after_starttls_ends_the_handshake() {
    let mut negotiation = Negotiation::begin_with_tls(&mut Vec::new());
    let input =
        [client_flags(3), option_bytes(option::STARTTLS, &[]), option_bytes(option::STRUCTURED_REPLY, &[])];
    let (step, _) = step(&mut negotiation, &input.concat());
    assert_eq!(step, HandshakeStep::Ended(HandshakeEnd::PlainAfterStartTls));
}
