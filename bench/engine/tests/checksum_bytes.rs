//! Bytes that checksums add to the writes of the cache device: footers, and the generations that they wait for.

use std::process::Command;

/// Bytes to the cache device for each byte of 4 KiB inserts, and of overwrites.
fn bytes_of(mode: &[&str]) -> [f64; 2] {
    let said = Command::new(env!("CARGO_BIN_EXE_counts")).arg("50000").args(mode).output();
    let said = said.unwrap_or_else(|e| panic!("{e}"));
    let out = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success(), "{out}{}", String::from_utf8_lossy(&said.stderr));
    ["insert", "overwrite"].map(|phase| {
        let line = out.lines().find_map(|l| l.strip_prefix(&format!("{phase}_cache_bytes_per_user_byte ")));
        line.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no figure of {phase}: {out}"))
    })
}

#[test]
fn checksums_add_at_most_three_percent() {
    let (with, without) = (bytes_of(&["checksums"]), bytes_of(&[]));
    for (phase, (with, without)) in ["insert", "overwrite"].iter().zip(with.into_iter().zip(without)) {
        println!("{phase}: {with:.4} bytes with checksums, {without:.4} without");
        // Footers take one block of 128.
        assert!(with > without * 1.001, "{phase}: no footers were written");
        assert!(with <= without * 1.03, "{phase}: {with:.4} bytes for each, {without:.4} without checksums");
    }
}
