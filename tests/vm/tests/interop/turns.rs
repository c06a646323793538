//! One side after the other, each stopping in good order.

use crate::world::*;

#[test]
fn kernel_formats_we_serve_kernel_serves() {
    unless_skipped!("kernel_formats_we_serve_kernel_serves");
    let mut w = World::new();
    let mut kernel = Kernel::boot("kernel-formats", &[&w.cache, &w.backing]);
    kernel.make("-C /dev/disk/cache -B /dev/disk/backing -b 64k --writeback");
    kernel.vm.sh("sync").ok();
    kernel.cut_power();
    w.set().superblocks_agree();
    w.our_turn(1, WRITEBACK_OFF);
    w.kernels_turn("kernel-formats-2", 2);
    w.our_turn(3, &[]);
}

#[test]
fn we_format_kernel_serves_we_serve() {
    unless_skipped!("we_format_kernel_serves_we_serve");
    let mut w = World::made();
    w.set().superblocks_agree();
    w.kernels_turn("we-format", 1);
    w.our_turn(2, WRITEBACK_OFF);
    w.kernels_turn("we-format-2", 3);
}

#[test]
fn kernel_stops_with_dirty_data_we_write_it_back() {
    unless_skipped!("kernel_stops_with_dirty_data_we_write_it_back");
    let mut w = World::made();
    let mut kernel = w.kernel("kernel-dirty");
    kernel.disable_writeback(&w.backing);
    let plan = w.plan(1);
    kernel.load(&w.backing, &plan, &mut w.model);
    assert_eq!(kernel.get(&w.backing, "state"), "dirty");
    kernel.stop();
    w.check();
    assert_eq!(w.state(), "dirty");
    w.set().flush();
    w.check();
    assert_eq!(w.state(), "clean");
    w.all_is_written_back();
    let mut kernel = w.kernel("kernel-dirty-2");
    assert_eq!(kernel.get(&w.backing, "state"), "clean");
    assert_eq!(kernel.get(&w.backing, "dirty_data"), "0.0k");
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
}

#[test]
fn we_stop_with_dirty_data_kernel_writes_it_back() {
    unless_skipped!("we_stop_with_dirty_data_kernel_writes_it_back");
    let mut w = World::made();
    w.our_turn(1, WRITEBACK_OFF);
    assert_eq!(w.state(), "dirty");
    let mut kernel = w.kernel("we-dirty");
    assert_eq!(kernel.get(&w.backing, "state"), "dirty");
    assert_ne!(kernel.get(&w.backing, "dirty_data"), "0.0k");
    kernel.judge(&w.backing, &mut w.model);
    kernel.write_back(&w.backing);
    assert_eq!(kernel.get(&w.backing, "dirty_data"), "0.0k");
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
    w.check();
    assert_eq!(w.state(), "clean");
    w.all_is_written_back();
}

#[test]
fn two_backing_devices_on_one_set() {
    unless_skipped!("two_backing_devices_on_one_set");
    let dir = Dir::new();
    let cache = dir.disk("cache", CACHE_BYTES);
    let backings = [dir.disk("one", 40 << 20), dir.disk("two", 24 << 20)];
    let mut models = [model(1, 40 << 20), model(2, 24 << 20)];
    let set = Set::new(&dir, &cache, &[&backings[0], &backings[1]]);
    set.make(USUAL);
    let plans = [models[0].plan(1), models[1].plan(2)];
    let up = set.up(2, WRITEBACK_OFF);
    for (i, (model, plan)) in models.iter_mut().zip(&plans).enumerate() {
        up.load(i, plan, model);
        up.judge(i, model);
    }
    up.stop();
    set.check();

    let mut kernel = Kernel::boot("two", &[&backings[1], &cache, &backings[0]]);
    // In another order than ours.
    kernel.register(&[&backings[1], &backings[0], &cache]);
    let plans = [models[0].plan(3), models[1].plan(4)];
    for ((backing, model), plan) in backings.iter().zip(&mut models).zip(&plans) {
        kernel.judge(backing, model);
        kernel.load(backing, plan, model);
    }
    for (backing, model) in backings.iter().zip(&mut models) {
        kernel.judge(backing, model);
    }
    kernel.stop();
    set.check();
    for (i, model) in models.iter_mut().enumerate() {
        set.judge(i, model);
    }
    let up = set.up(2, &[]);
    for (i, model) in models.iter_mut().enumerate() {
        up.judge(i, model);
    }
    up.stop();
    set.flush();
    set.check();
}

/// Thousands of keys, so that both sides have an index of more than one level, and nodes that were split.
#[test]
fn deep_indexes() {
    unless_skipped!("deep_indexes");
    let mut w = World::made();
    let tiny = |plan: Plan| Plan { max_sectors: 2, ops: 2500, reads_percent: 0, flushes_permille: 5, ..plan };
    let plan = tiny(w.plan(1));
    let up = w.set().up(1, WRITEBACK_OFF);
    up.load(0, &plan, &mut w.model);
    up.stop();
    w.check();
    let mut kernel = w.kernel("deep");
    assert_ne!(kernel.get_of_set("tree_depth"), "0");
    kernel.judge(&w.backing, &mut w.model);
    kernel.disable_writeback(&w.backing);
    let plan = tiny(w.plan(2));
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.judge(&w.backing, &mut w.model);
    kernel.stop();
    w.check();
    w.our_turn(3, &[]);
    w.set().flush();
    w.all_is_written_back();
}
