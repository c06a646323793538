//! NBD requests: the parser alone, and a whole server over a pipe that a client leaves at any byte.
#![no_main]

use export_nbd::codec::wire::{REQUEST_HEADER_BYTES, REQUEST_MAGIC, command};
use export_nbd::codec::{ExportInfo, RequestStream, Session, StreamStep};
use libfuzzer_sys::fuzz_target;
use rig::{RamDisk, RamVolume};

#[allow(dead_code)]
#[path = "../../crates/export-nbd/tests/it/pipe.rs"]
mod pipe;
#[allow(dead_code)]
#[path = "../../crates/export-nbd/tests/it/wire.rs"]
mod wire;
#[allow(dead_code)]
#[path = "../../crates/export-nbd/tests/it/world.rs"]
mod world;

const SIZE: u64 = 4 << 20;

fn session(mode: u8) -> Session {
    let export = ExportInfo {
        name: "disk".to_string(),
        description: String::new(),
        size_bytes: SIZE,
        read_only: mode & 4 != 0,
        preferred_block_bytes: 4096,
    };
    Session { export, structured: mode & 1 != 0, block_status: mode & 3 == 3 }
}

/// Steps with what they mean, payload put together; ends at the first violation.
fn parse(session: &Session, input: &[u8], grain: usize) -> Vec<(u64, String)> {
    let mut stream = RequestStream::new(session);
    let mut seen: Vec<(u64, String)> = Vec::new();
    for piece in input.chunks(grain) {
        let mut at = 0;
        while at < piece.len() {
            let (used, step) = match stream.step(&piece[at..]) {
                Ok(step) => step,
                Err(e) => {
                    seen.push((0, e.to_string()));
                    return seen;
                }
            };
            assert!(used > 0 && used <= piece.len() - at);
            at += used;
            match step {
                StreamStep::Nothing => {}
                StreamStep::Payload => match seen.last_mut() {
                    Some((bytes, what)) if what == "payload" => *bytes += used as u64,
                    _ => seen.push((used as u64, "payload".to_string())),
                },
                StreamStep::Begin(c) => {
                    assert!(c.offset % 512 == 0 && c.bytes % 512 == 0);
                    assert!(c.offset + u64::from(c.bytes) <= SIZE);
                    seen.push((0, format!("{c:?}")));
                }
                other => seen.push((0, format!("{other:?}"))),
            }
        }
    }
    seen
}

/// Reads `bytes` as headers without magic and with small numbers, and adds the payload of writes.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for header in bytes.chunks_exact(8) {
        let kind = u16::from(header[0] % 9);
        let sectors = u32::from(u16::from_le_bytes([header[4], header[5]]));
        let length = match header[6] {
            0 => 33 << 20,
            1 => sectors,
            _ => (sectors % 2300) * 512,
        };
        out.extend(REQUEST_MAGIC.to_be_bytes());
        out.extend(u16::from(header[1] & 31).to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend((out.len() as u64).to_be_bytes());
        out.extend((u64::from(u16::from_le_bytes([header[2], header[3]]) % 8200) * 512).to_be_bytes());
        out.extend(length.to_be_bytes());
        if kind == command::WRITE && length < 2 << 20 {
            out.resize(out.len() + length as usize, header[7]);
        }
    }
    out
}

fn serve(mode: u8, seed: u8, grain: usize, input: &[u8]) {
    let mut disk = RamDisk::new("disk", SIZE);
    if mode & 4 != 0 {
        disk = disk.with_read_only();
    }
    let volume = RamVolume::on(disk.shared()).shared();
    volume.fail(2048..2056, 5);
    let world = world::World::new([&volume]);
    world.shuffle(u64::from(seed));
    let client = world.connect("disk", mode & 1 != 0, mode & 3 == 3);
    client.pipe.set_grain(grain);
    if mode & 8 != 0 {
        client.pipe.set_capacity(100_000);
    }
    client.pipe.send(input);
    world.run();
    client.pipe.vanish();
    world.run();
    assert_eq!((world.tasks(), volume.in_flight(), world.server.connections()), (0, 0, 0));
}

fuzz_target!(|bytes: &[u8]| {
    let Some(([mode, seed, grain], bytes)) = bytes.split_first_chunk() else { return };
    let session = session(*mode);
    let sealed = sealed(&bytes[..bytes.len().min(8 * 64)]);
    for input in [bytes, &sealed] {
        let grain =
            (usize::from(*grain) + 1) * if input.len() > 4096 { REQUEST_HEADER_BYTES * 37 } else { 1 };
        assert_eq!(parse(&session, input, grain), parse(&session, input, input.len().max(1)));
        serve(*mode, *seed, grain, input);
    }
});
