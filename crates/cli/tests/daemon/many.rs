//! Many sets in one daemon: a host with 24 disks and a cache for each. What is demanded are counts; the table with times is for
//! docs/performance.md: `cargo test --release -p ubcache-cli --test daemon many -- --nocapture`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ubcache_cli::nbd_client::{Ask, Client};

use crate::place::*;
use crate::world::*;

const SETS: usize = 24;
/// Heap that the first export takes for the whole process (docs/decisions/028); used by the sets when they are busy.
const RESERVE_KIB: u64 = 64 << 10;
const BLOCK: usize = 4096;
const DEPTH: u64 = 32;
/// Requests for each set, of each kind.
const REQUESTS: u64 = 2048;
/// How long the daemon is watched at rest.
const REST: Duration = Duration::from_secs(10);

/// What the system says of a process and its threads.
struct Usage {
    /// Name, times that it was woken, processor time in ns.
    threads: BTreeMap<String, (String, u64, u64)>,
    rss_kib: u64,
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

impl Usage {
    fn of(id: u32) -> Usage {
        let process = format!("/proc/{id}");
        let mut threads = BTreeMap::new();
        for entry in std::fs::read_dir(format!("{process}/task")).unwrap() {
            let path = entry.unwrap().path();
            // A helper thread may have ended.
            let Ok(status) = std::fs::read_to_string(path.join("status")) else { continue };
            let spent = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            let spent = spent.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
            let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_owned();
            // Those of the kernel come and go with what the ring cannot do at once.
            if name.starts_with("iou-") {
                continue;
            }
            let woken = field(&status, "voluntary_ctxt_switches:");
            threads.insert(path.file_name().unwrap().to_string_lossy().into_owned(), (name, woken, spent));
        }
        let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
        Usage { threads, rss_kib: field(&status, "VmRSS:") }
    }

    /// Wake-ups and processor time since then.
    fn since(&self, before: &Usage) -> (u64, u64) {
        let (mut woken, mut spent) = (0, 0);
        for (id, (_, now_woken, now_spent)) in &self.threads {
            let (_, w, s) = before.threads.get(id).cloned().unwrap_or_default();
            (woken, spent) = (woken + now_woken - w, spent + now_spent - s);
        }
        (woken, spent)
    }
}

/// Which block a request of a set is for, and what is in it.
fn block(set: usize, n: u64) -> (u64, Vec<u8>) {
    let at = n * 7919 % 8192;
    (at * BLOCK as u64, vec![(set as u64 + at) as u8; BLOCK])
}

fn load(set: usize, client: &mut Client, write: bool) {
    for first in (0..REQUESTS).step_by(DEPTH as usize) {
        for n in first..first + DEPTH {
            let (at, data) = block(set, n);
            match write {
                true => client.ask_write(at, &data, false, n).unwrap(),
                false => client.ask(Ask::Read(BLOCK as u32), at, n).unwrap(),
            }
        }
        client.send().unwrap();
        for _ in 0..DEPTH {
            let reply = client.receive().unwrap();
            assert_eq!(reply.error, 0);
            assert!(write || reply.data == block(set, reply.tag).1, "set {set}, request {}", reply.tag);
        }
    }
}

/// All sets at once; how long it took.
fn load_all(clients: &mut [Client], write: bool) -> Duration {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (set, client) in clients.iter_mut().enumerate() {
            scope.spawn(move || load(set, client, write));
        }
    });
    began.elapsed()
}

/// Lets time pass without requests.
fn rest(id: u32) -> (u64, u64, f64) {
    let (_nobody_asks, never) = channel::<()>();
    let (before, began) = (Usage::of(id), Instant::now());
    assert!(never.recv_timeout(REST).is_err());
    let (woken, spent) = Usage::of(id).since(&before);
    (woken, spent, began.elapsed().as_secs_f64())
}

#[test]
fn twenty_four_sets_are_served_at_once_and_cost_little_at_rest() {
    let place = Place::new();
    let daemon = place.start();
    let id = daemon.id();
    let alone = Usage::of(id);
    for n in 0..SETS {
        let (ssd, hdd) =
            (place.dir.sparse(&format!("ssd{n}"), 1 << 30), place.dir.sparse(&format!("hdd{n}"), 4 << 30));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "512k", "--block", "4k", "--writeback"]).ok();
        daemon.run(&["register", &ssd, &hdd]).ok().says(&["served"]);
    }
    let empty = Usage::of(id);
    let of_sets_kib = (empty.rss_kib - alone.rss_kib).saturating_sub(RESERVE_KIB);
    let kib_per_set = of_sets_kib as f64 / SETS as f64;
    let (woken, spent, seconds) = rest(id);
    let wakes_per_second = woken as f64 / SETS as f64 / seconds;
    println!("at rest, a set with an empty cache of 1 GiB: {kib_per_set:.0} KiB,");
    println!(
        "  {wakes_per_second:.2} wake-ups/s, {:.1} us of processor time a second",
        spent as f64 / 1e3 / SETS as f64 / seconds
    );
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    empty.threads.values().for_each(|(name, ..)| *names.entry(name).or_default() += 1);
    println!("  threads: {names:?}");

    let mut clients: Vec<Client> = (0..SETS)
        .map(|n| {
            let name = format!("bcache{n}");
            let client = Client::connect(Path::new(&place.dir.path(&format!("{name}.sock"))), &name).unwrap();
            client.set_timeout(Some(DEADLINE)).unwrap();
            client
        })
        .collect();
    for (what, write) in [("writes", true), ("read hits", false)] {
        let before = Usage::of(id);
        let took = load_all(&mut clients, write);
        let after = Usage::of(id);
        let requests = (SETS as u64 * REQUESTS) as f64;
        let (woken, spent) = after.since(&before);
        println!(
            "{what} of 4 KiB, depth {DEPTH}, all sets at once: {:.0}/s, {:.1} us of processor time and {:.2} wake-ups each, {:.0} KiB a set",
            requests / took.as_secs_f64(),
            spent as f64 / 1e3 / requests,
            woken as f64 / requests,
            (after.rss_kib - alone.rss_kib) as f64 / SETS as f64,
        );
    }
    let served = Usage::of(id);
    let kib_served = (served.rss_kib - alone.rss_kib) as f64 / SETS as f64;
    drop(clients);

    // Threads that answer the socket's clients come and go, however many sets there are.
    let of_sets = names.iter().filter(|(name, _)| name.starts_with("set-")).map(|(_, n)| n).sum::<usize>();
    assert_eq!(of_sets, SETS, "a thread for each set");
    assert!(empty.threads.len() - of_sets <= 12, "{names:?}");
    assert!(wakes_per_second <= 3.0, "{wakes_per_second} wake-ups a second for each set at rest");
    assert!(kib_per_set <= 6144.0, "{kib_per_set} KiB for each set");
    assert!(kib_served <= 12288.0, "{kib_served} KiB for each set that was used");
    daemon.stop();
}
