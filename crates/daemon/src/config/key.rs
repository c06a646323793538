//! The key of a set or volume, by which a section of the configuration names it.

use serve::plain;

/// The set or volume that a section configures.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    /// UUID of the set or of the backing device; `SET/SLOT` for a flash-only volume.
    pub(crate) id: String,
    /// Label of the device, or empty.
    pub(crate) label: String,
    /// Whether it is a set; else it is a volume.
    pub(crate) set: bool,
}

impl Key {
    /// The label by which a section can name the volume; `None` if the label looks like the name of a volume.
    pub(crate) fn section_label(&self) -> Option<String> {
        let label = self.label.to_lowercase();
        (!label.is_empty() && !plain::is_volume_name(&label)).then_some(label)
    }
}
