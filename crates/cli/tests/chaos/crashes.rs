//! SIGKILL, SIGSTOP and SIGCONT under load: whatever was answered is there afterwards, flushed or not.

use rustix::process::Signal;

use crate::host;
use crate::load::{Load, Traffic, number};
use crate::place::*;
use crate::world::*;

const SSD: u64 = 12 << 20;
const HDD: u64 = 24 << 20;

/// One life of a server: load, perhaps a pause in it, and one of the ways to end.
fn life(place: &Place, load: &mut Load, by: &[&str]) {
    let mode = ["writeback", "writeback", "writeback", "writethrough"][load.rng.below(4) as usize];
    let mode = format!("--set=cache_mode={mode}");
    let cutoff = ["--set=sequential_cutoff=0", "--set=sequential_cutoff=4M"][load.rng.below(2) as usize];
    let percent = format!("--set=writeback_percent={}", [0, 10, 40][load.rng.below(3) as usize]);
    let delay = format!("--set=writeback_delay={}", load.rng.below(2));
    let args = [mode.as_str(), cutoff, &percent, &delay];
    if load.rng.below(4) == 0 {
        place.killed_while_starting(&args, load.rng.below(20_000_000));
    }
    let up = place.up_by(by, &args);
    let mut traffic = Traffic::connect(&place.socket);
    // By tens, hundreds and thousands.
    let magnitude = 1 + load.rng.below(3) as u32;
    let answers = 1 + load.rng.below(10u64.pow(magnitude));
    traffic.run(load, answers);
    if load.rng.below(2) == 0 {
        traffic.top_up(load).expect("a server");
        freeze(up.pid());
        no_server_answers(&place.socket);
        thaw(up.pid());
        let answers = 1 + load.rng.below(200);
        traffic.run(load, answers);
    }
    traffic.top_up(load).expect("a server");
    match load.rng.below(4) {
        0 | 1 => {
            signal(up.pid(), Signal::KILL);
            last_words(&mut traffic, load);
            up.ended();
        }
        2 => {
            freeze(up.pid());
            no_server_answers(&place.socket);
            signal(up.pid(), Signal::KILL);
            last_words(&mut traffic, load);
            up.ended();
        }
        // In the middle of an orderly stop, or behind it.
        _ => {
            signal(up.pid(), Signal::TERM);
            for _ in 0..load.rng.below(30) {
                if traffic.answer(load).is_err() {
                    break;
                }
            }
            signal(up.pid(), Signal::KILL);
            last_words(&mut traffic, load);
            up.ended();
        }
    }
}

/// Starts and process crashes; `by` starts the servers.
pub fn many_lives(seed: u64, rounds: u64, by: &[&str]) {
    let place = Place::new(SSD, HDD);
    let mut load = place.load(seed);
    for round in 0..number("UBCACHE_CHAOS_ROUNDS", rounds) {
        life(&place, &mut load, by);
        place.check();
        let up = place.up_by(by, &["--set=writeback_running=0"]);
        load.judge_served(&place.socket, &format!("round {round}: served again"));
        if load.rng.below(2) == 0 { up.kill() } else { drop(up.stop()) }
    }
    place.finish(&mut load);
}

#[test]
fn killed_and_stopped() {
    if host::ready(&["unshare"]) {
        many_lives(11, 14, &[]);
    }
}

/// What was answered is written back offline as well, without a server in between; and a start that cannot read it
/// does not continue.
#[test]
fn killed_and_written_back_offline() {
    if !host::ready(&["unshare"]) {
        return;
    }
    let place = Place::new(32 << 20, HDD);
    let mut load = place.load(12);
    for _ in 0..3 {
        let up = place.up(&["--set=sequential_cutoff=0", "--set=writeback_running=0"]);
        let mut traffic = Traffic::connect(&place.socket);
        traffic.run(&mut load, 150);
        signal(up.pid(), Signal::KILL);
        last_words(&mut traffic, &mut load);
        up.ended();
        let hidden = place.hide_crash_log();
        let refused = place.try_up(&[], &[]).err().expect("a refusal");
        assert!(refused.contains("cannot be read"), "{refused}");
        place.flush().refused(&["cannot be read"]);
        drop(hidden);
        place.flush().ok();
        place.check();
        let alone = &read(&place.hdd)[DATA_OFFSET as usize..][..load.oracle.sectors() * SECTOR];
        load.oracle.judge(alone, "written back offline");
    }
    place.finish(&mut load);
}

/// fio's verification continues over pauses of the server, and finds everything.
#[test]
fn paused_under_fio() {
    if !host::ready(&["unshare", "fio"]) {
        return;
    }
    let place = Place::new(32 << 20, 128 << 20);
    let mut up = place.up(&["--set=sequential_cutoff=0", "--set=writeback_delay=0"]);
    let mut fio = tool("fio", "fio");
    fio.args(["--name=paused", "--ioengine=nbd", "--rw=randwrite", "--bsrange=512-64k", "--blockalign=512"]);
    fio.args(["--iodepth=32", "--size=64M", "--verify=crc32c", "--verify_fatal=1", "--fsync=40"]);
    fio.args(["--verify_state_save=0", "--randseed=4"]);
    fio.arg(format!("--uri={}", up.uri(0))).current_dir(place.dir.root());
    let fio = std::thread::spawn(move || succeed(fio));
    let mut requests = 0;
    for _ in 0..12 {
        requests += 150;
        // Each is a pause in the writes or in the reads that verify them.
        wait_until("more requests", || {
            let stats = up.stats();
            let count = |what: &str| stats["volumes"][0][what].as_u64().expect("a number");
            count("writes") + count("reads") >= requests || fio.is_finished()
        });
        freeze(up.pid());
        no_server_answers(&place.socket);
        thaw(up.pid());
    }
    let said = fio.join().expect("fio finds what it wrote");
    assert!(said.contains("err= 0"), "{said}");
    up.stop();
    place.check();
}
