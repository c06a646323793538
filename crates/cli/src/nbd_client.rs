//! A small NBD client over a unix socket, for the demonstration and for tests.
//!
//! Owns one connection with any number of requests in flight. Replies come in the server's order and carry the tag of their
//! request. All calls block. A caller with many megabytes of requests in flight must receive before it sends more, or both
//! sides wait for each other; a few dozen requests of some KiB cannot block. Must not know what the data is.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use export_nbd::codec::wire;

/// Number of bytes that are collected before they are sent.
const GATHER_BYTES: usize = 256 << 10;

/// A request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// Read this many bytes.
    Read(u32),
    /// Make all data durable whose writes were answered before.
    Flush,
    /// Discard this many bytes.
    Trim(u32),
    /// Write this many zeros.
    WriteZeroes(u32),
}

/// The answer to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdReply {
    /// The tag of the request.
    pub tag: u64,
    /// The error number of the protocol, 0 for success.
    pub error: u32,
    /// The data of a read.
    pub data: Vec<u8>,
}

/// A connection to an export.
pub struct Client {
    from: BufReader<UnixStream>,
    to: UnixStream,
    out: Vec<u8>,
    size_bytes: u64,
    next_cookie: u64,
    /// Tag and length of the data in the reply, by the cookie of each request in flight.
    pending: BTreeMap<u64, (u64, usize)>,
}

fn violation(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("NBD: {what}"))
}

fn take<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The fields of a request header whose meaning depends on the command.
struct Header {
    command: u16,
    flags: u16,
    offset: u64,
    bytes: u32,
}

impl Client {
    /// Connects and chooses the export `name`.
    ///
    /// # Errors
    /// If no server listens, the export does not exist, or the peer is not an NBD server.
    pub fn connect(socket: &Path, name: &str) -> io::Result<Client> {
        let to = UnixStream::connect(socket)?;
        let mut client = Client {
            from: BufReader::with_capacity(GATHER_BYTES, to.try_clone()?),
            to,
            out: Vec::with_capacity(GATHER_BYTES),
            size_bytes: 0,
            next_cookie: 0,
            pending: BTreeMap::new(),
        };
        client.handshake(name)?;
        Ok(client)
    }

