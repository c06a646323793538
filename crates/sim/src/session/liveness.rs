//! Liveness: no request waits for a device that it does not need.
//!
//! Owns the time limit of requests while a backing device hangs: requests to other volumes, and reads of the volume of the
//! hung device that did not need the device. Must not know how a device hangs.

use std::rc::Rc;

use format::Sector;
use io::sync::{Either, select};
use io::{JoinHandle, Nanos};

use super::Session;
use crate::client::UnderWay;
use crate::disk::{SimDisk, Speed};
use crate::plan::Hang;
use crate::violation::Violation;

/// Time limit of a request that does not need the hung device.
///
/// It is longer than the engine waits for a device that it can do without, and longer than the other waits of a request.
/// Slow requests to devices extend it.
const REQUEST_DEADLINE: Nanos = Nanos::from_secs(900);

/// Limit of the slow device requests for which one request may wait in turn.
const SLOW_ON_THE_WAY: u64 = 100;

/// Interval between checks of the requests in flight.
const CHECK_INTERVAL: Nanos = Nanos::from_secs(60);

/// A backing device that hangs in a boot, and the rules for requests meanwhile.
pub(super) struct HungDevice {
    session: Rc<Session>,
    hang: Hang,
}

impl HungDevice {
    /// The device that hangs in this boot; `None` if no device does.
    pub(super) fn of(session: &Rc<Session>) -> Option<HungDevice> {
        let hang = session.boot.faults.as_ref()?.hang.clone()?;
        let exists = (1..=session.given.backings.len()).contains(&hang.device);
        exists.then(|| HungDevice { session: session.clone(), hang })
    }

    /// The number of the device's volume.
    pub(super) fn volume(&self) -> usize {
        self.hang.device - 1
    }

    /// Whether the plan releases the device.
    pub(super) fn is_released(&self) -> bool {
        self.hang.released
    }

    /// Makes the device hang from the step on that the plan has.
    pub(super) fn begin(&self) {
        self.disk().hang_after(self.hang.after, self.hang.flushes);
    }

    /// Waits for the clients of the volumes whose devices answer, and releases the hung device if the plan says so.
    pub(super) async fn outlive(&self, others: Vec<(usize, JoinHandle<()>)>) -> Result<(), Violation> {
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

    /// A request that waits although every device that it needs answers; `None` if there is none.
    fn request_that_waits(&self) -> Option<Violation> {
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
                return Some(Violation::WaitsInVain {
                    volume: i,
                    request: format!("{r:?}"),
                    seconds: s,
                    device: self.hang.device,
                    state: format!("{}; {status}", hung.dump()),
                });
            }
        }
        None
    }
}
