//! Changes of a set: garbage collection, devices that are detached and attached again, volumes.

use crate::world::*;

/// Loads that fill the cache many times over, on either side.
#[test]
fn many_rounds_of_gc() {
    unless_skipped!("many_rounds_of_gc");
    let mut w = World::with_cache(34 << 20);
    w.set().make(USUAL);
    let busy = |plan: Plan| Plan { ops: 1500, max_sectors: 256, ..plan };
    let mut kernel = w.kernel("gc");
    kernel.set(&w.backing, "writeback_percent", "0");
    kernel.set(&w.backing, "writeback_delay", "0");
    kernel.set_of_set("internal/copy_gc_enabled", "1");
    kernel.set_of_set("internal/gc_after_writeback", "1");
    for seed in 0..3 {
        let plan = busy(w.plan(seed));
        kernel.load(&w.backing, &plan, &mut w.model);
        kernel.set_of_set("internal/trigger_gc", "1");
    }
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
    w.check();

    let up = w.set().up(1, &["--set", "writeback_percent=0", "--set", "writeback_delay=0"]);
    for seed in 10..16 {
        let plan = busy(w.plan(seed));
        up.load(0, &plan, &mut w.model);
        up.judge(0, &mut w.model);
    }
    up.stop();
    w.check();
    w.kernels_turn("gc-2", 20);
    w.our_turn(21, &[]);
}

/// Detached by the kernel, written without its cache, and attached again by us; nothing old may come back.
#[test]
fn detached_and_attached_again() {
    unless_skipped!("detached_and_attached_again");
    let mut w = World::made();
    w.our_turn(1, WRITEBACK_OFF);
    let mut kernel = w.kernel("detach");
    kernel.detach(&w.backing);
    kernel.judge(&w.backing, &mut w.model);
    let plan = w.plan(2);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.stop();
    w.set().check();
    w.all_is_written_back();
    assert_eq!(w.state(), "detached");
    w.our_turn(3, WRITEBACK_OFF);
    assert_eq!(w.state(), "dirty");
    // Once more, and attached again by the kernel.
    let mut kernel = w.kernel("detach-2");
    kernel.judge(&w.backing, &mut w.model);
    kernel.detach(&w.backing);
    let plan = w.plan(4);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.attach(&w.backing);
    kernel.judge(&w.backing, &mut w.model);
    let plan = w.plan(5);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.stop();
    w.check();
    w.our_turn(6, &[]);
}

/// A backing device that was never in a set and is attached by the kernel to one that we made, next to another one.
#[test]
fn a_device_joins() {
    unless_skipped!("a_device_joins");
    let mut w = World::made();
    w.our_turn(1, WRITEBACK_OFF);
    let second = w.dir.disk("second", 16 << 20);
    let mut theirs = model(2, 16 << 20);
    let mut kernel = Kernel::boot("join", &[&w.cache, &w.backing, &second]);
    kernel.make("-B /dev/disk/second --writeback");
    kernel.register(&[&w.cache, &w.backing, &second]);
    kernel.attach(&second);
    let plan = theirs.plan(2);
    kernel.load(&second, &plan, &mut theirs);
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
    let set = Set::new(&w.dir, &w.cache, &[&w.backing, &second]);
    set.check();
    let up = set.up(2, &[]);
    up.judge(0, &mut w.model);
    up.judge(1, &mut theirs);
    up.stop();
    set.flush();
    set.check();
}

