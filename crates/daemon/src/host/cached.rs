//! The count of the cached data of each volume, which takes a walk over the index.
//!
//! Owns the last count and the time of the next one: counting takes at most a hundredth of the thread's time. Must not know
//! who asks for the figures.

use std::cell::RefCell;
use std::rc::Rc;

use blockio::Driver;
use engine::figures::CachedFigures;
use io::{Handle, Nanos};
use serve::Session;

/// Shortest time between two counts.
const INTERVAL: Nanos = Nanos::from_ms(500);
/// Time between two counts, in multiples of the time that a count takes.
const SPACING: u64 = 100;

/// The last count, and the time of the next one.
pub(super) struct CachedCount {
    rt: Handle,
    last: RefCell<Option<(Rc<CachedFigures>, Nanos)>>,
}

impl CachedCount {
    pub(super) fn new(driver: &Driver) -> CachedCount {
        CachedCount { rt: driver.handle(), last: RefCell::default() }
    }

    /// The data of each slot, from a new count or from a recent one.
    pub(super) async fn get(&self, session: &Session) -> Rc<CachedFigures> {
        let now = self.rt.now();
        if let Some((figures, next)) = &*self.last.borrow()
            && now < *next
        {
            return figures.clone();
        }
        let Some(set) = &session.set else { return Rc::default() };
        let figures = Rc::new(set.cached_figures().await);
        let ended = self.rt.now();
        let pause = Nanos(ended.since(now).0.saturating_mul(SPACING)).max(INTERVAL);
        *self.last.borrow_mut() = Some((figures.clone(), ended.after(pause)));
        figures
    }
}
