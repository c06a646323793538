//! `up`: its lines, exports, settings and signals.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use ubcache_cli::nbd_client::Client;

use crate::world::*;

fn fresh(dir: &Dir, options: &[&str]) -> [String; 2] {
    let files = [dir.sparse("ssd", 16 << 20), dir.sparse("hdd", 16 << 20)];
    let args = ["make", "-C", &files[0], "-B", &files[1], "--bucket", "16k"];
    run(&[&args, options].concat()).ok();
    files
}

#[test]
fn the_ready_line_as_text() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let socket = dir.path("a b.sock");
    let mut child = Command::new(program())
        .args(["up", "-C", &ssd, "-B", &hdd, "--export", &format!("nbd={socket}")])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    let escaped = socket.replace(' ', "%20");
    assert_eq!(line, format!("bcache0 ready: nbd+unix:///bcache0?socket={escaped}\n"));
    signal(child.id(), Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!Path::new(&socket).exists(), "the socket goes with the server");
}

/// A disk that was made for set G was attached to set F by `up -C F -B disk` without a word.
#[test]
fn a_device_that_was_made_for_another_set_is_attached_only_on_demand() {
    let dir = Dir::new();
    let [ssd, _] = fresh(&dir, &[]);
    let (other, disk) = (dir.sparse("other-ssd", 8 << 20), dir.sparse("other-hdd", 16 << 20));
    run(&["make", "-C", &other, "-B", &disk, "--bucket", "8k"]).ok();
    let set_of = |device: &str| {
        let said = run(&["super", device, "--json"]).ok();
        said.json()["set_uuid"].as_str().expect("a set").to_owned()
    };
    let (ours, theirs, before) = (set_of(&ssd), set_of(&disk), std::fs::read(&disk).unwrap());
    let socket = format!("nbd={}", dir.path("s"));
    let args = ["up", "-C", &ssd, "-B", &disk, "--export", &socket];
    run(&args).refused(&[&disk, &ours, &theirs, "--attach"]);
    assert!(std::fs::read(&disk).unwrap() == before, "nothing was written to it");
    let up = Up::start(&dir, 1, &[&args[1..], &["--attach"]].concat());
    up.stop();
    assert_eq!(set_of(&disk), ours);
}

#[test]
fn the_ready_line_as_json() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &["--label", "x"]);
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=nbd={}", dir.path("s"))]);
    let event = up.ready[0].clone();
    assert_eq!(event["volume"], "bcache0");
    assert_eq!(event["size_bytes"].as_u64(), Some((16 << 20) - DATA_OFFSET));
    assert_eq!(event["backing"], hdd);
    assert_eq!(event["backing_uuid"], run(&["super", &hdd, "--json"]).ok().json()["uuid"]);
    assert_eq!(event["exports"][0]["kind"], "nbd");
    let said = up.stop();
    assert!(said.contains("was initialised") && said.contains("SIGTERM"), "{said}");
}

/// `up` over NBD warns when there is no crash log: a process crash then loses completed, unflushed writes.
#[test]
fn a_set_without_a_crash_log_is_told() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=nbd={}", dir.path("s"))]);
    let kept = has_crash_log(up.ready[0]["set_uuid"].as_str().unwrap());
    let said = up.stop();
    assert_eq!(said.matches(NO_CRASH_LOG).count(), usize::from(!kept), "{said}");
}

/// Names follow the order of -B; flash-only volumes come last; each is found under its name alone.
#[test]
fn several_volumes() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 16 << 20);
    let disks = [("b", 2u64), ("a", 3)].map(|(n, mib)| dir.sparse(n, mib << 20));
    run(&["make", "-C", &ssd, "-B", &disks[0], "-B", &disks[1], "--bucket", "16k"]).ok();
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 2, &["-C", &ssd, "-B", &disks[1], "-B", &disks[0], &export]);
    let size = |name: &str| Client::connect(Path::new(&socket), name).map(|c| c.size_bytes());
    assert_eq!(size("bcache0").unwrap(), (3 << 20) - DATA_OFFSET);
    assert_eq!(size("bcache1").unwrap(), (2 << 20) - DATA_OFFSET);
    assert!(size("").is_err(), "the empty name is one of two");
    assert!(size("bcache2").is_err());
    up.stop();
}

