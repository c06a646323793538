//! Tests of the end of exports.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use blockio::DriverOptions;
use serve::exports::{Occupied, Opens, WayKind, Work};

use std::path::Path;

use super::*;
use crate::config::Config;
use crate::state::State;
use crate::testing::{backing_device_in, block_writes_of, reader_of};

/// An export that is a block device, and notes whether its link is there when it ends.
struct Device {
    link: PathBuf,
    is_used: Rc<Cell<bool>>,
    linked_at_end: Rc<Cell<Option<bool>>>,
}

const PATH: &str = "/dev/ublkb0";
static BLOCK: WayKind = WayKind { name: "ublk", opens: Opens::BlockDevice { prefix: "ublkb" } };

impl Export for Device {
    fn ways(&self, _: &str) -> Vec<Way> {
        vec![Way { kind: &BLOCK, address: PATH.into() }]
    }

    fn stop(self: Box<Self>, _: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }

    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            self.linked_at_end.set(Some(self.link.is_symlink()));
            match self.is_used.get() {
                true => Err(Occupied { export: self, why: Failure::Failed("it is open".into()) }),
                false => Ok(()),
            }
        })
    }

    fn can_be_handed_over(&self) -> bool {
        false
    }

    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async { None })
    }
}

/// The device ended before its link. udev handled the event of the end, found the label, and made the link again.
#[test]
fn a_link_goes_before_its_device_and_stays_if_the_device_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let links = dir.path().join("links");
    let mut config = Config::parse("exports = []").unwrap();
    config.links = Some(links.clone());
    let shared = Arc::new(Shared::new(config, State::open(&dir.path().join("state")).unwrap()));
    let disk = backing_device_in(dir.path(), 0, 5, format::BackingState::None);
    let plan = Plan { id: format::Uuid([5; 16]).to_string(), cache: None, alone: Some(disk), group: None };
    let driver = Driver::new(DriverOptions::default()).unwrap();
    driver
        .block_on(async {
            let host = Host::start(&driver, &plan, &shared, &Rc::default()).await.unwrap();
            let volume = host.session.volumes().remove(0);
            let link = links.join("data");
            let (is_used, linked_at_end) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(None)));
            let export =
                Device { link: link.clone(), is_used: is_used.clone(), linked_at_end: linked_at_end.clone() };
            let (spec, sharing) = ("ublk".parse().unwrap(), Sharing::Alone);
            host.with(&volume, |s| {
                s.exports.push(RunningExport { spec, sharing, export: Box::new(export) });
            });
            volume.set("label", "data").await.unwrap();
            shared.links.add(&plan.id, "data", Path::new(PATH));
            assert!(link.is_symlink());
            let release = async || {
                let stop = host.stops.begin(None, driver.handle().now());
                stops::release(&host, &stop, None, || true).await
            };
            let refused = release().await.unwrap_err().to_string();
            assert!(refused.contains("it is open"), "{refused}");
            assert_eq!((linked_at_end.take(), link.is_symlink()), (Some(false), true), "it serves on");
            is_used.set(false);
            release().await.unwrap();
            assert_eq!((linked_at_end.take(), link.is_symlink()), (Some(false), false));
            host.bring_down().await
        })
        .unwrap();
}

