//! Installs, uses and removes the Debian package, with a directory as the file system and this machine's list of packages.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

fn said(out: &Output) -> String {
    assert!(
        out.status.success(),
        "{}\n{}{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout.clone()).unwrap()
}

/// Builds the packages from the programs under test: the program, and the links named like bcache-tools.
fn packages() -> [PathBuf; 2] {
    let binaries = Path::new(env!("CARGO_BIN_EXE_ubcache-pages")).parent().unwrap();
    if !binaries.join("ubcache").exists() {
        // A test of the whole workspace has built the program already.
        said(&run(Command::new(env!("CARGO")).args(["build", "-p", "ubcache-cli"]).current_dir(root())));
    }
    let out = said(&run(Command::new(root().join("scripts/deb")).arg(binaries).current_dir(root())));
    let mut paths = out.lines().map(|l| root().join(l));
    [paths.next().unwrap(), paths.next().unwrap()]
}

/// Exposure of each unit, in tenths, as the guide says it; other versions of systemd count a little differently.
const EXPOSURE: &[(&str, u32)] = &[("ubcache", 45), ("ubcache-volume@", 28), ("ubcache-register@", 28)];

#[test]
fn units_have_few_rights() {
    let dir = tempfile::tempdir().unwrap();
    let guide = std::fs::read_to_string(root().join("docs/book/src/daemon.md")).unwrap();
    for (unit, exposure) in EXPOSURE {
        // A template is checked as one of its instances.
        let copy = dir.path().join(format!("{unit}{}.service", if unit.ends_with('@') { "x" } else { "" }));
        std::fs::copy(root().join(format!("packaging/systemd/{unit}.service")), &copy).unwrap();
        let most = format!("--threshold={}", exposure + 5);
        let judged = run(Command::new("systemd-analyze")
            .args(["security", "--offline=yes", "--no-pager", &most])
            .arg(&copy));
        said(&judged);
        let line = format!("| `{unit}.service` | {}.{} |", exposure / 10, exposure % 10);
        assert!(guide.contains(&line), "expected {line}\n{}", String::from_utf8_lossy(&judged.stdout));
    }
}

/// The documents to which README.md has links.
fn linked_by_readme() -> BTreeSet<String> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    let links = text.split("](docs/").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let pages: BTreeSet<String> = links.map(|link| format!("docs/{link}")).collect();
    assert!(pages.len() > 8, "{pages:?}");
    pages
}

#[test]
fn installed_used_and_removed() {
    let [deb, links] = packages();
    let contents = said(&run(Command::new("dpkg-deb").arg("--contents").arg(&deb)));
    let files: BTreeSet<&str> = contents
        .lines()
        .filter_map(|l| l.split_whitespace().last())
        .map(|f| f.trim_start_matches('.'))
        .collect();
    for command in cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
        let page = format!("/usr/share/man/man8/ubcache-{}.8.gz", command.get_name());
        assert!(files.contains(page.as_str()), "{page} is not among {files:?}");
    }
    for page in [
        "/usr/share/man/man8/ubcache.8.gz",
        "/usr/share/man/man5/ubcache.toml.5.gz",
        "/usr/share/doc/ubcache/guide/index.md",
        "/usr/share/doc/ubcache/guide/paths.svg",
        "/usr/share/doc/ubcache/guide/day2/index.md",
    ] {
        assert!(files.contains(page), "{page} is not among {files:?}");
    }
    assert!(contents.lines().any(|l| l.ends_with("/docs/book/src -> ../../guide")), "{contents}");
    for page in linked_by_readme() {
        let file = format!("/usr/share/doc/ubcache/{}", page.replace("docs/book/src/", "guide/"));
        assert!(files.contains(file.as_str()), "{file} is not among {files:?}");
    }
    assert!(contents.lines().all(|l| l.contains(" root/root ")), "{contents}");
    for script in [
        "/usr/share/initramfs-tools/hooks/ubcache",
        "/usr/share/initramfs-tools/scripts/local-block/ubcache",
        "/usr/lib/dracut/modules.d/90ubcache/module-setup.sh",
        "/usr/lib/dracut/modules.d/90ubcache/serve-root.sh",
        "/usr/lib/ubcache/serve-root",
    ] {
        let line = contents.lines().find(|l| l.ends_with(script));
        assert!(line.is_some_and(|l| l.starts_with("-rwxr-xr-x")), "{script}: {contents}");
    }
    for file in ["/usr/lib/ubcache/initramfs.rules", "/usr/lib/dracut/dracut.conf.d/50-ubcache.conf"] {
        assert!(files.contains(file), "{file} is not among {files:?}");
    }

    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/in-a-directory.sh");
    let out = said(&run(Command::new("sh").arg(script).arg(dir.path()).arg(&deb).arg(&links)));
    for step in
        ["installed", "units", "completions", "manual", "served", "stopped", "links", "removed", "purged"]
    {
        assert!(out.lines().any(|l| l == format!("{step}: fine")), "{step}: {out}");
    }
}