    /// Sets the time limit of a reply; `None` is no limit.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.to.set_read_timeout(timeout)?;
        self.to.set_write_timeout(timeout)
    }

    fn handshake(&mut self, name: &str) -> io::Result<()> {
        let greeting = (u64::from_be_bytes(take(&mut self.from)?), u64::from_be_bytes(take(&mut self.from)?));
        if greeting != (wire::NBD_MAGIC, wire::OPTION_MAGIC) {
            return Err(violation("expected a newstyle server"));
        }
        let _flags: [u8; 2] = take(&mut self.from)?;
        let flags = wire::client_flag::FIXED_NEWSTYLE | wire::client_flag::NO_ZEROES;
        self.out.extend(flags.to_be_bytes());
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend(0u16.to_be_bytes());
        self.out.extend(wire::OPTION_MAGIC.to_be_bytes());
        self.out.extend(wire::option::GO.to_be_bytes());
        self.out.extend((data.len() as u32).to_be_bytes());
        self.out.extend(data);
        self.send()?;
        loop {
            if u64::from_be_bytes(take(&mut self.from)?) != wire::OPTION_REPLY_MAGIC {
                return Err(violation("expected an answer to an option"));
            }
            let _option: [u8; 4] = take(&mut self.from)?;
            let kind = u32::from_be_bytes(take(&mut self.from)?);
            let len = u32::from_be_bytes(take(&mut self.from)?);
            let mut data = vec![0; len as usize];
            self.from.read_exact(&mut data)?;
            match kind {
                wire::option_reply::ACK => return Ok(()),
                wire::option_reply::INFO => {
                    // Information number 0 has the size and the flags of the export.
                    if let [0, 0, size @ ..] = data.as_slice()
                        && let Some(size) = size.first_chunk()
                    {
                        self.size_bytes = u64::from_be_bytes(*size);
                    }
                }
                _ => {
                    let why = String::from_utf8_lossy(&data);
                    return Err(io::Error::other(format!("NBD: export {name:?} is refused: {why}")));
                }
            }
        }
    }

    /// Size of the export in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Number of requests in flight.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Adds the header of a request, whose reply has `data` bytes.
    fn header(&mut self, header: Header, tag: u64, data: usize) {
        let Header { command, flags, offset, bytes } = header;
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.pending.insert(cookie, (tag, data));
        self.out.extend(wire::REQUEST_MAGIC.to_be_bytes());
        self.out.extend(flags.to_be_bytes());
        self.out.extend(command.to_be_bytes());
        self.out.extend(cookie.to_be_bytes());
        self.out.extend(offset.to_be_bytes());
        self.out.extend(bytes.to_be_bytes());
    }

    /// Adds a request without data. It is sent at the latest when a reply is received.
    ///
    /// # Errors
    /// If the connection was closed.
    pub fn ask(&mut self, ask: Ask, offset: u64, tag: u64) -> io::Result<()> {
        match ask {
            Ask::Read(bytes) => self.header(
                Header { command: wire::command::READ, flags: 0, offset, bytes },
                tag,
                bytes as usize,
            ),
            Ask::Flush => {
                self.header(Header { command: wire::command::FLUSH, flags: 0, offset: 0, bytes: 0 }, tag, 0)
            }
            Ask::Trim(bytes) => {
                self.header(Header { command: wire::command::TRIM, flags: 0, offset, bytes }, tag, 0)
            }
            Ask::WriteZeroes(bytes) => {
                self.header(Header { command: wire::command::WRITE_ZEROES, flags: 0, offset, bytes }, tag, 0)
            }
        }
        self.send_if_much()
    }

    /// Adds a write; with `fua` the data is durable when the write is answered.
    ///
    /// # Errors
    /// If the connection was closed.
    pub fn ask_write(&mut self, offset: u64, data: &[u8], fua: bool, tag: u64) -> io::Result<()> {
        let flags = if fua { wire::command_flag::FUA } else { 0 };
        let bytes = u32::try_from(data.len()).map_err(|_| violation("a write of 4 GiB or more"))?;
        self.header(Header { command: wire::command::WRITE, flags, offset, bytes }, tag, 0);
        self.out.extend(data);
        self.send_if_much()
    }

    fn send_if_much(&mut self) -> io::Result<()> {
        if self.out.len() >= GATHER_BYTES { self.send() } else { Ok(()) }
    }

    /// Sends the collected requests, without waiting for a reply.
    ///
    /// # Errors
    /// If the connection was closed.
    pub fn send(&mut self) -> io::Result<()> {
        let result = self.to.write_all(&self.out);
        self.out.clear();
        result
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    /// If the connection was closed or a reply is invalid.
    pub fn receive(&mut self) -> io::Result<NbdReply> {
        if !self.out.is_empty() {
            self.send()?;
        }
        if u32::from_be_bytes(take(&mut self.from)?) != wire::SIMPLE_REPLY_MAGIC {
            return Err(violation("expected a simple reply"));
        }
        let error = u32::from_be_bytes(take(&mut self.from)?);
        let cookie = u64::from_be_bytes(take(&mut self.from)?);
        let (tag, len) = self.pending.remove(&cookie).ok_or_else(|| violation("expected a reply to a pending \
                                                                               request, found one to no request"))?;
        let mut data = vec![0; if error == 0 { len } else { 0 }];
        self.from.read_exact(&mut data)?;
        Ok(NbdReply { tag, error, data })
    }

    fn alone(&mut self) -> io::Result<NbdReply> {
        let reply = self.receive()?;
        if reply.error == 0 {
            return Ok(reply);
        }
        Err(io::Error::from_raw_os_error(i32::try_from(reply.error).unwrap_or(5)))
    }

    /// Reads data and waits for it. No other request may be in flight.
    ///
    /// # Errors
    /// If the server reports an error or has closed the connection.
    pub fn read(&mut self, offset: u64, bytes: u32) -> io::Result<Vec<u8>> {
        self.ask(Ask::Read(bytes), offset, 0)?;
        Ok(self.alone()?.data)
    }

    /// Writes data and waits for the answer. No other request may be in flight.
    ///
    /// # Errors
    /// If the server reports an error or has closed the connection.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ask_write(offset, data, false, 0)?;
        self.alone().map(drop)
    }

    /// Flushes and waits for the answer. No other request may be in flight.
    ///
    /// # Errors
    /// If the server reports an error or has closed the connection.
    pub fn flush(&mut self) -> io::Result<()> {
        self.ask(Ask::Flush, 0, 0)?;
        self.alone().map(drop)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The disconnect request has no answer. If the server has ended, the error does not matter.
        self.header(Header { command: wire::command::DISCONNECT, flags: 0, offset: 0, bytes: 0 }, 0, 0);
        let _ = self.send();
    }
}
