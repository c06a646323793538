//! The end of the daemon, by one signal or two, in time or not; and what the service manager hears of it all.

use std::os::unix::net::UnixDatagram;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::life::Frozen;
use crate::place::*;
use crate::world::*;

/// Dirty data in pieces that do not lie side by side, `n` of 4 KiB.
fn make_dirty(place: &Place, n: u64) {
    let mut client = place.client("bcache0");
    for at in 0..n {
        client.write(at * 65536, &[at as u8 + 1; 4096]).unwrap();
    }
    client.flush().unwrap();
}

#[track_caller]
fn assert_all_there(place: &Place, n: u64) {
    let mut client = place.client("bcache0");
    for at in 0..n {
        assert_eq!(client.read(at * 65536, 4096).unwrap(), [at as u8 + 1; 4096], "{at}");
    }
}

const DRAINS: &str = "drain_on_stop = true\n[tunables]\nwriteback_running = 0\nwriteback_batch_sectors = 8\n\
                      sequential_cutoff = 0\n";

/// `drain SET` said that it was done while the cache had dirty data of a disk that was not registered any more.
#[test]
fn a_drain_of_a_set_counts_disks_that_are_not_registered() {
    let place = Place::new();
    place.configure("[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n");
    let daemon = place.start_registered();
    daemon.run(&["set-label", &place.hdd, "media"]).ok();
    make_dirty(&place, 10);
    daemon.run(&["unregister", &place.hdd]).ok();
    daemon.run(&["drain", &place.ssd]).refused(&["40.0 KiB stay dirty", "media", "register"]);
    daemon.run(&["register", &place.hdd]).ok();
    daemon.run(&["drain", &place.ssd]).ok().says(&["drain done"]);
    assert_eq!(daemon.volume("bcache0")["dirty_bytes"], 0);
    daemon.stop();
    run(&["check", &place.ssd, &place.hdd]).ok();
}

#[test]
fn a_second_signal_ends_the_drain_and_dirty_data_stays() {
    for second in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        place.configure(DRAINS);
        let daemon = place.start();
        let slow = Frozen::registered(&place, &daemon);
        make_dirty(&place, 100);
        slow.freeze();
        daemon.signal(Signal::TERM);
        wait_until("the drain", || {
            daemon.said().contains("drain ") && daemon.said().contains("SIGTERM: stopping")
        });
        daemon.signal(second);
        wait_until("its end", || daemon.said().contains("stopping without the drain"));
        slow.thaw();
        let (status, said) = daemon.ended();
        assert_eq!(status.code(), Some(0), "the order was to stop: {said}");
        run(&["super", &slow.file]).ok().says(&["dirty"]);
        place.configure("[tunables]\nwriteback_running = 0\n");
        let daemon = place.start();
        assert_all_there(&place, 100);
        daemon.stop();
        run(&["check", &place.ssd, &slow.file]).ok();
    }
}

#[test]
fn a_drain_that_takes_too_long_says_how_much_stays() {
    let place = Place::new();
    place.configure(&format!("drain_deadline_s = 1\n{DRAINS}"));
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    make_dirty(&place, 100);
    slow.freeze();
    daemon.signal(Signal::TERM);
    wait_until("the deadline", || daemon.said().contains("the drain did not end within 1 second"));
    let said = daemon.said();
    assert!(said.contains("400.0 KiB stay dirty in the cache (one, bcache0)"), "{said}");
    slow.thaw();
    let (status, said) = daemon.ended();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("error: stopped before the drain ended: up to 400.0 KiB stay dirty"), "{said}");
    run(&["super", &slow.file]).ok().says(&["dirty"]);
    place.configure("[tunables]\nwriteback_running = 0\n");
    let daemon = place.start();
    assert_all_there(&place, 100);
    daemon.stop();
}

#[test]
fn a_second_signal_waits_for_nobody() {
    let place = Place::new();
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    make_dirty(&place, 3);
    let mut client = place.client("bcache0");
    slow.freeze();
    // What the cache does not have has to come from the device that stands still.
    let reader = std::thread::spawn(move || client.read(6 << 20, 4096).is_ok());
    daemon.run(&["detach", "one", "--no-wait"]).ok();
    daemon.signal(Signal::TERM);
    wait_until("the stop", || daemon.said().contains("SIGTERM: stopping"));
    daemon.signal(Signal::TERM);
    wait_until("the force", || daemon.said().contains("stopping without waiting for the users"));
    wait_until("the end", || daemon.said().contains("error: "));
    slow.thaw();
    let (status, said) = daemon.ended();
    assert_eq!(status.code(), Some(1), "{said}");
    reader.join().unwrap();
    let daemon = place.start();
    assert_all_there(&place, 3);
    daemon.stop();
}

/// A service manager, with the messages that it receives and their times.
struct Manager {
    path: String,
    notifications: Receiver<(Instant, String)>,
}

