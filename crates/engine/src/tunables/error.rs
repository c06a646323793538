//! The reasons for which a setting is refused.

use super::tunable::{Range, Unit};

/// The error for a refused setting. The kernel returns EINVAL in these cases.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TunableError {
    /// There is no such setting.
    #[error("{name}: no such tunable")]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The value is not a number.
    #[error("{name}={value}: not a decimal number{}; {range}{}", hint(*unit), unit.suffix())]
    NotANumber {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The unit of the setting.
        unit: Unit,
        /// The values that are accepted.
        range: Range,
    },
    /// The value is not one of the choices.
    #[error("{name}={value}: not one of the choices; {range}")]
    NotAChoice {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The values that are accepted.
        range: Range,
    },
    /// The value is too long or has a zero byte.
    #[error("{name}={value:?}: {range}, without zero bytes")]
    BadText {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The values that are accepted.
        range: Range,
    },
}

fn hint(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => " with an optional suffix k, M, G or T",
        _ => "",
    }
}