#[test]
fn the_empty_name_with_one_volume() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let socket = dir.path("s");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=nbd={socket}")]);
    assert_eq!(Client::connect(Path::new(&socket), "").unwrap().size_bytes(), (16 << 20) - DATA_OFFSET);
    up.stop();
}

/// What is written through one export is read through the other.
#[test]
fn several_exports() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &["--writeback"]);
    let (a, b) = (dir.path("a"), dir.path("b"));
    let exports = [&a, &b].map(|s| format!("--export=nbd={s}"));
    let tcp = ["--export=nbd=localhost:0", "--nbd-allow-unauthenticated-tcp"];
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &exports[0], &exports[1], tcp[0], tcp[1]]);
    let ways = up.ready[0]["exports"].as_array().unwrap().clone();
    assert_eq!(ways.len(), 3);
    let mut first = Client::connect(Path::new(&a), "").unwrap();
    first.write(8192, &[5; 512]).unwrap();
    assert_eq!(Client::connect(Path::new(&b), "").unwrap().read(8192, 512).unwrap(), [5; 512]);
    let tcp = ways[2]["address"].as_str().unwrap();
    assert!(tcp.starts_with("nbd://") && !tcp.contains(":0/"), "{tcp}");
    let mut info = tool("nbdinfo", "libnbd-bin");
    info.args(["--size", tcp]);
    assert_eq!(succeed(info).trim(), ((16 << 20) - DATA_OFFSET).to_string());
    drop(first);
    up.stop();
}

#[test]
fn auto_says_what_it_chose() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd]);
    let way = up.ready[0]["exports"][0].clone();
    let said = up.stop();
    assert!(said.contains("export: "), "{said}");
    let address = way["address"].as_str().unwrap().to_owned();
    assert!(!address.is_empty(), "{said}");
}

#[test]
fn settings_reach_the_engine() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let export = format!("--export=nbd={}", dir.path("s"));
    let base = ["-C", &ssd, "-B", &hdd, &export];
    let more = ["--set=cache_mode=writeback", "--set", "label=new", "--set=set.io_error_limit=3"];
    let up = Up::start(&dir, 1, &[&base[..], &more].concat());
    up.stop();
    // These two are in the superblock.
    let sb = run(&["super", &hdd, "--json"]).ok().json();
    assert_eq!(
        (sb["backing"]["cache_mode_name"].as_str(), sb["label"].as_str()),
        (Some("writeback"), Some("new"))
    );

    let refused = |setting: &str| run(&[&["up"], &base[..], &["--set", setting]].concat()).usage();
    refused("no_such=1").says(&["unknown tunable no_such; known are", "writeback_percent"]);
    refused("writeback_precent=1").says(&["did you mean writeback_percent?"]);
    refused("writeback_percent=99").says(&["expected 0 to 70 %, found 99"]);
    refused("device.journal_delay_ms=1").says(&["write set.journal_delay_ms"]);
    refused("io_error_limit=1").says(&["set.io_error_limit", "device.io_error_limit"]);
    refused("cache_mode=sideways").says(&["expected one of writethrough, writeback", "found \"sideways\""]);
    refused("writeback_percent=much").says(&["expected a decimal number, 0 to 70 %"]);
    // The range depends on the other one.
    let more = ["--set=writeback_percent=50", "--set=cutoff_writeback=60"];
    Up::start(&dir, 1, &[&base[..], &more].concat()).stop();
    let said = run(&[&["up"], &base[..], &["--set=writeback_percent=50"]].concat());
    said.refused(&["expected 0 to 40 %, found 50"]);
    refused("writeback_percent").says(&["KEY=VALUE"]);
}