impl Manager {
    fn new(dir: &Dir) -> Manager {
        let path = dir.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let (sender, notifications) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = socket.recv(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
                if sender.send((Instant::now(), text)).is_err() {
                    return;
                }
            }
        });
        Manager { path, notifications }
    }

    /// The next message, apart from those of the watchdog.
    #[track_caller]
    fn next(&self) -> String {
        loop {
            let (_, text) = self.notifications.recv_timeout(DEADLINE).expect("a word");
            if text != "WATCHDOG=1" {
                return text;
            }
        }
    }
}

#[test]
fn the_service_manager_is_told_what_goes_on() {
    const ALIVE_WITHIN: Duration = Duration::from_secs(3);
    let place = Place::new();
    place.configure(DRAINS);
    let manager = Manager::new(&place.dir);
    let daemon = place.start_by(&[], |command| {
        command
            .env("NOTIFY_SOCKET", &manager.path)
            .env("WATCHDOG_USEC", ALIVE_WITHIN.as_micros().to_string());
    });
    assert_eq!(manager.next(), "READY=1");
    let slow = Frozen::registered(&place, &daemon);
    make_dirty(&place, 50);
    // The watchdog is answered in time, whatever the daemon does besides.
    let mut last = None;
    for _ in 0..4 {
        let (at, text) = manager.notifications.recv_timeout(DEADLINE).expect("a sign of life");
        assert_eq!(text, "WATCHDOG=1");
        if let Some(last) = last.replace(at) {
            assert!(at - last < ALIVE_WITHIN, "{:?}", at - last);
        }
    }
    // A reload is reported, also one that changes nothing because of a mistake.
    for config in ["", "nonsense = 1\n"] {
        place.configure(&format!("{config}{DRAINS}"));
        daemon.signal(Signal::HUP);
        let text = manager.next();
        let (first, second) = text.split_once('\n').unwrap_or((&text, ""));
        assert!(first == "RELOADING=1" && second.starts_with("MONOTONIC_USEC="), "{text}");
        assert_eq!(manager.next(), "READY=1");
    }
    slow.freeze();
    daemon.signal(Signal::TERM);
    assert_eq!(manager.next(), "STOPPING=1");
    let text = manager.next();
    assert!(text.starts_with("EXTEND_TIMEOUT_USEC="), "{text}");
    let text = manager.next();
    assert!(text.starts_with("STATUS=drain "), "{text}");
    slow.thaw();
    let (status, said) = daemon.ended();
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("nonsense"), "{said}");

    place.configure(DRAINS);
    // One that was meant for another process is not answered.
    let daemon = place.start_by(&[], |command| {
        let usec = ALIVE_WITHIN.as_micros().to_string();
        command.env("NOTIFY_SOCKET", &manager.path).env("WATCHDOG_USEC", usec).env("WATCHDOG_PID", "1");
    });
    daemon.signal(Signal::TERM);
    daemon.ended();
    // Signs of life of the first may still be there.
    let rest: Vec<String> = manager.notifications.try_iter().map(|(_, text)| text).collect();
    let from = rest.iter().position(|t| t == "READY=1").expect("a word");
    assert!(rest[from..].iter().all(|t| t != "WATCHDOG=1"), "{rest:?}");
}

