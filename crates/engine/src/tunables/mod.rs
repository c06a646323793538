//! The knobs of a running cache.
//!
//! Owns every setting that can be read and written while the engine runs: names, units, defaults and
//! ranges are the kernel's where the kernel has the knob (semantics section 16).
//! [`DeviceTunables`] and [`SetTunables`] are plain structs for the engine; for people and control
//! files each has a table of knobs that reads and writes the same fields as text.
//!
//! Text is read as the kernel reads it: plain decimal, and what is out of range is clamped to it. Where
//! the unit is bytes, the suffixes k, M, G and T are understood in addition. Values that are no number
//! at all, and names that are no choice, are refused.
//!
//! Attributes that only show something, and those that act (attach, detach, stop, running,
//! clear_stats ...), are not settings and not here.
//!
//! *Invariants:* every field is in its range, and so are the fields that limit each other, whatever was
//! set in which order. *Must not know:* what a setting does, and where it is stored.

mod device;
mod error;
mod knob;
mod parse;
mod set;

pub use crate::policy::choices::{
    Admission, Bridge, Controller, OnError, Overwrite, ReadaheadPolicy, StopWhenFailed,
};
pub use crate::policy::replacement::InPlaceOfLru;
pub use device::DeviceTunables;
pub use error::TunableError;
pub use knob::{KnobInfo, Range, Stored, Unit};
pub use set::SetTunables;

#[cfg(test)]
mod tests;
