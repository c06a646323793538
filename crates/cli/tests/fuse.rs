//! The whole product with a real file system on top: `ubcache make`, `ubcache up --export fuse=DIR`, ext4 on
//! the loop device, a source tree on it, and every way to end.
//!
//! Needs root, FUSE and loop devices; module `host` says what happens without.

#[path = "../../export-fuse/tests/it/host.rs"]
#[allow(dead_code, reason = "shared with the tests of the export, which use the rest")]
mod host;
#[path = "it/world.rs"]
#[allow(dead_code, reason = "shared with the other tests, which use the rest")]
mod world;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host::{Debris, Mounted, text};
use rustix::process::Signal;
use world::{Dir, Up, program, run, signal};

/// A cache of 64 MiB in front of a disk of 512 MiB, where to mount, and the guard that cleans up.
struct Place {
    dir: Dir,
    ssd: String,
    hdd: String,
    volumes: PathBuf,
    mount_point: PathBuf,
    _debris: Debris,
}

impl Place {
    fn new() -> Place {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 512 << 20));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
        let root = dir.root().canonicalize().expect("a directory");
        let (volumes, mount_point) = (root.join("volumes"), root.join("mnt"));
        Place { dir, ssd, hdd, _debris: Debris(volumes.clone()), volumes, mount_point }
    }

    fn up(&self) -> Up {
        let export = format!("--export=fuse={}", text(&self.volumes));
        // Everything through the cache, so that it is the cache that is tested.
        let args = ["-C", &self.ssd, "-B", &self.hdd, &export, "--set=sequential_cutoff=0"];
        Up::start(&self.dir, 1, &args)
    }

    fn mount(&self, device: &Path) -> Mounted {
        Mounted::new(device, &self.mount_point)
    }

    fn is_clean(&self) {
        assert!(!host::is_mount_point(&self.volumes));
        assert!(host::loops_over(&self.volumes).is_empty());
        run(&["check", &self.ssd, &self.hdd]).ok();
    }
}

/// The loop device of the only volume.
fn device(up: &Up) -> PathBuf {
    let ways = up.ready[0]["exports"].as_array().expect("a list");
    let text = |way: usize, key: &str| ways[way][key].as_str().expect("a text");
    assert_eq!((ways.len(), text(0, "kind"), text(1, "kind")), (2, "loop", "fuse"));
    let file = fs::metadata(text(1, "address")).expect("a file");
    assert_eq!(file.len(), up.ready[0]["size_bytes"]);
    PathBuf::from(text(0, "address"))
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates' folder").to_path_buf()
}

/// Names and sums of everything under `dir`.
fn sums(dir: &Path) -> String {
    let script = "cd \"$1\" && find . -type f -print0 | sort -z | xargs -0 sha256sum";
    let sums = host::run("sh", &["-c", script, "sh", text(dir)]);
    assert!(sums.lines().count() > 50, "there is something to compare");
    sums
}

#[test]
fn a_source_tree_on_ext4_survives_a_restart() {
    if !host::ready(&["mkfs.ext4", "e2fsck", "sha256sum", "fstrim"]) {
        return;
    }
    let place = Place::new();
    let mut up = place.up();
    host::run("mkfs.ext4", &["-q", text(&device(&up))]);
    let mounted = place.mount(&device(&up));
    host::run("cp", &["-a", text(&sources()), text(&place.mount_point.join("tree"))]);
    fs::remove_dir_all(place.mount_point.join("tree/engine")).unwrap();
    let before = sums(&place.mount_point.join("tree"));
    // The disk is a file, where holes are cheap.
    host::run("fstrim", &[text(&place.mount_point)]);
    mounted.unmount();
    let stats = up.stats();
    assert!(stats["volumes"][0]["dirty_bytes"].as_u64().unwrap() > 0, "{stats}");
    up.stop();
    place.is_clean();

    let up = place.up();
    assert!(!up.said().contains("died"), "{}", up.said());
    host::run("e2fsck", &["-fn", text(&device(&up))]);
    let mounted = place.mount(&device(&up));
    assert!(sums(&place.mount_point.join("tree")) == before);
    mounted.unmount();
    up.stop();
    place.is_clean();

    // The same through the other way out: the disk alone, after everything was written back.
    run(&["flush", "-C", &place.ssd, "-B", &place.hdd]).ok();
    let offset = (world::DATA_OFFSET).to_string();
    fs::create_dir_all(&place.mount_point).unwrap();
    host::run("mount", &["-o", &format!("ro,loop,offset={offset}"), &place.hdd, text(&place.mount_point)]);
    let _unmount = Debris(place.mount_point.clone());
    assert!(sums(&place.mount_point.join("tree")) == before);
}

