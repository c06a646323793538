//! The same two dozen checks for every command that takes a device: what it does with help, wrong arguments, and every
//! kind of thing that is no usable device. Whatever is refused is refused with exit code 1 and a message that names the
//! device, and nothing is modified.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::world::*;

/// A command with one of its devices left open: which kind belongs there, and what the rest is.
pub struct Subject {
    pub command: &'static str,
    /// Arguments after the command; `DEV` is the device in question, `SSD` and `HDD` are a set in order.
    args: &'static [&'static str],
    kind: Kind,
    /// Makes a superblock, instead of needing one.
    formats: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cache,
    Backing,
    /// Either.
    Both,
}

impl Subject {
    fn args(&self, dir: &Dir, device: &str) -> Vec<String> {
        let mut args = vec![self.command.to_owned()];
        for a in self.args {
            args.push(match *a {
                "DEV" => device.to_owned(),
                "SSD" => dir.path("ssd"),
                "HDD" => dir.path("hdd"),
                "OUT" => dir.path("out"),
                "SOCK" => format!("nbd={}", dir.path("sock")),
                other => other.to_owned(),
            });
        }
        args
    }

    fn run(&self, dir: &Dir, device: &str) -> Said {
        run(&self.args(dir, device))
    }

    /// The device that would be right.
    fn right(&self, dir: &Dir) -> String {
        let name = if self.kind == Kind::Backing { "hdd" } else { "ssd" };
        dir.path(name)
    }

    fn right_bytes(&self) -> &'static [u8] {
        let [ssd, hdd, _] = dirty_set();
        if self.kind == Kind::Backing { hdd } else { ssd }
    }

    /// Runs with a device that has to be refused.
    #[track_caller]
    fn refuses(&self, dir: &Dir, device: &str, words: &[&str]) {
        let before = snapshot(dir);
        let said = self.run(dir, device);
        let shown = said.to_string();
        said.refused(words).says(&[device]);
        let after = snapshot(dir);
        for ((name, b), (_, a)) in before.iter().zip(&after) {
            assert!(a == b, "{name} was modified: {shown}");
        }
        let names = |s: &[(String, Vec<u8>)]| s.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
        assert_eq!(names(&before), names(&after), "{shown}");
    }
}

/// The contents of the plain files of a directory.
fn snapshot(dir: &Dir) -> Vec<(String, Vec<u8>)> {
    let mut out: Vec<(String, Vec<u8>)> = std::fs::read_dir(dir.root())
        .expect("a directory")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.symlink_metadata().is_ok_and(|m| m.is_file()))
        .map(|p| (p.display().to_string(), std::fs::read(&p).unwrap_or_default()))
        .collect();
    out.sort();
    out
}

pub const MAKE_CACHE: Subject =
    Subject { command: "make", args: &["-C", "DEV", "--bucket", "8k"], kind: Kind::Cache, formats: true };
pub const MAKE_BACKING: Subject =
    Subject { command: "make", args: &["-B", "DEV"], kind: Kind::Backing, formats: true };
pub const SUPER: Subject = Subject { command: "super", args: &["DEV"], kind: Kind::Both, formats: false };
pub const CHECK: Subject = Subject { command: "check", args: &["DEV"], kind: Kind::Both, formats: false };
pub const DUMP: Subject =
    Subject { command: "dump", args: &["DEV", "buckets"], kind: Kind::Cache, formats: false };
pub const EXTRACT_CACHE: Subject = Subject {
    command: "extract",
    args: &["-C", "DEV", "-B", "HDD", "-o", "OUT"],
    kind: Kind::Cache,
    formats: false,
};
pub const EXTRACT_BACKING: Subject = Subject {
    command: "extract",
    args: &["-C", "SSD", "-B", "DEV", "-o", "OUT"],
    kind: Kind::Backing,
    formats: false,
};
pub const FLUSH_CACHE: Subject =
    Subject { command: "flush", args: &["-C", "DEV", "-B", "HDD"], kind: Kind::Cache, formats: false };
