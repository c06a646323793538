//! `--export ublk`.

/// Why it cannot be had.
pub(super) const UNAVAILABLE: &str = "this build has no ublk export: use --export fuse=DIR for a block device (as root), or --export nbd=SOCKET";
