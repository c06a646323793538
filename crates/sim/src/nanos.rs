//! A time in a plan: a number of nanoseconds.
//!
//! Owns the two functions that serde calls for a field with `#[serde(with = "crate::nanos")]`. Must not know which types have
//! such fields.

use io::Nanos;
use serde::{Deserialize, Deserializer, Serializer};

/// Writes the number.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(time: &Nanos, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(time.0)
}

/// Reads the number.
///
/// # Errors
/// Those of the deserializer.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Nanos, D::Error> {
    u64::deserialize(deserializer).map(Nanos)
}
