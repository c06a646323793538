//! A tunable as a figure: its value, its unit and what it can be.
//!
//! Owns the names of these figures. Must not know how a tunable is applied.

use engine::tunables::{Range, Stored, TunableInfo};
use serde::Serialize;

/// A tunable with its value.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct TunableFigure {
    /// Name: the kernel's, if the kernel has this tunable.
    pub key: &'static str,
    /// Value, in a form that a change accepts unchanged.
    pub value: String,
    /// Value as the kernel shows it: brackets around the choice, sizes with units.
    pub shown: String,
    /// The default, in the form of `value`.
    pub default: String,
    /// Unit; empty if there is none.
    pub unit: &'static str,
    /// Range, as text.
    pub range: String,
    /// The choices; `None` if the value is not one of several words.
    pub choices: Option<&'static [&'static str]>,
    /// Whether the value is stored in the superblock instead of the settings.
    pub in_superblock: bool,
    /// Whether the kernel has this tunable.
    pub in_kernel: bool,
    /// A description in one line.
    pub doc: &'static str,
}

impl From<TunableInfo> for TunableFigure {
    fn from(tunable: TunableInfo) -> TunableFigure {
        let choices = match tunable.range {
            Range::Choices(names) => Some(names),
            _ => None,
        };
        TunableFigure {
            key: tunable.name,
            value: tunable.raw,
            shown: tunable.value,
            default: tunable.default,
            unit: tunable.unit.name(),
            range: tunable.range.to_string(),
            choices,
            in_superblock: tunable.stored == Stored::Superblock,
            in_kernel: tunable.in_kernel,
            doc: tunable.doc,
        }
    }
}
