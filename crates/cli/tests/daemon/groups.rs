//! Groups in the daemon: dirty data on two cache devices, a cache device that is missing at the start, and its return.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use ubcache_cli::nbd_client::Client;

use crate::place::*;
use crate::world::*;

const DATA: [u8; 4096] = [7; 4096];
/// The number of blocks that a client under load writes.
const BLOCKS: usize = 64;

/// A directory with a group of two cache devices and two disks; each cache device has one of them.
struct Group {
    place: Place,
    second_ssd: String,
    second_hdd: String,
}

impl Group {
    fn new() -> Group {
        let place = Place::new();
        let (second_ssd, second_hdd) = (place.dir.sparse("ssd2", 8 << 20), place.dir.sparse("hdd2", 8 << 20));
        let devices = ["-C", &place.ssd, "-C", &second_ssd, "-B", &place.hdd, "-B", &second_hdd];
        run(&[&["make", "--bucket", "8k", "--writeback", "--wipe"], &devices[..]].concat()).ok();
        let tunables = "[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n";
        place.configure(&format!("takeover_after_s = 0\n{tunables}"));
        Group { place, second_ssd, second_hdd }
    }

    fn start_registered(&self) -> Daemon {
        let daemon = self.place.start();
        let Group { place, second_ssd, second_hdd } = self;
        daemon.run(&["register", &place.ssd, second_ssd, &place.hdd, second_hdd]).ok();
        daemon.run(&["set-label", &place.hdd, "one"]).ok();
        daemon.run(&["set-label", second_hdd, "two"]).ok();
        wait_for_copies(&daemon);
        daemon
    }
}

fn copy_of(daemon: &Daemon, volume: &str) -> Value {
    daemon.volume(volume)["copy"].clone()
}

fn wait_for_copies(daemon: &Daemon) {
    wait_until("two copies", || ["one", "two"].iter().all(|v| copy_of(daemon, v)["complete"] == true));
}

/// A client of the volume with this label. Disks that are registered together get their names in any order.
fn client(place: &Place, daemon: &Daemon, label: &str) -> Client {
    place.client(daemon.volume(label)["name"].as_str().unwrap())
}

fn write(place: &Place, daemon: &Daemon, label: &str, bytes: &[u8]) {
    let mut client = client(place, daemon, label);
    client.write(0, bytes).unwrap();
    client.flush().unwrap();
}

fn read_block(place: &Place, daemon: &Daemon, label: &str) -> Vec<u8> {
    client(place, daemon, label).read(0, 4096).unwrap()
}

/// The set that serves a volume.
fn set_of(daemon: &Daemon, volume: &str) -> String {
    let status = daemon.json(&["status"]);
    let sets = status["sets"].as_array().unwrap();
    let has = |set: &&Value| set["volumes"].as_array().unwrap().iter().any(|v| v["label"] == volume);
    sets.iter().find(has).unwrap()["id"].as_str().unwrap().to_owned()
}

/// Each of the two cache devices alone, with the disk, has these bytes in these blocks.
fn each_has(caches: [&str; 2], disk: &str, blocks: &[(usize, u8)]) {
    for kept in caches {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.file("ssd", &read(kept)), dir.file("hdd", &read(disk)));
        let export = format!("--export=nbd={}", dir.path("sock"));
        let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
        let mut client = Client::connect(dir.path("sock").as_ref(), "").unwrap();
        for (block, byte) in blocks {
            let found = client.read(*block as u64 * 4096, 4096).unwrap();
            assert!(found == [*byte; 4096], "{kept}, block {block}: {}", up.said());
        }
        drop(client);
        up.stop();
    }
}

/// A client that writes and reads all the time.
struct Load {
    stop: Arc<AtomicBool>,
    /// The number of blocks that were written, for those who wait for clients to go on.
    written: Arc<AtomicUsize>,
    thread: JoinHandle<Vec<(usize, u8)>>,
}

