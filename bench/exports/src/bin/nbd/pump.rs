//! A client that keeps many requests in flight with few system calls: one send for all that can go out,
//! one receive for all that has come.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use export_nbd::codec::wire::{NBD_MAGIC, OPTION_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_BYTES, command, option};

/// Bytes of each request.
const BLOCK: u32 = 4096;

/// When a load ends.
#[derive(Clone, Copy)]
pub enum End {
    /// After this time; the positions are random.
    Time(Duration),
    /// After one write or read of each block, in their order.
    EachBlock,
}

/// The requests of a client.
#[derive(Clone, Copy)]
pub struct Load<'a> {
    pub socket: &'a Path,
    pub export: &'a str,
    pub write: bool,
    /// Bytes of the volume that requests are for.
    pub size: u64,
    pub depth: u64,
}

/// Loads an export; returns how many requests were answered.
pub fn run(load: Load, end: End) -> std::io::Result<u64> {
    let Load { write, size, depth, .. } = load;
    let mut stream = UnixStream::connect(load.socket)?;
    open(&mut stream, load.export)?;
    let blocks = size / u64::from(BLOCK);
    // Without structured replies every answer has the same length, in whatever order they come.
    let reply_bytes = SIMPLE_REPLY_BYTES as u64 + if write { 0 } else { u64::from(BLOCK) };
    let mut random = io::Rng::new(1);
    let payload = [0xa5; BLOCK as usize];
    let mut replies = vec![0; 1 << 20];
    let (mut sent, mut received_bytes) = (0, 0);
    let mut requests = Vec::new();
    let began = Instant::now();
    let may_send = |sent: u64| match end {
        End::Time(span) => began.elapsed() < span,
        End::EachBlock => sent < blocks,
    };
    loop {
        let answered = received_bytes / reply_bytes;
        let running = may_send(sent);
        if !running && answered == sent {
            break;
        }
        requests.clear();
        while running && sent - answered < depth && (sent < blocks || matches!(end, End::Time(_))) {
            let block = if let End::EachBlock = end { sent } else { random.below(blocks) };
            let offset = block * u64::from(BLOCK);
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
fn open(stream: &mut UnixStream, export: &str) -> std::io::Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if greeting[..8] != NBD_MAGIC.to_be_bytes() {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut hello = vec![0, 0, 0, 3];
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(option::EXPORT_NAME.to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.as_bytes());
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 10])
}