#[test]
fn figures_on_request() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &["--writeback"]);
    let socket = dir.path("s");
    let mut up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=nbd={socket}")]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    client.write(0, &[1; 4096]).unwrap();
    client.read(0, 4096).unwrap();
    client.read(1 << 20, 4096).unwrap();
    client.flush().unwrap();
    let stats = up.stats();
    assert_eq!((stats["schema_version"].as_u64(), stats["event"].as_str()), (Some(1), Some("stats")));
    let volume = &stats["volumes"][0];
    assert_eq!(volume["dirty_bytes"], 4096);
    assert_eq!((&volume["cache_hits"], &volume["cache_misses"]), (&1.into(), &1.into()));
    assert_eq!((&volume["writes"], &volume["reads"], &volume["flushes"]), (&1.into(), &2.into(), &1.into()));
    assert_eq!(volume["metadata_requests"], 0, "a client over NBD cannot say so");
    assert_eq!(volume["state"], "dirty");
    assert_eq!(stats["set"]["dirty_bytes"], 4096);
    drop(client);
    up.stop();
}

/// A running set is changed by commands on its standard input; what they did is there after a restart.
#[test]
fn commands_on_standard_input() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &["--writeback"]);
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let mut up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    client.write(0, &[7; 4096]).unwrap();
    let done = |answer: &serde_json::Value| assert_eq!(answer["event"], "done", "{answer}");
    let error = |answer: &serde_json::Value| {
        assert_eq!(answer["event"], "error", "{answer}");
        answer["error"].as_str().unwrap().to_owned()
    };
    assert!(error(&up.ask("nonsense")).contains("stats"));
    assert!(error(&up.ask("set writeback_percent=abc")).contains("writeback_percent"));
    assert!(error(&up.ask("detach bcache7")).contains("bcache7"));
    assert!(error(&up.ask("create 0")).contains("0 bytes"));
    done(&up.ask("set label=from-the-console"));
    done(&up.ask("set writeback_percent=0"));
    done(&up.ask("create 1M scratch"));
    done(&up.ask("gc"));
    assert_eq!(up.stats()["volumes"][0]["dirty_bytes"], 4096, "still waits for its delay");
    let answer = up.ask("detach bcache0 --wipe");
    done(&answer);
    assert!(answer["wiped"]["zeroed_bytes"].as_u64().unwrap() > 1 << 20, "{answer}");
    assert!(up.ask("wipe")["wiped"]["whole_buckets"].as_u64().unwrap() > 0);
    assert_eq!(up.stats()["volumes"][0]["state"], "no cache");
    assert!(error(&up.ask("detach bcache0")).contains("not attached"));
    client.write(4096, &[8; 4096]).unwrap();
    assert_eq!(client.read(0, 8192).unwrap(), [[7; 4096], [8; 4096]].concat());
    drop(client);
    up.stop();
    run(&["check", &ssd]).ok();
    assert_eq!(
        run(&["super", "--json", &hdd]).ok().json()["label"],
        "from-the-console",
        "persistent, as in the kernel"
    );

    let up = Up::start(&dir, 1, &["-C", &ssd, &export]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    client.write(0, &[9; 4096]).unwrap();
    drop(client);
    up.stop();
}

/// Without its cache, a device that has nothing dirty: what the cache had of it is invalid from then on.
#[test]
fn without_the_cache() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    client.write(0, &[1; 4096]).unwrap();
    client.read(0, 4096).unwrap();
    drop(client);
    up.stop();

    let up = Up::start(&dir, 1, &["-B", &hdd, "--without-cache", &export]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    client.write(0, &[2; 4096]).unwrap();
    drop(client);
    let said = up.stop();
    assert!(said.contains("invalid from now on"), "{said}");
    run(&["super", &hdd]).ok().says(&["inconsistent"]);

    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), [2; 4096], "not what the cache had");
    drop(client);
    up.stop();
    run(&["check", &ssd, &hdd]).ok();
    run(&["up", "-B", &hdd, "--without-cache", "--set=set.errors=panic", &export]).usage();
    run(&["up", "-B", &hdd, "-C", &ssd, "--without-cache"]).usage();
}

