//! The server's half of the transmission phase: headers of replies.
//!
//! Owns the encoding of headers, into arrays on the stack, because this code runs for every request. A data header is sent
//! before the data, which is not copied. Must not know where the bytes go.

use io::RangeStatus;

use super::errno::Errno;
use super::wire::{
    ALLOCATION_CONTEXT_ID, CHUNK_HEADER_BYTES, CHUNK_MAGIC, DATA_HEADER_BYTES, SIMPLE_REPLY_BYTES,
    SIMPLE_REPLY_MAGIC, chunk, state,
};

/// Longest text of an error that is sent to a client.
pub const MAX_MESSAGE_BYTES: usize = 512;

/// Longest chunk of [`error_chunk`].
pub const MAX_ERROR_CHUNK_BYTES: usize = CHUNK_HEADER_BYTES + 6 + MAX_MESSAGE_BYTES;

/// Maximum number of extents in a reply to a status query. A client asks again for the rest.
pub const MAX_EXTENTS: usize = 8192;

/// A simple reply, without chunks; `error` is `None` for success. The data of a successful read follow the reply.
pub fn simple_reply(cookie: u64, error: Option<Errno>) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut reply = [0; SIMPLE_REPLY_BYTES];
    let code = error.map_or(0, Errno::code);
    let (fields, _) = reply.as_chunks_mut::<4>();
    let [cookie_high, cookie_low] = halves(cookie);
    for (to, from) in fields.iter_mut().zip([SIMPLE_REPLY_MAGIC, code, cookie_high, cookie_low]) {
        *to = from.to_be_bytes();
    }
    reply
}

/// Header of a chunk that is followed by `payload_bytes` of payload.
pub fn chunk_header(cookie: u64, kind: u16, done: bool, payload_bytes: u32) -> [u8; CHUNK_HEADER_BYTES] {
    let mut header = [0; CHUNK_HEADER_BYTES];
    let flags = if done { chunk::DONE } else { 0 };
    let flags_and_kind = (u32::from(flags) << 16) | u32::from(kind);
    let (fields, _) = header.as_chunks_mut::<4>();
    let [cookie_high, cookie_low] = halves(cookie);
    let values = [CHUNK_MAGIC, flags_and_kind, cookie_high, cookie_low, payload_bytes];
    for (to, from) in fields.iter_mut().zip(values) {
        *to = from.to_be_bytes();
    }
    header
}

/// Header of a chunk of read data. `data_bytes`, which lie at `offset` of the export, follow it.
pub fn data_header(cookie: u64, offset: u64, data_bytes: u32, done: bool) -> [u8; DATA_HEADER_BYTES] {
    // A read has 32 MiB at most, so the sum does not overflow.
    let header = chunk_header(cookie, chunk::OFFSET_DATA, done, data_bytes.saturating_add(8));
    let mut whole = [0; DATA_HEADER_BYTES];
    let (head, tail) = whole.split_at_mut(CHUNK_HEADER_BYTES);
    head.copy_from_slice(&header);
    tail.copy_from_slice(&offset.to_be_bytes());
    whole
}

/// The chunk that ends a reply and has no payload.
pub fn done_chunk(cookie: u64) -> [u8; CHUNK_HEADER_BYTES] {
    chunk_header(cookie, chunk::NONE, true, 0)
}

/// Appends the chunk that ends a reply with an error to `out`. The message is cut to [`MAX_MESSAGE_BYTES`].
pub fn error_chunk(cookie: u64, errno: Errno, message: &str, out: &mut Vec<u8>) {
    let longest = message.len().min(MAX_MESSAGE_BYTES);
    // `get` returns `None` for a cut within a character.
    let text = (0..=longest).rev().find_map(|cut| message.get(..cut)).unwrap_or_default();
    // The text has MAX_MESSAGE_BYTES at most.
    let len = text.len() as u16;
    out.extend(chunk_header(cookie, chunk::ERROR, true, u32::from(len).saturating_add(6)));
    out.extend(errno.code().to_be_bytes());
    out.extend(len.to_be_bytes());
    out.extend(text.as_bytes());
}

