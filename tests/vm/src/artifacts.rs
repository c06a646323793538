//! The parts of the machines and their sources: QEMU of the host, and a kernel package of Debian.
//!
//! Owns the cache directory (`UBCACHE_VM_CACHE`, else `ubcache-vm` under `XDG_CACHE_HOME` or `~/.cache`):
//!
//! ```text
//! <package>.deb, <package>.deb.sha256    as downloaded; the checksum is compared at each use
//! <version>/boot/vmlinuz-…, <version>/lib/modules/…    unpacked, modules uncompressed, `depmod` done
//! <version>/boot/vmlinux                 the same kernel uncompressed: that takes the emulation a second of each boot
//! <version>/complete                     written last
//! ```
//!
//! Nothing is installed on the host and no root is needed: apt gets lists and a cache of its own in that directory.
//! Once a kernel is there the network is not needed any more. `UBCACHE_VM_KERNEL=<directory>` names an unpacked kernel
//! instead; `scripts/vm-kernel` gets the newest one of a suite. Packages that the tests are known to pass with are in
//! `kernels.txt`, with their checksums.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::said::{find, run, run_within, tool};

/// Kernel packages of Debian follow this name; the version in it is the newest that the suite has.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
const SUITE: &str = "bookworm-backports";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const KNOWN: &str = include_str!("../kernels.txt");
/// The emulation of QEMU 7.2 crashes such guests (`cmpxchg16b`).
const OLDEST_QEMU: u32 = 8;
const DOWNLOAD: Duration = Duration::from_secs(300);

/// A kernel and an emulator.
pub struct Artifacts {
    /// The emulator.
    pub qemu: PathBuf,
    /// The kernel's image, uncompressed if that was possible.
    pub kernel: PathBuf,
    /// `lib/modules/<version>` with plain `.ko` files.
    pub modules: PathBuf,
    /// The kernel's version, as `uname -r` says.
    pub version: String,
}

/// The parts of machines; fetched once.
///
/// # Panics
/// If it is not available; the message says what to do.
pub fn artifacts() -> &'static Artifacts {
    static FOUND: OnceLock<Artifacts> = OnceLock::new();
    FOUND.get_or_init(|| {
        let qemu = emulator();
        let root = std::env::var_os("UBCACHE_VM_KERNEL").map_or_else(kernel, PathBuf::from);
        let (vmlinuz, version) = image(&root);
        let plain = root.join("boot/vmlinux");
        let kernel = if plain.is_file() { plain } else { vmlinuz };
        Artifacts { qemu, kernel, modules: root.join("lib/modules").join(&version), version }
    })
}

fn emulator() -> PathBuf {
    let Some(qemu) = find("qemu-system-x86_64") else {
        panic!("qemu-system-x86_64 is missing; `scripts/deps vm` installs it from {SUITE}");
    };
    let said = run(&qemu, &["--version"]).ok();
    let version = said.out.split_whitespace().skip_while(|w| *w != "version").nth(1).unwrap_or_default();
    let major: u32 = version.split('.').next().and_then(|v| v.parse().ok()).unwrap_or(0);
    assert!(
        major >= OLDEST_QEMU,
        "{}: version {version:?} is too old: {OLDEST_QEMU} or newer is needed; `scripts/deps vm` installs one from {SUITE}",
        qemu.display()
    );
    qemu
}

fn image(root: &Path) -> (PathBuf, String) {
    let boot = root.join("boot");
    let names = fs::read_dir(&boot).unwrap_or_else(|e| panic!("{}: {e}", boot.display()));
    for name in names.flatten().filter_map(|f| f.file_name().into_string().ok()) {
        if let Some(version) = name.strip_prefix("vmlinuz-") {
            return (boot.join(&name), version.to_owned());
        }
    }
    panic!("{}: no vmlinuz-<version> in there", boot.display());
}

