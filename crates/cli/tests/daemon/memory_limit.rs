//! A process whose memory is limited: what disks and clients ask for beyond that is refused, and nothing else ends.

use ubcache_cli::nbd_client::{Ask, Client};

use crate::place::*;
use crate::world::*;

/// Address space of the daemon. All its sets together take half of it at most, one of them a quarter; NBD clients an eighth.
const LIMIT_BYTES: u64 = 1 << 30;
/// The largest read of the protocol.
const READ_BYTES: u32 = 32 << 20;

/// A daemon that cannot get more memory than [`LIMIT_BYTES`], with a volume of 128 MiB.
fn limited(place: &Place) -> Daemon {
    let limit = format!("--as={LIMIT_BYTES}");
    let daemon = place.start_by(&["prlimit", &limit], |_| ());
    let (ssd, hdd) = (place.dir.sparse("ssd1", 64 << 20), place.dir.sparse("hdd1", 128 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback", "--label", "large"]).ok();
    daemon.run(&["register", &ssd, &hdd]).ok();
    place.client("bcache0").write(0, &[7; 65536]).unwrap();
    daemon
}

/// The volume can be read and written.
fn is_served(client: &mut Client) {
    client.write(4096, &[8; 4096]).unwrap();
    assert_eq!(client.read(0, 8192).unwrap(), [[7; 4096], [8; 4096]].concat());
}

/// Two threads for each file system read requests into buffers of 16 MiB, which were all resident: 823 MB for 24 volumes.
#[test]
fn many_file_systems_fit_into_a_memory_limit() {
    const VOLUMES: usize = 24;
    if let Err(why) = export_fuse::probe().fuse {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let root = place.dir.root().display().to_string();
    let config = format!("exports = [\"fuse={root}/mnt/{{volume}}\"]\nmemory_limit = \"64MiB\"\n");
    std::fs::write(place.dir.path("ubcache.toml"), config).unwrap();
    std::fs::create_dir(place.dir.path("mnt")).unwrap();
    let mut make = vec!["make".to_owned(), "-C".to_owned(), place.dir.sparse("many", 64 << 20)];
    let disks: Vec<String> = (0..VOLUMES).map(|n| place.dir.sparse(&format!("disk{n}"), 8 << 20)).collect();
    make.extend(disks.iter().flat_map(|disk| ["-B".to_owned(), disk.clone()]));
    make.extend(["--bucket", "64k", "--writeback"].map(str::to_owned));
    run(&make).ok();
    let daemon = place.start();
    let register: Vec<&str> =
        ["register", &make[2]].into_iter().chain(disks.iter().map(String::as_str)).collect();
    daemon.run(&register).ok();
    for n in 0..VOLUMES {
        let file = format!("{root}/mnt/bcache{n}/bcache{n}");
        std::fs::write(&file, vec![7; 4 << 20]).expect("a volume");
        assert!(read(&file).iter().take(4 << 20).all(|b| *b == 7), "{file}");
    }
    let resident = resident_mib(&daemon);
    eprintln!("{resident} MiB resident");
    assert!(resident < 256, "{resident} MiB are resident");
    daemon.stop();
}

fn resident_mib(daemon: &Daemon) -> u64 {
    mib_of(daemon, "VmRSS:")
}

/// A figure of the daemon's memory, by its name in the kernel.
#[track_caller]
fn mib_of(daemon: &Daemon, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a figure");
    line.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).expect("a number") >> 10
}

/// A daemon with four sets took 103 MiB at rest, 202 MiB after large writes and reads, and 209 MiB when all was unregistered.
#[test]
fn memory_is_given_back_when_sets_stop() {
    const SETS: usize = 4;
    const MIB: usize = 1 << 20;
    if let Err(why) = export_fuse::probe().fuse {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let root = place.dir.root().display().to_string();
    std::fs::write(place.dir.path("ubcache.toml"), format!("exports = [\"fuse={root}/mnt/{{volume}}\"]\n"))
        .unwrap();
    std::fs::create_dir(place.dir.path("mnt")).unwrap();
    let devices: Vec<[String; 2]> = (0..SETS)
        .map(|n| {
            let (ssd, hdd) = (
                place.dir.sparse(&format!("cache{n}"), 256 << 20),
                place.dir.sparse(&format!("disk{n}"), 256 << 20),
            );
            run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "128k", "--writeback"]).ok();
            [ssd, hdd]
        })
        .collect();
    let daemon = place.start();
    devices.iter().for_each(|[ssd, hdd]| drop(daemon.run(&["register", ssd, hdd]).ok()));
    let rest = resident_mib(&daemon);
    let volumes: Vec<String> = (0..SETS).map(|n| format!("{root}/mnt/bcache{n}/bcache{n}")).collect();
    let load = |path: &String| {
        std::fs::write(path, vec![7; 192 * MIB]).expect("a volume");
        assert!(read(path).iter().take(192 * MIB).all(|b| *b == 7), "{path}");
    };
    let threads: Vec<_> = volumes
        .iter()
        .map(|path| {
            std::thread::spawn({
                let path = path.clone();
                move || load(&path)
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let loaded = resident_mib(&daemon);
    for path in devices.iter().flatten().rev() {
        daemon.run(&["unregister", path]).ok();
    }
    wait_until("memory that is given back", || resident_mib(&daemon) <= rest + 16);
    let after = resident_mib(&daemon);
    eprintln!("{rest} MiB at rest, {loaded} loaded, {after} unregistered");
    daemon.stop();
}

/// Cache devices with ever more buckets: one that takes more than a set's share, and several that fit one by one and not
/// together. An allocation that fails would end the process with every volume.
#[test]
fn sets_that_take_more_than_the_limit_are_refused() {
    let place = Place::new();
    let daemon = limited(&place);
    let mut client = place.client("bcache0");
    let buckets = |name: &str, count: u64| {
        let file = place.dir.sparse(name, count * 4096);
        run(&["make", "-C", &file, "--bucket", "4k", "--block", "4k"]).ok();
        file
    };
    let huge = buckets("huge", 16 << 20);
    let share = (LIMIT_BYTES / 4).to_string();
    daemon.run(&["register", &huge]).refused(&["16777216 buckets", "bytes of memory", &share]);
    is_served(&mut client);
    let all = (LIMIT_BYTES / 2).to_string();
    let mut accepted = 0;
    let refused = (0..8).find_map(|n| {
        let said = daemon.run(&["register", &buckets(&format!("large{n}"), 3 << 20)]);
        accepted += u32::from(said.code == 0);
        (said.code != 0).then_some(said)
    });
    let refused = refused.expect("eight of them do not fit");
    refused.refused(&["3145728 buckets", "do not fit", &all]);
    assert!(accepted > 0, "the first fits");
    is_served(&mut client);
    assert_eq!(daemon.volume("bcache0")["attached"], true);
    daemon.stop();
}

/// The limit of the process is lowered after its start. Its budget does not know the new limit, so the allocator refuses the tables
/// of a set.
#[test]
fn a_set_whose_tables_get_no_memory_is_refused() {
    const BUCKETS: u64 = 8 << 20;
    let place = Place::new();
    let (ssd, hdd) = (place.dir.sparse("ssd1", 64 << 20), place.dir.sparse("hdd1", 128 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
    let huge = place.dir.sparse("huge", BUCKETS * 4096);
    run(&["make", "-C", &huge, "--bucket", "4k", "--block", "4k"]).ok();
    // With a limit from the start on, the heap grows in small steps.
    let daemon = place.start_by(&["prlimit", &format!("--as={}", 2 * LIMIT_BYTES)], |_| ());
    daemon.run(&["register", &ssd, &hdd]).ok();
    let mut client = place.client("bcache0");
    client.write(0, &[7; 65536]).unwrap();
    let limit = format!("--as={}", (mib_of(&daemon, "VmSize:") + 80) << 20);
    let pid = format!("--pid={}", daemon.id());
    assert!(std::process::Command::new("prlimit").args([&pid, &limit]).status().unwrap().success());
    let said = daemon.run(&["register", &huge]);
    said.refused(&["8388608 buckets", "the system has no", "more memory"]);
    is_served(&mut client);
    daemon.stop();
}

/// Clients that ask for more data than there is memory, and read none of it.
#[test]
fn clients_that_ask_for_more_than_the_limit_are_held_back() {
    let place = Place::new();
    let daemon = limited(&place);
    let mut client = place.client("bcache0");
    let mut greedy = Vec::new();
    for n in 0..40u64 {
        // Once the budget is used up, a newcomer may be turned away.
        let Ok(mut one) = Client::connect(std::path::Path::new(&place.dir.path("bcache0.sock")), "bcache0")
        else {
            continue;
        };
        for tag in 0..4 {
            one.ask(Ask::Read(READ_BYTES), (n + tag) % 4 * u64::from(READ_BYTES) / 2, tag).unwrap();
        }
        one.send().unwrap();
        greedy.push(one);
    }
    assert!(greedy.len() as u64 * 4 * u64::from(READ_BYTES) > LIMIT_BYTES, "{} clients", greedy.len());
    for _ in 0..20 {
        is_served(&mut client);
    }
    // One of them reads after all, and gets what it asked for.
    let reply = greedy[0].receive().unwrap();
    assert_eq!((reply.error, reply.data.len()), (0, READ_BYTES as usize));
    drop(greedy);
    is_served(&mut client);
    daemon.stop();
}

/// Threads of two sets prepare themselves for short memory, and the warnings are about the process.
#[test]
fn missing_rights_for_short_memory_are_reported_once() {
    if !rustix::process::geteuid().is_root() {
        rig::skipped("only root has these capabilities to give up");
        return;
    }
    let place = Place::new();
    let (ssd, hdd) = (place.dir.sparse("ssd1", 8 << 20), place.dir.sparse("hdd1", 8 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--label", "two"]).ok();
    let without = ["prlimit", "--memlock=0", "setpriv", "--bounding-set=-sys_resource,-ipc_lock"];
    let daemon = place.start_by(&without, |_| ());
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["register", &ssd, &hdd]).ok();
    for volume in ["bcache0", "bcache1"] {
        place.client(volume).write(0, &[1; 4096]).unwrap();
    }
    let said = daemon.said();
    for (words, remedy) in [
        (
            "cannot mark this process as one that block devices depend on (PR_SET_IO_FLUSHER: ",
            "CAP_SYS_RESOURCE",
        ),
        ("cannot lock memory (", "CAP_IPC_LOCK, or `ulimit -l unlimited`"),
    ] {
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(words)).collect();
        assert_eq!(lines.len(), 1, "{words}: {said}");
        assert!(lines[0].starts_with("ubcache: warning: ") && lines[0].contains(remedy), "{}", lines[0]);
    }
    daemon.stop();
}
