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
use crate::plan::Hang;

/// Deadline of a request that does not need the hung device: longer than the engine waits for a device that it can do
/// without, and than the other waits of a request, unless requests to devices are slow themselves.
const REQUEST_DEADLINE: Nanos = Nanos::from_secs(900);

/// So many slow requests to devices may be on the way of one request.
const SLOW_ON_THE_WAY: u64 = 100;

/// How often requests under way are checked.
const CHECK_INTERVAL: Nanos = Nanos::from_secs(60);

impl Session {
    /// The device that hangs in this boot.
    pub(super) fn hang(&self) -> Option<Hang> {
        let hang = self.boot.faults.as_ref()?.hang.clone()?;
        (1..=self.given.backings.len()).contains(&hang.device).then_some(hang)
    }

    /// Waits for the clients of the volumes whose devices answer, and lets the device that hangs go on if the plan says
    /// so.
    pub(super) async fn outlive(
        self: &Rc<Self>,
        hang: &Hang,
        others: Vec<(usize, JoinHandle<()>)>,
    ) -> Result<(), String> {
        let work = async {
            for (_, t) in others {
                t.await;
            }
        };
        let watch = async {
            loop {
                self.rt.sleep(CHECK_INTERVAL).await;
                if let Some(waits) = self.waits_needlessly(hang) {
                    return waits;
                }
            }
        };
        match select(std::pin::pin!(work), std::pin::pin!(watch)).await {
            Either::Left(()) => {}
            Either::Right(waits) => return Err(waits),
        }
        if hang.released {
            self.given.world.log(|| "the device that hung answers".into());
            self.given.backings[hang.device - 1].release();
        }
        Ok(())
    }

    fn deadline(&self) -> Nanos {
        let slow = |s: &crate::disk::Speed| if s.slow_one_in > 0 { s.slow.0 } else { 0 };
        let slowest = slow(&self.boot.cache_speed).max(slow(&self.boot.backing_speed));
        Nanos(REQUEST_DEADLINE.0 + SLOW_ON_THE_WAY * slowest)
    }

    /// A request that waits although every device that it needs answers.
    fn waits_needlessly(&self, hang: &Hang) -> Option<String> {
        let (now, deadline) = (self.rt.now(), self.deadline());
        let hung = &self.given.backings[hang.device - 1];
        let offset = self.offsets[hang.device - 1];
        let needs = |i: usize, r: &UnderWay| {
            if i + 1 != hang.device {
                return false;
            }
            let at = Sector(offset + r.start).0;
            !r.reads || hung.holds_read(at..at + r.sectors)
        };
        for (i, client) in self.given.clients.iter().enumerate() {
            let old = |r: &UnderWay| now.since(r.since) > deadline && !needs(i, r);
            if let Some(r) = client.under_way().into_iter().find(old) {
                let s = now.since(r.since).as_ms() / 1000;
                let status = self.set().map(|s| format!("{:?}", s.status())).unwrap_or_default();
                return Some(format!(
                    "a request waits for a device that it does not need: volume {i}: {r:?} for {s} s, while device {} \
                     hangs: {}; {status}",
                    hang.device,
                    hung.dump(),
                ));
            }
        }
        None
    }
}
