//! Gives up the cache device of a set that does not answer, if another set of the group has the data (decision 037).
//!
//! Owns the watch of the two sets of a volume. Must not know how a failed set is handled.
//!
//! A device that hangs returns no errors, so requests would wait for ever. Requests that are given up get errors at once; what the device
//! carries out of them later does not matter, because nothing names the set any more.

use std::pin::pin;
use std::rc::{Rc, Weak};

use format::Sectors;
use io::Nanos;
use io::sync::{Either, select};

use super::components::Components;
use crate::canary::{Bug, bug};
use crate::volume::{CopyState, Mirror, Volume, Which};

/// The pause of the watch while no time is set.
const UNSET_INTERVAL: Nanos = Nanos::from_secs(5);

/// Watches the two sets of a volume until the link between them ends.
pub(super) fn watch(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    (volume, mirror): (&Rc<Volume>, &Rc<Mirror>),
) {
    let rt = volume.rt().clone();
    let (volume, mirror) = (Rc::downgrade(volume), Rc::downgrade(mirror));
    let mut sets = Watch::new(primary, secondary);
    rt.clone().spawn(async move {
        let is_linked = || {
            let (Some(volume), Some(mirror)) = (volume.upgrade(), mirror.upgrade()) else { return false };
            volume.mirror().is_some_and(|present| Rc::ptr_eq(&present, &mirror))
        };
        while is_linked()
            && let Some(pause) = sets.check()
        {
            rt.sleep(pause).await;
            if bug(Bug::SlowSetAwaited) {
                return;
            }
        }
    });
}

/// Watches two sets while a step before their link is under way. If the second device does not answer, the step ends with an error.
pub(super) async fn watched<T>(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    step: impl Future<Output = T>,
) -> T {
    let (mut step, mut sets) = (pin!(step), Watch::new(primary, secondary));
    loop {
        let Some(pause) = sets.check() else { return step.await };
        if let Either::Left(done) = select(step.as_mut(), primary.cache.rt.sleep(pause)).await {
            return done;
        }
    }
}

/// The two sets of a volume. References to them would keep a stopped set.
struct Watch {
    primary: Weak<Components>,
    secondary: Weak<Components>,
    /// The set whose device did not answer at the last check. It is given up at the second one: after a pause of the whole process, the
    /// answers to old requests are there and not taken yet.
    suspect: Option<Which>,
}

impl Watch {
    fn new(primary: &Rc<Components>, secondary: &Rc<Components>) -> Watch {
        Watch { primary: Rc::downgrade(primary), secondary: Rc::downgrade(secondary), suspect: None }
    }

    /// Gives a set up whose device still does not answer. Returns the time until the next check, or `None` if there is nothing to watch
    /// any more.
    fn check(&mut self) -> Option<Nanos> {
        let (primary, secondary) = (self.primary.upgrade()?, self.secondary.upgrade()?);
        let timeouts = [timeout_of(&primary), timeout_of(&secondary)];
        let Some(shortest) = timeouts.into_iter().flatten().min() else { return Some(UNSET_INTERVAL) };
        let slow = slow_set((&primary, timeouts[0]), (&secondary, timeouts[1]));
        match slow {
            None => {
                self.suspect = None;
                return Some(Nanos(shortest.0 / 4));
            }
            Some(which) if self.suspect != Some(which) => {
                self.suspect = Some(which);
                return Some(Nanos(shortest.0 / 16));
            }
            Some(Which::Primary) => primary.cache.device.give_up(),
            Some(Which::Secondary) => secondary.cache.device.give_up(),
        }
        None
    }
}

/// The set whose device does not answer, if the other one can go on alone. Two devices that do not answer have a common cause.
fn slow_set(
    (primary, first): (&Components, Option<Nanos>),
    (secondary, second): (&Components, Option<Nanos>),
) -> Option<Which> {
    let waits = [primary.cache.device.unanswered_for(), secondary.cache.device.unanswered_for()];
    let is_slow = |timeout: Option<Nanos>, wait: Nanos| timeout.is_some_and(|timeout| wait >= timeout);
    let answers = |timeout: Option<Nanos>, wait: Nanos| timeout.is_none_or(|timeout| wait.0 < timeout.0 / 2);
    if is_slow(first, waits[0]) && answers(second, waits[1]) && can_do_without(primary) {
        return Some(Which::Primary);
    }
    (is_slow(second, waits[1]) && answers(first, waits[0]) && can_do_without(secondary))
        .then_some(Which::Secondary)
}

/// The time after which a set without an answer of its device is given up.
fn timeout_of(set: &Components) -> Option<Nanos> {
    let ms = set.cache.tunables.borrow().group_timeout_ms;
    (ms > 0).then(|| Nanos::from_ms(u64::from(ms)))
}

/// Whether no volume has dirty data in this set only.
fn can_do_without(set: &Components) -> bool {
    set.members.volumes().iter().all(|volume| {
        let has_copy = matches!(volume.copy_state(), CopyState::Complete { .. });
        has_copy
            || !volume.is_flash_only() && volume.dirty_sectors() == Sectors::ZERO
            || bug(Bug::OnlyDataGivenUp)
    })
}
