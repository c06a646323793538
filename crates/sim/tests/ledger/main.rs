//! The ledger: what requests cost, request by request. Each story has a page that lists what it did to the devices, when,
//! and what the figures say at its end; the pages are kept beside the stories and read like them.
//!
//! The simulator says whether data is right; that says nothing of a request too many, of a delay, or of a figure that is
//! wrong. The ledger does. A page that changes with the engine is written anew with `UBCACHE_LEDGER=write`, and the
//! difference is looked at like code.
#![allow(clippy::unwrap_used)]

mod devices;
mod index;
mod mixed;
mod page;
mod requests;
mod space;
mod troubles;
mod writeback;