impl Load {
    fn start(mut client: Client) -> Load {
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (ends, counts) = (stop.clone(), written.clone());
        let thread = std::thread::spawn(move || {
            let mut blocks: Vec<(usize, u8)> = (0..BLOCKS).map(|block| (block, 0)).collect();
            for n in 0usize.. {
                if n >= BLOCKS && ends.load(Ordering::Relaxed) {
                    break;
                }
                let (block, byte) = (n % BLOCKS, (n % 251) as u8);
                client.write(block as u64 * 4096, &[byte; 4096]).unwrap();
                if n % 4 == 0 {
                    client.flush().unwrap();
                }
                blocks[block].1 = byte;
                let (other, byte) = blocks[n * 7 % BLOCKS];
                let is_written = n > BLOCKS;
                let found = client.read(other as u64 * 4096, 4096).unwrap();
                assert!(!is_written || found == [byte; 4096], "block {other} in step {n}");
                counts.store(n, Ordering::Relaxed);
            }
            client.flush().unwrap();
            blocks
        });
        Load { stop, written, thread }
    }

    /// Waits until the client has written more.
    fn goes_on(&self) {
        let before = self.written.load(Ordering::Relaxed);
        wait_until("more writes", || self.written.load(Ordering::Relaxed) > before + BLOCKS);
    }

