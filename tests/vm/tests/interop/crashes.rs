//! One side ends in the middle of its work, and the other one continues.

use ubcache_vm::guest_load::flushed;

use crate::world::*;

/// A load that would take long.
fn long(plan: Plan) -> Plan {
    Plan { ops: 20_000, flushes_permille: 50, ..plan }
}

/// A kernel runs a load, and loses power when this many of its requests are flushed. What it would have made of that
/// itself is what extract makes of it.
#[track_caller]
fn kernel_loses_power(w: &mut World, label: &str, seed: u64, requests: u32) {
    let mut kernel = w.kernel(label);
    kernel.judge(&w.backing, &mut w.model);
    let plan = long(w.plan(seed));
    kernel.begin_load(&w.backing, &plan);
    kernel.wait_for_load(&plan, requests);
    let progress = kernel.cut_power();
    w.model.kernel_interrupted(&plan, &flushed(&plan, &progress));
    assert!(w.model.open_sectors() > 0, "the load had ended");
    w.check();
}

#[track_caller]
fn we_are_killed(w: &mut World, seed: u64, requests: u32, options: &[&str]) {
    let plan = long(w.plan(seed));
    let up = w.set().up(1, options);
    up.judge(0, &mut w.model);
    up.load_and_kill(0, &plan, requests, &mut w.model);
    w.check();
}

#[test]
fn kernel_loses_power_we_recover() {
    unless_skipped!("kernel_loses_power_we_recover");
    let mut w = World::made();
    kernel_loses_power(&mut w, "power", 1, 1000);
    // The kernel itself makes the same of it.
    let twin = [w.dir.copy_of(&w.cache, "cache-twin"), w.dir.copy_of(&w.backing, "backing-twin")];
    let mut kernel = Kernel::boot("power-twin", &[&twin[0], &twin[1]]);
    kernel.register(&[&twin[0], &twin[1]]);
    kernel.judge(&twin[1], &mut w.model);
    kernel.stop();
    w.our_turn(2, &[]);
    w.kernels_turn("power-2", 3);
}

#[test]
fn we_are_killed_kernel_recovers() {
    unless_skipped!("we_are_killed_kernel_recovers");
    let mut w = World::made();
    we_are_killed(&mut w, 1, 3000, &[]);
    w.kernels_turn("killed", 2);
    w.our_turn(3, WRITEBACK_OFF);
}

#[test]
fn crashes_in_turns() {
    unless_skipped!("crashes_in_turns");
    let mut w = World::made();
    let writeback = ["--set", "writeback_percent=0", "--set", "writeback_delay=0"];
    for round in 0..3 {
        we_are_killed(
            &mut w,
            10 + round,
            2000 << round,
            [&writeback[..], &[], WRITEBACK_OFF][round as usize],
        );
        kernel_loses_power(&mut w, &format!("turn-{round}"), 20 + round, 500 << round);
    }
    w.our_turn(30, &[]);
    w.set().flush();
    w.check();
    w.all_is_written_back();
}

/// With 4 KiB blocks and 4 KiB buckets both sides collect garbage all the time.
#[test]
fn crashes_with_small_buckets_and_large_blocks() {
    unless_skipped!("crashes_with_small_buckets_and_large_blocks");
    let mut w = World::with_cache(32 << 20);
    w.block_sectors = 8;
    w.set().make(&["--bucket", "16k", "--block", "4k", "--writeback", "--cache-replacement-policy", "fifo"]);
    for round in 0..2 {
        kernel_loses_power(&mut w, &format!("small-{round}"), 20 + round, 2000);
        we_are_killed(
            &mut w,
            10 + round,
            6000,
            &["--set", "writeback_percent=0", "--set", "writeback_delay=0"],
        );
    }
    w.kernels_turn("small-end", 30);
}

/// The kernel is killed while it still recovers from our crash.
#[test]
fn crash_in_recovery() {
    unless_skipped!("crash_in_recovery");
    let mut w = World::made();
    we_are_killed(&mut w, 1, 3000, &[]);
    // Registered, and gone at once.
    w.kernel("recovery").cut_power();
    w.check();
    // Now ours: ready, and gone at once.
    w.set().up(1, &[]).kill();
    w.check();
    w.kernels_turn("recovery-2", 2);
}

/// Why the model allows more after a crash of the kernel (docs/compat.md, item 5): a write past the cache is on the
/// backing device while the key that takes the old copy away still waits for the journal. After the crash the old copy
/// is valid for both sides, and when it leaves the cache the sector changes, with no write.
#[test]
fn the_kernel_leaves_copies_that_are_older_than_the_backing_device() {
    unless_skipped!("the_kernel_leaves_copies_that_are_older_than_the_backing_device");
    let mut w = World::made();
    let mut kernel = w.kernel("old-copies");
    let plan = w.plan(1);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.write_back(&w.backing);
    kernel.set(&w.backing, "cache_mode", "writearound");
    let device = kernel.device(&w.backing);
    // The journal knows that all is written back; of what comes now it learns in a minute.
    kernel.vm.sh(&format!("dd if=/dev/null of={device} conv=notrunc,fsync")).ok();
    kernel.set_of_set("journal_delay_ms", "60000");
    kernel
        .vm
        .sh(&format!("tr '\\0' x </dev/zero | dd of={device} bs=1M count=4 iflag=fullblock oflag=direct"))
        .ok();
    kernel.cut_power();

    // What is in the cache hides what was written; every other sector shows it.
    let on_backing = ubcache_vm::load::raw_map(&w.backing.path, DATA_OFFSET, w.model.tag);
    let written = 0..(4 << 20) / 512;
    assert!(on_backing.versions[written.clone()].iter().all(|v| *v == FOREIGN));
    let now = w.set().extract(0, w.model.tag);
    let hidden = written.filter(|s| now.versions[*s] != FOREIGN).count();
    assert!(hidden > 500, "old copies of {hidden} sectors");
    let mut kernel = w.kernel("old-copies-2");
    assert_eq!(kernel.map(&w.backing, w.model.tag).versions, now.versions, "the kernel reads what we read");
    // The copies leave the cache.
    kernel.detach(&w.backing);
    assert_eq!(kernel.map(&w.backing, w.model.tag).versions, on_backing.versions);
    kernel.stop();
}
