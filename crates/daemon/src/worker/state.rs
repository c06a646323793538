//! What the thread of a set and its handle share: phase, label, and whether the set has ended.
//!
//! Owns the locks around these values, which are held only for moments.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use serve::{Failure, plain};

use crate::order::{Plan, Progress};
use crate::shared::Shared;
use crate::why::SharedFailure;

/// The phase of the thread of a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Starting,
    Serving,
    Stopping,
    Stopped,
    Failed(SharedFailure),
}

impl Phase {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Serving => "serving",
            Phase::Stopping => "stopping",
            Phase::Stopped => "stopped",
            Phase::Failed(_) => "failed",
        }
    }

    /// There are volumes, also while they are being stopped.
    pub(crate) fn has_figures(&self) -> bool {
        matches!(self, Phase::Serving | Phase::Stopping)
    }

    /// The thread serves no device.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Phase::Stopped | Phase::Failed(_))
    }
}

/// The phase of a thread, which the thread sets and others read.
#[derive(Clone)]
pub(super) struct PhaseCell(Arc<Mutex<Phase>>);

impl PhaseCell {
    pub(super) fn get(&self) -> Phase {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, phase: Phase) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }
}

/// The label of the set of a thread, or of the device that is served alone, for messages. It is empty until it is known.
#[derive(Clone, Default)]
pub(super) struct LabelCell(Arc<Mutex<String>>);

impl LabelCell {
    pub(super) fn set(&self, label: &str) {
        label.clone_into(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn get(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The set or device as messages name it.
    pub(super) fn title(&self, plan: &Plan) -> String {
        plain::named(&self.get(), plan.title())
    }
}

/// The group of a set that a thread serves.
#[derive(Clone)]
pub(super) struct GroupCell(Arc<Mutex<Option<String>>>);

impl GroupCell {
    pub(super) fn set(&self, group: Option<String>) {
        *lock(&self.0) = group;
    }

    pub(super) fn get(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

/// Whether a thread serves a set no more.
#[derive(Clone, Default)]
pub(super) struct HasEnded(Arc<(Mutex<bool>, Condvar)>);

impl HasEnded {
    /// Whether both are of the same set.
    pub(super) fn is(&self, other: &HasEnded) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn set(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    /// Waits for it. It blocks.
    pub(super) fn wait(&self) {
        let has_ended = lock(&self.0.0);
        // A poisoned lock has a value that is consistent.
        drop(self.0.1.wait_while(has_ended, |has_ended| !*has_ended));
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread and its handle share.
#[derive(Clone)]
pub(super) struct ThreadState {
    pub(super) plan: Plan,
    pub(super) phase: PhaseCell,
    pub(super) label: LabelCell,
    pub(super) group: GroupCell,
    pub(super) ended: HasEnded,
    pub(super) shared: Arc<Shared>,
}

impl ThreadState {
    pub(super) fn new(plan: Plan, shared: Arc<Shared>) -> ThreadState {
        let phase = PhaseCell(Arc::new(Mutex::new(Phase::Starting)));
        let group = GroupCell(Arc::new(Mutex::new(plan.group.clone())));
        ThreadState { plan, phase, label: LabelCell::default(), group, ended: HasEnded::default(), shared }
    }

    /// The set or device as messages name it.
    pub(super) fn title(&self) -> String {
        self.label.title(&self.plan)
    }

    /// The failure of a command that the thread has not carried out to its end, because the thread has ended or is ending.
    pub(super) fn ended(&self, command: Progress) -> Failure {
        let title = self.title();
        match self.phase.get() {
            Phase::Failed(why) => Failure::because(format_args!("{title} has failed"), why),
            _ => Failure::Failed(self.plan.ends_before(&title, command, self.shared.is_stopping())),
        }
    }
}
