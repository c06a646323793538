//! The map, made while the contents are written.
//!
//! Owns [`Mapper`], an output that passes all bytes on, compares them where a verdict depends on them, and hands out the lines of the
//! map in order. Must not know why a verdict is what it is.
//!
//! Invariant: memory does not grow with the number of lines.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use format::{Sector, Sectors};
use inspect::{ReadAt, Remark, Sink};

use super::judge::{Judged, Other, Segment, Verdict};
use super::map::{MapLine, Part, Reason, State};

/// Sectors that are compared at a time.
const COMPARED: u64 = 8;
/// Number of reasons that are listed.
const MAX_REASONS: usize = 100;

static ZEROS: [u8; COMPARED as usize * 512] = [0; COMPARED as usize * 512];

/// The figures of a map.
#[derive(Default)]
pub(super) struct Totals {
    pub(super) certain: Part,
    pub(super) uncertain: Part,
    pub(super) lost: Part,
    pub(super) by_journal_end: Part,
    pub(super) reasons: Vec<Reason>,
    pub(super) more_reasons: u64,
}

impl Totals {
    fn add(&mut self, line: &MapLine, by_journal_end: bool) {
        match line.state {
            State::Certain => self.certain.add(line.sectors),
            State::Uncertain => self.uncertain.add(line.sectors),
            State::Lost => self.lost.add(line.sectors),
        }
        if by_journal_end {
            self.by_journal_end.add(line.sectors);
        }
        let Some(why) = line.why.as_deref() else { return };
        if let Some(reason) = self.reasons.iter_mut().find(|r| r.state == line.state && r.why == why) {
            reason.part.add(line.sectors);
        } else if self.reasons.len() < MAX_REASONS {
            let mut part = Part::default();
            part.add(line.sectors);
            self.reasons.push(Reason { state: line.state, why: why.to_owned(), part });
        } else {
            self.more_reasons += 1;
        }
    }
}

/// An output with a map.
pub(super) struct Mapper<'a> {
    judged: &'a Judged,
    cache: &'a dyn ReadAt,
    backing: Option<&'a dyn ReadAt>,
    sink: &'a mut dyn Sink,
    line: &'a mut dyn FnMut(&MapLine) -> io::Result<()>,
    /// Number of the current segment.
    segment: usize,
    at: u64,
    /// Ranges that come, and what the extraction said about them.
    remarks: VecDeque<(u64, u64, Remark)>,
    open: Option<(MapLine, bool)>,
    unreadable: Rc<str>,
    damaged: Rc<str>,
    /// Why a line of the map cannot be written.
    pub(super) map_error: Option<io::Error>,
    pub(super) totals: Totals,
}