/// A stop waited for a mount: `status` had no problem, and a device of a set that had stopped already was said to wait for a cache
/// device that is not registered.
#[test]
fn status_says_what_a_stop_waits_for() {
    if let Err(why) = export_fuse::probe().loop_device {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let (ssd, hdd) = (place.dir.sparse("ssd2", 8 << 20), place.dir.sparse("hdd2", 8 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback", "--label", "two"]).ok();
    let exports = format!("exports = [\"fuse={}/{{volume}}\"]\n", place.dir.root().display());
    std::fs::write(place.dir.path("ubcache.toml"), exports).unwrap();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &ssd, &hdd]).ok();
    let volume = daemon.volume("one");
    let name = volume["name"].as_str().unwrap().to_owned();
    let held = std::fs::File::open(volume["exports"][0]["address"].as_str().unwrap()).unwrap();
    daemon.signal(Signal::TERM);
    wait_until("the stop of the other set", || daemon.state_of(&hdd) == "stopped");
    let problem = || daemon.json(&["status"])["problems"][0].clone();
    wait_until("the problem", || problem()["kind"] == "stopping");
    let text = format!(
        "the daemon is stopping, and waits until one ({name}) is not in use: process {}",
        std::process::id()
    );
    let command = format!("unmount or close it, and the stop continues; run `ps -fp {}`", std::process::id());
    daemon.run(&["status"]).ok().says(&["1 PROBLEM", &text, &command]);
    // Those of `set` and `drain` said that the set had stopped, and jobs failed.
    for command in [
        &["register", &*hdd][..],
        &["unregister", &hdd],
        &["drain", "one"],
        &["detach", "one"],
        &["set", "one", "writeback_delay=7"],
        &["set-label", "one", "other"],
        &["drain", "two"],
    ] {
        let refused = daemon.run(command);
        refused.refused(&["the daemon is stopping; `ubcache status` shows what it waits for"]);
    }
    assert_eq!(daemon.json(&["jobs"])["jobs"], serde_json::json!([]));
    let status = daemon.run(&["status"]).ok();
    assert!(!status.out.contains("not registered") && !status.out.contains("waiting"), "{status}");
    drop(held);
    let (status, said) = daemon.ended();
    assert_eq!(status.code(), Some(0), "{said}");
}

/// The `stop` of a volume whose disk does not answer was silent, also at Ctrl-C, and `status` had no problem of it.
#[test]
fn a_stop_that_waits_for_a_disk_says_so() {
    use std::io::{BufRead, BufReader};
    let place = Place::new();
    place.configure("[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n");
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    make_dirty(&place, 10);
    slow.freeze();
    // The stop waits for the write that is under way.
    daemon.run(&["drain", "one", "--no-wait"]).ok();
    wait_until("the drain", || daemon.json(&["jobs"])["jobs"][0]["total_bytes"] == 40960);
    let mut stop = std::process::Command::new(program())
        .args(["stop", "one", "--socket", daemon.socket()])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(stop.stderr.take().unwrap());
    let mut next = || {
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        line
    };
    let waits = next();
    assert!(waits.contains("`stop one` has been under way for 1"), "{waits}");
    assert!(waits.contains(&slow.file), "{waits}");
    let status = daemon.json(&["status"]);
    let mut problems = status["problems"].as_array().unwrap().iter();
    let problem = problems.find(|problem| problem["kind"] == "command_waits").expect("the command");
    assert_eq!(problem["device"], slow.file.as_str());
    signal(stop.id(), Signal::INT);
    let goes_on = next();
    assert!(goes_on.contains("`stop one` goes on in the daemon"), "{goes_on}");
    assert_eq!(stop.wait().unwrap().code(), Some(130));
    slow.thaw();
    wait_until("the stop", || daemon.state_of(&slow.file) == "stopped");
    // That the disk does not answer is known by samples.
    let no_problem = || daemon.json(&["status"])["problems"] == serde_json::json!([]);
    wait_until("the end of the problems", no_problem);
    daemon.stop();
}

/// The job of another command failed when the volume was stopped, and `stop` did not name it.
#[test]
fn a_stop_names_the_job_that_it_ends() {
    let place = Place::new();
    place
        .configure("[tunables]\nwriteback_running = 0\nwriteback_batch_sectors = 8\nsequential_cutoff = 0\n");
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    make_dirty(&place, 100);
    slow.freeze();
    daemon.run(&["drain", "one", "--no-wait"]).ok();
    std::thread::scope(|scope| {
        let stops = scope.spawn(|| daemon.run(&["stop", "one"]));
        let socket = std::path::PathBuf::from(place.dir.path("bcache0.sock"));
        wait_until("the end of the export", || !socket.exists());
        slow.thaw();
        stops.join().unwrap().ok().says(&["; job 1, drain bcache0, was cancelled"]);
    });
    let job = daemon.json(&["jobs"])["jobs"][0].clone();
    assert_eq!(job["state"], "cancelled", "{job}");
    let why = job["error"].as_str().unwrap();
    assert!(why.starts_with("the volume was stopped before all was written back; "), "{why}");
    assert!(!daemon.json(&["status"])["last_errors"].to_string().contains("written back"));
    daemon.run(&["jobs"]).ok().says(&["cancelled: the volume was stopped"]);
    daemon.stop();
}

/// A mount of the device of a killed daemon was dead, and `status` said that there are no problems.
#[test]
fn a_device_of_a_killed_daemon_is_a_problem_until_it_is_free() {
    if let Err(why) = export_fuse::probe().loop_device {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let exports = format!("exports = [\"fuse={}/{{volume}}\"]\n", place.dir.root().display());
    std::fs::write(place.dir.path("ubcache.toml"), exports).unwrap();
    let daemon = place.start_registered();
    let device = |daemon: &Daemon| daemon.volume("one")["exports"][0]["address"].as_str().unwrap().to_owned();
    let dead = device(&daemon);
    let held = std::fs::File::open(&dead).unwrap();
    daemon.kill();

    let daemon = place.start();
    wait_until("the volume", || daemon.state_of(&place.hdd) == "served");
    let problems = || daemon.json(&["status"])["problems"].as_array().unwrap().clone();
    let found = problems();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["kind"], "dead_export", "{found:?}");
    let text = found[0]["text"].as_str().unwrap();
    assert!(text.contains(&format!("{dead} is of a process that has ended")), "{text}");
    let now = format!("; unmount or close it, and use {}, where the volume is served now", device(&daemon));
    assert!(text.ends_with(&now), "{text}");
    assert_eq!(found[0]["command"], format!("ps -fp {}", std::process::id()));
    let metric =
        |count| daemon.metrics().contains(&format!("ubcache_problems{{kind=\"dead_export\"}} {count}\n"));
    assert!(metric(1), "{}", daemon.metrics());
    drop(held);
    wait_until("the end of the problem", || problems().is_empty());
    assert!(metric(0));
    daemon.stop();
}
