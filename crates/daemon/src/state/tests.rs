//! Tests of the state file: earlier versions, files that cannot be used, and names of volumes.

use super::*;
use std::os::unix::fs::PermissionsExt;

use crate::identity::Identity;
use crate::testing::{block_writes_of, reader_of};

/// The name of a volume, as `Shared::name` gives it.
fn name(state: &mut State, id: &str) -> String {
    let Name { name, storing } = state.name(id);
    match storing.and_then(|storing| storing.not_stored()) {
        None => name,
        Some(_) => state.lasting_name(id),
    }
}

fn not_stored(state: &State) -> Option<String> {
    state.storing().not_stored()
}

/// A state file of the first version is readable for all users, and has no identities.
#[test]
fn the_first_version_is_read_and_closed_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.json");
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    let first = r#"{"version": 1, "devices": {"/dev/x": {"uuid": "u1"}}, "names": {"u1": "bcache0"}}"#;
    std::fs::write(&path, first).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let mut state = State::open(dir.path()).unwrap();
    assert_eq!(mode(), 0o600);
    assert!(state.devices()[Path::new("/dev/x")].named && state.mark("u1").is_none());
    std::fs::write(dir.path().join("state.new"), "left behind").unwrap();
    let mark = Mark { identity: Identity::default(), sequence: 7, path: None, label: String::new() };
    state.set_mark("u1", mark);
    assert_eq!(not_stored(&state), None);
    assert_eq!(mode(), 0o600);
    drop(state);
    assert_eq!(State::open(dir.path()).unwrap().mark("u1").unwrap().sequence, 7);
}

/// `reuse` is an earlier word for `cost_benefit`.
#[test]
fn words_of_earlier_versions_are_read_and_present_ones_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.json");
    let old =
        r#"{"version": 2, "tunables": {"s": {"replacement": "reuse"}, "v": {"writeback_percent": "5"}}}"#;
    std::fs::write(&path, old).unwrap();
    let state = State::open(dir.path()).unwrap();
    assert_eq!(state.tunables("s")["replacement"], "cost_benefit");
    assert_eq!(state.tunables("v")["writeback_percent"], "5");
    state.check_writable(true).result_of_test().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("cost_benefit") && !text.contains("reuse"), "{text}");
}

