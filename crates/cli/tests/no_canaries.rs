//! The program that users run has none of the deliberate bugs that the simulator looks for: not even switched off.

use std::path::Path;

/// Cargo unites the features that all crates of a build ask for, so this test reads the program that was built.
#[test]
fn this_build_has_no_deliberate_bugs() {
    const { assert!(!engine::CANARIES) };
}

/// Crates other than the engine, which has them, and the simulator, whose feature is off by default, do not know of
/// the feature: nothing that is built together with the program can switch it on.
#[test]
fn no_manifest_asks_for_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates =
        std::fs::read_dir(root.join("crates")).expect("the crates").map(|d| d.expect("a crate").path());
    let others = ["bench/engine", "bench/caches", "tests/vm", "fuzz", "."].map(|d| root.join(d));
    let mut seen = 0;
    for dir in crates.chain(others) {
        let file = dir.join("Cargo.toml");
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        seen += 1;
        let lines: Vec<&str> =
            text.lines().filter(|l| l.contains("canary") && !l.trim_start().starts_with('#')).collect();
        let allowed: &[&str] = match dir.strip_prefix(&root).ok().and_then(Path::to_str) {
            Some("crates/engine") => &["canary = []"],
            Some("crates/sim") => &["canary = [\"engine/canary\"]", "required-features = [\"canary\"]"],
            _ => &[],
        };
        let wrong: Vec<_> = lines.iter().filter(|l| !allowed.contains(&l.trim())).collect();
        assert!(wrong.is_empty(), "{}: {wrong:?}", file.display());
    }
    assert!(seen > 10, "{seen} manifests were found");
}
