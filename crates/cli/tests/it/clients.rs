//! Programs that others wrote, against `up --export nbd=…`: what they write is what they read, what is extracted after
//! the stop, and what `flush` leaves on the backing device.

use ubcache_cli::nbd_client::Client;

use crate::world::*;

const SSD: u64 = 64 << 20;
const HDD: u64 = 256 << 20;
const MODES: [&str; 4] = ["writethrough", "writeback", "writearound", "none"];

struct Served {
    dir: Dir,
    ssd: String,
    hdd: String,
    up: Up,
}

impl Served {
    fn start(mode: &str) -> Served {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", SSD), dir.sparse("hdd", HDD));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k"]).ok();
        let export = format!("--export=nbd={}", dir.path("s"));
        let setting = format!("--set=cache_mode={mode}");
        let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export, &setting]);
        Served { dir, ssd, hdd, up }
    }

    fn uri(&self) -> String {
        self.up.uri(0)
    }

    /// Copies everything out by nbdcopy.
    fn copy_out(&self) -> Vec<u8> {
        let out = self.dir.path("copied-out");
        let mut copy = tool("nbdcopy", "libnbd-bin");
        copy.args([&self.uri(), &out]);
        succeed(copy);
        let bytes = read(&out);
        std::fs::remove_file(&out).expect("our file");
        bytes
    }

    /// Stops, and compares what is extracted, and what the backing device has after a flush, with `contents`.
    fn stop_and_compare(self, contents: &[u8]) {
        let Served { dir, ssd, hdd, up } = self;
        up.stop();
        run(&["check", &ssd, &hdd]).ok();
        let out = dir.path("extracted");
        run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
        assert!(read(&out) == contents, "extracted");
        run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
        assert!(&read(&hdd)[DATA_OFFSET as usize..] == contents, "flushed");
        run(&["check", &ssd, &hdd]).ok();
    }
}

