//! Completions of names that only a daemon knows.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::process::Command;

/// What bash offers for the last of these words; `list-names` answers its arguments and a name of each kind.
fn offered(dir: &Path, words: &[&str]) -> Vec<String> {
    let script = r#"
ubcache() {
    shift
    for kind in "$@"; do echo "$kind-1"; echo "$kind-2"; done
}
. "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_ubcache_named ubcache "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;
    let out = Command::new("bash")
        .args(["-c", script, "bash"])
        .arg(dir.join("completions/ubcache"))
        .args(words)
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && err.is_empty(), "{words:?}: {err}");
    String::from_utf8(out.stdout).unwrap().lines().filter(|l| !l.is_empty()).map(str::to_owned).collect()
}

/// Before, completions had the options of commands, but no names of volumes, sets or tunables.
#[test]
fn names_are_completed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let made = Command::new(env!("CARGO_BIN_EXE_ubcache-pages")).arg(dir).status().unwrap();
    assert!(made.success());
    for (words, names) in [
        (&["ubcache", "get", ""][..], &["volumes-1", "volumes-2", "sets-1", "sets-2"][..]),
        (&["ubcache", "stop", ""], &["volumes-1", "volumes-2"]),
        (&["ubcache", "stop", "volumes-1", "volumes-2"], &["volumes-2"]),
        (&["ubcache", "detach", "--wipe", "v"], &["volumes-1", "volumes-2"]),
        (&["ubcache", "wipe", ""], &["sets-1", "sets-2"]),
        (&["ubcache", "get", "--socket", "x", "data", ""], &["tunables-1", "tunables-2"]),
        (&["ubcache", "set", "data", "a=1", "tunables-1"], &["tunables-1"]),
        (&["ubcache", "volume", "create", ""], &["sets-1", "sets-2"]),
        (&["ubcache", "volume", "delete", "volumes-1"], &["volumes-1"]),
        (&["ubcache", "cancel", ""], &["jobs-1", "jobs-2"]),
    ] {
        assert_eq!(offered(dir, words), names, "{words:?}");
    }
    // The value of an option, and an option, are no operands.
    for words in [&["ubcache", "get", "--socket", ""][..], &["ubcache", "stop", "--s"]] {
        assert!(!offered(dir, words).iter().any(|name| name.ends_with("-1")), "{words:?}");
    }
    let read = |name: &str| std::fs::read_to_string(dir.join("completions").join(name)).unwrap();
    let (zsh, fish) = (read("_ubcache"), read("ubcache.fish"));
    assert!(zsh.contains("_ubcache_named() {") && zsh.contains(":{_ubcache_named volumes}'"), "{zsh}");
    assert!(fish.contains("__fish_seen_subcommand_from wipe\" -a \"(ubcache list-names sets"), "{fish}");
    for (shell, file) in [("zsh", "_ubcache"), ("fish", "ubcache.fish")] {
        // A machine without the shell has no judge of the syntax.
        if let Ok(out) = Command::new(shell).arg("-n").arg(dir.join("completions").join(file)).output() {
            assert!(out.status.success(), "{shell}: {}", String::from_utf8_lossy(&out.stderr));
        }
    }
}
