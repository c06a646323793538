//! Repair of a damaged cache set (decision 036).
//!
//! Owns the plan of a repair ([`plan`]), the undo file (`undo`), and the writing of both. A plan is made in memory: every change
//! goes into an overlay of its device, the next structure is examined through the overlays, and at the end crate `inspect` checks
//! the result. Nothing is written before the caller applies the plan. What cannot be rebuilt with certainty is refused, or is a step
//! that says what is uncertain. Must not know the engine or the command line.
//!
//! Invariant: no contents of a device make it panic or loop.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)
)]

mod backing_super;
mod bits;
mod cache_super;
mod evidence;
mod fields;
mod guard;
mod journal;
mod nodes;
mod overlay;
mod plan;
mod prio;
mod reason;
mod roots;
mod salvage;
mod undo;
mod uuids;
mod work;

pub use guard::Guard;
pub use overlay::{Change, Overlay};
pub use plan::{Plan, Report, plan};
pub use salvage::{
    MapLine, Part, Reason, Salvage, SalvageError, SalvageOptions, SalvageTarget, Salvaged, State,
};
pub use undo::{IfUsed, Undo, UndoError, UndoneDevice};
pub use work::Step;
