//! Makes a failing plan shorter and simpler while it fails in the same way.
//!
//! Owns the candidates and the order in which they are tried: whole boots, then requests and actions in ever smaller pieces,
//! then single values. The parts of a run that its plan does not specify change when anything is removed, so each candidate
//! is tried with several seeds and several moments of the crash. The search is deterministic. Must not know the meaning of
//! a plan beyond its fields.

use io::{Nanos, Rng};

use crate::disk::{Retained, Speed};
use crate::plan::{Cut, Faults, Plan, Request};
use crate::world::Order;

/// Number of seeds and moments that are tried for a candidate.
const VARIANTS: u64 = 12;

/// The kind of a failure: its text without numbers.
pub fn kind_of(failure: &str) -> String {
    let line = failure.lines().next().unwrap_or_default();
    let words = line.split(|c: char| !c.is_ascii_alphabetic()).filter(|w| !w.is_empty());
    words.take(5).collect::<Vec<_>>().join(" ")
}

/// A search for a shorter plan.
pub struct Shrink<F> {
    fails: F,
    kind: String,
    best: Plan,
    runs_left: u64,
    rng: Rng,
}

impl<F: Fn(&Plan) -> Option<String>> Shrink<F> {
    /// Starts a search with `plan`. `None` if the plan does not fail.
    ///
    /// `fails` runs a plan and returns its failure. The search runs at most `runs` plans.
    pub fn new(plan: &Plan, runs: u64, fails: F) -> Option<Shrink<F>> {
        let kind = kind_of(&fails(plan)?);
        Some(Shrink { fails, kind, best: plan.clone(), runs_left: runs, rng: Rng::new(plan.seed) })
    }

    /// Runs the search, and returns the best plan and its failure.
    pub fn run(mut self) -> (Plan, String) {
        loop {
            let before = self.best.clone();
            self.drop_boots();
            self.drop_pieces(|b| &mut b.requests);
            self.drop_pieces(|b| &mut b.actions);
            self.simplify();
            if self.best == before || self.runs_left == 0 {
                break;
            }
        }
        let what = (self.fails)(&self.best).unwrap_or_default();
        (self.best, what)
    }

    /// Takes a candidate as the best plan if it fails in the same way, with some seed. Returns whether it does.
    fn offer(&mut self, candidate: &Plan) -> bool {
        if *candidate == self.best {
            return false;
        }
        for variant in 0..VARIANTS {
            if self.runs_left == 0 {
                return false;
            }
            self.runs_left -= 1;
            let plan = if variant == 0 { candidate.clone() } else { candidate.like(&mut self.rng) };
            if (self.fails)(&plan).is_some_and(|what| kind_of(&what) == self.kind) {
                self.best = plan;
                return true;
            }
        }
        false
    }

    /// Tries a change of the best plan. Returns whether the changed plan fails in the same way.
    fn change(&mut self, change: impl FnOnce(&mut Plan)) -> bool {
        let mut plan = self.best.clone();
        change(&mut plan);
        self.offer(&plan)
    }

    fn drop_boots(&mut self) {
        let mut i = self.best.boots.len();
        while i > 0 {
            i -= 1;
            if self.best.boots.len() > 1 {
                self.change(|p| drop(p.boots.remove(i)));
            }
        }
    }

    /// Removes pieces of a list of each boot: halves, quarters, single elements.
    fn drop_pieces<T>(&mut self, list: fn(&mut crate::plan::BootPlan) -> &mut Vec<T>) {
        for boot in 0..self.best.boots.len() {
            let mut piece = list(&mut self.best.boots[boot]).len();
            while piece > 0 {
                let mut at = 0;
                loop {
                    let len = list(&mut self.best.boots[boot]).len();
                    if at >= len {
                        break;
                    }
                    let end = (at + piece).min(len);
                    if !self.change(|p| drop(list(&mut p.boots[boot]).drain(at..end))) {
                        at = end;
                    }
                }
                piece /= 2;
            }
        }
    }

    /// Removes the faults of a boot, one after the other.
    fn drop_faults(&mut self, boot: usize) {
        let drops: [fn(&mut Faults); 10] = [
            |f| f.cache_one_in = 0,
            |f| f.backing_one_in = 0,
            |f| f.outage = None,
            |f| f.unreadable = None,
            |f| f.unreadable_backing = None,
            |f| f.hang = None,
            |f| f.lossy_flush = None,
            |f| f.pull = None,
            |f| f.failed_writes = None,
            |f| f.damage = None,
        ];
        for drop in drops {
            self.change(|p| {
                if let Some(f) = &mut p.boots[boot].faults {
                    drop(f);
                }
            });
        }
    }

