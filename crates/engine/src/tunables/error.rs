//! Why a setting was not taken over.

use super::knob::{Range, Unit};

/// A setting that was refused. All of these are the kernel's EINVAL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TunableError {
    /// There is no such setting.
    #[error("{name}: no such tunable")]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// Not a number.
    #[error("{name}={value}: not a decimal number{}; {range}{}", hint(*unit), unit.suffix())]
    NotANumber {
        /// The setting.
        name: &'static str,
        /// The value refused.
        value: String,
        /// What it is counted in.
        unit: Unit,
        /// What would be taken over.
        range: Range,
    },
    /// Not one of the choices.
    #[error("{name}={value}: not one of the choices; {range}")]
    NotAChoice {
        /// The setting.
        name: &'static str,
        /// The value refused.
        value: String,
        /// What would be taken over.
        range: Range,
    },
    /// Too long, or not storable as text.
    #[error("{name}={value:?}: {range}, without zero bytes")]
    BadText {
        /// The setting.
        name: &'static str,
        /// The value refused.
        value: String,
        /// What would be taken over.
        range: Range,
    },
}

fn hint(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => " with an optional suffix k, M, G or T",
        _ => "",
    }
}
