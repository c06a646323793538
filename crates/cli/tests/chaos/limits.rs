//! Hosts that refuse things: io_uring, locked memory, descriptors.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use ubcache_cli::nbd_client::{Ask, Client};

use crate::crashes::many_lives;
use crate::host;
use crate::load::Traffic;
use crate::place::*;
use crate::world::*;

/// The number of io_uring_setup(2), on every architecture.
const IO_URING_SETUP: i64 = 425;

/// Programs that `test` starts on its thread get `errno` when they ask for io_uring, as in a container.
fn without_io_uring(errno: Errno, test: impl FnOnce() + Send + 'static) {
    let body = move || {
        let refused = SeccompAction::Errno(errno.raw_os_error() as u32);
        let arch = std::env::consts::ARCH.try_into().expect("an architecture with filters");
        let rules = [(IO_URING_SETUP, Vec::new())].into_iter().collect();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch).expect("a filter");
        let program: BpfProgram = filter.try_into().expect("a filter");
        seccompiler::apply_filter(&program).expect("a kernel with filters");
        test();
    };
    if let Err(why) = std::thread::spawn(body).join() {
        std::panic::resume_unwind(why);
    }
}

/// The product without io_uring: it says so, and keeps every promise.
#[test]
fn io_uring_is_refused() {
    if !host::ready(&["unshare"]) {
        return;
    }
    without_io_uring(Errno::PERM, || {
        let place = Place::new(12 << 20, 24 << 20);
        let up = place.up(&[]);
        let said = up.stop();
        assert!(said.contains("a pool of up to") && said.contains("seccomp"), "{said}");
        many_lives(31, 6, &[]);
    });
}

/// Where the kernel counts the ring as locked memory and there is none to be had.
#[test]
fn no_locked_memory_for_a_ring() {
    if !host::ready(&["unshare"]) {
        return;
    }
    without_io_uring(Errno::NOMEM, || {
        let place = Place::new(12 << 20, 24 << 20);
        let mut load = place.load(32);
        let up = place.up(&[]);
        Traffic::connect(&place.socket).run(&mut load, 200);
        let said = up.stop();
        assert!(said.contains("LimitMEMLOCK"), "{said}");
        place.finish(&mut load);
    });
}

/// Not a page may be locked, and the right to do so all the same is taken away.
#[test]
fn no_locked_memory() {
    if host::ready(&["unshare", "prlimit", "setpriv"]) {
        many_lives(33, 3, &["prlimit", "--memlock=0", "setpriv", "--bounding-set=-ipc_lock"]);
    }
}

/// Processor time that a process has used.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).expect("a process");
    let ns = stat.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    Duration::from_nanos(ns)
}

/// Whether a server greets who comes to this socket now; the connection.
fn greeted(socket: &str) -> (UnixStream, bool) {
    let mut stream = UnixStream::connect(Path::new(socket)).expect("a socket");
    stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
    let said = stream.read(&mut [0; 18]);
    (stream, said.is_ok_and(|n| n == 18))
}

/// As many clients come as there are descriptors, and more: connected clients are served, later ones wait
/// without costing anything, and are served when others leave. Most of them do not take their replies.
fn out_of_descriptors(seed: u64) {
    let place = Place::new(12 << 20, 24 << 20);
    let mut load = place.load(seed);
    let began = Instant::now();
    let mut up = place.up_by(&["prlimit", "--nofile=32"], &[]);
    let mut traffic = Traffic::connect(&place.socket);
    let mut clients = Vec::new();
    // The greeting of those behind the last descriptor does not come.
    let mut waiting = loop {
        let (probe, true) = greeted(&place.socket) else { break greeted(&place.socket).0 };
        drop(probe);
        let mut client = Client::connect(place.socket.as_ref(), "").expect("a server");
        for tag in 0..4 {
            client.ask(Ask::Read(1 << 20), tag << 20, tag).expect("a server");
        }
        client.send().expect("a server");
        clients.push(client);
        assert!(clients.len() < 32, "more clients than descriptors");
    };
    assert!(clients.len() > 8, "{} clients", clients.len());
    // Those that were probed have gone.
    traffic.run(&mut load, 100);
    traffic.settle(&mut load);
    // Nothing to do: no processor time.
    let before = (Instant::now(), processor_time(up.pid()));
    no_server_answers(&place.socket);
    no_server_answers(&place.socket);
    let used = processor_time(up.pid()) - before.1;
    assert!(used < before.0.elapsed() / 4, "{used:?} of {:?}", before.0.elapsed());
    traffic.run(&mut load, 300);
    up.stats();
    drop(clients);
    waiting.set_read_timeout(Some(DEADLINE)).expect("a socket");
    waiting.read_exact(&mut [0; 18]).expect("a greeting");
    Client::connect(place.socket.as_ref(), "").expect("a server");
    traffic.run(&mut load, 100);
    drop(traffic);
    let said = up.stop();
    let said_times = said.lines().filter(|l| l.contains("cannot be accepted")).count();
    // Each client that leaves makes room, so that it may begin again: said once in ten seconds.
    let most = 1 + began.elapsed().as_secs() / 10;
    assert!(said_times >= 1 && said_times as u64 <= most, "said {said_times} times: {said}");
    place.finish(&mut load);
}

#[test]
fn descriptors_run_out() {
    if host::ready(&["unshare", "prlimit"]) {
        out_of_descriptors(34);
    }
}

#[test]
fn descriptors_run_out_without_io_uring() {
    if host::ready(&["unshare", "prlimit"]) {
        without_io_uring(Errno::PERM, || out_of_descriptors(35));
    }
}

/// Fewer descriptors than the start needs: it ends with a message, or it works.
#[test]
fn too_few_descriptors_to_start() {
    if !host::ready(&["unshare", "prlimit"]) {
        return;
    }
    let place = Place::new(12 << 20, 24 << 20);
    let mut load = place.load(36);
    let up = place.up(&[]);
    Traffic::connect(&place.socket).run(&mut load, 200);
    up.kill();
    let (mut refused, mut served) = (0, 0);
    for limit in 5..32 {
        match place.try_up(&["prlimit", &format!("--nofile={limit}")], &[]) {
            Ok(up) => {
                served += 1;
                up.kill();
            }
            Err(said) => {
                refused += 1;
                assert!(!said.contains("panicked"), "{limit} descriptors: {said}");
                assert!(said.contains("Too many open files"), "{limit} descriptors: {said}");
            }
        }
    }
    assert!(refused > 5 && served > 5, "{refused} refused, {served} served");
    place.finish(&mut load);
}
