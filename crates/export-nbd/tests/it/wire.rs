//! The client's side of the protocol, as far as tests speak it.

use export_nbd::codec::wire::{
    CHUNK_MAGIC, NBD_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, chunk,
    option,
};

pub fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

pub fn option_bytes(number: u32, data: &[u8]) -> Vec<u8> {
    let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
    out.extend(number.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_be_bytes().to_vec();
    out.extend(text.as_bytes());
    out
}

/// GO or INFO.
pub fn choose(number: u32, name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((kinds.len() as u16).to_be_bytes());
    data.extend(kinds.iter().flat_map(|k| k.to_be_bytes()));
    option_bytes(number, &data)
}

/// LIST_META_CONTEXT or SET_META_CONTEXT.
pub fn contexts(number: u32, name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|q| string(q)));
    option_bytes(number, &data)
}

/// Everything a client sends to open `name`.
pub fn opening(name: &str, structured: bool, block_status: bool) -> Vec<u8> {
    let mut out = client_flags(3);
    if structured {
        out.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    }
    if block_status {
        out.extend(contexts(option::SET_META_CONTEXT, name, &["base:allocation"]));
    }
    out.extend(choose(option::GO, name, &[]));
    out
}

pub fn request(kind: u16, flags: u16, cookie: u64, offset: u64, bytes: u32) -> Vec<u8> {
    let mut out = REQUEST_MAGIC.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(bytes.to_be_bytes());
    out
}

pub fn write(flags: u16, cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut out = request(1, flags, cookie, offset, data.len() as u32);
    out.extend(data);
    out
}

/// Takes fields off received bytes.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().expect("two bytes"))
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().expect("four bytes"))
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().expect("eight bytes"))
    }
}

/// An answer to an option: (option, kind, data).
pub type OptionReply = (u32, u32, Vec<u8>);

pub fn take_greeting(fields: &mut Fields<'_>) {
    assert_eq!(fields.u64(), NBD_MAGIC);
    assert_eq!(fields.u64(), OPTION_MAGIC);
    assert_eq!(fields.u16(), 3, "fixed newstyle, no zeroes");
}

pub fn option_replies(mut fields: Fields<'_>) -> Vec<OptionReply> {
    let mut out = Vec::new();
    while !fields.0.is_empty() {
        assert_eq!(fields.u64(), OPTION_REPLY_MAGIC);
        let (option, kind, len) = (fields.u32(), fields.u32(), fields.u32());
        out.push((option, kind, fields.bytes(len as usize).to_vec()));
    }
    out
}

/// What the server says about a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    Simple {
        cookie: u64,
        error: u32,
    },
    /// A simple reply to a read.
    SimpleData {
        cookie: u64,
        data: Vec<u8>,
    },
    Data {
        cookie: u64,
        done: bool,
        offset: u64,
        data: Vec<u8>,
    },
    Done {
        cookie: u64,
    },
    Error {
        cookie: u64,
        error: u32,
        message: String,
    },
    Extents {
        cookie: u64,
        extents: Vec<(u32, u32)>,
    },
}

impl Reply {
    pub fn ok(cookie: u64) -> Reply {
        Reply::Simple { cookie, error: 0 }
    }

    pub fn cookie(&self) -> u64 {
        match self {
            Reply::Simple { cookie, .. }
            | Reply::SimpleData { cookie, .. }
            | Reply::Data { cookie, .. }
            | Reply::Done { cookie }
            | Reply::Error { cookie, .. }
            | Reply::Extents { cookie, .. } => *cookie,
        }
    }

    /// Whether this is the last word on its request.
    pub fn is_final(&self) -> bool {
        !matches!(self, Reply::Data { done: false, .. })
    }

    pub fn error(&self) -> u32 {
        match self {
            Reply::Simple { error, .. } | Reply::Error { error, .. } => *error,
            _ => 0,
        }
    }
}

/// Parses replies. `simple_read` says how much data follows a simple reply of this cookie.
pub fn replies(bytes: &[u8], simple_read: impl Fn(u64) -> usize) -> Vec<Reply> {
    let mut fields = Fields(bytes);
    let mut out = Vec::new();
    while !fields.0.is_empty() {
        match fields.u32() {
            SIMPLE_REPLY_MAGIC => {
                let (error, cookie) = (fields.u32(), fields.u64());
                let len = if error == 0 { simple_read(cookie) } else { 0 };
                out.push(match len {
                    0 => Reply::Simple { cookie, error },
                    len => Reply::SimpleData { cookie, data: fields.bytes(len).to_vec() },
                });
            }
            CHUNK_MAGIC => {
                let (flags, kind, cookie, len) = (fields.u16(), fields.u16(), fields.u64(), fields.u32());
                let done = flags & chunk::DONE != 0;
                let mut payload = Fields(fields.bytes(len as usize));
                out.push(match kind {
                    chunk::NONE => Reply::Done { cookie },
                    chunk::OFFSET_DATA => {
                        let offset = payload.u64();
                        Reply::Data { cookie, done, offset, data: payload.0.to_vec() }
                    }
                    chunk::ERROR => {
                        let (error, text) = (payload.u32(), payload.u16());
                        let message = String::from_utf8(payload.bytes(text.into()).to_vec()).expect("UTF-8");
                        Reply::Error { cookie, error, message }
                    }
                    chunk::BLOCK_STATUS => {
                        assert_eq!(payload.u32(), 1, "the context's number");
                        let mut extents = Vec::new();
                        while !payload.0.is_empty() {
                            extents.push((payload.u32(), payload.u32()));
                        }
                        Reply::Extents { cookie, extents }
                    }
                    other => panic!("unknown chunk {other}"),
                });
            }
            other => panic!("no reply begins with {other:#x}"),
        }
    }
    out
}
