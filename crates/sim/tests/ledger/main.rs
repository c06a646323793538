//! The ledger: what requests cost, request by request. Each scenario has a page that lists what it did to the devices, when,
//! and what the figures say at its end; the pages lie beside the scenarios.
//!
//! The simulator checks data; it does not detect an unnecessary request, a delay, or a wrong figure. The ledger does. A page
//! that changes with the engine is written again with `UBCACHE_LEDGER=write`, and the difference is reviewed like code.
#![allow(clippy::unwrap_used)]

mod devices;
mod index;
mod mixed;
mod page;
mod requests;
mod space;
mod troubles;
mod writeback;