impl<'a> Mapper<'a> {
    pub(super) fn new(
        judged: &'a Judged,
        cache: &'a dyn ReadAt,
        backing: Option<&'a dyn ReadAt>,
        sink: &'a mut dyn Sink,
        line: &'a mut dyn FnMut(&MapLine) -> io::Result<()>,
    ) -> Mapper<'a> {
        Mapper {
            judged,
            cache,
            backing,
            sink,
            line,
            segment: 0,
            at: 0,
            remarks: VecDeque::new(),
            open: None,
            unreadable: "the device cannot be read".into(),
            damaged: "the data does not have its checksum".into(),
            map_error: None,
            totals: Totals::default(),
        }
    }

    /// Maps the next sectors; `bytes` are `None` if they are zeros.
    fn walk(&mut self, len: Sectors, bytes: Option<&[u8]>) -> io::Result<()> {
        let (begin, end) = (self.at, self.at.saturating_add(len.0));
        while self.at < end {
            let judged = self.judged;
            let Some(segment) = judged.segments.get(self.segment) else {
                return Err(io::Error::other("the output is longer than the disk"));
            };
            if segment.end <= self.at {
                self.segment += 1;
                continue;
            }
            while self.remarks.front().is_some_and(|(_, to, _)| *to <= self.at) {
                self.remarks.pop_front();
            }
            let mut stop = segment.end.min(end);
            let remark = match self.remarks.front().copied() {
                Some((from, to, remark)) if from <= self.at => {
                    stop = stop.min(to);
                    Some(remark)
                }
                Some((from, ..)) => {
                    stop = stop.min(from);
                    None
                }
                None => None,
            };
            let part = bytes.map(|bytes| part_of(bytes, self.at - begin, stop - self.at));
            match (remark, &segment.unless) {
                (Some(remark), _) => self.remarked(segment, remark, stop)?,
                (None, Some((other, differs))) => self.compare(segment, (*other, differs), stop, part)?,
                (None, None) => self.push(stop, segment.from, &segment.verdict)?,
            }
        }
        Ok(())
    }

    /// Maps a range that was not copied as planned.
    fn remarked(&mut self, segment: &Segment, remark: Remark, stop: u64) -> io::Result<()> {
        let lost =
            |why: &Rc<str>| Verdict { state: State::Lost, why: Some(Rc::clone(why)), by_journal_end: false };
        match remark {
            Remark::Unreadable => self.push(stop, segment.from, &lost(&Rc::clone(&self.unreadable))),
            Remark::Damaged => self.push(stop, segment.from, &lost(&Rc::clone(&self.damaged))),
            // The data of the backing device would not be certain with a journal whose end is known, either.
            Remark::FromBacking
                if segment.verdict.state == State::Certain || segment.verdict.by_journal_end =>
            {
                self.push(stop, "backing", &Verdict::uncertain(&self.judged.instead))
            }
            Remark::FromBacking => self.push(stop, "backing", &segment.verdict),
        }
    }

    /// Maps a range whose verdict depends on whether other bytes are the same.
    fn compare(
        &mut self,
        segment: &Segment,
        (other, differs): (Other, &Verdict),
        stop: u64,
        bytes: Option<&[u8]>,
    ) -> io::Result<()> {
        let begin = self.at;
        let mut buffer = [0; COMPARED as usize * 512];
        while self.at < stop {
            let n = (stop - self.at).min(COMPARED);
            let is_same = {
                let ours = match bytes {
                    Some(bytes) => part_of(bytes, self.at - begin, n),
                    None => part_of(&ZEROS, 0, n),
                };
                let theirs = buffer.get_mut(..ours.len()).unwrap_or_default();
                let read = match (other, self.backing) {
                    (Other::Cache(first), _) => {
                        let at = first.0.saturating_add(self.at - segment.start);
                        self.cache.read_at(Sector(at), theirs).is_ok()
                    }
                    (Other::Backing, Some(backing)) => {
                        let at = self.judged.data_offset.0.saturating_add(self.at);
                        backing.read_at(Sector(at), theirs).is_ok()
                    }
                    (Other::Backing, None) => false,
                };
                read && !ours.is_empty() && ours == theirs
            };
            let verdict = if is_same { &segment.verdict } else { differs };
            self.push(self.at + n, segment.from, verdict)?;
        }
        Ok(())
    }

    /// Adds the sectors up to `stop` to the map.
    fn push(&mut self, stop: u64, from: &'static str, verdict: &Verdict) -> io::Result<()> {
        let (start_sector, sectors) = (self.at, stop - self.at);
        self.at = stop;
        let Verdict { state, why, by_journal_end } = verdict;
        match &mut self.open {
            Some((line, _)) if line.state == *state && line.from == from && line.why == *why => {
                line.sectors += sectors;
                return Ok(());
            }
            _ => {}
        }
        self.close()?;
        let line = MapLine { start_sector, sectors, state: *state, from, why: why.clone() };
        self.open = Some((line, *by_journal_end));
        Ok(())
    }

    /// Hands out the line that is complete.
    fn close(&mut self) -> io::Result<()> {
        let Some((line, by_journal_end)) = self.open.take() else { return Ok(()) };
        self.totals.add(&line, by_journal_end);
        (self.line)(&line).map_err(|e| {
            let failed = io::Error::other(e.to_string());
            self.map_error = Some(e);
            failed
        })
    }
}

impl Sink for Mapper<'_> {
    fn begin(&mut self, total: Sectors) -> io::Result<()> {
        self.sink.begin(total)
    }

    fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        let len = Sectors::from_bytes_floor(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.walk(len, Some(bytes))?;
        self.sink.data(bytes)
    }

    fn zeros(&mut self, n: Sectors) -> io::Result<()> {
        self.walk(n, None)?;
        self.sink.zeros(n)
    }

    fn remark(&mut self, start: Sectors, len: Sectors, remark: Remark) {
        let end = start.0.saturating_add(len.0);
        match self.remarks.back_mut() {
            Some((_, to, last)) if *to == start.0 && *last == remark => *to = end,
            _ => self.remarks.push_back((start.0, end, remark)),
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.judged.segments.last().is_some_and(|last| last.end != self.at) {
            return Err(io::Error::other("the output is shorter than the disk"));
        }
        self.close()?;
        self.sink.finish()
    }
}

/// A part of `bytes`, in sectors.
fn part_of(bytes: &[u8], from: u64, len: u64) -> &[u8] {
    let byte = |sectors: u64| usize::try_from(Sectors(sectors).bytes()).unwrap_or(usize::MAX);
    bytes.get(byte(from)..).and_then(|rest| rest.get(..byte(len))).unwrap_or_default()
}