/// Appends the whole reply to a status query over `range_bytes` to `out`.
///
/// `runs` come from a volume and are not trusted. They are merged, and cut to the range and to [`MAX_EXTENTS`] (or to one).
/// If no run is left, the whole range is reported as allocated data, which is never wrong.
pub fn block_status_chunk(cookie: u64, range_bytes: u32, runs: &[RangeStatus], one: bool, out: &mut Vec<u8>) {
    let limit = if one { 1 } else { MAX_EXTENTS };
    let mut extents: Vec<(u32, u32)> = Vec::new();
    let mut left = range_bytes;
    for run in runs {
        let bytes = u32::try_from(run.sectors.0.saturating_mul(format::SECTOR_BYTES)).unwrap_or(u32::MAX);
        let bytes = bytes.min(left);
        if bytes == 0 {
            continue;
        }
        let hole = if run.hole { state::HOLE } else { 0 };
        let zero = if run.zero { state::ZERO } else { 0 };
        let full = extents.len() == limit;
        match extents.last_mut() {
            Some((len, flags)) if *flags == hole | zero => *len = len.saturating_add(bytes),
            _ if full => break,
            _ => extents.push((bytes, hole | zero)),
        }
        left = left.saturating_sub(bytes);
    }
    if extents.is_empty() {
        extents.push((range_bytes, 0));
    }
    // There are MAX_EXTENTS at most, so the product does not overflow.
    let payload_bytes = (extents.len() as u32).saturating_mul(8).saturating_add(4);
    out.extend(chunk_header(cookie, chunk::BLOCK_STATUS, true, payload_bytes));
    out.extend(ALLOCATION_CONTEXT_ID.to_be_bytes());
    for (len, flags) in extents {
        out.extend(len.to_be_bytes());
        out.extend(flags.to_be_bytes());
    }
}

fn halves(cookie: u64) -> [u32; 2] {
    [(cookie >> 32) as u32, cookie as u32]
}

#[cfg(test)]
mod tests {
    use format::Sectors;

    use super::*;

    fn run(sectors: u64, hole: bool, zero: bool) -> RangeStatus {
        RangeStatus { sectors: Sectors(sectors), hole, zero }
    }

    fn extents(range_bytes: u32, runs: &[RangeStatus], one: bool) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        block_status_chunk(7, range_bytes, runs, one, &mut out);
        let (header, rest) = out.split_at(24);
        assert_eq!(header[4..8], [0, 1, 0, 5], "done, block status");
        assert_eq!(header[16..20], (rest.len() as u32 + 4).to_be_bytes());
        assert_eq!(header[20..24], ALLOCATION_CONTEXT_ID.to_be_bytes());
        let word = |b: &[u8]| u32::from_be_bytes(b.try_into().expect("four bytes"));
        rest.chunks_exact(8).map(|e| (word(&e[..4]), word(&e[4..]))).collect()
    }

    #[test]
    fn simple_replies_lie_on_the_wire_as_the_protocol_says() {
        let reply = simple_reply(0x0102_0304_0506_0708, Some(Errno::Inval));
        assert_eq!(reply, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(simple_reply(1, None)[4..8], [0; 4]);
    }

    #[test]
    fn data_headers_lie_on_the_wire_as_the_protocol_says() {
        let header = data_header(9, 0x1000, 512, true);
        let expected = [
            0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0,
        ];
        assert_eq!(header, expected);
        assert_eq!(data_header(9, 0, 512, false)[4..6], [0, 0]);
        assert_eq!(done_chunk(1)[4..8], [0, 1, 0, 0]);
    }

    #[test]
    fn a_message_is_cut_at_a_character() {
        let mut out = Vec::new();
        error_chunk(1, Errno::Io, &"é".repeat(400), &mut out);
        assert_eq!(out.len(), MAX_ERROR_CHUNK_BYTES);
        assert_eq!(out[6..8], [0x80, 1]);
        assert!(std::str::from_utf8(&out[26..]).is_ok());

        out.clear();
        error_chunk(1, Errno::Io, &format!("x{}", "é".repeat(400)), &mut out);
        assert_eq!(out.len(), MAX_ERROR_CHUNK_BYTES - 1);
        assert!(std::str::from_utf8(&out[26..]).is_ok());
    }

    #[test]
    fn runs_are_merged_and_cut() {
        let runs = [run(1, false, false), run(0, true, true), run(1, false, false), run(100, true, true)];
        assert_eq!(extents(4096, &runs, false), [(1024, 0), (3072, 3)]);
        assert_eq!(extents(4096, &runs, true), [(1024, 0)]);
        assert_eq!(extents(512, &runs, false), [(512, 0)]);
        assert_eq!(extents(u32::MAX - 511, &[run(u64::MAX, false, true)], false), [(u32::MAX - 511, 2)]);
    }

    #[test]
    fn a_volume_that_says_nothing_means_data() {
        assert_eq!(extents(4096, &[], false), [(4096, 0)]);
        assert_eq!(extents(4096, &[run(0, true, true)], true), [(4096, 0)]);
    }

    #[test]
    fn extents_are_bounded() {
        let runs: Vec<RangeStatus> = (0..20_000).map(|i| run(1, i % 2 == 0, false)).collect();
        assert_eq!(extents(20_000 * 512, &runs, false).len(), MAX_EXTENTS);
    }
}
