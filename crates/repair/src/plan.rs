//! The plan of a repair: what is mended, in which order, and what the check says before and after.
//!
//! Owns the order of the structures, the steps and the report. One file per structure finds and rebuilds it.

use std::fmt;

use format::{Uuid, counted};
use inspect::{CheckOptions, DamagedDirtyData, ReadAt, SetReport, check_set};
use serde::Serialize;

use crate::overlay::Overlay;
use crate::work::{Step, Work};
use crate::{backing_super, cache_super, journal, nodes, prio, roots, uuids};

/// What a plan does, for the operator.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Damage that is not mended, with the reason.
    pub refused: Vec<String>,
    /// Number of errors that `check` finds before the repair.
    pub errors_before: u64,
    /// Number of errors that `check` finds after it.
    pub errors_after: u64,
    /// The errors that remain.
    pub remaining: Vec<String>,
    /// Damaged dirty data, which a repair does not mend; empty if the caller has not looked for it.
    pub damaged_data: Vec<DamagedDirtyData>,
}

/// A repair that was not carried out yet.
pub struct Plan<'a> {
    pub(crate) work: Work<'a>,
    before: SetReport,
    pub(crate) after: SetReport,
}

/// Examines a set and plans its repair. Reads only.
///
/// `fresh` becomes the UUID of the cache device if its own is lost; it has no meaning but to differ from all others.
pub fn plan<'a>(cache: &'a dyn ReadAt, backings: &[&'a dyn ReadAt], fresh: Uuid) -> Plan<'a> {
    let before = check_set(cache, backings, CheckOptions::METADATA);
    let mut work = Work {
        cache: Overlay::new(cache),
        backings: backings.iter().map(|b| Overlay::new(*b)).collect(),
        steps: Vec::new(),
        refused: Vec::new(),
        doubts: Vec::new(),
    };
    backing_super::correct(&mut work);
    cache_super::mend(&mut work, fresh);
    journal::mend(&mut work);
    nodes::correct(&mut work);
    roots::rebuild(&mut work);
    nodes::refuse(&mut work);
    prio::mend(&mut work);
    uuids::mend(&mut work);
    backing_super::rebuild(&mut work);
    let after = check(&work);
    Plan { work, before, after }
}

fn check(work: &Work<'_>) -> SetReport {
    let backings: Vec<&dyn ReadAt> = work.backings.iter().map(|b| b as &dyn ReadAt).collect();
    check_set(&work.cache, &backings, CheckOptions::METADATA)
}

impl Plan<'_> {
    /// The cache device, with the changes.
    pub fn cache(&self) -> &Overlay<'_> {
        &self.work.cache
    }

    /// The backing devices, with the changes.
    pub fn backings(&self) -> &[Overlay<'_>] {
        &self.work.backings
    }

    /// Whether `check` finds no error after the repair and nothing was refused.
    pub fn is_complete(&self) -> bool {
        self.after.is_ok() && self.work.refused.is_empty()
    }

    /// Whether the plan changes anything.
    pub fn is_empty(&self) -> bool {
        !self.work.cache.is_changed() && self.work.backings.iter().all(|b| !b.is_changed())
    }

    /// What the plan does.
    pub fn report(&self) -> Report {
        Report {
            schema_version: 1,
            steps: self.work.steps.clone(),
            refused: self.work.refused.clone(),
            errors_before: self.before.errors,
            errors_after: self.after.errors,
            remaining: self
                .after
                .findings
                .iter()
                .filter(|f| f.severity > inspect::Severity::Notice)
                .map(ToString::to_string)
                .collect(),
            damaged_data: Vec::new(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{}: {}: {}", step.device, step.structure, step.action)?;
            for what in &step.uncertain {
                writeln!(f, "  uncertain: {what}")?;
            }
        }
        for what in &self.refused {
            writeln!(f, "not mended: {what}")?;
        }
        for finding in &self.remaining {
            writeln!(f, "remains: {finding}")?;
        }
        let Report { errors_before, errors_after, .. } = self;
        match (errors_before, self.steps.len(), self.damaged_data.is_empty()) {
            (0, 0, true) => writeln!(f, "nothing to mend")?,
            (0, 0, false) => writeln!(f, "no structure is damaged")?,
            _ => writeln!(
                f,
                "in the structures check finds {} before the repair and {errors_after} after it",
                counted(errors_before, "error")
            )?,
        }
        self.damaged_data.iter().try_for_each(|data| write_damaged(f, data))
    }
}

/// Number of damaged ranges in the text of a report.
const SHOWN: usize = 5;

/// The damaged dirty data of one device or volume.
fn write_damaged(f: &mut fmt::Formatter<'_>, data: &DamagedDirtyData) -> fmt::Result {
    let name = if data.label.is_empty() { data.uuid.clone() } else { format!("{:?}", data.label) };
    writeln!(
        f,
        "not mended: {} of dirty data of {name}, which no other device has:",
        counted(data.blocks, "damaged block")
    )?;
    for range in data.ranges.iter().take(SHOWN) {
        writeln!(f, "  {range}")?;
    }
    match data.ranges.len().checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(more) => writeln!(f, "  and {}, which `ubcache check` lists", counted(more, "more range")),
    }
}
