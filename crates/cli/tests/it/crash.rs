//! `kill -9` of `up` at random moments under load, again and again on the same devices.
//!
//! An oracle knows for every sector what it may hold after a crash: the last write that a completed flush covers, or a
//! later one that was begun. After each crash the set is checked and extracted as it lies there, then started again,
//! and everything is read: extract and server must agree, every sector must hold something that is allowed, and its
//! contents must not change later.
//!
//! `UBCACHE_CRASH_SEED` chooses the load and the moments, `UBCACHE_CRASH_ROUNDS` how many.

use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::load::{Load, Traffic, number, read_all};
use crate::world::*;

const SECTORS: usize = (24 << 20) / SECTOR - 16;

/// Load until so many answers have come, then the crash. Answers that were on their way still count.
pub fn load_and_kill(load: &mut Load, up: &Up, socket: &str, answers: u64) {
    let mut traffic = Traffic::connect(socket);
    let (mut seen, mut killed) = (0u64, false);
    loop {
        if !killed && traffic.top_up(load).is_err() {
            killed = true;
        }
        match traffic.answer(load) {
            Ok(error) => assert_eq!(error, 0, "{}", up.said()),
            Err(e) => {
                assert!(killed, "the server went away by itself: {e}: {}", up.said());
                return;
            }
        }
        seen += 1;
        if seen == answers {
            signal(up.pid(), Signal::KILL);
            killed = true;
        }
    }
}

#[test]
fn killed_again_and_again() {
    killed(1, 12 << 20, &["--bucket", "16k"]);
}

/// Most requests are less than a block then.
#[test]
fn killed_with_large_blocks() {
    killed(2, 16 << 20, &["--bucket", "64k", "--block", "4k", "--cache-replacement-policy", "fifo"]);
}

fn killed(seed: u64, cache_bytes: u64, options: &[&str]) {
    let seed = number("UBCACHE_CRASH_SEED", seed);
    let rounds = number("UBCACHE_CRASH_ROUNDS", 25);
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", cache_bytes), dir.sparse("hdd", 24 << 20));
    run(&[&["make", "-C", &ssd, "-B", &hdd, "--writeback"], options].concat()).ok();
    let mut load = Load::new(seed, SECTORS);
    let (socket, out) = (dir.path("sock"), dir.path("out"));
    let export = format!("--export=nbd={socket}");
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let mode = ["writeback", "writeback", "writeback", "writethrough", "writearound"]
            [load.rng.below(5) as usize];
        let mode = format!("--set=cache_mode={mode}");
        let cutoff = ["--set=sequential_cutoff=0", "--set=sequential_cutoff=4M"][load.rng.below(2) as usize];
        let percent = format!("--set=writeback_percent={}", [0, 10, 40][load.rng.below(3) as usize]);
        let delay = format!("--set=writeback_delay={}", load.rng.below(2));
        let args = ["-C", &ssd, "-B", &hdd, &export, &mode, cutoff, &percent, &delay];
        if load.rng.below(5) == 0 {
            // A crash while the last one is being recovered from.
            kill_while_starting(&args, load.rng.below(3_000_000));
        }
        let up = Up::start(&dir, 1, &args);
        // By tens, hundreds and thousands.
        let magnitude = 1 + load.rng.below(3) as u32 + u32::from(round % 4 == 0);
        let answers = 1 + load.rng.below(10u64.pow(magnitude));
        load_and_kill(&mut load, &up, &socket, answers);
        up.ended();

        run(&["check", "--quick", &ssd, &hdd]).ok();
        run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]).ok();
        let extracted = read(&out);
        load.oracle.judge(&extracted, &format!("{what}: extracted"));
        // Served again, without writeback, so that the crash is what is seen.
        let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
        let served = read_all(&socket, SECTORS);
        for (s, (a, b)) in extracted.chunks_exact(SECTOR).zip(served.chunks_exact(SECTOR)).enumerate() {
            assert!(a == b, "{what}: sector {s}: extracted {:02x?}, served {:02x?}", &a[..16], &b[..16]);
        }
        if load.rng.below(2) == 0 { up.kill() } else { drop(up.stop()) }
    }
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
    run(&["check", &ssd, &hdd]).ok();
    load.oracle.judge(&read(&hdd)[DATA_OFFSET as usize..], "the backing device alone");
}

/// Starts a server and kills it some way into its start.
fn kill_while_starting(args: &[&str], spins: u64) {
    let mut child = Command::new(program())
        .arg("up")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program");
    for _ in 0..spins {
        std::hint::spin_loop();
    }
    child.kill().expect("a child of ours");
    child.wait().expect("a child of ours");
}