/// A stop answers what is under way; afterwards everything that was answered is there, flushed or not.
#[test]
fn a_stop_under_load_loses_nothing() {
    for (i, number) in [Signal::INT, Signal::TERM].into_iter().enumerate() {
        let dir = Dir::new();
        let [ssd, hdd] = fresh(&dir, &["--writeback"]);
        let socket = dir.path("s");
        let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=nbd={socket}")]);
        let mut client = Client::connect(Path::new(&socket), "").unwrap();
        let mut answered = Vec::new();
        let (mut sent, mut signalled, pid) = (0u64, false, up.pid());
        loop {
            while client.pending() < 16 {
                sent += 1;
                let at = sent % 1000 * 4096;
                if client.ask_write(at, &[(sent % 251) as u8; 4096], false, sent).is_err() {
                    break;
                }
            }
            // Once: a second signal ends the program at once. The condition holds again if the next reply is a refusal.
            if !signalled && (sent == 500 + i as u64 * 16 || sent > 500 && answered.len() == 484) {
                signal(pid, number);
                signalled = true;
            }
            match client.receive() {
                Ok(reply) if reply.error == 0 => answered.push(reply.tag),
                // Refused because of the stop; what comes later is refused too.
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let (status, said) = up.ended();
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(answered.len() >= 400, "{}", answered.len());
        run(&["check", &ssd, &hdd]).ok();
        let out = dir.path("out");
        run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
        let contents = read(&out);
        // A block may hold a later write than the last answered one.
        for tag in &answered {
            let at = (tag % 1000 * 4096) as usize;
            let later = (*tag..=sent).step_by(1000).map(|t| (t % 251) as u8);
            assert!(
                later.into_iter().any(|b| contents[at..at + 4096].iter().all(|c| *c == b)),
                "write {tag}"
            );
        }
    }
}

/// Clients that do not read their answers cannot hold up a second signal.
#[test]
fn a_second_signal_ends_it_at_once() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &["--writeback"]);
    let socket = dir.path("s");
    let args = ["-C", &ssd, "-B", &hdd, &format!("--export=nbd={socket}"), "--simulate-delay-ms=1500"];
    let up = Up::start(&dir, 1, &args);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    // A miss, which takes a while.
    client.ask(ubcache_cli::nbd_client::Ask::Read(4096), 0, 1).unwrap();
    client.ask(ubcache_cli::nbd_client::Ask::Flush, 0, 2).unwrap();
    assert_eq!(client.receive().unwrap().tag, 2);
    signal(up.pid(), Signal::INT);
    wait_until("the stop", || up.said().contains("stopping"));
    signal(up.pid(), Signal::INT);
    let (status, said) = up.ended();
    assert_eq!(status.code(), Some(130), "{said}");
    run(&["check", &ssd, &hdd]).ok();
}

#[test]
fn the_end_of_the_input_stops_it() {
    let dir = Dir::new();
    let [ssd, hdd] = fresh(&dir, &[]);
    let export = format!("--export=nbd={}", dir.path("s"));
    let mut command = Command::new(program());
    command.args(["up", "-C", &ssd, "-B", &hdd, &export, "--stdin"]);
    Said::of(output(command)).ok().says(&["bcache0 ready"]);
}

/// The line of a disk with a label began with its number.
#[test]
fn the_ready_line_begins_with_the_label() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 16 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--label", "data"]).ok();
    let export = format!("--export=nbd={}", dir.path("s"));
    for (more, ready) in [(&[][..], "data, bcache0 ready: nbd+unix:"), (&["--json"], "\"label\":\"data\"")] {
        let mut command = Command::new(program());
        command.args(["up", "-C", &ssd, "-B", &hdd, &export, "--stdin"]).args(more);
        Said::of(output(command)).ok().says(&[ready]);
    }
}

#[test]
fn slow_disks_are_slow() {
    let dir = Dir::new();
    let [_, hdd] = fresh(&dir, &[]);
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 1, &["-B", &hdd, "--without-cache", &export, "--simulate-hdd"]);
    let mut client = Client::connect(Path::new(&socket), "").unwrap();
    let start = std::time::Instant::now();
    for i in 0..20u64 {
        client.read(i * 7_654_400 % (15 << 20), 4096).unwrap();
    }
    // The shortest seek takes 1 ms.
    assert!(start.elapsed().as_millis() >= 20, "{:?}", start.elapsed());
    drop(client);
    up.stop();
}

