//! The description of an export for a client, and the list of exports for the handshake.

use super::wire::transmission_flag as flag;

/// Smallest unit of a request: a sector. Requests that are not sector-aligned are refused.
pub const MIN_BLOCK_BYTES: u32 = 512;

/// Largest payload of a request; what the protocol's document recommends as a limit.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// Smallest preferred size that we announce: file systems and page caches work in such units.
const MIN_PREFERRED_BYTES: u32 = 4096;

/// An export as a client sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// The name under which the server knows it.
    pub name: String,
    /// A line for people.
    pub description: String,
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Preferred size of requests: a power of two between 4096 and [`MAX_PAYLOAD_BYTES`].
    pub preferred_block_bytes: u32,
}

impl ExportInfo {
    /// The size of requests to announce for a volume that likes `optimal_io_bytes` and
    /// `logical_block_bytes`. Clients reject what is no power of two, so a stripe of three disks is
    /// rounded down.
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
            // A volume has one cache for all connections, so that a flush covers them all.
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

/// The exports of a server, as the handshake sees them. May change between two calls.
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
