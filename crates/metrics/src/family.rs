//! A metric family, as a row of a table.
//!
//! Owns the shape of a row, and the lists of labels that several families have. Must not know which families there are, nor
//! their syntax.

use crate::Figures;
use crate::text::{Kind, Text};

/// Names of labels.
pub(crate) type LabelNames = &'static [&'static str];

/// Labels of a volume.
pub(crate) const VOLUME: LabelNames = &["set", "volume"];
/// Labels of a volume and of the outcome of its requests.
pub(crate) const OUTCOME: LabelNames = &["set", "volume", "op", "outcome", "reason"];
/// Labels of a volume and of a reason.
pub(crate) const REASON: LabelNames = &["set", "volume", "reason"];
/// Labels of a device.
pub(crate) const DEVICE: LabelNames = &["set", "device", "role"];
/// Labels of a device and of an operation.
pub(crate) const DEVICE_OP: LabelNames = &["set", "device", "role", "op"];
/// Labels of a set.
pub(crate) const SET: LabelNames = &["set"];

/// A family: its name, and the source of its samples.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The labels of its samples, besides the `le` of histograms. A sample leaves out labels with an empty value.
    pub(crate) labels: LabelNames,
    pub(crate) help: &'static str,
    pub(crate) samples: fn(&Figures, &mut Text),
}

pub(crate) const fn counter(
    name: &'static str,
    labels: LabelNames,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Counter, labels, help, samples }
}

pub(crate) const fn gauge(
    name: &'static str,
    labels: LabelNames,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Gauge, labels, help, samples }
}

pub(crate) const fn histogram(
    name: &'static str,
    labels: LabelNames,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Histogram, labels, help, samples }
}

/// A family as the guide describes it.
#[derive(Clone, Copy, Debug)]
pub struct FamilyInfo {
    /// Name of the family; a histogram has the series `_bucket`, `_sum` and `_count`.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The labels of its series, besides the `le` of histograms. A series leaves out labels with an empty value.
    pub labels: &'static [&'static str],
    /// The meaning, as one line.
    pub help: &'static str,
}
