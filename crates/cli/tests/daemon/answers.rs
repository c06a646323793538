//! What commands answer: which dirty data stays where, which job goes on, and what is in the way.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};

use format::BackingState;
use rustix::process::Signal;

use crate::hotplug::edit;
use crate::life::Frozen;
use crate::place::*;
use crate::world::*;

/// Writes 8 KiB, which stay dirty.
fn dirty(place: &Place) {
    let mut client = place.client("bcache0");
    client.write(0, &[7; 8192]).unwrap();
    client.flush().unwrap();
}

/// `attach` of a dirty disk said that it is attached elsewhere, and nothing of what is dirty.
#[test]
fn attach_says_what_is_dirty_in_another_set() {
    let place = Place::new();
    let new = place.dir.sparse("new", 8 << 20);
    run(&["make", "-C", &new, "--bucket", "8k", "--set-label", "new"]).ok();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &new]).ok();
    daemon.run(&["set-label", &place.ssd, "old"]).ok();
    let next = ["run `ubcache detach one`, then this command"];
    daemon.run(&["attach", "new", "one"]).refused(&["is attached to old, set ", &place.ssd]).says(&next);
    dirty(&place);
    let place_of =
        format!(" on {}; run `ubcache detach one`, which writes it back, then this command", place.ssd);
    daemon.run(&["attach", "new", "one"]).refused(&["has 8.0 KiB of dirty data in old, set ", &place_of]);
    daemon.run(&["stop", "one"]).ok();
    let both = format!("run `ubcache register {} && ubcache detach one`", place.hdd);
    daemon.run(&["attach", "new", "one"]).refused(&["8.0 KiB of dirty data in old", &both]);
    daemon.run(&["unregister", &place.ssd]).ok();
    let alone = format!(
        "which is not served: {0} alone has it; run `ubcache register {0} {1}`, then `ubcache detach one`",
        place.ssd, place.hdd
    );
    daemon.run(&["attach", "new", "one"]).refused(&[
        "has dirty data in cache set ",
        &alone,
        "dead-ssd-dirty",
    ]);
    // The commands of the answer work.
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["set", "one", "writeback_running=1"]).ok();
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["attach", "new", "one"]).ok();
    daemon.stop();
}

/// `stop` did not say that dirty data stays in the cache.
#[test]
fn stop_says_what_stays_dirty() {
    let place = Place::new();
    let daemon = place.start_registered();
    let said = daemon.run(&["stop", "one"]).ok();
    assert!(said.out.ends_with(": stopped\n"), "{said}");
    daemon.run(&["register", &place.hdd]).ok();
    dirty(&place);
    let stays =
        format!(": stopped; 8.0 KiB of dirty data stay on {}, and this disk is out of date", place.ssd);
    daemon.run(&["stop", "one"]).ok().says(&[&stays]);
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(daemon.json(&["stop", "one"])["stays_dirty"]["dirty_bytes"], 8192);
    daemon.stop();
}

