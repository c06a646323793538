//! `--export ublk`.

/// Why it cannot be had.
pub(super) const UNAVAILABLE: &str =
    "this build has no ublk export: use --export nbd=SOCKET, and nbd-client where a block device is needed";