/// Sizes from one sector to a megabyte in random order, 32 at a time, each block with its checksum.
fn fio(mode: &str) {
    let served = Served::start(mode);
    let mut fio = tool("fio", "fio");
    fio.args(["--name=mixed", "--ioengine=nbd", "--rw=randwrite", "--bsrange=512-1M", "--blockalign=512"]);
    fio.args(["--iodepth=32", "--size=96M", "--offset=16M", "--verify=crc32c", "--verify_fatal=1"]);
    fio.args(["--verify_state_save=0", "--randrepeat=0", "--fsync=50"]);
    fio.arg(format!("--uri={}", served.uri())).current_dir(served.dir.root());
    let said = succeed(fio);
    assert!(said.contains("err= 0"), "{said}");
    // Reads of the same, with writes among them, on what is cached by now.
    let mut fio = tool("fio", "fio");
    fio.args(["--name=again", "--ioengine=nbd", "--rw=randrw", "--bs=4k", "--iodepth=32", "--size=16M"]);
    fio.args(["--offset=128M", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--loops=2"]);
    fio.arg(format!("--uri={}", served.uri())).current_dir(served.dir.root());
    let said = succeed(fio);
    assert!(said.contains("err= 0"), "{said}");
    let contents = served.copy_out();
    served.stop_and_compare(&contents);
}

#[test]
fn fio_writethrough() {
    fio(MODES[0]);
}

#[test]
fn fio_writeback() {
    fio(MODES[1]);
}

#[test]
fn fio_writearound() {
    fio(MODES[2]);
}

#[test]
fn fio_none() {
    fio(MODES[3]);
}

/// An image copied in by one program and out by another.
#[test]
fn an_image_is_copied_in_and_out() {
    for mode in MODES {
        let served = Served::start(mode);
        let mut rng = io::Rng::new(3);
        let mut image = vec![0; (HDD - DATA_OFFSET) as usize];
        for chunk in image[1 << 20..9 << 20].chunks_exact_mut(8) {
            chunk.copy_from_slice(&rng.next_u64().to_le_bytes());
        }
        let from = served.dir.file("image", &image);
        let mut copy = tool("nbdcopy", "libnbd-bin");
        copy.args(["--flush", &from, &served.uri()]);
        succeed(copy);
        assert!(served.copy_out() == image, "{mode}: nbdcopy");
        let to = served.dir.path("converted");
        let mut convert = tool("qemu-img", "qemu-utils");
        convert.args(["convert", "-f", "raw", "-O", "raw", &served.uri(), &to]);
        succeed(convert);
        assert!(read(&to) == image, "{mode}: qemu-img");
        let mut compare = tool("qemu-img", "qemu-utils");
        compare.args(["compare", "-f", "raw", "-F", "raw", &from, &served.uri()]);
        assert!(succeed(compare).contains("identical"), "{mode}");
        std::fs::remove_file(&to).expect("our file");
        served.stop_and_compare(&image);
    }
}

#[test]
fn nbdinfo_lists_the_export_with_its_abilities() {
    let served = Served::start("writeback");
    let mut info = tool("nbdinfo", "libnbd-bin");
    info.args(["--json", &served.uri()]);
    let doc: serde_json::Value = serde_json::from_str(&succeed(info)).expect("JSON");
    let export = &doc["exports"][0];
    assert_eq!(export["export-name"], "bcache0");
    assert_eq!(export["export-size"].as_u64(), Some(HDD - DATA_OFFSET));
    for can in ["can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"] {
        assert_eq!(export[can], true, "{can}: {export}");
    }
    assert_eq!(export["is_read_only"], false);
    let mut list = tool("nbdinfo", "libnbd-bin");
    list.args(["--list", &served.uri().replace("bcache0", "")]);
    assert!(succeed(list).contains("export=\"bcache0\""));
    served.up.stop();
}

/// TRIM and zeros that may be unmapped free space in a disk that is a file; they once allocated the whole file.
#[test]
fn discards_free_space_in_files() {
    use std::os::unix::fs::MetadataExt;
    for mode in MODES {
        let served = Served::start(mode);
        let allocated = || std::fs::metadata(&served.hdd).expect("our file").blocks();
        let qemu_io = |command: &str| {
            let mut io = tool("qemu-io", "qemu-utils");
            io.args(["-f", "raw", "-d", "unmap", "-c", command, "-c", "flush", &served.uri()]);
            succeed(io);
        };
        let empty = allocated();
        for command in ["discard 0 128M", "write -z -u 0 128M", "discard 4k 128M", "write -z -u 512 128M"] {
            qemu_io(command);
            // The blocks at the edges are written as data.
            assert!(allocated() <= empty + 64, "{mode}: {command}: {} blocks, {empty} before", allocated());
        }
        qemu_io("write -P 7 1M 16M");
        qemu_io("write -z 1M 1M");
        qemu_io("discard 1M 16M");
        assert!(allocated() <= empty + 64, "{mode}: {} blocks after data, {empty} before", allocated());
        served.up.stop();
    }
}

/// A file system made and checked on the volume without a block device: by copying images.
#[test]
fn a_file_system_survives_a_crash() {
    let served = Served::start("writeback");
    let image = served.dir.sparse("fs", HDD - DATA_OFFSET);
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs");
    mkfs.args(["-q", "-F", &image]);
    succeed(mkfs);
    let mut copy = tool("nbdcopy", "libnbd-bin");
    copy.args(["--flush", &image, &served.uri()]);
    succeed(copy);
    let Served { dir, ssd, hdd, up } = served;
    up.kill();
    run(&["check", &ssd, &hdd]).ok();
    let out = dir.path("out");
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    let mut fsck = tool("e2fsck", "e2fsprogs");
    fsck.args(["-fn", &out]);
    succeed(fsck);
    assert!(read(&out) == read(&image));
}

/// Many clients at once; each has its own part of the volume.
#[test]
fn many_clients() {
    let served = Served::start("writeback");
    let socket = served.dir.path("s");
    let threads: Vec<_> = (0..8u64)
        .map(|t| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let mut client = Client::connect(socket.as_ref(), "bcache0").expect("a server");
                for i in 0..200u64 {
                    let at = (t << 24) + i * 8192;
                    client.write(at, &[(t * 31 + i) as u8; 4096]).expect("a write");
                    if i % 20 == 19 {
                        client.flush().expect("a flush");
                    }
                    assert_eq!(client.read(at, 4096).expect("a read"), [(t * 31 + i) as u8; 4096]);
                }
            })
        })
        .collect();
    for t in threads {
        t.join().expect("a client");
    }
    let contents = served.copy_out();
    served.stop_and_compare(&contents);
}
