//! The oracle: the contents that every sector of a volume may have, by the durability contract.
//!
//! Owns the history of changes (writes, zeros, discards) and for each sector the changes whose outcome may be there now
//! (*visible*) or after a crash (*allowed*). Must not know the engine.
//!
//! Rules, in the words of the contract (`A` comes before `B` if `A` ended before `B` was issued):
//! * a completed change hides every change before it from readers; a read may return changes in flight or not;
//! * a durable change (it carried FUA, or a flush ended that was issued after the change had ended) rules out every change
//!   before it for ever; if the change is not durable, a crash may bring back any of them;
//! * a change that failed or was interrupted may have happened or not;
//! * after a discard a sector has zeros, garbage of the device, or any of its earlier contents;
//! * contents that were read after a recovery stay: no other contents from before the crash are allowed any more.

use crate::stamp::{Content, SECTOR, WrongContents, decode};

/// Number of a change of a volume, which its data carries. Change 0 is the initial contents.
pub type ChangeId = u32;

/// The kind of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChangeKind {
    /// A write of stamped data.
    Data,
    /// A write of zeros.
    Zero,
    /// A discard.
    Discard,
    /// The contents that a read returned after a discard.
    Observed(Content),
}

const RUNNING: u64 = u64::MAX;

/// Number of changes of a sector that an error message lists.
const HISTORY: usize = 6;

#[derive(Clone, Debug)]
struct Change {
    what: ChangeKind,
    start: u64,
    sectors: u64,
    issued: u64,
    ended: u64,
    /// Whether the change succeeded.
    certain: bool,
    durable: bool,
}

impl Change {
    fn covers(&self, sector: u64) -> bool {
        (self.start..self.start + self.sectors).contains(&sector)
    }

    fn is_before(&self, other: &Change) -> bool {
        self.ended < other.issued
    }
}

/// A change that is allowed in a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Allowed {
    id: ChangeId,
    visible: bool,
}

/// A read in flight.
pub struct Reading {
    start: u64,
    issued: u64,
    /// The visible changes of all sectors at the time of the read's issue, sector after sector.
    observed: Vec<ChangeId>,
    /// The end of each sector's changes in `observed`. An empty range means change 0 alone.
    ends: Vec<u32>,
}

/// A flush in flight.
#[derive(Clone, Copy)]
pub struct Flushing {
    issued: u64,
}

/// The history and the allowed contents of one volume.
#[derive(Clone)]
pub struct Oracle {
    volume: u8,
    clock: u64,
    changes: Vec<Change>,
    /// The allowed changes of each sector. An empty list means change 0, visible.
    sectors: Vec<Vec<Allowed>>,
    /// Certain changes that are not durable.
    volatile: Vec<ChangeId>,
    /// Time of the last crash.
    crash: u64,
    /// Time at which a device last lost data while the process lived.
    lost: u64,
    /// Number of requests that have ended.
    ended: u64,
}

impl Oracle {
    /// The oracle of a volume of `sectors` sectors, which have their stamps of write 0, or zeros.
    pub fn new(volume: u8, sectors: u64, zeros: bool) -> Oracle {
        let what = if zeros { ChangeKind::Zero } else { ChangeKind::Data };
        let first = Change { what, start: 0, sectors, issued: 0, ended: 0, certain: true, durable: true };
        Oracle {
            volume,
            clock: 1,
            changes: vec![first],
            sectors: vec![Vec::new(); sectors as usize],
            volatile: Vec::new(),
            crash: 0,
            lost: 0,
            ended: 0,
        }
    }

