//! Reading the metadata of a cache device.
//!
//! Owns nothing: a [`Reader`] names the device and what its structures are checked against.

use format::{Geometry, SetMagic};
use io::Disk;

use crate::error::Place;

/// A cache device whose metadata is read: journal, priorities or btree nodes.
pub(crate) struct Reader<'a> {
    pub(crate) disk: &'a Disk,
    /// The name of the device and the UUID of its set, for error messages.
    pub(crate) place: &'a Place,
    pub(crate) geometry: &'a Geometry,
    pub(crate) magic: SetMagic,
}
