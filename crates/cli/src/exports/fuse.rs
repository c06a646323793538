//! `--export fuse=DIR`.

/// Why it cannot be had.
pub(super) const UNAVAILABLE: &str =
    "this build has no FUSE export: use --export nbd=SOCKET, and nbd-client where a block device is needed";
