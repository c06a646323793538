//! The tunables of a running cache.
//!
//! Owns every setting that can be read and written while the engine runs. Names, units, defaults and ranges are the
//! kernel's where the kernel has the setting (semantics section 16). [`DeviceTunables`] and [`SetTunables`] are plain
//! structs for the engine; for operators and control files, each has a table of tunables that read and write the same
//! fields as text.
//!
//! Text is parsed as in the kernel: numbers are plain decimal, and `set` clamps numbers out of range. A number can also have
//! a unit of its kind, as the program prints it (`4MiB`, `10s`). A value that is not a number, and a name that is not a choice,
//! is refused. `check` refuses numbers out of range, too: callers use it for what an operator types, and the sysfs view does
//! not.
//!
//! Attributes that only show a value, and those that start an action (attach, detach, stop, running, clear_stats ...),
//! are not settings and not in this module.
//!
//! *Invariants:* every field is in its range, also where fields limit each other, in whatever order they were set.
//! *Must not know:* the effect of a setting, and the place where it is stored.

mod device;
mod error;
mod parse;
mod set;
mod tunable;

pub use crate::policy::choices::{
    Admission, Bridge, Controller, OnError, Overwrite, ReadaheadPolicy, StopWhenFailed,
};
pub use crate::policy::replacement::InPlaceOfLru;
pub use device::DeviceTunables;
pub use error::TunableError;
pub use parse::bytes as parse_bytes;
pub use set::SetTunables;
pub use tunable::{Range, Stored, TunableInfo, Unit, nearest};

/// The number that a text stands for, in the unit of the setting `name`; `None` if the text is no number, or there is no such
/// setting.
pub fn number(name: &str, text: &str) -> Option<u64> {
    device::number(name, text).or_else(|| set::number(name, text))
}

#[cfg(test)]
mod tests;
