//! Real clients: libnbd's tools, QEMU's, and fio.

use serde_json::Value;

use crate::tools::{Running, Spec, noise, run, run_ok, write_file};

const LIBNBD: &str = "libnbd-bin";
const QEMU: &str = "qemu-utils";
const FIO: &str = "fio";

const MIB: u64 = 1 << 20;

fn nbdinfo(args: &[&str]) -> Value {
    let mut all = vec!["--json"];
    all.extend(args);
    serde_json::from_str(&run_ok(LIBNBD, "nbdinfo", &all)).expect("JSON")
}

#[test]
fn nbdinfo_sees_what_the_export_can_do() {
    for server in
        [Running::unix(vec![Spec::new("disk", 64 * MIB)]), Running::tcp(vec![Spec::new("disk", 64 * MIB)])]
    {
        let report = nbdinfo(&[server.uri()]);
        assert_eq!(report["protocol"], "newstyle-fixed");
        assert_eq!(report["structured"], true);
        let export = &report["exports"][0];
        assert_eq!(export["export-name"], "disk");
        assert_eq!(export["export-size"], 64 * MIB);
        assert_eq!(export["is_read_only"], false);
        assert_eq!(export["is_rotational"], false);
        let can = ["can_cache", "can_df", "can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"];
        for ability in can {
            assert_eq!(export[ability], true, "{ability}");
        }
        assert_eq!(export["can_fast_zero"], false);
        assert_eq!(export["contexts"][0], "base:allocation");
        assert_eq!(export["block_size_minimum"], 512);
        assert_eq!(export["block_size_preferred"], 4096);
        assert_eq!(export["block_size_maximum"], 32 * MIB);
    }
}

#[test]
fn nbdinfo_lists_exports() {
    let server = Running::unix(vec![Spec::new("disk #1", MIB), Spec::new("zwei/ö", 2 * MIB)]);
    let report = nbdinfo(&["--list", &server.default_uri()]);
    let exports = report["exports"].as_array().expect("a list");
    let names: Vec<&str> = exports.iter().filter_map(|e| e["export-name"].as_str()).collect();
    assert_eq!(names, ["disk #1", "zwei/ö"]);
    assert_eq!(exports[1]["export-size"], 2 * MIB);
    // The printed URIs name the exports, whatever is in their names.
    for (uri, size) in server.uris.iter().zip([MIB, 2 * MIB]) {
        assert_eq!(run_ok(LIBNBD, "nbdinfo", &["--size", uri]).trim(), size.to_string());
    }
}

#[test]
fn the_default_export_is_the_only_one() {
    let server = Running::unix(vec![Spec::new("disk", MIB)]);
    assert_eq!(run_ok(LIBNBD, "nbdinfo", &["--size", &server.default_uri()]).trim(), MIB.to_string());

    let server = Running::unix(vec![Spec::new("a", MIB), Spec::new("b", MIB)]);
    let refused = run(LIBNBD, "nbdinfo", &["--size", &server.default_uri()]);
    assert!(!refused.status.success());
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("no export named"), "{message}");
}

#[test]
fn nbdinfo_maps_holes() {
    let mut spec = Spec::new("disk", MIB);
    spec.filled.push((128 << 10, vec![1; 64 << 10]));
    let server = Running::unix(vec![spec]);
    let map = run_ok(LIBNBD, "nbdinfo", &["--map", "--json", server.uri()]);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let extents: Vec<(u64, u64, u64)> = map
        .as_array()
        .expect("a list")
        .iter()
        .map(|e| {
            let number = |key: &str| e[key].as_u64().expect("a number");
            (number("offset"), number("length"), number("type"))
        })
        .collect();
    assert_eq!(extents, [(0, 128 << 10, 3), (128 << 10, 64 << 10, 0), (192 << 10, 832 << 10, 3)]);
}

#[test]
fn nbdcopy_brings_back_what_it_took() {
    let server = Running::unix(vec![Spec::new("disk", 64 * MIB)]);
    let (from, to) = (server.dir.path().join("from"), server.dir.path().join("to"));
    let data = noise(20 << 20, 7);
    write_file(&from, &[(3 * MIB, &data), (60 * MIB, &data[..MIB as usize])], 64 * MIB);
    let (from, to) = (from.to_str().expect("UTF-8"), to.to_str().expect("UTF-8"));
    // Several connections, many requests on each.
    run_ok(LIBNBD, "nbdcopy", &["--connections=4", "--requests=64", "--flush", from, server.uri()]);
    run_ok(LIBNBD, "nbdcopy", &["--connections=4", server.uri(), to]);
    assert!(std::fs::read(from).expect("a file") == std::fs::read(to).expect("a file"));
    let map = run_ok(LIBNBD, "nbdinfo", &["--map", "--totals", server.uri()]);
    assert!(map.contains("hole,zero"), "holes stayed holes: {map}");
}

