//! A metric family, as a row of a table.
//!
//! Owns the shape of a row. Must not know which families there are, nor their syntax.

use crate::Figures;
use crate::text::{Kind, Text};

/// A family: its name, and the source of its samples.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) help: &'static str,
    pub(crate) samples: fn(&Figures, &mut Text),
}

pub(crate) const fn counter(
    name: &'static str,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Counter, help, samples }
}

pub(crate) const fn gauge(
    name: &'static str,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Gauge, help, samples }
}

pub(crate) const fn histogram(
    name: &'static str,
    help: &'static str,
    samples: fn(&Figures, &mut Text),
) -> Family {
    Family { name, kind: Kind::Histogram, help, samples }
}
