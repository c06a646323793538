//! The figures of the engine as metrics and as explanations.
//!
//! Two readers of the same plain figures: [`render`] makes text that Prometheus and others scrape, [`explain`] makes
//! sentences about one volume. Everything here is a pure function of the figures. Must not know their source, nor how
//! the text is sent.
#![forbid(unsafe_code)]

mod explain;
mod families;
mod text;

pub use explain::{Explanation, explain};
pub use families::{names, render};
pub use text::Format;

use std::collections::BTreeSet;

use engine::figures::{SetFigures, VolumeFigures};

/// What there is to tell about: all sets of a process, and backing devices that are served without one.
#[derive(Clone, Default, Debug)]
pub struct Figures {
    /// Sets with their volumes.
    pub sets: Vec<SetFigures>,
    /// Volumes without a set.
    pub alone: Vec<VolumeFigures>,
    /// Names of volumes that clients cannot reach as the configuration says.
    pub not_exported: BTreeSet<String>,
}

impl Figures {
    /// Every volume, with the UUID of its set, which is empty where there is none.
    pub fn volumes(&self) -> impl Iterator<Item = (String, &VolumeFigures)> {
        let of_sets = self.sets.iter().flat_map(|s| {
            let uuid = s.status.set_uuid.to_string();
            s.volumes.iter().map(move |v| (uuid.clone(), v))
        });
        of_sets.chain(self.alone.iter().map(|v| (String::new(), v)))
    }
}
