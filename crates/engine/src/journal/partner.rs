//! The order between the journals of two sets that hold the same dirty data (decision 037).
//!
//! Owns the pairs: which entry of the other journal has the second keys of the mirrored writes of each entry of this one. Must not
//! know volumes.
//!
//! Invariant: an entry is written after the second keys of all earlier entries are durable. So after a crash only the newest
//! durable entry of a journal has keys whose second ones may be missing. Neither journal waits for ever: both have the pairs in
//! the same order, so an entry for which this journal waits needs only entries of this one that are durable already. If the other
//! journal has failed, this one waits until no volume is coupled any more: until then, a start believes that the other set has a copy.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use format::JournalSeq;

use super::{HEADER_BYTES, Journal, JournalState};
use crate::canary::{Bug, bug};

/// The journals of the other sets with which this one shares dirty data.
#[derive(Default)]
pub(super) struct Partners {
    list: RefCell<Vec<Partner>>,
}

struct Partner {
    other: Rc<Journal>,
    /// For each entry of this journal with mirrored keys, oldest first, the entry of the other one that has the last of them.
    pairs: VecDeque<(JournalSeq, JournalSeq)>,
    /// For each coupled volume, what to call when one of the journals fails.
    on_failure: Vec<Rc<dyn Fn()>>,
}

/// Couples the journals of two sets for one volume until it is dropped.
pub(crate) struct Coupling {
    journals: (Rc<Journal>, Rc<Journal>),
    on_failure: Rc<dyn Fn()>,
}

impl Coupling {
    /// Couples two journals for a volume. `on_failure` is called when one of them fails; it may be called several times.
    pub(crate) fn new(one: &Rc<Journal>, two: &Rc<Journal>, on_failure: impl Fn() + 'static) -> Coupling {
        let on_failure: Rc<dyn Fn()> = Rc::new(on_failure);
        one.partners.add(two, &on_failure);
        two.partners.add(one, &on_failure);
        Coupling { journals: (one.clone(), two.clone()), on_failure }
    }

    /// Records that entry `one` of the first journal and entry `two` of the second one have the keys of one write. The caller has
    /// added both in one step.
    pub(crate) fn pair(&self, one: JournalSeq, two: JournalSeq) {
        self.journals.0.partners.paired(&self.journals.1, one, two);
        self.journals.1.partners.paired(&self.journals.0, two, one);
    }
}

impl Drop for Coupling {
    fn drop(&mut self) {
        let (one, two) = &self.journals;
        for (own, other) in [(one, two), (two, one)] {
            own.partners.remove(other, &self.on_failure);
            own.progress.notify_all();
        }
    }
}

impl Partners {
    fn add(&self, other: &Rc<Journal>, on_failure: &Rc<dyn Fn()>) {
        let mut list = self.list.borrow_mut();
        match list.iter_mut().find(|p| Rc::ptr_eq(&p.other, other)) {
            Some(partner) => partner.on_failure.push(on_failure.clone()),
            None => {
                let on_failure = vec![on_failure.clone()];
                list.push(Partner { other: other.clone(), pairs: VecDeque::new(), on_failure });
            }
        }
    }

    fn remove(&self, other: &Rc<Journal>, on_failure: &Rc<dyn Fn()>) {
        let mut list = self.list.borrow_mut();
        for partner in list.iter_mut().filter(|p| Rc::ptr_eq(&p.other, other)) {
            partner.on_failure.retain(|f| !Rc::ptr_eq(f, on_failure));
        }
        list.retain(|p| !p.on_failure.is_empty());
    }

    fn paired(&self, other: &Rc<Journal>, own: JournalSeq, theirs: JournalSeq) {
        let mut list = self.list.borrow_mut();
        let Some(partner) = list.iter_mut().find(|p| Rc::ptr_eq(&p.other, other)) else { return };
        match partner.pairs.back_mut() {
            Some(last) if last.0 == own => last.1 = theirs,
            _ => partner.pairs.push_back((own, theirs)),
        }
    }

    /// The entry of another journal that must be durable before entry `next` of this one is written.
    fn wanted_before(&self, next: JournalSeq) -> Option<(Rc<Journal>, JournalSeq)> {
        let mut list = self.list.borrow_mut();
        list.iter_mut().find_map(|partner| {
            let durable = partner.other.durable();
            while partner.pairs.front().is_some_and(|(_, theirs)| *theirs <= durable) {
                partner.pairs.pop_front();
            }
            let earlier = partner.pairs.iter().take_while(|(own, _)| *own < next);
            earlier.last().map(|(_, theirs)| (partner.other.clone(), *theirs))
        })
    }

    fn has(&self, other: &Rc<Journal>) -> bool {
        self.list.borrow().iter().any(|p| Rc::ptr_eq(&p.other, other))
    }

    /// Reports to every coupled volume that this journal has failed.
    pub(super) fn report_failure(&self) {
        let reports: Vec<_> = self.list.borrow().iter().flat_map(|p| p.on_failure.clone()).collect();
        reports.iter().for_each(|report| report());
    }
}

impl Journal {
    /// The words of the open entry with so many more, if there is room for them.
    #[inline(always)]
    pub(super) fn words_with(&self, s: &mut JournalState, more: usize) -> Option<usize> {
        let words = s.words + more;
        let (bytes, last_seq) = (HEADER_BYTES + 8 * words, self.last_seq_of_keys(s));
        let fits = bytes <= self.max_entry_bytes && s.ring.has_room(bytes, s.reserve_of_keys(), last_seq);
        fits.then_some(words)
    }

    /// Whether the open entry has room for keys of so many words.
    pub(crate) fn has_room_for(&self, words: usize) -> bool {
        self.words_with(&mut self.state.borrow_mut(), words).is_some()
    }

    /// Waits until the open entry may be written.
    pub(super) async fn wait_for_partners(&self) {
        if bug(Bug::JournalsRunApart) {
            return;
        }
        while let Some((other, theirs)) = self.partners.wanted_before(self.open_seq()) {
            if other.commit(theirs).await.is_err() {
                self.progress
                    .wait_until(|| !self.partners.has(&other) || self.failed.borrow().is_some())
                    .await;
                if self.failed.borrow().is_some() {
                    return;
                }
            }
        }
    }
}
