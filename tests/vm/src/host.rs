//! Where programs of this workspace are on the host.

use std::path::PathBuf;

/// The target directory: test programs are in `<target>/<profile>/deps`.
pub fn target_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("a program knows its path");
    exe.ancestors().nth(3).expect("a test program in <target>/<profile>/deps").to_owned()
}

/// A program of the workspace by name: the release build if there is one, else that of the tests' profile.
///
/// # Panics
/// If it is not built.
#[track_caller]
pub fn built(name: &str) -> PathBuf {
    let target = target_dir();
    let found = ["release", "debug"].iter().map(|p| target.join(p).join(name)).find(|p| p.is_file());
    found.unwrap_or_else(|| panic!("{name} is not built in {}: `make vm-test` does it", target.display()))
}

/// A program of this package (what guests run), in the profile of the tests.
///
/// # Panics
/// If it is not there.
#[track_caller]
pub fn beside_tests(name: &str) -> PathBuf {
    let exe = std::env::current_exe().expect("a program knows its path");
    let path = exe.ancestors().nth(2).expect("a test program in <target>/<profile>/deps").join(name);
    assert!(path.is_file(), "{}: is not there", path.display());
    path
}