/// A command that waits for its job was ended by Ctrl-C without a word of the job, which went on.
#[test]
fn a_command_that_is_interrupted_says_that_its_job_goes_on() {
    let place = Place::new();
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    dirty(&place);
    slow.freeze();
    for (command, which, code) in [("detach", Signal::INT, 130), ("drain", Signal::TERM, 143)] {
        let jobs_before = daemon.json(&["jobs"])["jobs"].as_array().unwrap().len();
        let waiting = Command::new(program())
            .args([command, "one", "--socket", daemon.socket()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let job = || daemon.json(&["jobs"])["jobs"].as_array().unwrap().get(jobs_before).cloned();
        wait_until("the job", || job().is_some());
        signal(waiting.id(), which);
        let said = Said::of(waiting.wait_with_output().unwrap());
        assert_eq!(said.code, code, "{said}");
        let id = job().unwrap()["id"].as_u64().unwrap();
        let words = format!("goes on in the daemon; `ubcache jobs` shows it, `ubcache cancel {id}` ends it");
        said.says(&[&format!("job {id}, {command} one, bcache0"), &words]);
        assert_eq!(job().unwrap()["state"], "running");
        daemon.run(&["cancel", &id.to_string()]).ok();
        wait_until("its end", || job().unwrap()["state"] == "cancelled");
    }
    slow.thaw();
    daemon.stop();
}

/// Starts a command, and interrupts it after its request. Returns also its connection.
fn interrupted(listener: &UnixListener, args: &[&str]) -> (Child, UnixStream) {
    let child = Command::new(program())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut client, _) = listener.accept().unwrap();
    // The command listens for signals before its request.
    assert_ne!(client.read(&mut [0; 65536]).unwrap(), 0);
    signal(child.id(), Signal::INT);
    (child, client)
}

/// `register` waited for a disk that hangs, and said nothing when it was interrupted.
#[test]
fn register_says_at_an_interrupt_that_it_may_go_on() {
    let dir = Dir::new();
    let (socket, disk) = (dir.path("socket"), dir.sparse("disk", 1 << 20));
    let listener = UnixListener::bind(&socket).unwrap();
    let (child, _client) = interrupted(&listener, &["register", &disk, "--socket", &socket]);
    // Its question for the status has no answer either.
    drop(listener.accept().unwrap());
    let said = Said::of(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{said}");
    said.says(&[&format!("`register {disk}` may go on in the daemon")]);
}

/// A signal during the request was lost: the command ended with exit code 0.
#[test]
fn a_command_that_does_not_wait_ends_by_a_signal_after_its_answer() {
    let dir = Dir::new();
    let socket = dir.path("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let (child, mut client) = interrupted(&listener, &["detach", "one", "--no-wait", "--socket", &socket]);
    let status = format!("/proc/{}/status", child.id());
    wait_until("the signal", || {
        let text = std::fs::read_to_string(&status).unwrap();
        let mut pending =
            text.lines().filter_map(|l| l.strip_prefix("ShdPnd:").or(l.strip_prefix("SigPnd:")));
        pending.all(|mask| mask.trim().bytes().all(|b| b == b'0'))
    });
    // The thread that takes the signal has noted it when all threads sleep again.
    wait_until("threads that sleep", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
        })
    });
    let body = r#"{"schema_version": 1, "job": {"id": 7, "kind": "detach", "target": "bcache0", "state": "running"}}"#;
    let answer = format!(
        "HTTP/1.0 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(answer.as_bytes()).unwrap();
    drop(client);
    let said = Said::of(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{said}");
    said.says(&["job 7: bcache0"]);
}

/// A directory in the place of a socket was said to be in use, and an address without a port became the name of a socket.
#[test]
fn an_export_names_what_is_in_the_way_and_a_missing_port() {
    let place = Place::new();
    let dir = place.dir.path("sockets");
    std::fs::create_dir(&dir).unwrap();
    let configure = |export: &str| {
        std::fs::write(place.dir.path("ubcache.toml"), format!("exports = [\"nbd={export}\"]\n")).unwrap();
    };
    configure("127.0.0.1");
    let said = place.refused();
    assert!(said.contains("127.0.0.1 has no port: write 127.0.0.1:10809, or ./127.0.0.1"), "{said}");
    configure(&dir);
    let daemon = place.start();
    let found = format!("found a directory; name a socket in it, such as {dir}/ubcache.sock");
    daemon.run(&["register", &place.ssd, &place.hdd]).refused(&["NOT EXPORTED", &found]);
    configure(&format!("{dir}/ubcache.sock"));
    daemon.run(&["reload"]).ok();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    daemon.stop();
}

/// Two sets with one label, made on two hosts, were no problem of `status`.
#[test]
fn status_names_two_sets_with_one_label() {
    let place = Place::new();
    let caches = ["a", "b"].map(|name| place.dir.sparse(name, 8 << 20));
    caches.iter().for_each(|cache| {
        run(&["make", "-C", cache, "--bucket", "8k", "--set-label", "fast"]).ok();
    });
    let daemon = place.start();
    daemon.run(&["register", &caches[0], &caches[1]]).ok();
    let said = daemon.run(&["status"]).ok();
    let paths = caches.each_ref().map(|cache| format!("({cache})"));
    said.says(&["1 PROBLEM", "2 sets have the label fast (set ", &paths[0], &paths[1]])
        .says(&["run `ubcache set-label NAME fast-2`"]);
    daemon.run(&["set-label", &caches[1], "fast-2"]).ok();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    daemon.stop();
}

/// A disk with dirty data in the set was served without it. An earlier command had named the disk, and the next start dropped the
/// data. Then only log and events said that a command drops it.
#[test]
fn register_says_that_it_drops_dirty_data() {
    let place = Place::new();
    let daemon = place.start_registered();
    dirty(&place);
    daemon.stop();
    edit(&place.hdd, |superblock| superblock.set_state(BackingState::Stale));
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    daemon.run(&["status"]).says(&["8.0 KiB of dirty data", "if it is attached again"]);
    let said = daemon.run(&["register", &place.hdd]).ok();
    said.says(&[
        "warning: ",
        "so set ",
        " drops its dirty data of the disk (8.0 KiB): it is older",
        "served as one",
    ]);
    assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [0; 4096]);
    daemon.stop();
}

/// `register` took a label twice without a word, and `unregister` of a cache device did not say which volumes end.
#[test]
fn register_and_unregister_name_what_else_changes() {
    let place = Place::new();
    let daemon = place.start_registered();
    let other = place.dir.sparse("other", 8 << 20);
    run(&["make", "-B", &other, "--label", "one"]).ok();
    let said = daemon.run(&["register", &other]).ok();
    said.says(&["warning: 2 volumes have the label one", "run `ubcache set-label NAME one-2`"]);
    let said = daemon.run(&["unregister", &other]).ok();
    assert!(!said.to_string().contains("served any more"), "{said}");
    daemon.run(&["unregister", &place.ssd]).ok().says(&["; one (bcache0) is not served any more"]);
    daemon.stop();
}

/// `cancel` of a job that had ended said "cancelled".
#[test]
fn a_job_that_has_ended_is_not_cancelled() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["drain", "one"]).ok();
    daemon.run(&["cancel", "1"]).refused(&["job 1 (drain bcache0) has ended: done"]);
    daemon.stop();
}

/// `reload` took a group that does not exist, and the next start failed.
#[test]
fn a_reload_refuses_what_the_next_start_would() {
    let place = Place::new();
    let daemon = place.start();
    place.configure("group = \"no-such-group\"\n");
    daemon.run(&["reload"]).refused(&["ubcache.toml: group no-such-group: there is no such group"]);
    daemon.stop();
    assert!(place.refused().contains("group no-such-group: there is no such group"));
}
