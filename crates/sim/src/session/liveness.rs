//! Liveness: no request waits for a device that it does not need.
//!
//! Owns the bound within which requests end while a backing device hangs: those of the other volumes, and reads of the
//! hung device's volume for which the device was not asked.

use std::rc::Rc;

use format::Sector;
use io::sync::{Either, select};
use io::{JoinHandle, Nanos};

use super::Session;
use crate::client::UnderWay;
use crate::disk::{SimDisk, Speed};
use crate::plan::Hang;

/// Deadline of a request that does not need the hung device: longer than the engine waits for a device that it can do
/// without, and than the other waits of a request, unless requests to devices are slow themselves.
const REQUEST_DEADLINE: Nanos = Nanos::from_secs(900);

/// So many slow requests to devices may be on the way of one request.
const SLOW_ON_THE_WAY: u64 = 100;

/// How often requests under way are checked.
const CHECK_INTERVAL: Nanos = Nanos::from_secs(60);

/// A backing device that hangs in a boot, and the rules about requests beside it.
pub(super) struct HungDevice {
    session: Rc<Session>,
    hang: Hang,
}

impl HungDevice {
    /// The device that hangs in this boot.
    pub(super) fn of(session: &Rc<Session>) -> Option<HungDevice> {
        let hang = session.boot.faults.as_ref()?.hang.clone()?;
        let exists = (1..=session.given.backings.len()).contains(&hang.device);
        exists.then(|| HungDevice { session: session.clone(), hang })
    }

    /// The place of the device's volume among all volumes.
    pub(super) fn volume(&self) -> usize {
        self.hang.device - 1
    }

    /// Whether the plan lets the device go on.
    pub(super) fn is_released(&self) -> bool {
        self.hang.released
    }

    /// Lets the device hang from the step on that the plan says.
    pub(super) fn begin(&self) {
        self.disk().hang_after(self.hang.after, self.hang.flushes);
    }

    /// Waits for the clients of the volumes whose devices answer, and lets the device that hangs go on if the plan says
    /// so.
    pub(super) async fn outlive(&self, others: Vec<(usize, JoinHandle<()>)>) -> Result<(), String> {
        let work = async {
            for (_, t) in others {
                t.await;
            }
        };
        let watch = async {
            loop {
                self.session.rt.sleep(CHECK_INTERVAL).await;
                if let Some(waits) = self.request_that_waits() {
                    return waits;
                }
            }
        };
        match select(std::pin::pin!(work), std::pin::pin!(watch)).await {
            Either::Left(()) => {}
            Either::Right(waits) => return Err(waits),
        }
        if self.hang.released {
            self.session.given.world.log(|| "the device that hung answers".into());
            self.disk().release();
        }
        Ok(())
    }

    fn disk(&self) -> &Rc<SimDisk> {
        &self.session.given.backings[self.volume()]
    }

    fn deadline(&self) -> Nanos {
        let boot = &self.session.boot;
        let slow = |s: &Speed| if s.slow_one_in > 0 { s.slow.0 } else { 0 };
        let slowest = slow(&boot.cache_speed).max(slow(&boot.backing_speed));
        Nanos(REQUEST_DEADLINE.0 + SLOW_ON_THE_WAY * slowest)
    }

    /// A request that waits although every device that it needs answers.
    fn request_that_waits(&self) -> Option<String> {
        let session = &self.session;
        let (now, deadline) = (session.rt.now(), self.deadline());
        let hung = self.disk();
        let offset = session.offsets[self.volume()];
        let needs = |i: usize, r: &UnderWay| {
            if i != self.volume() {
                return false;
            }
            let at = Sector(offset + r.start).0;
            !r.reads || hung.holds_read(at..at + r.sectors)
        };
        for (i, client) in session.given.clients.iter().enumerate() {
            let old = |r: &UnderWay| now.since(r.since) > deadline && !needs(i, r);
            if let Some(r) = client.under_way().into_iter().find(old) {
                let s = now.since(r.since).as_ms() / 1000;
                let status = session.set().map(|s| format!("{:?}", s.status())).unwrap_or_default();
                return Some(format!(
                    "a request waits for a device that it does not need: volume {i}: {r:?} for {s} s, while device {} \
                     hangs: {}; {status}",
                    self.hang.device,
                    hung.dump(),
                ));
            }
        }
        None
    }
}
