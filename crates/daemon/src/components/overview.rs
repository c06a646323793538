//! What an operator has to do on this host: the problems of sets, devices, commands, jobs, exports and the state directory.
//!
//! Owns the sources of the list. `problems` has the rules, and `status` and `/metrics` show the result.

use std::sync::Arc;

use super::exports::Exports;
use super::problems::{
    Problem, commands_that_wait, dead_exports, in_order, jobs_that_wait, problems, state_not_stored,
};
use super::registration::Registration;
use super::views::{DeviceView, SetView, Views};
use crate::jobs::Jobs;
use crate::shared::Shared;

/// The sources of the problems.
#[derive(Clone)]
pub(crate) struct Overview {
    pub(crate) shared: Arc<Shared>,
    pub(crate) views: Views,
    pub(crate) registration: Arc<Registration>,
    pub(crate) exports: Arc<Exports>,
    pub(crate) jobs: Arc<Jobs>,
}

impl Overview {
    /// All problems of these sets and devices and of the host, the worst first.
    pub(crate) async fn problems(&self, sets: &[SetView], devices: &[DeviceView]) -> Vec<Problem> {
        let mut found = problems(sets, devices);
        found.extend(commands_that_wait(&self.registration.under_way(), devices));
        found.extend(jobs_that_wait(&self.jobs.all(), devices));
        found.extend(dead_exports(&self.exports.dead().await, sets));
        in_order(&mut found);
        found.extend(state_not_stored(&self.shared.state()));
        found
    }

    /// All problems now, the worst first.
    pub(crate) async fn problems_now(&self) -> Vec<Problem> {
        let sets = self.views.sets().await;
        let devices = self.views.devices_with_growth(&sets).await;
        self.problems(&sets, &devices).await
    }
}
