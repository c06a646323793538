//! The NBD handshake: as it comes, and as options with their magic and lengths put right.
#![no_main]

use export_nbd::codec::wire::OPTION_MAGIC;
use export_nbd::codec::{Catalogue, ExportInfo, HandshakeStep, Negotiation};
use libfuzzer_sys::fuzz_target;

struct Two;

impl Catalogue for Two {
    fn list(&self) -> Vec<ExportInfo> {
        ["a", "b"].iter().filter_map(|n| self.find(n.as_bytes())).collect()
    }

    fn find(&self, name: &[u8]) -> Option<ExportInfo> {
        let name = std::str::from_utf8(name).ok().filter(|n| matches!(*n, "a" | "b"))?;
        Some(ExportInfo {
            name: name.to_string(),
            description: "a volume".to_string(),
            size_bytes: 1 << 20,
            read_only: name == "b",
            preferred_block_bytes: 4096,
        })
    }

    fn shutting_down(&self) -> bool {
        false
    }
}

/// Everything that comes out when `input` comes in pieces of `grain` bytes.
fn run(input: &[u8], grain: usize) -> (Vec<u8>, usize, Option<HandshakeStep>) {
    let mut out = Vec::new();
    let mut negotiation = Negotiation::begin(&mut out);
    let mut used = 0;
    for piece in input.chunks(grain) {
        let mut at = 0;
        loop {
            let before = out.len();
            let (n, step) = negotiation.step(&piece[at..], &Two, &mut out);
            at += n;
            used += n;
            assert!(out.len() - before < 4096, "one option has a short answer");
            match step {
                HandshakeStep::Continue => {}
                HandshakeStep::NeedMore => break,
                end => return (out, used, Some(end)),
            }
        }
        assert_eq!(at, piece.len());
    }
    (out, used, None)
}

/// Reads `bytes` as options, each a number, a length and so much data.
fn sealed(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0, 0, 0, 3];
    while let Some((head, rest)) = bytes.split_first_chunk::<2>() {
        let data = &rest[..usize::from(head[1]).min(rest.len())];
        bytes = &rest[data.len()..];
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend(u32::from(head[0]).to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
    }
    out
}

fuzz_target!(|bytes: &[u8]| {
    let Some((grain, bytes)) = bytes.split_first() else { return };
    let grain = usize::from(*grain).max(1);
    for input in [bytes, &sealed(bytes)] {
        assert_eq!(run(input, grain), run(input, input.len().max(1)));
    }
});
