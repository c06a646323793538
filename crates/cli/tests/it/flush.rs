//! `flush`, which is `drain -C`, beyond the fixtures: which devices it takes, and what it says about those that are missing.

use crate::world::*;

fn dirty_bytes(ssd: &str) -> u64 {
    let doc = run(&["dump", ssd, "uuids", "--json"]).ok().json();
    doc["slots"].as_array().unwrap().iter().map(|s| s["dirty_sectors"].as_u64().unwrap() * 512).sum()
}

#[test]
fn finds_the_backing_device_beside_the_cache() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let bytes = dirty_bytes(&ssd);
    let doc = run(&["flush", "-C", &ssd, "--json"]).ok();
    assert!(doc.err.contains(&format!("found backing device {hdd}")), "{doc}");
    let doc = doc.json();
    assert_eq!(doc["schema_version"], 1);
    assert_eq!(doc["drained"][0]["drained_bytes"].as_u64(), Some(bytes));
    // The former names.
    assert_eq!(doc["flushed"][0]["flushed_bytes"].as_u64(), Some(bytes));
    assert_eq!(doc["missing"].as_array().unwrap().len(), 0);
    assert!(read(&hdd)[DATA_OFFSET as usize..] == dirty_set()[2]);
    assert_eq!(dirty_bytes(&ssd), 0);
    run(&["super", &hdd]).ok().says(&["cache_state\t1 [clean]"]);
}

#[test]
fn a_missing_backing_device_is_named_with_its_bytes() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let uuid = run(&["super", &hdd, "--json"]).ok().json()["uuid"].as_str().unwrap().to_owned();
    std::fs::remove_file(&hdd).unwrap();
    let bytes = dirty_bytes(&ssd);
    assert!(bytes > 0);
    let said = run(&["drain", "-C", &ssd]);
    said.refused(&[&uuid, "800.0 KiB of dirty data", "\"disk one\"", "missing", "-B"]);
    assert!(read(&ssd) == dirty_set()[0], "nothing could be done, so nothing was");
    let doc = run(&["flush", "-C", &ssd, "--json"]).refused(&[]).json();
    assert_eq!(doc["missing"][0]["dirty_bytes"].as_u64(), Some(bytes));
    assert_eq!(doc["missing"][0]["uuid"], uuid);
}

/// Two backing devices, one of which is away: the other one is drained, and the exit code says that not all is well.
#[test]
fn a_drain_continues_without_a_missing_disk() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 16 << 20);
    let disks = ["a", "b"].map(|n| dir.sparse(n, 4 << 20));
    run(&["make", "-C", &ssd, "-B", &disks[0], "-B", &disks[1], "--bucket", "16k", "--writeback"]).ok();
    let socket = dir.path("sock");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 2, &["-C", &ssd, "-B", &disks[0], "-B", &disks[1], &export]);
    for (i, name) in ["bcache0", "bcache1"].iter().enumerate() {
        let mut client = ubcache_cli::nbd_client::Client::connect(socket.as_ref(), name).unwrap();
        client.write(i as u64 * 8192, &vec![i as u8 + 1; 4096 * (i + 1)]).unwrap();
    }
    up.stop();
    let away = dir.path("away/b");
    std::fs::create_dir(dir.path("away")).unwrap();
    std::fs::rename(&disks[1], &away).unwrap();
    let said = run(&["flush", "-C", &ssd]).refused(&["8.0 KiB", "missing"]);
    assert!(said.out.contains(&format!("{}: 4.0 KiB written back", disks[0])), "{said}");
    assert_eq!(read(&disks[0])[DATA_OFFSET as usize..][..4096], [1; 4096]);
    run(&["flush", "-C", &ssd, "-B", &away]).ok();
    assert_eq!(read(&away)[DATA_OFFSET as usize + 8192..][..8192], [2; 8192]);
    run(&["check", &ssd, &disks[0], &away]).ok().says(&["no errors"]);
    run(&["flush", "-C", &ssd, "-B", &away]).ok().says(&["nothing is dirty"]);
}

#[test]
fn a_set_that_was_never_used() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 8 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback"]).ok();
    let before = [read(&ssd), read(&hdd)];
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok().says(&["nothing is dirty", "not attached"]);
    run(&["flush", "-C", &ssd]).ok().says(&["nothing is dirty"]);
    assert!(before == [read(&ssd), read(&hdd)]);
}

/// What the cache has of a device that ran without it is out of date: it must not be written back.
#[test]
fn a_device_that_ran_alone() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let stale = crate::common_checks::resealed(&read(&hdd), 104, &(3u64 << 61 | 1).to_le_bytes());
    let hdd = dir.file("hdd", &stale);
    run(&["flush", "-C", &ssd, "-B", &hdd]).refused(&[&hdd, "inconsistent", "out of date"]);
    assert!(read(&hdd) == stale && read(&ssd) == dirty_set()[0]);
}
