//! The description of an export for a client, and the list of exports for the handshake.
//!
//! Owns the limits of requests that the server announces. Must not know how exports are served.

use super::wire::transmission_flag as flag;

/// Smallest unit of a request: a sector. The server refuses requests that are not sector-aligned.
pub const MIN_BLOCK_BYTES: u32 = 512;

/// Largest payload of a request, as the protocol's document recommends.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// Smallest preferred size that the server announces. File systems and page caches use this unit.
const MIN_PREFERRED_BYTES: u32 = 4096;

/// An export as a client sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// Name of the export on the server.
    pub name: String,
    /// Description for operators, one line.
    pub description: String,
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Preferred size of requests: a power of two between 4096 and [`MAX_PAYLOAD_BYTES`].
    pub preferred_block_bytes: u32,
}

impl ExportInfo {
    /// The preferred size of requests for a volume with `optimal_io_bytes` and `logical_block_bytes`.
    ///
    /// Clients reject a size that is not a power of two, so a stripe of three disks is rounded down.
    pub fn preferred_block_bytes(optimal_io_bytes: u32, logical_block_bytes: u32) -> u32 {
        let wish = optimal_io_bytes.max(logical_block_bytes);
        let power = wish.checked_ilog2().map_or(0, |log| 1u32 << log);
        power.clamp(MIN_PREFERRED_BYTES, MAX_PAYLOAD_BYTES)
    }

    /// The transmission flags of the export for a client that did or did not agree on structured replies.
    pub fn transmission_flags(&self, structured: bool) -> u16 {
        let mut flags = flag::HAS_FLAGS
            | flag::SEND_FLUSH
            | flag::SEND_FUA
            | flag::SEND_TRIM
            | flag::SEND_WRITE_ZEROES
            // All connections use the same cache of the volume, so a flush covers their writes.
            | flag::CAN_MULTI_CONN
            | flag::SEND_CACHE;
        if self.read_only {
            flags |= flag::READ_ONLY;
        }
        if structured {
            flags |= flag::SEND_DF;
        }
        flags
    }
}

/// The exports of a server, for the handshake. They may change between two calls.
pub trait Catalogue {
    /// All names, in the order in which they are listed.
    fn list(&self) -> Vec<ExportInfo>;

    /// The export called `name`. The empty name is the default export, if there is one.
    fn find(&self, name: &[u8]) -> Option<ExportInfo>;

    /// Whether the server accepts no new clients.
    fn shutting_down(&self) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preferred_size_is_a_power_of_two_in_bounds() {
        let preferred = ExportInfo::preferred_block_bytes;
        assert_eq!(preferred(0, 512), 4096);
        assert_eq!(preferred(0, 4096), 4096);
        assert_eq!(preferred(192 << 10, 512), 128 << 10);
        assert_eq!(preferred(1 << 20, 4096), 1 << 20);
        assert_eq!(preferred(u32::MAX, 512), MAX_PAYLOAD_BYTES);
    }
}
