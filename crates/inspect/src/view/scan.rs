//! The state that all steps of the opening share: the device, the mode, and the findings so far.
//!
//! Owns the list of findings and assumptions. Must not know the steps.

use crate::finding::{Finding, Findings, Severity};
use crate::source::ReadAt;
use crate::view::Mode;

/// The end of the opening, with the finding that caused it.
#[derive(Debug)]
pub(crate) struct Stop(pub(crate) Box<Finding>);

/// The state while a set is opened.
pub(crate) struct Scan<'a> {
    pub(crate) source: &'a dyn ReadAt,
    mode: Mode,
    pub(crate) findings: Findings,
    pub(crate) assumptions: Vec<String>,
}

/// Maximum number of assumptions that are listed.
const MAX_ASSUMPTIONS: usize = 1000;

impl<'a> Scan<'a> {
    pub(crate) fn new(source: &'a dyn ReadAt, mode: Mode) -> Scan<'a> {
        Scan { source, mode, findings: Findings::default(), assumptions: Vec::new() }
    }

    /// Adds a finding. A fatal finding ends a strict opening.
    pub(crate) fn report(&mut self, finding: Finding) -> Result<(), Stop> {
        if finding.severity == Severity::Fatal && self.mode == Mode::Strict {
            return Err(self.give_up(finding));
        }
        self.findings.push(finding);
        Ok(())
    }

    /// Adds a finding that ends the opening in any mode.
    pub(crate) fn give_up(&mut self, finding: Finding) -> Stop {
        self.findings.push(finding.clone());
        Stop(Box::new(finding))
    }

    /// Records an assumption about a damaged structure.
    pub(crate) fn assume(&mut self, what: impl Into<String>) {
        if self.assumptions.len() < MAX_ASSUMPTIONS {
            self.assumptions.push(what.into());
        }
    }
}
