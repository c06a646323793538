//! Every failure of a scenario: one request fails, or all from one on, or the device answers none for a while, at the cache device
//! or at a backing device, wherever that is in the scenario. And every crash: the process, or the power, ends after each step.
//!
//! The oracle and the judges check the data. The pages, which lie beside those of the ledger, record the effects of each
//! failure: which steps of the scenario fail, the state of the set, the reports, and the number of requests to the devices. A
//! missing retry, a device that is disabled too early, or an error without a report changes a line.
#![allow(clippy::unwrap_used)]

#[path = "../ledger/page.rs"]
#[allow(dead_code)]
mod page;
mod scenario;

use std::cell::RefCell;
use std::rc::Rc;

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::CacheMode;
use sim::disk::{Retained, SimDisk};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

use page::compare;
use scenario::{Steps, commands, counts, end, requests};

/// The device has no room.
const ENOSPC: i32 = 28;
/// The device failed the request.
const EIO: i32 = 5;
/// How long a device answers nothing, in milliseconds: longer than a flush is waited for.
const LATE_MS: u64 = 7000;

/// Two sets for the same scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Set {
    Usual,
    /// Larger blocks, other settings.
    Other,
}

impl Set {
    fn layout(self) -> Layout {
        let two = Layout::sized(CacheMode::Writeback, 128, 512).and_backing(256, CacheMode::Writethrough);
        let mut layout = Layout { bucket_sectors: 16, ..two };
        if self == Set::Other {
            (layout.block_sectors, layout.bucket_sectors) = (8, 32);
            layout.backings.iter_mut().for_each(|b| (b.block_sectors, b.discard) = (8, false));
            layout.backings[0].stripe_bytes = 32 * 512;
        }
        layout
    }

    async fn open(self, b: &Boot) {
        let mut options = SetOptions::default();
        if self == Set::Other {
            options.tunables.overwrite_in_place = Overwrite::Always;
            options.tunables.btree_cache_limit = 1;
            options.tunables.journal_delay_ms = 0;
        }
        b.open_with(options).await;
        for i in 0..2 {
            b.tune(i, "sequential_cutoff", "0").await;
            b.tune(i, "writeback_delay", "1").await;
            if self == Set::Other {
                b.tune(i, "admission", "kernel").await;
                b.tune(i, "writeback_bridge", "always").await;
                b.tune(i, "cache_mode", "writeback").await;
            }
        }
        b.clients.iter().for_each(|c| c.set_tolerant(true));
    }
}

fn disks(b: &Boot) -> impl Iterator<Item = &Rc<SimDisk>> {
    std::iter::once(&b.cache).chain(&b.backings)
}

fn sums(b: &Boot) -> String {
    let sums: Vec<String> = disks(b).map(|d| counts(d.counters())).collect();
    format!("{}; {} ms", sums.join(", "), b.world.now().0 / 1_000_000)
}

/// Runs the scenario, with what `arm` does to the devices once the set is open. Returns its line, and how many requests each
/// device got since then.
fn outcome(set: Set, arm: impl FnOnce(&Boot) + 'static) -> (String, Vec<u64>) {
    let mut scenario = Scenario::new(5, set.layout(), 64);
    let line: Rc<RefCell<(String, Vec<u64>)>> = Rc::default();
    let result = line.clone();
    scenario.boot(move |b| async move {
        set.open(&b).await;
        let requests_of = |d: &Rc<SimDisk>| {
            let c = d.counters();
            c.reads + c.writes + c.durable_writes + c.flushes + c.plain
        };
        let before: Vec<u64> = disks(&b).map(requests_of).collect();
        arm(&b);
        let steps = Steps::default();
        requests(&b, &steps).await;
        commands(&b, &steps).await;
        let end = end(&b, &steps).await;
        let sent = disks(&b).zip(before).map(|(d, n)| requests_of(d) - n).collect();
        *result.borrow_mut() = (format!("{} {end}; {}", steps.marks(), sums(&b)), sent);
    });
    // What failing devices were outcome counts only as long as they survives their power.
    scenario.kill().judge();
    line.take()
}

/// What goes wrong with a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    FailsOnce,
    FailsThrice,
    FailsForGood,
    HasNoRoomOnce,
    IsLate,
}

