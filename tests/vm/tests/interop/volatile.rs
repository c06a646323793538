//! Power losses of machines whose disks lose unflushed writes; and crashes of ubcache in the middle
//! of its own recovery, at chosen requests to its devices.

use ubcache_vm::Guest;
use ubcache_vm::guest_load;

use crate::world::*;

const WRITE_BACK: &[&str] = &["--set", "writeback_percent=0", "--set", "writeback_delay=0"];

/// A load that would take long, and flushes often.
fn long(plan: Plan) -> Plan {
    Plan { ops: 20_000, flushes_permille: 60, ..plan }
}

/// Serves in the guest, and loses power when this many requests of a load are flushed.
#[track_caller]
fn we_lose_power(w: &mut World, label: &str, seed: u64, requests: u32, options: &[&str]) {
    let mut ours = Guest::boot(Vm::build(label), &w.cache, &w.backing);
    ours.up(options);
    ours.judge(&mut w.model);
    let plan = long(w.plan(seed));
    guest_load::begin(&mut ours.vm, ubcache_vm::guest::DEVICE, &plan);
    guest_load::wait(&mut ours.vm, &plan, requests);
    let progress = ours.cut_power();
    w.model.interrupted(&plan, &guest_load::flushed(&plan, &progress));
    assert!(w.model.open_sectors() > 0, "the load had ended");
    w.check();
}

/// Data goes to the backing device as soon as possible.
#[test]
fn we_lose_power_and_our_disks_forget() {
    unless_skipped!("we_lose_power_and_our_disks_forget");
    let mut w = World::volatile(&Power::new(1));
    we_lose_power(&mut w, "forget", 1, 700, WRITE_BACK);
    // We recover, and lose power again.
    we_lose_power(&mut w, "forget-2", 2, 400, WRITE_BACK);
    w.kernels_turn("forget-3", 3);
}

/// The cache fills up with dirty data.
#[test]
fn we_lose_power_with_a_cache_full_of_dirty_data() {
    unless_skipped!("we_lose_power_with_a_cache_full_of_dirty_data");
    let mut w = World::volatile(&Power::new(2));
    w.our_turn(1, WRITEBACK_OFF);
    we_lose_power(&mut w, "full", 2, 700, WRITEBACK_OFF);
    w.our_turn(3, &[]);
    w.kernels_turn("full-2", 4);
}

/// Nothing is written back here: what a kernel has written back and a disk has forgotten, that kernel takes for clean
/// (docs/compat.md, item 2).
#[test]
fn kernel_loses_power_and_its_disks_forget() {
    unless_skipped!("kernel_loses_power_and_its_disks_forget");
    let mut w = World::volatile(&Power::new(1));
    for round in 0..2 {
        let mut kernel = w.kernel(&format!("forgets-{round}"));
        kernel.disable_writeback(&w.backing);
        kernel.judge(&w.backing, &mut w.model);
        let plan = long(w.plan(10 + round));
        kernel.begin_load(&w.backing, &plan);
        kernel.wait_for_load(&plan, 500);
        let progress = kernel.cut_power();
        w.model.kernel_forgot(&plan, &guest_load::flushed(&plan, &progress));
        assert!(w.model.open_sectors() > 0, "the load had ended");
        w.check();
        // The kernel itself makes the same of it.
        let twin = [w.dir.copy_of(&w.cache, "cache-twin"), w.dir.copy_of(&w.backing, "backing-twin")];
        let mut kernel = Kernel::boot(&format!("forgets-{round}-twin"), &[&twin[0], &twin[1]]);
        kernel.register(&[&twin[0], &twin[1]]);
        kernel.judge(&twin[1], &mut w.model);
        kernel.stop();
        drop(twin);
        std::fs::remove_file(w.dir.path("cache-twin.img")).unwrap();
        std::fs::remove_file(w.dir.path("backing-twin.img")).unwrap();
        w.our_turn(20 + round, if round == 0 { WRITEBACK_OFF } else { &[] });
    }
}

/// The process is killed at every write and flush of its recovery, with the load waiting; nothing that was answered is
/// missing in the end, flushed or not, and no request has failed.
#[test]
fn killed_in_our_own_recovery() {
    unless_skipped!("killed_in_our_own_recovery");
    let power = Power::new(1);
    let mut w = World::volatile(&power);
    let mut ours = Guest::boot(Vm::build("killed-again"), &w.cache, &w.backing);
    ours.up(WRITEBACK_OFF);
    let plan = Plan { ops: 1500, max_sectors: 16, flushes_permille: 10, ..w.plan(1) };
    guest_load::begin(&mut ours.vm, ubcache_vm::guest::DEVICE, &plan);
    guest_load::wait(&mut ours.vm, &plan, 100);
    let mut kills = 0;
    ours.sh("crash; gone").ok();
    for changes in 0.. {
        power.stop_after(changes);
        ours.begin(WRITEBACK_OFF);
        let ready = ready_or(&mut ours, &power);
        if ready {
            power.release();
            break;
        }
        kills += 1;
        ours.kill();
        // What it had asked of its disks arrives after its crash.
        power.release();
        ours.sh("gone").ok();
        if changes % 2 == 1 {
            // Serves for a while, so that there is something new to replay.
            ours.up(WRITEBACK_OFF);
            ours.sh("moves; crash; gone").ok();
        }
    }
    println!("killed {kills} times before it was ready");
    assert!(kills >= 2, "its recovery writes and flushes");
    guest_load::end(&mut ours.vm, &plan);
    w.model.ran(&plan);
    ours.judge(&mut w.model);
    ours.down();
    ours.cut_power();
    w.check();
    w.kernels_turn("killed-again-2", 2);
}

/// Waits until it is ready, or stands still because no more changes are allowed; says which.
#[track_caller]
fn ready_or(ours: &mut Guest, power: &Power) -> bool {
    let mut ready = false;
    ubcache_vm::wait_until("it recovers", || {
        ready = ours.is_ready();
        ready || power.is_used_up()
    });
    ready
}

/// The power goes at every write and flush of our recovery, one after the other, on disks that forget.
#[test]
fn power_goes_in_our_own_recovery() {
    unless_skipped!("power_goes_in_our_own_recovery");
    let power = Power::new(2);
    let mut w = World::volatile(&power);
    we_lose_power(&mut w, "power-again", 1, 500, WRITEBACK_OFF);
    let mut cuts = 0;
    for changes in 0.. {
        let mut ours = Guest::boot(Vm::build(&format!("power-again-{changes}")), &w.cache, &w.backing);
        power.stop_after(changes);
        ours.begin(WRITEBACK_OFF);
        let ready = ready_or(&mut ours, &power);
        ours.cut_power();
        w.check();
        if ready {
            break;
        }
        cuts += 1;
    }
    println!("lost power {cuts} times before it was ready");
    assert!(cuts >= 2, "its recovery writes and flushes");
    w.kernels_turn("power-again-end", 2);
    w.our_turn(3, &[]);
}