/// Whether this host lets us make loop devices over FUSE; a test that needs them says so and ends if not.
fn block_devices() -> bool {
    let host = export_fuse::probe();
    let why = host.fuse.and(host.loop_device).err();
    if let Some(why) = &why {
        rig::skipped(why);
    }
    why.is_none()
}

fn mount(device: &str, dir: &str) {
    std::fs::create_dir_all(dir).unwrap();
    let mut mount = tool("mount", "util-linux");
    mount.args(["-t", "ext4", device, dir]);
    succeed(mount);
}

fn unmount(dir: &str) {
    let mut unmount = tool("umount", "util-linux");
    unmount.arg(dir);
    succeed(unmount);
}

/// A block device with a file system; the stop waits until it is unmounted.
#[test]
fn a_block_device_by_fuse() {
    if !block_devices() {
        return;
    }
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 256 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
    let volumes = dir.path("volumes");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=fuse={volumes}")]);
    let ways = up.ready[0]["exports"].as_array().unwrap().clone();
    assert_eq!((ways[0]["kind"].as_str(), ways[1]["kind"].as_str()), (Some("loop"), Some("fuse")));
    let (device, file) = (up.uri(0), ways[1]["address"].as_str().unwrap().to_owned());
    assert_eq!(file, format!("{volumes}/bcache0"));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), (256 << 20) - DATA_OFFSET);
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs");
    mkfs.args(["-q", "-F", &device]);
    succeed(mkfs);
    let mnt = dir.path("mnt");
    mount(&device, &mnt);
    let contents: Vec<u8> = (0..5_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(format!("{mnt}/file"), &contents).unwrap();
    signal(up.pid(), Signal::TERM);
    wait_until("the refusal", || up.said().contains("in use"));
    assert!(std::fs::read(format!("{mnt}/file")).unwrap() == contents, "still served");
    unmount(&mnt);
    let (status, said) = up.ended();
    assert_eq!(status.code(), Some(0), "{said}");
    run(&["check", &ssd, &hdd]).ok();

    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=fuse={volumes}")]);
    mount(&up.uri(0), &mnt);
    assert!(std::fs::read(format!("{mnt}/file")).unwrap() == contents);
    unmount(&mnt);
    up.stop();
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
    let mut fsck = tool("e2fsck", "e2fsprogs");
    fsck.args(["-fn", &format!("{hdd}?offset={DATA_OFFSET}")]);
    succeed(fsck);
}

/// A second signal does not wait for users of a volume; data that was synced before is there.
#[test]
fn a_second_signal_takes_a_mounted_device_away() {
    if !block_devices() {
        return;
    }
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 256 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
    let volumes = dir.path("volumes");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &format!("--export=fuse={volumes}")]);
    let device = up.uri(0);
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs");
    mkfs.args(["-q", "-F", &device]);
    succeed(mkfs);
    let mnt = dir.path("mnt");
    mount(&device, &mnt);
    std::fs::write(format!("{mnt}/file"), b"synced").unwrap();
    std::fs::File::open(format!("{mnt}/file")).unwrap().sync_all().unwrap();
    signal(up.pid(), Signal::TERM);
    wait_until("the refusal", || up.said().contains("in use"));
    signal(up.pid(), Signal::TERM);
    let (status, said) = up.ended();
    assert_eq!(status.code(), Some(143), "{said}");
    let mut unmount = tool("umount", "util-linux");
    unmount.args(["-l", &mnt]);
    succeed(unmount);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&volumes), "{mounts}");
    run(&["check", &ssd, &hdd]).ok();
    let out = dir.path("out");
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    let mut debugfs = tool("debugfs", "e2fsprogs");
    // The journal of the file system is replayed by the one who opens it for writing.
    let mut fsck = tool("e2fsck", "e2fsprogs");
    fsck.args(["-fy", &out]);
    let code = output(fsck).status.code();
    assert!(matches!(code, Some(0 | 1)), "{code:?}");
    debugfs.args(["-R", "cat file", &out]);
    assert_eq!(succeed(debugfs), "synced");
}
