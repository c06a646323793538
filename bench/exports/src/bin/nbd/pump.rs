//! A client that keeps many requests in flight with few system calls: one send for all that can go out,
//! one receive for all that has come.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use export_nbd::codec::wire::{NBD_MAGIC, OPTION_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_BYTES, command, option};

const BLOCK: u32 = 4096;
const DEPTH: u64 = 32;

/// Loads the default export behind `socket`; returns how many requests were answered.
pub fn run(socket: &Path, write: bool, size: u64, span: Duration) -> std::io::Result<u64> {
    let mut stream = UnixStream::connect(socket)?;
    open(&mut stream)?;
    // Without structured replies every answer has the same length, in whatever order they come.
    let reply_bytes = SIMPLE_REPLY_BYTES as u64 + if write { 0 } else { u64::from(BLOCK) };
    let mut random = io::Rng::new(1);
    let payload = [0xa5; BLOCK as usize];
    let mut replies = vec![0; 1 << 20];
    let (mut sent, mut received_bytes) = (0, 0);
    let mut requests = Vec::new();
    let end = Instant::now() + span;
    loop {
        let answered = received_bytes / reply_bytes;
        let running = Instant::now() < end;
        if !running && answered == sent {
            break;
        }
        requests.clear();
        while running && sent - answered < DEPTH {
            let offset = random.below(size / u64::from(BLOCK)) * u64::from(BLOCK);
            let kind = if write { command::WRITE } else { command::READ };
            request(&mut requests, kind, sent, offset, BLOCK);
            if write {
                requests.extend(payload);
            }
            sent += 1;
        }
        stream.write_all(&requests)?;
        let n = stream.read(&mut replies)?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        received_bytes += n as u64;
    }
    requests.clear();
    request(&mut requests, command::DISCONNECT, 0, 0, 0);
    stream.write_all(&requests)?;
    Ok(sent)
}

fn request(out: &mut Vec<u8>, kind: u16, cookie: u64, offset: u64, bytes: u32) {
    out.extend(REQUEST_MAGIC.to_be_bytes());
    out.extend([0, 0]);
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(bytes.to_be_bytes());
}

/// The shortest handshake there is: name the export and go.
fn open(stream: &mut UnixStream) -> std::io::Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if greeting[..8] != NBD_MAGIC.to_be_bytes() {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut hello = vec![0, 0, 0, 3];
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(option::EXPORT_NAME.to_be_bytes());
    hello.extend([0; 4]);
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 10])
}