pub const FLUSH_BACKING: Subject =
    Subject { command: "flush", args: &["-C", "SSD", "-B", "DEV"], kind: Kind::Backing, formats: false };
pub const UP_CACHE: Subject = Subject {
    command: "up",
    args: &["-C", "DEV", "-B", "HDD", "--export", "SOCK"],
    kind: Kind::Cache,
    formats: false,
};
pub const UP_BACKING: Subject = Subject {
    command: "up",
    args: &["-C", "SSD", "-B", "DEV", "--export", "SOCK"],
    kind: Kind::Backing,
    formats: false,
};
pub const UP_ALONE: Subject = Subject {
    command: "up",
    args: &["-B", "DEV", "--without-cache", "--export", "SOCK"],
    kind: Kind::Backing,
    formats: false,
};

fn set() -> Dir {
    let dir = Dir::new();
    dirty_files(&dir);
    dir
}

fn noise(len: usize) -> Vec<u8> {
    let mut rng = io::Rng::new(11);
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

pub fn help(s: &Subject) {
    for flag in ["--help", "-h"] {
        let said = run(&[s.command, flag]).ok();
        assert!(said.out.contains(&format!("Usage: ubcache {}", s.command)), "{said}");
        assert_eq!(said.err, "");
    }
}

pub fn version(s: &Subject) {
    for flag in ["--version", "-V"] {
        let said = run(&[s.command, flag]).ok();
        assert!(said.out.contains(env!("CARGO_PKG_VERSION")), "{said}");
    }
}

pub fn unknown_option(s: &Subject) {
    run(&[s.command, "--no-such-option"]).usage().says(&["--no-such-option"]);
}

pub fn no_arguments(s: &Subject) {
    run(&[s.command]).usage();
}

pub fn option_without_value(s: &Subject) {
    if s.args[0].starts_with('-') {
        run(&[s.command, s.args[0]]).usage();
    }
}

pub fn surplus_argument(s: &Subject) {
    // A device list takes any number.
    if s.command != "check" {
        let dir = set();
        let mut args = s.args(&dir, &s.right(&dir));
        args.push("surplus".into());
        run(&args).usage().says(&["surplus"]);
    }
}

pub fn missing(s: &Subject) {
    let dir = set();
    s.refuses(&dir, &dir.path("nothing-here"), &["No such file"]);
}

pub fn empty_path(s: &Subject) {
    let dir = set();
    let said = s.run(&dir, "");
    assert!(matches!(said.code, 1 | 2), "{said}");
}

pub fn directory(s: &Subject) {
    let dir = set();
    s.refuses(&dir, dir.root().to_str().expect("plain"), &["directory"]);
}

pub fn character_device(s: &Subject) {
    s.refuses(&set(), "/dev/zero", &["expected a block device or a regular file"]);
}

/// Must not wait for a writer.
pub fn pipe(s: &Subject) {
    let dir = set();
    let path = dir.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    s.refuses(&dir, &path, &["a pipe"]);
}

pub fn symlink_loop(s: &Subject) {
    let dir = set();
    let path = dir.path("loop");
    std::os::unix::fs::symlink(&path, &path).expect("a link");
    s.refuses(&dir, &path, &["symbolic link"]);
}

/// As a user who may not read it: root reads everything, so another user is needed.
pub fn unreadable(s: &Subject) {
    let dir = set();
    let device = dir.file("locked", s.right_bytes());
    std::fs::set_permissions(&device, PermissionsExt::from_mode(0o000)).expect("our file");
    let args = s.args(&dir, &device);
    let said = if rustix::process::geteuid().is_root() {
        std::fs::set_permissions(dir.root(), PermissionsExt::from_mode(0o777)).expect("our directory");
        for name in ["ssd", "hdd"] {
            std::fs::set_permissions(dir.path(name), PermissionsExt::from_mode(0o666)).expect("our file");
        }
        let copy = dir.path("ubcache");
        std::fs::hard_link(program(), &copy)
            .or_else(|_| std::fs::copy(program(), &copy).map(drop))
            .expect("a copy");
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).expect("our file");
        let mut command = tool("setpriv", "util-linux");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", &copy]).args(&args);
        Said::of(output(command))
    } else {
        run(&args)
    };
    said.refused(&[&device, "Permission denied"]);
    std::fs::set_permissions(&device, PermissionsExt::from_mode(0o600)).expect("our file");
    assert!(read(&device) == s.right_bytes());
}

