//! The view of a real set, mounted, and compared with what a real kernel shows.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod exporter;
mod files;
mod kernel;
mod viewed_set;