#[test]
fn qemu_img_converts_and_compares() {
    let server = Running::unix(vec![Spec::new("disk", 64 * MIB)]);
    let dir = server.dir.path();
    let (raw, qcow2) = (dir.join("disk.raw"), dir.join("disk.qcow2"));
    write_file(&raw, &[(0, &noise(MIB as usize, 1)), (33 * MIB + 512, &noise(5 << 20, 2))], 64 * MIB);
    let (raw, qcow2) = (raw.to_str().expect("UTF-8"), qcow2.to_str().expect("UTF-8"));
    let info = run_ok(QEMU, "qemu-img", &["info", "--output=json", server.uri()]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["virtual-size"], 64 * MIB);
    assert_eq!(info["format"], "raw");
    run_ok(QEMU, "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", raw, server.uri()]);
    let same = run_ok(QEMU, "qemu-img", &["compare", "-f", "raw", "-F", "raw", raw, server.uri()]);
    assert!(same.contains("Images are identical"), "{same}");
    run_ok(QEMU, "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", server.uri(), qcow2]);
    run_ok(QEMU, "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", raw, qcow2]);
    let map = run_ok(QEMU, "qemu-img", &["map", "--output=json", server.uri()]);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    assert!(map.as_array().expect("a list").iter().any(|e| e["data"] == false), "{map}");
}

#[test]
fn qemu_io_uses_every_command() {
    let server = Running::unix(vec![Spec::new("disk", 64 * MIB)]);
    let commands = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 1M 64k",
        "write -z 64k 64k",
        "write -z -u 256k 128k",
        "discard 512k 64k",
        "flush",
        "read -P 0x11 0 64k",
        "read -P 0 64k 64k",
        "read -P 0 256k 128k",
        "read -P 0x22 1M 64k",
        // Not whole sectors: the client reads, changes and writes them.
        "write -P 0x33 1000 100",
        "read -P 0x33 1000 100",
        "read -P 0x11 900 100",
        "write -P 0x44 3M 40M",
        "read -P 0x44 3M 40M",
    ];
    let mut args = vec!["-f", "raw", "-t", "none"];
    args.extend(commands.iter().flat_map(|c| ["-c", c]));
    args.push(server.uri());
    let output = run_ok(QEMU, "qemu-io", &args);
    assert!(!output.contains("failed") && !output.contains("error"), "{output}");
}

#[test]
fn errors_reach_clients() {
    let mut read_only = Spec::new("ro", MIB);
    read_only.read_only = true;
    let server = Running::unix(vec![read_only, Spec::new("rw", MIB)]);
    assert_eq!(nbdinfo(&[&server.uris[0]])["exports"][0]["is_read_only"], true);
    let file = server.dir.path().join("two");
    write_file(&file, &[], 2 * MIB);
    let file = file.to_str().expect("UTF-8");
    for uri in &server.uris {
        let refused = run(LIBNBD, "nbdcopy", &[file, uri]);
        assert!(!refused.status.success(), "{uri}");
    }
    // Past the end, with a client that asks anyway.
    let output = run(QEMU, "qemu-io", &["-r", "-f", "raw", "-c", "read 1M 4k", &server.uris[0]]);
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("failed") || text.contains("error") || text.contains("beyond"), "{text}");
}

fn fio(server: &Running, jobs: &[&str]) {
    let uri = format!("--uri={}", server.uri());
    let mut args = vec!["--name=verify", "--ioengine=nbd", "--verify_state_save=0", &uri];
    args.extend(jobs);
    run_ok(FIO, "fio", &args);
}

#[test]
fn fio_verifies_random_writes() {
    let server = Running::unix(vec![Spec::new("disk", 64 * MIB)]);
    fio(
        &server,
        &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=32M", "--verify=crc32c", "--fsync=16"],
    );
    fio(
        &server,
        &[
            "--rw=randrw",
            "--bsrange=512-256k",
            "--bs_unaligned=0",
            "--iodepth=16",
            "--size=48M",
            "--verify=crc32c",
        ],
    );
}

#[test]
fn fio_verifies_large_requests_over_tcp() {
    let server = Running::tcp(vec![Spec::new("disk", 128 * MIB)]);
    fio(&server, &["--rw=randwrite", "--bs=4M", "--iodepth=8", "--size=128M", "--verify=crc32c"]);
}

#[test]
fn fio_verifies_over_several_connections() {
    let server = Running::unix(vec![Spec::new("disk", 64 * MIB)]);
    let jobs = ["--rw=randwrite", "--bs=8k", "--iodepth=16", "--size=16M", "--verify=crc32c"];
    let jobs = [&jobs[..], &["--numjobs=4", "--offset_increment=16M", "--thread"]].concat();
    fio(&server, &jobs);
}

#[test]
fn without_io_uring_everything_works_too() {
    let server = Running::plain(vec![Spec::new("disk", 64 * MIB)]);
    fio(&server, &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=16M", "--verify=crc32c"]);
    fio(&server, &["--rw=randwrite", "--bs=2M", "--iodepth=8", "--size=64M", "--verify=crc32c"]);
}