/// Regression: the error of an empty file was "EOF while parsing a value at line 1 column 0".
#[test]
fn a_file_that_cannot_be_used_says_what_to_do() {
    for (text, words) in [
        ("", "expected the state of the daemon, found an empty file"),
        ("\0\0\0\0", "found an empty file"),
        ("{", "is damaged: it ends too early at line 1"),
        (r#"{"version": true}"#, "expected a whole number of 0 or more, found true at line 1"),
        (
            r#"{"version": 9}"#,
            "expected version 2 of the state, found 9: start the version of ubcache that wrote it",
        ),
        (r#"{"version": 2, "devices": {"/dev/x": {}}}"#, "expected a key `uuid`, found none"),
        (r#"{"version": 2, "colour": 1}"#, "unknown key `colour`"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        std::fs::write(&path, text).unwrap();
        let said = State::open(dir.path()).err().expect(text);
        let said = said.message().unwrap();
        let advice = format!("`mv {0} {0}.old`", path.display());
        assert!(said.contains(words) && said.contains(&advice), "{text}: {said}");
        assert_eq!(std::fs::read(&path).unwrap(), text.as_bytes(), "the file stays");
    }
}

/// Names become parts of paths of sockets, files and links, so a name must not leave its directory.
#[test]
fn a_name_that_is_a_path_is_refused() {
    for name in ["../../etc/passwd", "a/b", "..", "", "bcache0\\n"] {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(r#"{{"version": 2, "names": {{"u1": "{name}"}}}}"#);
        std::fs::write(dir.path().join("state.json"), text).unwrap();
        let said = State::open(dir.path()).err().unwrap();
        assert!(said.message().unwrap().contains("expected bcache and a number"), "{said:?}");
    }
}

/// Regression: the names of volumes could not be stored, and at each start the volume that answered first was bcache0.
#[test]
fn names_that_cannot_be_stored_do_not_depend_on_the_order() {
    let volumes = ["u1", "u2", "u3", "u4"];
    let names = |backwards: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut state = State::open(dir.path()).unwrap();
        assert_eq!(name(&mut state, "stored"), "bcache0");
        // Not even root can replace a directory by a file.
        std::fs::create_dir_all(dir.path().join("state.new/x")).unwrap();
        let mut named: Vec<_> = volumes.iter().map(|id| (id.to_owned(), String::new())).collect();
        if backwards {
            named.reverse();
        }
        named.iter_mut().for_each(|(id, given)| *given = name(&mut state, id));
        assert!(not_stored(&state).is_some());
        named.sort();
        assert!(
            named.iter().all(|(_, name)| serve::plain::is_volume_name(name) && name.len() == 12),
            "{named:?}"
        );
        std::fs::remove_dir_all(dir.path().join("state.new")).unwrap();
        assert_eq!(state.store_again().not_stored(), None);
        drop(state);
        let mut state = State::open(dir.path()).unwrap();
        let again: Vec<_> = volumes.iter().map(|id| (id.to_owned(), name(&mut state, id))).collect();
        assert_eq!(again, named, "they stay when they can be stored");
        named
    };
    assert_eq!(names(false), names(true));
}

/// Regression: a directory was mounted over the state directory of a running daemon, which overwrote the file in it.
#[test]
fn another_directory_in_the_place_of_the_own_one_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("state");
    let mut state = State::open(&place).unwrap();
    std::fs::rename(&place, dir.path().join("moved")).unwrap();
    std::fs::create_dir(&place).unwrap();
    state.set_tunable("a", "writeback_percent", Some("5"));
    assert!(not_stored(&state).unwrap().contains("another directory is there"));
    assert!(state.test().result_of_test().is_err() && std::fs::read_dir(&place).unwrap().next().is_none());
}

#[test]
fn stored_changes_are_there_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State::open(dir.path()).unwrap();
    assert!(State::open(dir.path()).err().unwrap().message().unwrap().contains("another daemon"));
    assert_eq!(name(&mut state, "a"), "bcache0");
    assert_eq!(name(&mut state, "b"), "bcache1");
    state.add_device(Path::new("/dev/x"), "u1", true);
    state.add_device(Path::new("/dev/y"), "u1", false);
    state.set_tunable("a", "writeback_percent", Some("5"));
    state.set_tunable("a", "writeback_delay", Some("1"));
    state.set_tunable("a", "writeback_delay", None);
    drop(state);
    let mut state = State::open(dir.path()).unwrap();
    assert_eq!((name(&mut state, "b"), name(&mut state, "a")), ("bcache1".into(), "bcache0".into()));
    assert_eq!(state.devices().keys().collect::<Vec<_>>(), [Path::new("/dev/y")], "moved");
    assert!(
        state.devices()[Path::new("/dev/y")].named,
        "the operator had named the device, and an update keeps that"
    );
    assert_eq!(state.tunables("a"), Values::from([("writeback_percent".into(), "5".into())]));
    drop(state);
    std::fs::write(dir.path().join("state.json"), "{").unwrap();
    assert!(State::open(dir.path()).is_err());
}

/// Regression: the state was locked while its file was written, and all threads waited for the file system.
#[test]
fn the_state_can_be_read_and_changed_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State::open(dir.path()).unwrap();
    let pipe = dir.path().join("state.new");
    block_writes_of(&pipe);
    state.set_tunable("a", "writeback_percent", Some("5"));
    state.set_tunable("a", "writeback_percent", Some("6"));
    assert_eq!(state.tunables("a")["writeback_percent"], "6");
    assert_eq!(state.not_stored(), None, "it is being written");
    // It waits for the first change, and then for no other.
    let late = not_stored(&state).unwrap();
    assert!(late.contains("state.json: cannot be written: a write has not ended after 5 s"), "{late}");
    let refused = state.test().result_of_test().unwrap_err().to_string();
    assert!(refused.contains("nothing was changed"), "{refused}");
    assert_eq!((state.not_stored(), state.has_stored(&[])), (Some(late), false));
    let reader = reader_of(&pipe);
    // A pipe cannot be synced, so a write fails before one succeeds.
    let began = std::time::Instant::now();
    while state.store_again().not_stored().is_some() {
        assert!(began.elapsed() < Duration::from_secs(20), "the writer goes on");
    }
    drop((reader, state));
    assert_eq!(State::open(dir.path()).unwrap().tunables("a")["writeback_percent"], "6");
}

/// The time since which dirty data has one copy outlives a restart of the daemon.
#[test]
fn the_time_of_the_loss_of_a_copy_is_stored_until_there_are_two() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State::open(dir.path()).unwrap();
    assert_eq!(state.has_one_copy("disk", 7), 7);
    assert_eq!(state.has_one_copy("disk", 8), 7, "it has had one copy since 7");
    state.check_writable(true).result_of_test().unwrap();
    drop(state);
    let mut state = State::open(dir.path()).unwrap();
    assert_eq!(state.has_one_copy("disk", 9), 7);
    state.has_two_copies("disk");
    assert_eq!(state.has_one_copy("disk", 10), 10);
    state.add_device(Path::new("/dev/disk"), "disk", true);
    state.remove_device(Path::new("/dev/disk"), "disk", "");
    assert_eq!(state.has_one_copy("disk", 11), 11, "the device was unregistered");
}