pub fn empty(s: &Subject) {
    let dir = set();
    s.refuses(&dir, &dir.file("empty", &[]), &["expected"]);
}

pub fn tiny(s: &Subject) {
    let dir = set();
    // Too small for a superblock and for anything behind one.
    s.refuses(&dir, &dir.file("tiny", &noise(1000)), &["expected"]);
    s.refuses(&dir, &dir.file("smallest", &noise(8191)), &["expected"]);
}

pub fn zeroed(s: &Subject) {
    let dir = set();
    let device = dir.sparse("zeroed", 8 << 20);
    if s.formats {
        s.run(&dir, &device).ok();
    } else {
        s.refuses(&dir, &device, &["bcache"]);
    }
}

pub fn random(s: &Subject) {
    let dir = set();
    let device = dir.file("random", &noise(8 << 20));
    if s.formats {
        // What looks like nothing is nothing to lose.
        s.run(&dir, &device).ok();
    } else {
        s.refuses(&dir, &device, &["bcache"]);
    }
}

pub fn truncated(s: &Subject) {
    let dir = set();
    let half = dir.file("half", &s.right_bytes()[..4 << 20]);
    match (s.command, s.kind) {
        ("make", _) => s.refuses(&dir, &half, &["--wipe"]),
        // Nothing in a backing device says how large it was; only its cache knows.
        ("up", Kind::Backing) if s.args.contains(&"--without-cache") => {
            s.refuses(&dir, &half, &["dirty data"])
        }
        ("up", Kind::Backing) => {
            // The set was opened to see that: its own superblock counts that.
            s.run(&dir, &half).refused(&["truncated", &half]);
            assert!(read(&half) == s.right_bytes()[..4 << 20]);
            run(&["check", &dir.path("ssd"), &dir.path("hdd")]).ok();
        }
        (_, Kind::Backing) => {
            let before = snapshot(&dir);
            s.run(&dir, &half).refused(&["outside", "sector"]);
            assert!(before == snapshot(&dir));
        }
        _ => s.refuses(&dir, &half, &["expected at most 8192, found 16384"]),
    }
}

/// A superblock in which one bit is wrong.
pub fn flipped_bit(s: &Subject) {
    let dir = set();
    let mut bytes = s.right_bytes().to_vec();
    bytes[4096 + 45] ^= 0x10;
    let device = dir.file("flipped", &bytes);
    s.refuses(
        &dir,
        &device,
        if s.formats { &["--wipe", "checksum"] } else { &["checksum", "expected", "found"] },
    );
}

pub fn wrong_magic(s: &Subject) {
    let dir = set();
    let mut bytes = s.right_bytes().to_vec();
    bytes[4096 + 24] ^= 1;
    let device = dir.file("other", &bytes);
    if s.formats {
        s.run(&dir, &device).ok();
    } else {
        s.refuses(&dir, &device, &["bcache"]);
    }
}

/// A superblock of a version that does not exist yet, with a checksum that fits.
pub fn unknown_version(s: &Subject) {
    let dir = set();
    let device = dir.file("future", &resealed(s.right_bytes(), 16, &77u64.to_le_bytes()));
    s.refuses(&dir, &device, if s.formats { &["--wipe"] } else { &["77", "not supported"] });
}

/// An incompatible feature that does not exist yet: version 5, bit 40.
pub fn unknown_feature(s: &Subject) {
    if s.kind == Kind::Backing {
        return;
    }
    let dir = set();
    let version5 = resealed(s.right_bytes(), 16, &5u64.to_le_bytes());
    let device = dir.file("feature", &resealed(&version5, 128, &(1u64 << 40).to_le_bytes()));
    s.refuses(
        &dir,
        &device,
        if s.formats { &["--wipe"] } else { &["feature_incompat", "not supported", "10000000000"] },
    );
}

