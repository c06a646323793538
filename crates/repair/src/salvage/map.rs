//! The map of a salvage and its summary.
//!
//! Owns the documents that a salvage prints. Must not know how a state is found.

use std::fmt;
use std::rc::Rc;

use format::{counted, form};
use inspect::Extracted;
use serde::Serialize;

use crate::work::Step;

/// Whether the bytes of a range are those of the last write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// No damaged and no guessed structure could have decided about them.
    Certain,
    /// They may be other bytes than the last ones that were written.
    Uncertain,
    /// The data existed, and cannot be read or is damaged.
    Lost,
}

impl State {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            State::Certain => "certain",
            State::Uncertain => "uncertain",
            State::Lost => "lost",
        }
    }
}

/// A line of the map.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MapLine {
    /// First sector on the volume.
    pub start_sector: u64,
    /// Length.
    pub sectors: u64,
    /// Whether the bytes are those of the last write.
    pub state: State,
    /// The place of the data: `cache dirty`, `cache clean`, `backing`, or `nowhere` for a part of a volume that was never written.
    pub from: &'static str,
    /// Why the range is not certain.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "text")]
    pub why: Option<Rc<str>>,
}

fn text<S: serde::Serializer>(why: &Option<Rc<str>>, s: S) -> Result<S::Ok, S::Error> {
    why.as_deref().serialize(s)
}

/// The ranges of one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Part {
    /// Their sectors.
    pub sectors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their number in the map.
    pub ranges: u64,
}

impl Part {
    pub(super) fn add(&mut self, sectors: u64) {
        self.sectors += sectors;
        self.bytes = self.sectors.saturating_mul(512);
        self.ranges += 1;
    }
}

/// A reason, and how much is not certain because of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Reason {
    /// The state of the ranges.
    pub state: State,
    /// The reason.
    pub why: String,
    /// The ranges.
    #[serde(flatten)]
    pub part: Part,
}

/// The result of a salvage.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Salvaged {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Size of the volume.
    pub sectors: u64,
    /// What is certain.
    pub certain: Part,
    /// What is uncertain.
    pub uncertain: Part,
    /// What is lost.
    pub lost: Part,
    /// What would be certain if the newest journal entry that was found is the last one that was written.
    pub uncertain_by_journal_end: Part,
    /// The newest journal entry that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal_entry: Option<u64>,
    /// Whether the backing device has every write that was acknowledged, as its state says.
    pub backing_is_clean: bool,
    /// The reasons, up to a limit.
    pub reasons: Vec<Reason>,
    /// Number of ranges with a reason that is not listed.
    pub more_reasons: u64,
    /// What was rebuilt in memory for it.
    pub steps: Vec<Step>,
    /// What could not be rebuilt.
    pub refused: Vec<String>,
    /// Assumptions and omissions of the extraction.
    pub notes: Vec<String>,
    /// Why the contents may be older than the last writes.
    pub warnings: Vec<String>,
    /// The figures of the extraction.
    pub extracted: Extracted,
}

impl Salvaged {
    /// Whether every sector is certain.
    pub fn is_certain(&self) -> bool {
        self.uncertain.sectors + self.lost.sectors == 0
    }
}

impl fmt::Display for Salvaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{}: {}: {} (in memory)", step.device, step.structure, step.action)?;
        }
        for what in &self.refused {
            writeln!(f, "not rebuilt: {what}")?;
        }
        for (state, part) in
            [(State::Certain, self.certain), (State::Uncertain, self.uncertain), (State::Lost, self.lost)]
        {
            let bytes = part.bytes;
            writeln!(f, "{:<10} {bytes} bytes in {}", state.name(), counted(part.ranges, "range"))?;
        }
        for Reason { state, why, part } in &self.reasons {
            writeln!(
                f,
                "  {}: {} bytes in {}: {why}",
                state.name(),
                part.bytes,
                counted(part.ranges, "range")
            )?;
        }
        let more = self.more_reasons;
        if more > 0 {
            writeln!(
                f,
                "  and {} {}, which the map names",
                counted(more, "range"),
                form(more, "has another reason", "have other reasons")
            )?;
        }
        Ok(())
    }
}