/// The cache directory.
pub fn cache_dir() -> PathBuf {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    let dir = var("UBCACHE_VM_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("ubcache-vm")))
        .or_else(|| var("HOME").map(|d| d.join(".cache/ubcache-vm")))
        .expect("UBCACHE_VM_CACHE or HOME has to be set");
    fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    dir
}

/// The newest kernel in the cache, or one that is downloaded now.
fn kernel() -> PathBuf {
    let dir = cache_dir();
    // Test programs of one run start at the same time.
    let lock = File::create(dir.join("lock")).expect("a lock file in the cache directory");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let root = unpacked(&dir).unwrap_or_else(|| {
        let deb = downloaded(&dir).unwrap_or_else(|| download(&dir));
        unpack(&dir, &deb)
    });
    uncompress(&image(&root).0, &root.join("boot/vmlinux"));
    root
}

/// Uncompresses the kernel in `image` (Linux's boot protocol, fields of the header at 0x1f1) into `to`, if it is not
/// there yet. Where that is impossible, machines boot the image itself.
fn uncompress(image: &Path, to: &Path) {
    const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
    let Some(zstd) = find("zstd").filter(|_| !to.exists()) else { return };
    let bytes = fs::read(image).unwrap_or_else(|e| panic!("{}: {e}", image.display()));
    let word = |at: usize| bytes.get(at..)?.first_chunk().map(|b| u32::from_le_bytes(*b) as usize);
    let payload = || {
        let begin = (usize::from(*bytes.get(0x1f1)?) + 1) * 512 + word(0x248)?;
        // Its last four bytes are the size of the kernel.
        bytes.get(begin..begin + word(0x24c)?.checked_sub(4)?)
    };
    let Some(payload) = payload().filter(|p| p.starts_with(&ZSTD)) else { return };
    let (packed, part) = (to.with_extension("zst"), to.with_extension("part"));
    fs::write(&packed, payload).expect("room");
    let args = [Path::new("-dqf"), Path::new("--rm"), &packed, Path::new("-o"), &part];
    if run(&zstd, &args).code == 0 {
        fs::rename(&part, to).expect("room");
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().map(|f| f.path()).collect();
    all.sort();
    all
}

fn unpacked(dir: &Path) -> Option<PathBuf> {
    entries(dir).into_iter().rfind(|d| d.join("complete").exists())
}

fn is_deb(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "deb")
}

fn downloaded(dir: &Path) -> Option<PathBuf> {
    entries(dir).into_iter().rfind(|p| is_deb(p) && record(p).exists())
}

fn record(deb: &Path) -> PathBuf {
    deb.with_extension("deb.sha256")
}

fn download(dir: &Path) -> PathBuf {
    let apt = dir.join("apt");
    for d in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(d)).expect("directories in the cache directory");
    }
    let mirror = std::env::var("UBCACHE_VM_MIRROR").unwrap_or_else(|_| mirror());
    let sources = apt.join("sources.list");
    fs::write(&sources, format!("deb [signed-by={KEYRING}] {mirror} {SUITE} main\n")).expect("room");
    let own = [
        format!("Dir::Etc::SourceList={}", sources.display()),
        "Dir::Etc::SourceParts=/dev/null".into(),
        format!("Dir::State::Lists={}", apt.join("lists").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        // Else root downloads as another user, who cannot write here.
        "APT::Sandbox::User=root".into(),
    ];
    let with = |args: &[&str]| {
        let options = own.iter().flat_map(|o| ["-o".to_owned(), o.clone()]);
        options.chain(args.iter().map(|a| (*a).to_owned())).collect::<Vec<String>>()
    };
    let why = format!("no kernel in {} and none can be downloaded", dir.display());
    let get = find("apt-get").unwrap_or_else(|| panic!("{why}: this takes Debian's apt-get"));
    let said = run_within(DOWNLOAD, &get, &with(&["update", "-qq"]));
    assert_eq!(said.code, 0, "{why}: {said}");
    let said = run(&tool("apt-cache"), &with(&["depends", META_PACKAGE]));
    let package = said.out.split_whitespace().find(|w| w.starts_with("linux-image-") && *w != META_PACKAGE);
    let package = package.unwrap_or_else(|| panic!("{why}: {META_PACKAGE} names no kernel: {said}"));
    // apt-get downloads into the current directory.
    let mut command = Command::new(&get);
    command.args(with(&["download", "-qq", package])).current_dir(dir);
    let output = command.output().unwrap_or_else(|e| panic!("{why}: {e}"));
    assert!(output.status.success(), "{why}: {}", String::from_utf8_lossy(&output.stderr));
    let deb = entries(dir).into_iter().rfind(|p| is_deb(p)).unwrap_or_else(|| panic!("{why}: {package}"));
    // apt has compared it with the signed list; from now on it must stay the same.
    fs::write(record(&deb), sha256(&deb)).expect("room");
    deb
}

/// Where this machine gets Debian's packages.
fn mirror() -> String {
    let args = ["indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"];
    let said = run(&tool("apt-get"), &args.map(str::to_owned));
    let uri = said.out.lines().find_map(|l| l.strip_suffix(" Debian"));
    let uri = uri.unwrap_or_else(|| {
        panic!("no mirror of Debian in the sources of apt: {said}; set UBCACHE_VM_MIRROR")
    });
    uri.trim_end_matches('/').to_owned()
}

fn sha256(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn unpack(dir: &Path, deb: &Path) -> PathBuf {
    let name = deb.file_name().and_then(|n| n.to_str()).expect("a name of Debian's");
    let (sum, recorded) = (sha256(deb), fs::read_to_string(record(deb)).unwrap_or_default());
    assert_eq!(sum, recorded.trim(), "{}: its checksum is not the one recorded; delete it", deb.display());
    let known = KNOWN.lines().filter(|l| !l.starts_with('#')).find_map(|l| l.strip_suffix(name));
    match known.map(str::trim) {
        Some(expected) => assert_eq!(sum, expected, "{}: not the package known by that name", deb.display()),
        None => eprintln!(
            "note: {name} (sha256 {sum}) is not in kernels.txt: the tests are not known to pass with it"
        ),
    }
    // Until it is complete it has a name of its own.
    let part = dir.join("part");
    let _ = fs::remove_dir_all(&part);
    run_within(DOWNLOAD, &tool("dpkg-deb"), &[Path::new("-x"), deb, &part]).ok();
    let usr = part.join("usr/lib/modules");
    if usr.exists() {
        fs::create_dir_all(part.join("lib")).expect("room");
        fs::rename(usr, part.join("lib/modules")).expect("room");
    }
    let version = image(&part).1;
    let modules = part.join("lib/modules").join(&version);
    let mut packed = Vec::new();
    packed_modules(&modules, &mut packed);
    for some in packed.chunks(500) {
        run_within(DOWNLOAD, &tool("xz"), &[&[PathBuf::from("-d")], some].concat()).ok();
    }
    run(&tool("depmod"), &[Path::new("-b"), &part, Path::new(&version)]).ok();
    fs::write(part.join("complete"), name).expect("room");
    let root = dir.join(&version);
    let _ = fs::remove_dir_all(&root);
    fs::rename(&part, &root).expect("room");
    root
}

fn packed_modules(dir: &Path, out: &mut Vec<PathBuf>) {
    for path in entries(dir) {
        if path.is_dir() {
            packed_modules(&path, out);
        } else if path.to_string_lossy().ends_with(".ko.xz") {
            out.push(path);
        }
    }
}
