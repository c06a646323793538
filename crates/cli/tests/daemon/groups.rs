//! Groups in the daemon: dirty data on two cache devices, a cache device that is missing at the start, and its return.

use serde_json::Value;
use ubcache_cli::nbd_client::Client;

use crate::place::*;
use crate::world::*;

const DATA: [u8; 4096] = [7; 4096];

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
    // Either of the two has it all.
    let rest = [&group.second_ssd, &new];
    for lost in rest {
        let dir = Dir::new();
        let copies: Vec<String> =
            rest.iter().filter(|ssd| **ssd != lost).map(|ssd| dir.file("ssd", &read(ssd))).collect();
        let disk = dir.file("hdd", &read(&place.hdd));
        let export = format!("--export=nbd={}", dir.path("sock"));
        let up = Up::start(&dir, 1, &["-C", &copies[0], "-B", &disk, &export]);
        let mut client = Client::connect(dir.path("sock").as_ref(), "").unwrap();
        for byte in 1..5u8 {
            assert!(
                client.read(u64::from(byte) * 4096, 4096).unwrap() == [byte; 4096],
                "{byte}: {}",
                up.said()
            );
        }
        drop(client);
        up.stop();
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
