//! The reasons for which a setting is refused.

use super::tunable::{Range, Unit};

/// The error for a refused setting. The kernel returns EINVAL in these cases.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TunableError {
    /// There is no such setting.
    #[error("unknown tunable {}{}", shown(name), similar(*nearest))]
    Unknown {
        /// The requested name.
        name: String,
        /// The name that is spelled nearly so.
        nearest: Option<&'static str>,
    },
    /// The value is a number out of the range.
    #[error("{name}: expected {range}{}, found {value}; {}", unit.suffix(), remedy(name))]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The unit of the setting.
        unit: Unit,
        /// The values that are accepted.
        range: Range,
    },
    /// The value is not a number.
    #[error("{name}: expected a decimal number{}, {range}{}, found {value:?}", hint(*unit), unit.suffix())]
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
    #[error("{name}: expected one of {range}, found {value:?}")]
    NotAChoice {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The values that are accepted.
        range: Range,
    },
    /// The value is too long or has a zero byte.
    #[error("{name}: expected {range}, without zero bytes, found {value:?}")]
    BadText {
        /// The setting.
        name: &'static str,
        /// The refused value.
        value: String,
        /// The values that are accepted.
        range: Range,
    },
}

/// The name, in a form that shows that it is empty.
fn shown(name: &str) -> String {
    if name.is_empty() { "\"\"".to_owned() } else { name.to_owned() }
}

/// The question after an unknown name.
pub(super) fn similar(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!("; did you mean {nearest}?"))
}

/// What to do about a number out of range. The range of some settings depends on others.
fn remedy(name: &str) -> &'static str {
    match name {
        "writeback_percent" => "the set's cutoff_writeback is the upper limit",
        "cutoff_writeback" => "cutoff_writeback_sync is an upper limit",
        "writeback_rate_fp_term_low" | "writeback_rate_fp_term_mid" | "writeback_rate_fp_term_high" => {
            "the factors low, mid and high have to ascend, so set the others first"
        }
        _ => "give a number in this range",
    }
}

fn hint(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => ", also with a unit such as 512KiB or 4MiB",
        Unit::Sectors => ", also with a unit such as 4MiB",
        Unit::BytesPerSecond | Unit::SectorsPerSecond => ", also with a unit such as 4MiB/s",
        Unit::Seconds => ", also with a unit such as 10s or 5min",
        Unit::Millis => ", also with a unit such as 500ms or 2s",
        Unit::Micros => ", also with a unit such as 500us or 2ms",
        Unit::None | Unit::Percent | Unit::Ios => "",
    }
}
