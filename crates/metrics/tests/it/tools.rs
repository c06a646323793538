//! Programs of Prometheus, which a script of this workspace finds or fetches.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Whether the user asked to do without; says so.
pub fn skipped() -> bool {
    rig::skip_requested("UBCACHE_PROMETHEUS_SKIP")
}

/// Runs promtool with this on its standard input; it must be content, without a word.
#[track_caller]
pub fn promtool(args: &[&str], input: &str) -> String {
    let found = Command::new(root().join("scripts/prometheus-tools")).output().expect("a shell");
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let dir = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    let mut tool = Command::new(dir.join("promtool"))
        .args(args)
        .current_dir(root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool");
    tool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let said = tool.wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "promtool {args:?}: {out}{err}");
    format!("{out}{err}")
}