/// `blkdiscard` on the loop device of a volume in a sparse file allocated the whole file: 1 MiB became 4 GiB.
#[test]
fn a_discard_keeps_the_disk_sparse() {
    use std::os::unix::fs::MetadataExt;
    if !host::ready(&["blkdiscard"]) {
        return;
    }
    let place = Place::new();
    let up = place.up();
    let allocated = || fs::metadata(&place.hdd).expect("our file").blocks();
    let empty = allocated();
    for arguments in [&[][..], &["--offset", "1048576", "--length", "104857600"]] {
        let device = device(&up);
        host::run("blkdiscard", &[arguments, &["--force", text(&device)]].concat());
        assert!(allocated() <= empty + 64, "{arguments:?}: {} blocks, {empty} before", allocated());
    }
    up.stop();
    place.is_clean();
}

#[test]
fn synced_data_survives_a_kill() {
    if !host::ready(&["mkfs.ext4", "e2fsck"]) {
        return;
    }
    let place = Place::new();
    let up = place.up();
    let lost = device(&up);
    host::run("mkfs.ext4", &["-q", text(&lost)]);
    let mounted = place.mount(&lost);
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i / 5) as u8).collect();
    fs::write(place.mount_point.join("precious"), &data).unwrap();
    host::run("sync", &["-f", text(&place.mount_point)]);
    up.kill();
    drop(mounted);

    let up = place.up();
    assert!(up.said().contains("unmounted the file system of a process that has ended"), "{}", up.said());
    let mounted = place.mount(&device(&up));
    assert!(fs::read(place.mount_point.join("precious")).unwrap() == data);
    mounted.unmount();
    host::run("e2fsck", &["-fn", text(&device(&up))]);
    up.stop();
    place.is_clean();
}

#[test]
fn a_stop_waits_for_who_has_it_mounted_and_names_him() {
    if !host::ready(&["mkfs.ext4"]) {
        return;
    }
    let place = Place::new();
    let up = place.up();
    host::run("mkfs.ext4", &["-q", text(&device(&up))]);
    let mounted = place.mount(&device(&up));
    signal(up.pid(), Signal::TERM);
    host::soon("it says why it does not stop", || up.said().contains("is mounted at"));
    assert!(up.said().contains(text(&place.mount_point)), "{}", up.said());
    fs::write(place.mount_point.join("still"), "served").unwrap();
    mounted.unmount();
    let (status, said) = up.ended();
    assert_eq!(status.code(), Some(0), "{said}");
    place.is_clean();
}

#[test]
fn a_second_signal_takes_it_away() {
    if !host::ready(&["mkfs.ext4"]) {
        return;
    }
    let place = Place::new();
    let up = place.up();
    host::run("mkfs.ext4", &["-q", text(&device(&up))]);
    let mounted = place.mount(&device(&up));
    signal(up.pid(), Signal::INT);
    host::soon("it says why it does not stop", || up.said().contains("is mounted at"));
    signal(up.pid(), Signal::INT);
    let (status, said) = up.ended();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(!host::is_mount_point(&place.volumes));
    drop(mounted);
    host::soon("the loop device is free", || host::loops_over(&place.volumes).is_empty());
    // What was not written is lost, as the operator wanted; the set is whole.
    place.up().stop();
    place.is_clean();
}

#[test]
fn the_line_that_says_ready_names_the_device_and_the_file() {
    if !host::ready(&[]) {
        return;
    }
    let place = Place::new();
    let export = format!("fuse={}", text(&place.volumes));
    let mut child = Command::new(program())
        .args(["up", "-C", &place.ssd, "-B", &place.hdd, "--export", &export, "--stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    // The end of the input stops it.
    drop(child.stdin.take());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    let file = format!(" (file {})\n", text(&place.volumes.join("bcache0")));
    assert!(line.starts_with("bcache0 ready: /dev/loop") && line.ends_with(&file), "{line}");
    assert_eq!(rest, "");
    place.is_clean();
}