    /// A fingerprint, which is equal for oracles that allow the same contents.
    pub fn fingerprint(&self) -> u64 {
        let mut sum = 0_u64;
        let mut add = |word: u64| sum = (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        for c in &self.changes {
            // A discard may have left the contents of any change that was issued before the discard ended.
            let older =
                self.changes.iter().filter(|o| c.what == ChangeKind::Discard && o.issued < c.ended).count();
            let what = match c.what {
                ChangeKind::Data => 0,
                ChangeKind::Zero => 1,
                ChangeKind::Discard => 2,
                ChangeKind::Observed(content) => content.fingerprint(),
            };
            [what, c.start, c.sectors, older as u64].into_iter().for_each(&mut add);
        }
        for list in &self.sectors {
            add(list.len() as u64);
            list.iter().for_each(|a| add(u64::from(a.id) << 1 | u64::from(a.visible)));
        }
        sum
    }

    /// Size of the volume in sectors.
    pub fn size(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// Number of requests that have ended so far, which shows progress.
    pub fn requests_ended(&self) -> u64 {
        self.ended
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn list(&mut self, sector: u64) -> &mut Vec<Allowed> {
        let list = &mut self.sectors[sector as usize];
        if list.is_empty() {
            list.push(Allowed { id: 0, visible: true });
        }
        list
    }

    fn allowed(&self, sector: u64) -> &[Allowed] {
        const FIRST: &[Allowed] = &[Allowed { id: 0, visible: true }];
        let list = &self.sectors[sector as usize];
        if list.is_empty() { FIRST } else { list }
    }

    /// Records that a change was issued.
    pub fn begin(&mut self, what: ChangeKind, start: u64, sectors: u64) -> ChangeId {
        let issued = self.tick();
        let id = self.changes.len() as ChangeId;
        self.changes.push(Change {
            what,
            start,
            sectors,
            issued,
            ended: RUNNING,
            certain: false,
            durable: false,
        });
        for s in start..start + sectors {
            self.list(s).push(Allowed { id, visible: true });
        }
        id
    }

    /// Records that a change has ended.
    pub fn end(&mut self, id: ChangeId, ok: bool, durable: bool) {
        let now = self.tick();
        self.ended += 1;
        let c = &mut self.changes[id as usize];
        c.ended = now;
        c.certain = ok;
        if !ok {
            return;
        }
        let c = c.clone();
        // A device that loses non-durable data may lose the data of this change, too, although the change succeeds.
        let may_be_lost = c.issued < self.lost;
        for s in c.start..c.start + c.sectors {
            let changes = &self.changes;
            for a in &mut self.sectors[s as usize] {
                if a.id != id && !may_be_lost && changes[a.id as usize].is_before(&c) {
                    a.visible = false;
                }
            }
        }
        if durable {
            self.make_durable(id);
        } else {
            self.volatile.push(id);
        }
    }

    fn make_durable(&mut self, id: ChangeId) {
        self.changes[id as usize].durable = true;
        let c = self.changes[id as usize].clone();
        for s in c.start..c.start + c.sectors {
            let changes = &self.changes;
            self.sectors[s as usize].retain(|a| a.id == id || !changes[a.id as usize].is_before(&c));
        }
    }

    /// Records that a flush was issued.
    pub fn begin_flush(&mut self) -> Flushing {
        Flushing { issued: self.tick() }
    }

    /// Records that a flush has ended.
    pub fn end_flush(&mut self, f: Flushing, ok: bool) {
        self.ended += 1;
        if !ok {
            return;
        }
        let (covered, rest): (Vec<ChangeId>, Vec<ChangeId>) =
            self.volatile.iter().partition(|id| self.changes[**id as usize].ended < f.issued);
        self.volatile = rest;
        for id in covered {
            self.make_durable(id);
        }
    }

    /// Records that the volume was stopped in order, so that all changes are durable.
    pub fn stopped(&mut self) {
        self.released();
        self.cut_off();
    }

    /// Makes all acknowledged changes durable.
    pub fn released(&mut self) {
        for id in std::mem::take(&mut self.volatile) {
            self.make_durable(id);
        }
    }

    /// Records that the process died on a machine that stays up, with memory that outlives the process.
    ///
    /// The next process returns all acknowledged changes. The devices alone may have older versions.
    pub fn killed(&mut self) {
        self.cut_off();
        self.crash = self.tick();
    }

    /// Returns to the state `then`, because the devices have their contents of that time.
    ///
    /// Numbers of changes are not used again, so data of later changes counts as foreign.
    pub fn go_back(&mut self, then: Oracle) {
        let (clock, mut changes) = (self.clock, std::mem::take(&mut self.changes));
        // Later changes did not happen, so they cover no sectors.
        changes.iter_mut().skip(then.changes.len()).for_each(|c| c.sectors = 0);
        let known = then.changes.len();
        *self = then;
        self.changes.extend(changes.into_iter().skip(known));
        self.clock = clock;
        self.crash = self.tick();
    }

    /// Records that a device lost non-durable data while the process lives: a read may return any allowed version.
    pub fn device_lost(&mut self) {
        for list in &mut self.sectors {
            list.iter_mut().for_each(|a| a.visible = true);
        }
        self.lost = self.tick();
    }

    /// Records that a command reported lost data. Later flushes promise nothing about data that was not durable.
    pub fn loss_reported(&mut self) {
        self.volatile.clear();
        self.device_lost();
    }

    /// Records a crash of the machine or the process: non-durable data may be lost, and changes in flight may have
    /// happened.
    pub fn crashed(&mut self) {
        self.volatile.clear();
        self.cut_off();
        for list in &mut self.sectors {
            list.iter_mut().for_each(|a| a.visible = true);
        }
        self.crash = self.tick();
    }

    fn cut_off(&mut self) {
        let now = self.tick();
        for c in self.changes.iter_mut().filter(|c| c.ended == RUNNING) {
            c.ended = now;
        }
    }

    /// Records that a read was issued.
    pub fn begin_read(&mut self, start: u64, sectors: u64) -> Reading {
        let issued = self.tick();
        let range = start as usize..(start + sectors) as usize;
        let mut observed = Vec::with_capacity(range.len());
        let mut ends = Vec::with_capacity(range.len());
        for list in &self.sectors[range] {
            observed.extend(list.iter().filter(|a| a.visible).map(|a| a.id));
            ends.push(observed.len() as u32);
        }
        Reading { start, issued, observed, ends }
    }

    /// Records that a read has failed.
    pub fn fail_read(&mut self, _: Reading) {
        self.ended += 1;
    }

    /// Records that a read has ended, and checks its data.
    ///
    /// # Errors
    /// The first sector with contents that the oracle does not allow.
    pub fn end_read(&mut self, r: &Reading, bytes: &[u8]) -> Result<(), Box<WrongContents>> {
        self.ended += 1;
        if r.issued < self.lost {
            // A device lost data during the read, so the read may return any contents.
            return Ok(());
        }
        let mut begin = 0;
        let mut matching: Vec<ChangeId> = Vec::new();
        for (i, sector_bytes) in bytes.chunks_exact(SECTOR).enumerate() {
            let sector = r.start + i as u64;
            let found = decode(sector_bytes);
            let end = r.ends[i] as usize;
            let observed: &[ChangeId] = if begin == end { &[0] } else { &r.observed[begin..end] };
            begin = end;
            matching.clear();
            matching.extend(observed.iter().copied().filter(|id| self.matches(*id, sector, found)));
            if matching.is_empty() {
                if !self.issued_meanwhile(r.issued, sector, found) {
                    return Err(self.complain("a read", sector, found, observed));
                }
            } else if matches!(found, Content::Data { .. }) || !self.issued_meanwhile(r.issued, sector, found)
            {
                // The zeros may come from a change in flight. Then they say nothing about older changes.
                self.settle(r.issued, sector, found, &matching);
            }
        }
        Ok(())
    }

    /// Whether the contents may come from a change that was issued during the read.
    fn issued_meanwhile(&self, since: u64, sector: u64, found: Content) -> bool {
        // The newest changes come last. An observed discard has the time of the discard, so it does not end the search.
        let old = |c: &Change| c.issued <= since && !matches!(c.what, ChangeKind::Observed(_));
        let newest_first = self.changes.iter().enumerate().rev();
        let mut newer = newest_first.take_while(|(_, c)| !old(c)).filter(|(_, c)| c.issued > since);
        newer.any(|(id, c)| c.covers(sector) && self.matches(id as ChangeId, sector, found))
    }

    /// Removes changes that ended before the read and do not match, because the read returned the outcome of `matching`.
    fn settle(&mut self, issued: u64, sector: u64, found: Content, matching: &[ChangeId]) {
        if self.sectors[sector as usize].is_empty() {
            return;
        }
        let settled = matching.iter().all(|id| self.changes[*id as usize].ended < issued);
        if !settled {
            return;
        }
        let crash = self.crash;
        let old = matching.iter().all(|id| self.changes[*id as usize].ended <= crash);
        // The comparison is by contents, because overlapping reads may have recorded the same contents under several
        // numbers.
        let mut list = std::mem::take(&mut self.sectors[sector as usize]);
        let fits: Vec<bool> = list.iter().map(|a| self.matches(a.id, sector, found)).collect();
        for (a, fits) in list.iter_mut().zip(&fits) {
            a.visible &= *fits || self.changes[a.id as usize].ended >= issued;
        }
        if old {
            let mut fits = fits.iter();
            list.retain(|a| fits.next() == Some(&true) || self.changes[a.id as usize].ended > crash);
        }
        let visible = |what: fn(ChangeKind) -> bool| {
            let mut all = list.iter().filter(|a| a.visible && self.matches(a.id, sector, found));
            all.any(|a| what(self.changes[a.id as usize].what))
        };
        let only_discards = !visible(|w| w != ChangeKind::Discard) && visible(|w| w == ChangeKind::Discard);
        self.sectors[sector as usize] = list;
        if let ([one], true) = (matching, only_discards) {
            self.discard_settled(sector, found, *one, old);
        }
    }

    /// Records the contents after a discard, which do not change by themselves.
    fn discard_settled(&mut self, sector: u64, found: Content, discard: ChangeId, old: bool) {
        let observed = self.changes.len() as ChangeId;
        let mut c = self.changes[discard as usize].clone();
        (c.what, c.start, c.sectors) = (ChangeKind::Observed(found), sector, 1);
        self.changes.push(c);
        let list = &mut self.sectors[sector as usize];
        if old {
            list.retain(|a| a.id != discard);
        }
        for a in list.iter_mut().filter(|a| a.id == discard) {
            a.visible = false;
        }
        list.push(Allowed { id: observed, visible: true });
    }

    /// Whether a change leaves these contents in a sector.
    fn matches(&self, id: ChangeId, sector: u64, found: Content) -> bool {
        let c = &self.changes[id as usize];
        match (c.what, found) {
            (ChangeKind::Data, Content::Data { volume, sector: s, write }) => {
                volume == self.volume && s == sector && write == id
            }
            (ChangeKind::Zero, Content::Zero) => true,
            (ChangeKind::Observed(content), found) => content == found,
            (ChangeKind::Discard, Content::Zero | Content::Garbage { .. }) => true,
            (ChangeKind::Discard, Content::Data { volume, sector: s, write }) => {
                volume == self.volume
                    && s == sector
                    && self
                        .changes
                        .get(write as usize)
                        .is_some_and(|w| w.what == ChangeKind::Data && w.covers(sector) && w.issued < c.ended)
            }
            _ => false,
        }
    }

    /// Checks the contents of a sector after a crash, before any read.
    ///
    /// # Errors
    /// If the oracle does not allow the contents.
    pub fn check_sector(&self, sector: u64, bytes: &[u8]) -> Result<Content, Box<WrongContents>> {
        let found = decode(bytes);
        let allowed = self.allowed(sector);
        if allowed.iter().any(|a| self.matches(a.id, sector, found)) {
            return Ok(found);
        }
        let ids: Vec<ChangeId> = allowed.iter().map(|a| a.id).collect();
        Err(self.complain("the disks", sector, found, &ids))
    }

    fn complain(
        &self,
        reader: &'static str,
        sector: u64,
        found: Content,
        allowed: &[ChangeId],
    ) -> Box<WrongContents> {
        let name = |id: &ChangeId| {
            let c = &self.changes[*id as usize];
            let durable = if c.durable { ", durable" } else { "" };
            let how = match (c.ended, c.certain) {
                (RUNNING, _) => "under way",
                (_, true) => "done",
                (_, false) => "failed or cut off",
            };
            format!("#{id} {:?} {}+{} ({how}{durable})", c.what, c.start, c.sectors)
        };
        let expected: Vec<String> = allowed.iter().map(name).collect();
        let origin = match found {
            Content::Data { volume, write, .. } if volume == self.volume => {
                self.changes.get(write as usize).map(|_| name(&write))
            }
            _ => None,
        };
        let of_sector =
            (0..self.changes.len() as ChangeId).rev().filter(|id| self.changes[*id as usize].covers(sector));
        let history: Vec<String> = of_sector.take(HISTORY).map(|id| name(&id)).collect();
        Box::new(WrongContents { volume: self.volume, sector, reader, found, origin, expected, history })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::fill_data;

    fn stamped(sector: u64, write: ChangeId) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        fill_data(&mut bytes, 1, sector, write);
        bytes
    }

    fn reads(o: &mut Oracle, sector: u64, bytes: &[u8]) -> bool {
        let r = o.begin_read(sector, 1);
        o.clone().end_read(&r, bytes).is_ok()
    }

    #[test]
    fn readers_see_the_last_completed_write_or_one_under_way() {
        let mut o = Oracle::new(1, 8, false);
        let a = o.begin(ChangeKind::Data, 0, 4);
        assert!(reads(&mut o, 2, &stamped(2, 0)) && reads(&mut o, 2, &stamped(2, a)));
        o.end(a, true, false);
        assert!(!reads(&mut o, 2, &stamped(2, 0)) && reads(&mut o, 2, &stamped(2, a)));
        assert!(!reads(&mut o, 2, &stamped(3, a)), "the right write in the wrong place");
        assert!(reads(&mut o, 5, &stamped(5, 0)));
        let r = o.begin_read(2, 1);
        let b = o.begin(ChangeKind::Data, 0, 4);
        o.end(b, true, false);
        assert!(o.end_read(&r, &stamped(2, b)).is_ok(), "issued while the read was under way");
    }

    #[test]
    fn a_crash_brings_back_what_was_not_ruled_out() {
        let mut o = Oracle::new(1, 8, false);
        let a = o.begin(ChangeKind::Data, 0, 1);
        o.end(a, true, false);
        let f = o.begin_flush();
        let b = o.begin(ChangeKind::Data, 0, 1);
        o.end(b, true, false);
        o.end_flush(f, true);
        let mut after = o.clone();
        after.crashed();
        assert!(!reads(&mut after, 0, &stamped(0, 0)), "the flush covered the first write");
        assert!(reads(&mut after, 0, &stamped(0, a)) && reads(&mut after, 0, &stamped(0, b)));
        let r = after.begin_read(0, 1);
        assert!(after.end_read(&r, &stamped(0, a)).is_ok());
        after.crashed();
        assert!(!reads(&mut after, 0, &stamped(0, b)), "it was read after the recovery and must stay");
        o.stopped();
        assert!(!reads(&mut o, 0, &stamped(0, a)) && reads(&mut o, 0, &stamped(0, b)));
    }

    /// A write waits for the cache device when the backing device, which has its data, loses data that is not durable.
    #[test]
    fn a_write_in_flight_when_a_device_loses_data_may_be_lost() {
        let mut o = Oracle::new(1, 8, false);
        let before = o.begin(ChangeKind::Data, 0, 8);
        o.end(before, true, false);
        let under_way = o.begin(ChangeKind::Data, 0, 8);
        o.device_lost();
        o.end(under_way, true, false);
        assert!(reads(&mut o, 0, &stamped(0, before)) && reads(&mut o, 0, &stamped(0, under_way)));
        let after = o.begin(ChangeKind::Data, 0, 8);
        o.end(after, true, false);
        assert!(!reads(&mut o, 0, &stamped(0, before)) && !reads(&mut o, 0, &stamped(0, under_way)));
    }

    #[test]
    fn a_failed_write_may_have_happened() {
        let mut o = Oracle::new(1, 8, true);
        let a = o.begin(ChangeKind::Data, 0, 2);
        o.end(a, false, false);
        assert!(reads(&mut o, 0, &stamped(0, a)) && reads(&mut o, 0, &[0; SECTOR]));
        let r = o.begin_read(0, 1);
        assert!(o.end_read(&r, &[0; SECTOR]).is_ok());
        assert!(!reads(&mut o, 0, &stamped(0, a)), "it was seen not to have happened");
        assert!(reads(&mut o, 1, &stamped(1, a)));
    }

    #[test]
    fn a_discard_leaves_one_thing() {
        let mut o = Oracle::new(1, 8, false);
        let d = o.begin(ChangeKind::Discard, 0, 1);
        o.end(d, true, false);
        assert!(reads(&mut o, 0, &[0; SECTOR]) && reads(&mut o, 0, &stamped(0, 0)));
        assert!(!reads(&mut o, 0, &stamped(1, 0)));
        let r = o.begin_read(0, 1);
        assert!(o.end_read(&r, &[0; SECTOR]).is_ok());
        assert!(!reads(&mut o, 0, &stamped(0, 0)));
        o.crashed();
        assert!(reads(&mut o, 0, &stamped(0, 0)), "nothing made the discard durable");
    }
}