    fn simplify(&mut self) {
        self.change(|p| p.depth = 1);
        self.change(|p| p.depth = p.depth.min(2));
        self.change(|p| p.order = Order::Fifo);
        self.change(|p| p.flash_sectors = 0);
        self.change(|p| p.first_gen = 0);
        self.change(|p| p.kernel_boots = 0);
        self.change(|p| p.crash_log = false);
        self.change(|p| p.layout.backings.truncate(1));
        self.change(|p| p.layout.discard = false);
        self.change(|p| p.layout.backings.iter_mut().for_each(|b| b.stripe_bytes = 0));
        let even = [Speed::even(100), Speed::even(1000)];
        for i in 0..self.best.boots.len() {
            self.change(|p| p.boots[i].faults = None);
            self.drop_faults(i);
            self.change(|p| p.boots[i].late = None);
            self.change(|p| p.boots[i].older = None);
            self.change(|p| p.boots[i].substitute = None);
            self.change(|p| p.boots[i].cache_speed.nodes = Nanos(0));
            self.change(|p| p.boots[i].cut_with_faults = false);
            self.change(|p| p.boots[i].aim = None);
            self.change(|p| p.boots[i].absent.clear());
            self.change(|p| p.boots[i].off_seconds = 0);
            self.change(|p| p.boots[i].crash = None);
            self.change(|p| p.boots[i].crash_in_durable_write = None);
            self.change(|p| p.boots[i].drain = false);
            self.change(|p| p.boots[i].read_back_percent = 0);
            self.change(|p| p.boots[i].settings.cache_mode = None);
            self.change(|p| p.boots[i].settings.congestion = false);
            self.change(|p| p.boots[i].settings.admission = "kernel".into());
            self.change(|p| p.boots[i].settings.bridge.writeback_bridge = "off".into());
            self.change(|p| p.boots[i].settings.writeback_controller = "kernel".into());
            self.change(|p| p.boots[i].settings.replacement = "kernel".into());
            self.change(|p| p.boots[i].settings.overwrite_in_place = "off".into());
            self.change(|p| p.boots[i].settings.node_cache_bytes = 1 << 30);
            for retained in [Retained::Nothing, Retained::Everything] {
                self.change(|p| p.boots[i].cut = Cut::Power(retained, retained));
            }
            for speed in even {
                self.change(|p| p.boots[i].cache_speed = speed);
                self.change(|p| p.boots[i].backing_speed = speed);
            }
            for r in 0..self.best.boots[i].requests.len() {
                self.change(|p| simpler(&mut p.boots[i].requests[r].1));
            }
        }
    }
}

/// Makes a request simpler: fewer sectors, no flags.
fn simpler(request: &mut Request) {
    match request {
        Request::Read { sectors, .. } | Request::Discard { sectors, .. } => *sectors = sectors.div_ceil(2),
        Request::Write { sectors, fua, .. } => {
            *sectors = sectors.div_ceil(2);
            *fua = false;
        }
        Request::Zeroes { sectors, .. } => *sectors = sectors.div_ceil(2),
        Request::Pause { ns }
        | Request::FlushGivenUp { ns }
        | Request::PauseUntilRead { ns }
        | Request::PauseUntilFailure { ns } => *ns = Nanos::from_ms(Nanos(*ns).as_ms() / 2).0,
        Request::Flush => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A "failure" that needs two requests in one boot, in order.
    fn fails(plan: &Plan) -> Option<String> {
        let is = |r: &(usize, Request), flush: bool| match r.1 {
            Request::Flush => flush,
            Request::Write { sectors, .. } => !flush && sectors >= 4,
            _ => false,
        };
        let bad = plan.boots.iter().any(|b| {
            let write = b.requests.iter().position(|r| is(r, false));
            write.is_some_and(|w| b.requests[w..].iter().any(|r| is(r, true)))
        });
        bad.then(|| format!("found {} things", plan.len()))
    }

    #[test]
    fn only_what_matters_is_left() {
        let mut plan = (0..200).map(Plan::from_seed).find(|p| p.len() > 300 && fails(p).is_some());
        let plan = plan.take().expect("one of these plans fails");
        let (short, what) = Shrink::new(&plan, 100_000, fails).expect("it fails").run();
        assert_eq!((short.len(), kind_of(&what).as_str()), (3, "found things"), "{short:#?}");
        assert!(matches!(short.boots[0].requests[0].1, Request::Write { sectors: 4..8, fua: false, .. }));
        assert!(Shrink::new(&short, 10, |_| None).is_none());
    }
}