/// Regression: the thread of a set stored the state itself. If the state was on a volume of the set, it waited for itself.
#[test]
fn a_thread_goes_on_while_the_state_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let shared = Arc::new(Shared::new(Config::parse("exports = []").unwrap(), State::open(&state).unwrap()));
    let disk = backing_device_in(dir.path(), 0, 5, format::BackingState::None);
    let plan = Plan { id: format::Uuid([5; 16]).to_string(), cache: None, alone: Some(disk), group: None };
    let pipe = state.join("state.new");
    block_writes_of(&pipe);
    let (done, is_done) = channel::<()>();
    let last_resort = pipe.clone();
    let watchdog = std::thread::spawn(move || {
        let ended = is_done.recv_timeout(Duration::from_secs(20));
        (ended == Err(RecvTimeoutError::Timeout)).then(|| reader_of(&last_resort))
    });
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let reader = driver.block_on(async {
        let members = Rc::default();
        let mut start = pin!(Host::start(&driver, &plan, &shared, &members));
        // The name of the volume is new, and is being stored.
        let is_named = async {
            while shared.state().known_name(&plan.id).is_none() {
                driver.handle().sleep(Nanos::from_ms(1)).await;
            }
        };
        let Either::Right(()) = select(start.as_mut(), pin!(is_named)).await else {
            panic!("the thread waited for the file system")
        };
        // What the file system waits for is on this thread.
        let reader = reader_of(&pipe);
        let host = start.await.unwrap();
        let name = host.session.volumes().remove(0).name();
        // A pipe cannot be synced, so the first name was not stored.
        assert_eq!(name.len(), "bcache".len() + 6, "{name}");
        host.bring_down().await.unwrap();
        reader
    });
    drop((reader, done));
    assert!(watchdog.join().unwrap().is_none());
    assert_eq!(shared.state().store_again().not_stored(), None, "it is stored when it can be");
}

/// An export of clients whose requests wait for a device: its stop waits until it may end.
struct Waiting(Rc<io::sync::Event>);

static NBD: WayKind = WayKind { name: "nbd", opens: Opens::Connection };

impl Export for Waiting {
    fn ways(&self, _: &str) -> Vec<Way> {
        vec![Way { kind: &NBD, address: "nbd+unix:///data".into() }]
    }

    fn stop(self: Box<Self>, _: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }

    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            self.0.changed().await;
            Ok(())
        })
    }

    fn can_be_handed_over(&self) -> bool {
        false
    }

    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async { None })
    }
}

/// The export was gone, and the volume was exported and without a problem, for as long as the stop waited for the device.
#[test]
fn an_export_that_a_waiting_stop_has_ended_is_a_problem_of_its_volume() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("state")).unwrap();
    let shared = Arc::new(Shared::new(Config::parse("exports = []").unwrap(), state));
    let disk = backing_device_in(dir.path(), 0, 5, format::BackingState::None);
    let plan = Plan { id: format::Uuid([5; 16]).to_string(), cache: None, alone: Some(disk), group: None };
    let driver = Driver::new(DriverOptions::default()).unwrap();
    driver
        .block_on(async {
            let host = Host::start(&driver, &plan, &shared, &Rc::default()).await.unwrap();
            let volume = host.session.volumes().remove(0);
            let may_end = Rc::new(io::sync::Event::default());
            let (spec, sharing) = ("nbd=data.sock".parse().unwrap(), Sharing::Alone);
            host.with(&volume, |s| {
                s.exports.push(RunningExport { spec, sharing, export: Box::new(Waiting(may_end.clone())) });
            });
            let seen = || {
                let figures = host.figures(&CachedFigures::default());
                let exported = host.engine_figures().not_exported.is_empty();
                (figures.volumes[0].problem.clone(), figures.stops.len(), exported)
            };
            assert_eq!(seen(), (None, 0, true));
            let (reply, answer) = oneshot();
            let mut stop = pin!(host.carry_out(Order::StopIfFree(reply)));
            // The command has failed meanwhile.
            drop(answer);
            poll_fn(|cx| {
                assert!(stop.as_mut().poll(cx).is_pending());
                match host.with(&volume, |s| s.exports.is_empty()) {
                    Some(true) => Poll::Ready(()),
                    _ => Poll::Pending,
                }
            })
            .await;
            let (problem, stops, exported) = seen();
            let problem = problem.unwrap();
            assert!(problem.ends_with("s ago has ended nbd+unix:///data, and is not done"), "{problem}");
            assert_eq!((stops, exported), (1, false));
            may_end.notify_all();
            stop.await;
            let (problem, stops, exported) = seen();
            assert_eq!((stops, exported), (0, problem.is_none()));
            assert!(!problem.unwrap_or_default().contains("has ended"));
            host.bring_down().await
        })
        .unwrap();
}
