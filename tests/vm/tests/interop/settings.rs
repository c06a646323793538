//! Cache modes, labels, policies: what one side sets, the other one sees; and loads in every mode.

use crate::world::*;

/// Dirty data is there from before; then both sides run loads in this mode.
fn mode(mode: &str) {
    let mut w = World::made();
    w.our_turn(1, WRITEBACK_OFF);
    let setting = format!("cache_mode={mode}");
    w.our_turn(2, &["--set", &setting, "--set", "writeback_running=0"]);
    let mut kernel = w.kernel(&format!("mode-{mode}"));
    assert_eq!(kernel.cache_mode(&w.backing), mode, "as we have set it");
    kernel.judge(&w.backing, &mut w.model);
    let plan = w.plan(3);
    kernel.load(&w.backing, &plan, &mut w.model);
    kernel.judge(&w.backing, &mut w.model);
    if mode != "writeback" {
        // Then the backing device has it all.
        kernel.write_back(&w.backing);
    }
    // The kernel wants to be asked twice: writing the same mode is no change.
    kernel.set(&w.backing, "cache_mode", "writeback");
    kernel.set(&w.backing, "cache_mode", mode);
    kernel.stop();
    w.check();
    // As the old tool says it.
    let name = if mode == "none" { "no caching" } else { mode };
    let superblock = w.set().superblock(&w.backing);
    assert_eq!(text(&superblock["backing"]["cache_mode_name"]), name, "as the kernel has set it");
    if mode != "writeback" {
        assert_eq!(w.state(), "clean");
        w.all_is_written_back();
    }
    w.our_turn(4, &[]);
}

#[test]
fn writeback() {
    unless_skipped!("writeback");
    mode("writeback");
}

#[test]
fn writethrough() {
    unless_skipped!("writethrough");
    mode("writethrough");
}

#[test]
fn writearound() {
    unless_skipped!("writearound");
    mode("writearound");
}

#[test]
fn none() {
    unless_skipped!("none");
    mode("none");
}

#[test]
fn labels_modes_and_policies() {
    unless_skipped!("labels_modes_and_policies");
    let w = World::new();
    // The longest label.
    let label = "a label of exactly 32 bytes here";
    let options = ["--label", label, "--cache-replacement-policy", "random"];
    w.set().make(&[USUAL, &options[..]].concat());
    let mut kernel = w.kernel("labels");
    assert_eq!(kernel.get(&w.backing, "label"), label);
    let policy = "cat /sys/block/*/bcache/cache_replacement_policy";
    assert_eq!(kernel.vm.sh(policy).ok().line(), "lru fifo [random]");
    kernel.set(&w.backing, "label", "of the kernel");
    kernel.set(&w.backing, "cache_mode", "writearound");
    kernel.vm.sh("echo fifo > $(echo /sys/block/*/bcache/cache_replacement_policy)").ok();
    kernel.stop();

    w.set().check();
    let superblock = w.set().superblock(&w.backing);
    assert_eq!(text(&superblock["label"]), "of the kernel");
    assert_eq!(text(&superblock["backing"]["cache_mode_name"]), "writearound");
    assert_eq!(text(&w.set().superblock(&w.cache)["cache"]["replacement_name"]), "fifo");
    let settings =
        ["--set", "label=ours", "--set", "cache_mode=none", "--set", "cache_replacement_policy=lru"];
    w.set().up(1, &settings).stop();
    w.set().check();

    let mut kernel = w.kernel("labels-2");
    assert_eq!(kernel.get(&w.backing, "label"), "ours");
    assert_eq!(kernel.cache_mode(&w.backing), "none");
    assert_eq!(kernel.vm.sh(policy).ok().line(), "[lru] fifo random");
    kernel.stop();
}