/// The image with some bytes of its superblock changed and the checksum made right again.
pub fn resealed(image: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = image.to_vec();
    bytes[4096 + at..4096 + at + new.len()].copy_from_slice(new);
    let raw = format::RawSuperblock::from_prefix(&bytes[4096..]).expect("4096 bytes").clone();
    let csum = raw.computed_csum().expect("few journal buckets");
    bytes[4096..4104].copy_from_slice(&csum.to_le_bytes());
    bytes
}

pub fn foreign_file_system(s: &Subject) {
    let dir = set();
    let device = dir.sparse("ext4", 8 << 20);
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs");
    mkfs.args(["-q", "-F", &device]);
    succeed(mkfs);
    s.refuses(&dir, &device, if s.formats { &["ext4", "--force"] } else { &["bcache"] });
}

/// Another process holds it.
pub fn in_use(s: &Subject) {
    let dir = set();
    let device = dir.file("held", s.right_bytes());
    let holder = std::fs::File::open(&device).expect("our file");
    rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    if s.command == "super" {
        // One block, written as a unit, can be looked at.
        s.run(&dir, &device).ok();
    } else {
        s.refuses(&dir, &device, &["in use"]);
    }
}

/// The other kind of device.
pub fn swapped(s: &Subject) {
    let dir = set();
    let [ssd, hdd, _] = dirty_set();
    let words: &[&str] = match (s.formats, s.kind) {
        (true, _) => &["--wipe"],
        (_, Kind::Cache) => &["expected a cache device", "backing device"],
        (_, Kind::Backing) => &["expected a backing device", "cache device"],
        // Both kinds are right.
        (_, Kind::Both) => return,
    };
    let device = dir.file("swapped", if s.kind == Kind::Backing { ssd } else { hdd });
    s.refuses(&dir, &device, words);
}

/// One device for both places.
pub fn twice(s: &Subject) {
    let dir = set();
    let device = match s.kind {
        _ if s.formats => return,
        Kind::Cache => dir.path("hdd"),
        Kind::Backing => dir.path("ssd"),
        Kind::Both => return,
    };
    if s.args.contains(&"SSD") || s.args.contains(&"HDD") {
        let before = snapshot(&dir);
        s.run(&dir, &device).refused(&[&device]);
        assert!(before == snapshot(&dir));
    }
}

macro_rules! checks {
    ($($module:ident: $subject:ident;)+) => { $(mod $module {
        checks!(@ $subject: help version unknown_option no_arguments option_without_value surplus_argument missing
            empty_path directory character_device pipe symlink_loop unreadable empty tiny zeroed random truncated
            flipped_bit wrong_magic unknown_version unknown_feature foreign_file_system in_use swapped twice);
    })+ };
    (@ $subject:ident: $($check:ident)+) => { $(
        #[test]
        fn $check() {
            super::$check(&super::$subject);
        }
    )+ };
}

checks! {
    make_cache: MAKE_CACHE;
    make_backing: MAKE_BACKING;
    superblock: SUPER;
    check: CHECK;
    dump: DUMP;
    extract_cache: EXTRACT_CACHE;
    extract_backing: EXTRACT_BACKING;
    flush_cache: FLUSH_CACHE;
    flush_backing: FLUSH_BACKING;
    up_cache: UP_CACHE;
    up_backing: UP_BACKING;
    up_alone: UP_ALONE;
}

/// The path that no check needs: the subjects are in order when the device is.
#[test]
fn the_right_device_is_taken() {
    for s in [SUPER, CHECK, DUMP, EXTRACT_CACHE, EXTRACT_BACKING, FLUSH_CACHE, FLUSH_BACKING] {
        let dir = set();
        s.run(&dir, &s.right(&dir)).ok();
        assert!(Path::new(&dir.path("ssd")).exists());
    }
}
