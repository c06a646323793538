//! The plan of a repair: what is mended, in which order, and what the check says before and after.
//!
//! Owns the order of the structures, the steps and the report. One file per structure finds and rebuilds it.

use std::fmt;

use format::{CacheSuper, Uuid};
use inspect::{CheckOptions, DeviceSuper, Mode, ReadAt, SetReport, SetView, check_set, read_superblock};
use serde::Serialize;

use crate::overlay::Overlay;
use crate::{backing_super, cache_super, journal, nodes, prio, roots, uuids};

/// A structure that a plan mends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Step {
    /// The structure.
    pub structure: &'static str,
    /// Name of the device.
    pub device: String,
    /// What is done, and from which knowledge.
    pub action: String,
    /// What may be wrong or lost afterwards; empty if the structure is certainly what it was.
    pub uncertain: Vec<String>,
}

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
}

/// A repair that was not carried out yet.
pub struct Plan<'a> {
    /// The cache device, with the changes.
    pub cache: Overlay<'a>,
    /// The backing devices, with the changes.
    pub backings: Vec<Overlay<'a>>,
    pub(crate) steps: Vec<Step>,
    pub(crate) refused: Vec<String>,
    before: SetReport,
    after: SetReport,
}

/// Examines a set and plans its repair. Reads only.
///
/// `fresh` becomes the UUID of the cache device if its own is lost; it has no meaning but to differ from all others.
pub fn plan<'a>(cache: &'a dyn ReadAt, backings: &[&'a dyn ReadAt], fresh: Uuid) -> Plan<'a> {
    let before = check_set(cache, backings, CheckOptions::METADATA);
    let mut plan = Plan {
        cache: Overlay::new(cache),
        backings: backings.iter().map(|b| Overlay::new(*b)).collect(),
        steps: Vec::new(),
        refused: Vec::new(),
        after: before.clone(),
        before,
    };
    backing_super::correct(&mut plan);
    cache_super::mend(&mut plan, fresh);
    journal::mend(&mut plan);
    nodes::correct(&mut plan);
    roots::rebuild(&mut plan);
    nodes::refuse(&mut plan);
    prio::mend(&mut plan);
    uuids::mend(&mut plan);
    backing_super::rebuild(&mut plan);
    plan.after = plan.check();
    plan
}

impl Plan<'_> {
    fn check(&self) -> SetReport {
        let backings: Vec<&dyn ReadAt> = self.backings.iter().map(|b| b as &dyn ReadAt).collect();
        check_set(&self.cache, &backings, CheckOptions::METADATA)
    }

    /// The checked superblock of the cache device, with the changes so far.
    pub(crate) fn superblock(&self) -> Option<CacheSuper> {
        match read_superblock(&self.cache) {
            Ok(DeviceSuper::Cache(superblock)) => Some(superblock),
            _ => None,
        }
    }

    /// The set with the changes so far, as far as it can be read.
    pub(crate) fn view(&self) -> Option<SetView> {
        SetView::open(&self.cache, Mode::BestEffort).ok()
    }

    pub(crate) fn step(
        &mut self,
        structure: &'static str,
        device: String,
        action: String,
        uncertain: Vec<String>,
    ) {
        self.steps.push(Step { structure, device, action, uncertain });
    }

    pub(crate) fn refuse(&mut self, what: String) {
        self.refused.push(what);
    }

    /// Whether `check` finds no error after the repair and nothing was refused.
    pub fn is_complete(&self) -> bool {
        self.after.is_ok() && self.refused.is_empty()
    }

    /// Whether the plan changes anything.
    pub fn is_empty(&self) -> bool {
        !self.cache.is_changed() && self.backings.iter().all(|b| !b.is_changed())
    }

    /// What the plan does.
    pub fn report(&self) -> Report {
        Report {
            schema_version: 1,
            steps: self.steps.clone(),
            refused: self.refused.clone(),
            errors_before: self.before.errors,
            errors_after: self.after.errors,
            remaining: self
                .after
                .findings
                .iter()
                .filter(|f| f.severity > inspect::Severity::Notice)
                .map(ToString::to_string)
                .collect(),
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
        match (errors_before, self.steps.len()) {
            (0, 0) => writeln!(f, "nothing to mend"),
            _ => writeln!(
                f,
                "check finds {errors_before} errors before the repair and {errors_after} after it"
            ),
        }
    }
}