impl Trouble {
    /// Lets it happen after so many more requests to the device.
    fn arm(self, b: &Boot, disk: &Rc<SimDisk>, after: u64) {
        disk.fail_with(if self == Trouble::HasNoRoomOnce { ENOSPC } else { EIO });
        match self {
            Trouble::FailsOnce | Trouble::HasNoRoomOnce => disk.fail_between(after, Some(1)),
            Trouble::FailsThrice => disk.fail_between(after, Some(3)),
            Trouble::FailsForGood => disk.fail_between(after, None),
            Trouble::IsLate => {
                disk.hang_after(after, false);
                let (theirs, disk) = (b.clone(), disk.clone());
                b.rt.spawn(async move {
                    // The scenario takes less than two minutes.
                    for _ in 0..600 {
                        theirs.sleep_ms(200).await;
                        if disk.held() > 0 {
                            theirs.sleep_ms(LATE_MS).await;
                            break;
                        }
                    }
                    disk.release();
                });
            }
        }
    }
}

/// The lines of all moments at which a device has this trouble; neighbours that are alike are one line.
fn lines(set: Set, device: usize, trouble: Trouble, sent: u64) -> Vec<String> {
    let name = ["cache", "backing0", "backing1"][device];
    let mut lines: Vec<(u64, u64, String)> = Vec::new();
    for n in 0..=sent {
        let (line, _) = outcome(set, move |b| {
            if let Some(disk) = disks(b).nth(device) {
                trouble.arm(b, disk, n);
            }
        });
        match lines.last_mut() {
            Some((_, last, before)) if *before == line => *last = n,
            _ => lines.push((n, n, line)),
        }
    }
    lines.iter().map(|(from, to, line)| format!("{name} {trouble:?} after {from} to {to}: {line}")).collect()
}

fn failures(name: &str, set: Set, device: usize) {
    let (line, sent) = outcome(set, |_| ());
    let mut all = vec![format!("nothing fails: {line}")];
    let troubles = [
        Trouble::FailsOnce,
        Trouble::FailsThrice,
        Trouble::FailsForGood,
        Trouble::HasNoRoomOnce,
        Trouble::IsLate,
    ];
    for trouble in troubles {
        all.extend(lines(set, device, trouble, sent[device]));
    }
    compare(&format!("failures_{name}"), &all);
}

#[test]
fn failures_of_the_cache_device() {
    failures("cache", Set::Usual, 0);
    failures("cache_other", Set::Other, 0);
}

#[test]
fn failures_of_backing_devices() {
    failures("backing0", Set::Usual, 1);
    failures("backing1", Set::Usual, 2);
    failures("backing0_other", Set::Other, 1);
    failures("backing1_other", Set::Other, 2);
}

/// After so many steps the process dies, or the power fails; returns what the next start costs and finds.
fn recovery(set: Set, steps: usize, survives: Option<Retained>) -> String {
    let mut scenario = Scenario::new(5, set.layout(), 64);
    scenario.boot(move |b| async move {
        set.open(&b).await;
        let (done, theirs) = (Steps::default(), b.clone());
        let outcome = done.clone();
        b.rt.spawn(async move {
            requests(&theirs, &outcome).await;
            commands(&theirs, &outcome).await;
        });
        done.reach(steps).await;
    });
    match survives {
        Some(survives) => scenario.power_loss(survives),
        None => scenario.kill(),
    };
    let line: Rc<RefCell<String>> = Rc::default();
    let result = line.clone();
    scenario.judge().boot(move |b| async move {
        set.open(&b).await;
        let opened = sums(&b);
        let s = b.set();
        let status = s.status();
        let events = s.take_events();
        for i in 0..2 {
            b.volume(i).drained().await.unwrap();
        }
        *result.borrow_mut() = format!(
            "{opened}; {events:?}; dirty {:?}, {} nodes, {:?} of the journal; drained {}",
            status.dirty,
            status.btree_nodes,
            status.journal_free,
            sums(&b)
        );
    });
    scenario.power_loss(Retained::Nothing).judge();
    line.take()
}

/// Steps of requests and commands, where nothing fails.
const STEPS: usize = 45;

#[test]
fn crashes_after_each_step() {
    let mut all = Vec::new();
    for set in [Set::Usual, Set::Other] {
        for steps in 0..=STEPS {
            for (what, survives) in
                [("power", Some(Retained::Nothing)), ("some", Some(Retained::Some(4))), ("killed", None)]
            {
                all.push(format!("{set:?}, {what} after {steps}: {}", recovery(set, steps, survives)));
            }
        }
    }
    compare("recoveries", &all);
}