    /// Ends the client. Returns what it has written.
    fn end(self) -> Vec<(usize, u8)> {
        self.goes_on();
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// The cache device is an empty set in no group, and the daemon does not have it.
#[track_caller]
fn is_empty_set(daemon: &Daemon, ssd: &str) {
    assert!(daemon.devices().iter().all(|d| d["path"] != ssd), "{:?}", daemon.devices());
    let shown = run(&["group", "show", "-C", ssd, "--json"]).ok().json();
    assert!(shown["group_uuid"].is_null(), "{shown}");
    run(&["check", ssd]).ok();
    let slots = run(&["dump", ssd, "uuids", "--json"]).ok().json();
    let slots = slots["slots"].as_array().unwrap();
    assert!(slots.iter().all(|slot| slot["kind"] == "invalidated"), "{slots:?}");
}

#[test]
fn dirty_data_is_on_two_cache_devices_and_a_start_without_one_takes_over() {
    let group = Group::new();
    let place = &group.place;
    let daemon = group.start_registered();
    write(place, &daemon, "one", &DATA);
    write(place, &daemon, "two", &[8; 4096]);
    let both = format!("protected, dirty data is also on {}", group.second_ssd);
    daemon.run(&["status"]).ok().says(&["no problems", &both]);
    assert!(copy_of(&daemon, "one")["one_copy_since_unix_seconds"].is_null());
    let sets = ["one", "two"].map(|volume| set_of(&daemon, volume));
    assert_ne!(sets[0], sets[1]);
    assert_eq!(copy_of(&daemon, "one")["second_set"], *sets[1]);
    daemon.stop();
    run(&[
        "group",
        "show",
        "-C",
        &place.ssd,
        "-C",
        &group.second_ssd,
        "-B",
        &place.hdd,
        "-B",
        &group.second_hdd,
    ])
    .ok();

    // The first cache device is away. The other one takes its disk over.
    let away = place.dir.path("away");
    std::fs::rename(&place.ssd, &away).unwrap();
    let daemon = place.start();
    wait_until("a takeover", || daemon.state_of(&place.hdd) == "served");
    assert_eq!(set_of(&daemon, "one"), sets[1]);
    assert!(read_block(place, &daemon, "one") == DATA);
    assert!(read_block(place, &daemon, "two") == [8; 4096]);
    let status = daemon.json(&["status"]);
    let problems = status["problems"].as_array().unwrap();
    let alone: Vec<&Value> = problems.iter().filter(|p| p["kind"] == "one_copy").collect();
    assert_eq!(alone.len(), 2, "{status}");
    assert!(
        alone[0]["text"].as_str().unwrap().contains("4.0 KiB of dirty data are on one cache device only")
    );
    write(place, &daemon, "one", &[9; 4096]);
    let says = |daemon: &Daemon| {
        daemon.run(&["status"]).ok().says(&["DEGRADED since 20", "8.0 KiB of dirty data on"])
    };
    says(&daemon);
    let since = |daemon: &Daemon| copy_of(daemon, "one")["one_copy_since_unix_seconds"].as_u64();
    let lost_at = since(&daemon).unwrap();
    // The time outlives the daemon.
    daemon.stop();
    let daemon = place.start();
    wait_until("a takeover", || daemon.state_of(&place.hdd) == "served");
    assert_eq!(since(&daemon), Some(lost_at));
    says(&daemon);

    // It comes back: what it has is out of date, and it becomes the copy.
    std::fs::rename(&away, &place.ssd).unwrap();
    daemon.run(&["register", &place.ssd]).ok();
    wait_for_copies(&daemon);
    assert_eq!(set_of(&daemon, "one"), sets[1]);
    assert!(read_block(place, &daemon, "one") == [9; 4096]);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    assert_eq!(since(&daemon), None);
    daemon.stop();

    // The same the other way round, after a crash.
    std::fs::rename(&group.second_ssd, &away).unwrap();
    let daemon = place.start();
    wait_until("a takeover", || daemon.state_of(&group.second_hdd) == "served");
    wait_until("a takeover", || daemon.state_of(&place.hdd) == "served");
    assert!(read_block(place, &daemon, "one") == [9; 4096]);
    assert!(read_block(place, &daemon, "two") == [8; 4096]);
    daemon.kill();
    run(&["check", &place.ssd, &place.hdd, &group.second_hdd]).ok();
}

/// The SSD is exchanged under a client: a new one joins the group, and the old one leaves. The client does not notice it.
#[test]
fn a_cache_device_is_exchanged_while_its_disk_is_in_use() {
    let group = Group::new();
    let place = &group.place;
    let daemon = group.start_registered();
    let mut client = client(place, &daemon, "one");
    let mut write = |byte: u8| {
        client.write(u64::from(byte) * 4096, &[byte; 4096]).unwrap();
        client.flush().unwrap();
        assert!(client.read(u64::from(byte) * 4096, 4096).unwrap() == [byte; 4096]);
    };
    write(1);
    let before = set_of(&daemon, "one");
    let new = place.dir.sparse("new", 8 << 20);
    run(&["group", "add", "-C", &place.ssd, &new]).ok();
    daemon.run(&["register", &new]).ok();
    write(2);
    daemon.run(&["unregister", &place.ssd]).ok();
    write(3);
    wait_for_copies(&daemon);
    assert_ne!(set_of(&daemon, "one"), before);
    write(4);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    let devices = daemon.devices();
    assert!(devices.iter().all(|d| d["path"] != *place.ssd && d["state"] == "served"), "{devices:?}");
    daemon.stop();
    for byte in 1..5u8 {
        each_has([&group.second_ssd, &new], &place.hdd, &[(usize::from(byte), byte)]);
    }
}

/// A cache device that has left its group is registered again at once. A task of the stopped set slept for up to 10 s and kept the device:
/// `register` said `in use by this process`.
#[test]
fn a_cache_device_that_has_left_comes_back_at_once() {
    let group = Group::new();
    let daemon = group.start_registered();
    wait_for_copies(&daemon);
    for ssd in [&group.second_ssd, &group.place.ssd] {
        daemon.run(&["unregister", ssd]).ok();
        daemon.run(&["register", ssd]).ok();
        wait_for_copies(&daemon);
    }
    daemon.stop();
}

#[test]
fn a_second_cache_device_joins_a_plain_set_under_load() {
    let place = Place::new();
    let daemon = place.start_registered();
    let new = place.dir.file("new", &vec![1; 8 << 20]);
    daemon.run(&["group", "add", &place.ssd, &place.hdd]).refused(&["is registered", "ubcache unregister"]);
    std::fs::copy(&place.hdd, place.dir.path("used")).unwrap();
    let used = place.dir.path("used");
    daemon.run(&["group", "add", &place.ssd, &used]).refused(&[&used, "--wipe"]);
    assert!(daemon.volume("one")["copy"].is_null(), "a refused command has changed the set");
    let load = Load::start(place.client("bcache0"));
    load.goes_on();
    let dry = daemon.run(&["group", "add", &place.ssd, &new, "--dry-run"]).ok();
    dry.says(&[&new]);
    assert!(read(&new) == vec![1; 8 << 20], "a dry run has written");
    daemon.run(&["group", "add", &place.ssd, &new]).ok().says(&["group add done", &new, "is in the group"]);
    load.goes_on();
    assert_eq!(copy_of(&daemon, "one")["complete"], true);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    let blocks = load.end();
    daemon.stop();
    each_has([&place.ssd, &new], &place.hdd, &blocks);
    // It is a member at the next start, too.
    let daemon = place.start();
    wait_until("a copy", || copy_of(&daemon, "one")["complete"] == true);
    daemon.stop();
}

#[test]
fn a_cache_device_leaves_its_group_under_load() {
    let group = Group::new();
    let place = &group.place;
    let daemon = group.start_registered();
    let load = Load::start(client(place, &daemon, "one"));
    load.goes_on();
    let second = set_of(&daemon, "two");
    let removed = daemon.run(&["group", "remove", &group.second_ssd, &place.ssd]);
    removed.ok().says(&["group remove done", &place.ssd, "has left the group"]);
    load.goes_on();
    assert_eq!(["one", "two"].map(|volume| set_of(&daemon, volume)), [second.clone(), second]);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    is_empty_set(&daemon, &place.ssd);
    // The data of the rest is on one device. That one cannot leave.
    let dirty = daemon.volume("one")["dirty_bytes"].as_u64().unwrap();
    assert!(dirty >= BLOCKS as u64 * 4096);
    daemon.run(&["group", "remove", &group.second_ssd, &group.second_ssd]).refused(&["found none"]);
    daemon.run(&["group", "add", &group.second_ssd, &place.ssd]).refused(&["--wipe"]);
    daemon.run(&["group", "add", &group.second_ssd, &place.ssd, "--wipe"]).ok();
    wait_for_copies(&daemon);
    // The client goes on with the set that has joined again.
    daemon.run(&["group", "remove", &place.ssd, &group.second_ssd]).ok();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    let blocks = load.end();
    is_empty_set(&daemon, &group.second_ssd);
    daemon.stop();
    each_has([&place.ssd, &place.ssd], &place.hdd, &blocks);
}

/// The only SSD of a set is replaced, and one of the two of a group.
#[test]
fn a_cache_device_is_replaced_under_load() {
    let place = Place::new();
    let daemon = place.start_registered();
    let load = Load::start(place.client("bcache0"));
    load.goes_on();
    let [new, third, fourth] = ["new", "third", "fourth"].map(|name| place.dir.sparse(name, 8 << 20));
    let replaced = daemon.run(&["group", "replace", &place.ssd, &place.ssd, &new]);
    replaced.ok().says(&["group replace done", &new, "is in the group", &place.ssd, "has left the group"]);
    load.goes_on();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    is_empty_set(&daemon, &place.ssd);
    daemon.run(&["group", "add", &new, &third]).ok();
    // The set that serves the volume leaves, and then the one that has its copy.
    let replaced = daemon.run(&["group", "replace", &third, &new, &fourth]).ok();
    replaced.says(&["have one copy until it is copied"]);
    is_empty_set(&daemon, &new);
    load.goes_on();
    daemon.run(&["group", "replace", &third, &fourth, &new, "--wipe"]).ok();
    is_empty_set(&daemon, &fourth);
    assert_eq!(copy_of(&daemon, "one")["complete"], true);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    let blocks = load.end();
    daemon.stop();
    each_has([&third, &new], &place.hdd, &blocks);
}

/// Begins a change of the group of a set and cancels its job when it says `note`. Returns how the job has ended.
fn cancelled(daemon: &Daemon, path: &str, body: &Value, note: &str) -> String {
    let (status, begun) = daemon.http("POST", path, &body.to_string());
    assert_eq!(status, 202, "{begun}");
    let job = format!("/v1/jobs/{}", begun["job"]["id"]);
    let now = || daemon.http("GET", &job, "").1["job"].clone();
    wait_until(note, || {
        let job = now();
        let notes = job["notes"].as_array().unwrap();
        notes.iter().any(|said| said.as_str().unwrap().contains(note)) || job["state"] != "running"
    });
    // It may have ended.
    daemon.http("DELETE", &job, "");
    wait_until("the end of a job", || now()["state"] != "running");
    now()["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_cancelled_change_of_a_group_is_taken_back() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = set_of(&daemon, "one");
    let load = Load::start(place.client("bcache0"));
    load.goes_on();
    let new = place.dir.sparse("new", 8 << 20);
    let path = |verb: &str| format!("/v1/sets/{set}/group/{verb}");
    let is_taken_back = || {
        is_empty_set(&daemon, &new);
        assert!(copy_of(&daemon, "one").is_null(), "the set stays in a group of one");
        assert_eq!(set_of(&daemon, "one"), set);
        daemon.run(&["status"]).ok().says(&["no problems"]);
        load.goes_on();
    };
    let add = json!({"device": new, "force": true, "wipe": true});
    wait_until("a cancelled add", || {
        let end = cancelled(&daemon, &path("add"), &add, "is copied");
        if end == "done" {
            daemon.run(&["group", "remove", &set, &new]).ok();
        }
        end == "cancelled"
    });
    is_taken_back();
    let replace = json!({"old": place.ssd, "new": new, "force": true, "wipe": true});
    wait_until("a cancelled replace", || {
        let end = cancelled(&daemon, &path("replace"), &replace, "is copied");
        if end == "done" {
            daemon.run(&["group", "replace", &new, &new, &place.ssd, "--wipe"]).ok();
        }
        end == "cancelled" || set_of(&daemon, "one") != set
    });
    if set_of(&daemon, "one") == set {
        is_taken_back();
    }
    let blocks = load.end();
    daemon.stop();
    each_has([&place.ssd, &place.ssd], &place.hdd, &blocks);
}

#[test]
fn a_change_of_a_group_that_loses_data_is_refused() {
    let place = Place::new();
    let daemon = place.start_registered();
    let remove = |device: &str| daemon.run(&["group", "remove", &place.ssd, device]);
    remove(&place.ssd).refused(&["expected the group of", "found none", "nothing was changed"]);
    remove(&place.hdd).refused(&["expected a cache device", "nothing was changed"]);
    remove("/nowhere").refused(&["/nowhere"]);
    daemon.run(&["group", "add", &place.ssd]).usage();
    write(&place, &daemon, "one", &DATA);
    let new = place.dir.sparse("new", 8 << 20);
    daemon.run(&["group", "add", &place.ssd, &new]).ok();
    // The disk has its copy on a device that goes away in another way: the daemon has no other one.
    daemon.run(&["unregister", &new]).ok();
    let refused = remove(&place.ssd);
    refused.refused(&["4.0 KiB of dirty data of one", "ubcache detach one", "ubcache group add"]);
    assert_eq!(daemon.volume("one")["dirty_bytes"], 4096);
    daemon.run(&["register", &new]).ok();
    wait_until("a copy", || copy_of(&daemon, "one")["complete"] == true);
    // Data of a flash-only volume is nowhere else.
    daemon.run(&["volume", "create", &place.ssd, "1MiB", "--label", "flash"]).ok();
    remove(&place.ssd).refused(&["flash-only", "ubcache volume delete flash"]);
    daemon.run(&["volume", "delete", "flash", "--force"]).ok();
    remove(&place.ssd).ok();
    assert!(read_block(&place, &daemon, "one") == DATA);
    daemon.stop();
}

/// A disk is not registered, and the SSD that serves it has gone: the copy of its dirty data is all that there is. The SSD with that copy
/// left the group, and the copy ended.
#[test]
fn a_cache_device_with_the_last_copy_stays_in_its_group() {
    let group = Group::new();
    let place = &group.place;
    let daemon = group.start_registered();
    write(place, &daemon, "one", &DATA);
    wait_for_copies(&daemon);
    for device in [&place.hdd, &group.second_hdd, &place.ssd] {
        daemon.run(&["unregister", device]).ok();
    }
    let refused = daemon.run(&["group", "remove", &group.second_ssd, &group.second_ssd]);
    refused.refused(&["4.0 KiB", "register", "nothing was changed"]);
    daemon.stop();
    // The data is there.
    each_has([&group.second_ssd, &group.second_ssd], &place.hdd, &[(0, DATA[0])]);
}