/// A dirty device that was started without its cache: what is in the cache must not come back.
#[test]
fn given_up_dirty_data_stays_away() {
    unless_skipped!("given_up_dirty_data_stays_away");
    let mut w = World::made();
    w.our_turn(1, WRITEBACK_OFF);
    let mut kernel = Kernel::boot("alone", &[&w.backing]);
    kernel.vm.sh("echo $(readlink -f /dev/disk/backing) > /sys/fs/bcache/register").ok();
    kernel.vm.wait_for("it is registered", "test -e /sys/block/vd*/bcache/running");
    kernel.vm.sh("echo 1 > $(echo /sys/block/vd*/bcache/running)").ok();
    kernel.vm.wait_for("it is there", "test -e /sys/block/bcache0");
    // Nothing was ever written back.
    let mut alone = model(1, BACKING_BYTES);
    alone.put(0..0, w.plan(0).after_version);
    kernel.judge(&w.backing, &mut alone);
    let plan = alone.plan(2);
    kernel.load(&w.backing, &plan, &mut alone);
    kernel.stop();
    w.model = alone;
    w.our_turn(3, WRITEBACK_OFF);
    w.kernels_turn("alone-2", 4);
}

#[test]
fn flash_only_volumes() {
    unless_skipped!("flash_only_volumes");
    let mut w = World::made();
    let mut volume = Model::new(9, (8 << 20) / 512);
    // The cached device gets slot 0, the volume slot 1.
    let mut kernel = w.kernel("volume");
    kernel.create_volume(1, "8M");
    let plan = volume.plan(1);
    kernel.load(Served::Volume(1), &plan, &mut volume);
    let device = kernel.device(Served::Volume(1));
    kernel.vm.sh(&format!("blkdiscard -o 1M -l 2M {device}")).ok();
    volume.put(2048..6144, 0);
    kernel.judge(Served::Volume(1), &mut volume);
    let plan = w.plan(2);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.stop();
    w.check();
    volume.judge(&w.set().extract_volume(1, 9), "extract");

    let up = w.set().up(2, &[]);
    up.judge(0, &mut w.model);
    up.judge(1, &mut volume);
    let plan = volume.plan(3);
    up.load(1, &plan, &mut volume);
    let plan = w.plan(4);
    up.load(0, &plan, &mut w.model);
    up.judge(1, &mut volume);
    up.stop();
    w.check();
    volume.judge(&w.set().extract_volume(1, 9), "extract");

    let mut kernel = w.kernel("volume-2");
    kernel.judge(Served::Volume(1), &mut volume);
    let plan = volume.plan(5);
    kernel.load(Served::Volume(1), &plan, &mut volume);
    kernel.judge(Served::Volume(1), &mut volume);
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
    w.check();
    volume.judge(&w.set().extract_volume(1, 9), "extract");
}

/// We create a volume, detach a device, and attach it again; the kernel finds all three as they are.
#[test]
fn a_kernel_serves_a_set_that_ubcache_changed() {
    unless_skipped!("a_kernel_serves_a_set_that_ubcache_changed");
    let mut w = World::made();
    let plan = w.plan(1);
    let mut up = w.set().up(1, WRITEBACK_OFF);
    up.load(0, &plan, &mut w.model);
    up.ask("create 4M scratch");
    up.ask("detach bcache0");
    let plan = w.plan(2);
    up.load(0, &plan, &mut w.model);
    up.stop();
    w.set().check();
    assert_eq!(w.state(), "detached");
    w.all_is_written_back();
    let mut kernel = w.kernel("detached");
    assert_eq!(kernel.get(&w.backing, "state"), "no cache");
    assert_eq!(kernel.get(Served::Volume(1), "label"), "scratch");
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();

    // Attached again, which takes another slot.
    let mut volume = Model::new(2, (4 << 20) / 512);
    let plans = [w.plan(3), volume.plan(4)];
    let up = w.set().up(2, WRITEBACK_OFF);
    up.judge(0, &mut w.model);
    up.load(0, &plans[0], &mut w.model);
    up.load(1, &plans[1], &mut volume);
    up.stop();
    w.check();
    let mut kernel = w.kernel("attached");
    assert_eq!(kernel.get(&w.backing, "state"), "dirty");
    kernel.judge(&w.backing, &mut w.model);
    kernel.judge(Served::Volume(1), &mut volume);
    let plan = volume.plan(5);
    kernel.load(Served::Volume(1), &plan, &mut volume);
    kernel.stop();
    w.check();
    volume.judge(&w.set().extract_volume(1, 2), "extract");
}
