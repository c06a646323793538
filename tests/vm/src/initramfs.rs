//! The root filesystem of a guest: busybox, modules, and the programs a test asks for with their shared libraries.
//!
//! Must not know what the programs do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::artifacts::Artifacts;
use crate::cpio::Archive;
use crate::said::{find, run, tool};

/// Modules that every guest has on board, with what they depend on. A module is loaded by `modprobe` only.
const MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_rng",
    "bcache",
    "ublk_drv",
    "nbd",
    "loop",
    "brd",
    "null_blk",
    "scsi_debug",
    "dm_mod",
    "dm_delay",
    "dm_flakey",
    "dm_log_writes",
    "dm_cache",
    "dm_cache_smq",
    "raid1",
    "dm_writecache",
    "xfs",
    "btrfs",
    // Found by their aliases only.
    "crc32c_generic",
    "crc32c_intel",
    "blake2b_generic",
    "xxhash_generic",
    "sha256_generic",
];

/// Where programs of a test go.
pub const PROGRAMS: &str = "/usr/bin";

/// A file that goes into the guest.
#[derive(Clone, Debug)]
pub enum Extra {
    /// A program of the host by name, which lands in [`PROGRAMS`] under that name.
    Tool(String),
    /// A program by path, under its own file name in [`PROGRAMS`].
    Program(PathBuf),
    /// A program of the host that stays where it is there.
    At(PathBuf),
    /// A symbolic link.
    Link {
        /// In the guest.
        path: String,
        /// Target of the link.
        target: String,
    },
    /// Any file to any place.
    File {
        /// On the host.
        from: PathBuf,
        /// In the guest.
        to: String,
    },
    /// A file with this text.
    Text {
        /// Contents.
        text: String,
        /// In the guest.
        to: String,
    },
}

/// Writes the archive.
///
/// # Panics
/// If something is missing.
pub fn write(artifacts: &Artifacts, extras: &[Extra], to: &Path) {
    let mut out = BufWriter::new(fs::File::create(to).expect("a file in the test's directory"));
    let archive = archive(artifacts, extras);
    archive.write(&mut out).and_then(|()| out.flush()).expect("room in the test's directory");
}

/// Writes the same files into a directory.
///
/// # Panics
/// If something is missing.
pub fn unpack(artifacts: &Artifacts, extras: &[Extra], to: &Path) {
    archive(artifacts, extras).unpack(to).expect("room in the test's directory");
}

fn archive(artifacts: &Artifacts, extras: &[Extra]) -> Archive {
    let mut archive = Archive::default();
    for dir in ["/proc", "/sys", "/dev", "/tmp", "/run", "/root", "/mnt", "/etc", "/usr/bin", "/usr/sbin"] {
        archive.directory(dir);
    }
    busybox(&mut archive);
    archive.file("/init", 0o755, include_bytes!("../guest/init").to_vec());
    archive.file("/etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n".to_vec());
    archive.file("/etc/group", 0o644, b"root:x:0:\n".to_vec());
    archive.link("/etc/mtab", "/proc/mounts");
    modules(&mut archive, artifacts);
    for extra in extras {
        match extra {
            Extra::Tool(name) => program(&mut archive, &tool(name), &format!("{PROGRAMS}/{name}")),
            Extra::Program(path) => {
                let name = path.file_name().and_then(|n| n.to_str()).expect("a program with a name");
                program(&mut archive, path, &format!("{PROGRAMS}/{name}"));
            }
            Extra::At(path) => program(&mut archive, path, path.to_str().expect("a plain path")),
            Extra::Link { path, target } => archive.link(path, target),
            Extra::File { from, to } => archive.file(to, 0o644, bytes(from)),
            Extra::Text { text, to } => archive.file(to, 0o644, text.clone().into_bytes()),
        }
    }
    archive
}

fn bytes(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn busybox(archive: &mut Archive) {
    let path = tool("busybox");
    let said = run(Path::new("ldd"), &[&path]);
    assert_ne!(said.code, 0, "{} needs shared libraries: run `scripts/deps vm`", path.display());
    let applets = run(&path, &["--list"]).ok();
    archive.file("/bin/busybox", 0o755, bytes(&path));
    for name in applets.out.split_whitespace().filter(|n| *n != "busybox") {
        archive.link(&format!("/bin/{name}"), "busybox");
    }
    // The kernel calls these by their full names.
    archive.link("/sbin/modprobe", "../bin/busybox");
}

/// The modules with what they need, by `modules.dep`: lines of `path: paths`.
fn modules(archive: &mut Archive, artifacts: &Artifacts) {
    let dir = &artifacts.modules;
    let table = String::from_utf8_lossy(&bytes(&dir.join("modules.dep"))).into_owned();
    let name = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    };
    let lines: BTreeMap<String, (&str, &str)> =
        table.lines().filter_map(|l| l.split_once(':')).map(|(p, d)| (name(p), (p, d))).collect();
    let mut wanted = BTreeSet::new();
    for module in MODULES {
        // A module that this kernel has built in, or not at all: a test that needs it says so itself.
        let Some((path, needs)) = lines.get(*module) else { continue };
        wanted.insert(*path);
        wanted.extend(needs.split_whitespace());
    }
    let to = format!("/lib/modules/{}", artifacts.version);
    for path in &wanted {
        archive.file(&format!("{to}/{path}"), 0o644, bytes(&dir.join(path)));
    }
    // Lists of what is on board alone: busybox reads them whole at each `modprobe`, and the emulation takes its time.
    let on_board: BTreeSet<String> = wanted.iter().map(|path| name(path)).collect();
    let deps = table.lines().filter(|l| l.split_once(':').is_some_and(|(path, _)| wanted.contains(path)));
    archive.file(&format!("{to}/modules.dep"), 0o644, lines_of(deps));
    for list in ["modules.alias", "modules.symbols"] {
        let table = String::from_utf8_lossy(&bytes(&dir.join(list))).into_owned();
        let mine = |l: &&str| l.split(' ').next_back().is_some_and(|module| on_board.contains(module));
        archive.file(&format!("{to}/{list}"), 0o644, lines_of(table.lines().filter(mine)));
    }
    archive.file(&format!("{to}/modules.softdep"), 0o644, bytes(&dir.join("modules.softdep")));
}

fn lines_of<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<u8> {
    lines.flat_map(|l| [l, "\n"]).collect::<String>().into_bytes()
}

/// A program without its debugging information, and the libraries that `ldd` names, at the same places as here.
fn program(archive: &mut Archive, path: &Path, to: &str) {
    archive.file(to, 0o755, stripped(path));
    let said = run(&tool("ldd"), &[path]);
    if said.code != 0 {
        return; // static, or a script
    }
    for library in said.out.split_whitespace().filter(|w| w.starts_with('/')) {
        if !archive.has(library) {
            archive.file(library, 0o755, bytes(Path::new(library)));
        }
    }
}

/// Names of functions stay, for profiles.
fn stripped(path: &Path) -> Vec<u8> {
    let whole = bytes(path);
    let (Some(strip), true) = (find("strip"), whole.len() > 1 << 20) else { return whole };
    let dir = tempfile::tempdir().expect("a directory");
    let out = dir.path().join("stripped");
    let said = run(&strip, &[Path::new("--strip-debug"), Path::new("-o"), &out, path]);
    if said.code == 0 { bytes(&out) } else { whole }
}
