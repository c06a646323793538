//! Images that kernels left pass the check, with the notices that their history explains.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::ops::ControlFlow;

use common::{ALL, backing, backing_source, cache, cache_source, expected, initialised};
use inspect::{CheckOptions, Invariant, ReadAt, SetReport, check, check_set};

fn report(dir: &str) -> SetReport {
    let (cache, backing) = (cache(dir), backing(dir));
    check_set(&cache_source(&cache), &[&backing_source(&backing)], CheckOptions::default())
}

#[test]
fn images_of_kernels_pass() {
    for dir in ALL {
        let report = report(dir);
        assert!(report.is_ok(), "{dir}: {report}");
        println!("{dir}: {report}");
    }
}

#[test]
fn bucket_usage_and_devices_agree() {
    for dir in initialised() {
        let (report, expected) = (report(dir), expected(dir));
        let summary = report.summary.unwrap();
        let (b, e) = (summary.buckets, &expected["buckets"]);
        let found = [b.superblock, b.journal, b.prio, b.uuid, b.btree, b.data];
        let names = ["sb", "journal", "prio", "uuid", "btree", "data"];
        assert_eq!(found.map(Some), names.map(|name| e[name].as_u64()), "{dir}");
        assert_eq!(found.iter().sum::<u64>() + b.unused, expected["cache"]["nbuckets"].as_u64().unwrap());

        for device in expected["devices"].as_array().unwrap() {
            let found = summary.devices.iter().find(|d| device["inode"] == d.inode).unwrap();
            assert_eq!(found.kind, device["kind"].as_str().unwrap(), "{dir}");
            assert_eq!(found.sectors, device["sectors"].as_u64(), "{dir}");
            assert_eq!(Some(found.dirty_sectors), device["dirty_sectors"].as_u64(), "{dir}");
            assert_eq!(Some(found.clean_sectors), device["clean_sectors"].as_u64(), "{dir}");
            if let Some(b) = &found.backing {
                assert_eq!(
                    found.clean_extents_differing_from_backing,
                    device["clean_extents_differing_from_backing"].as_u64(),
                    "{dir}"
                );
                assert_eq!(
                    (b.state, b.cache_mode),
                    (device["state"].as_str().unwrap(), device["mode"].as_str())
                );
                assert_eq!(
                    (Some(b.data_offset), b.attachment),
                    (device["data_offset"].as_u64(), Some("attached"))
                );
            }
        }
    }
}

/// What is legal and still worth knowing about each image.
#[test]
fn notices_are_the_documented_ones() {
    for dir in ALL {
        let report = report(dir);
        let expected: &[(Invariant, u64)] = match dir {
            // Writethrough writes were in flight.
            "07-busy-killed" => &[(Invariant::CleanEqual, 6)],
            // Built with stale dirty keys, and an invalidation that is not aligned.
            "08-synthetic" => &[(Invariant::PointerAge, 2), (Invariant::Alignment, 3)],
            _ => &[],
        };
        let found: Vec<_> = report.counts.iter().map(|c| (c.invariant, c.count)).collect();
        assert_eq!(found, expected, "{dir}: {report}");
    }
}

#[test]
fn devices_come_in_any_order() {
    let (a, b) = ("04-writeback-killed", "06-volume-and-backing-killed");
    let (ca, ba, cb, bb) = (cache(a), backing(a), cache(b), backing(b));
    let (ca, cb) = (cache_source(&ca), cache_source(&cb));
    let (ba, bb) = (backing_source(&ba), backing_source(&bb));
    let devices: [&dyn ReadAt; 4] = [&bb, &ca, &ba, &cb];
    let report = check(&devices, CheckOptions::default(), &mut |_| ControlFlow::Continue(()));
    assert!(report.is_ok(), "{report}");
    assert_eq!(report.sets.len(), 2);
    for set in &report.sets {
        let backings = set.summary.as_ref().unwrap().devices.iter().filter(|d| d.backing.is_some());
        assert_eq!(backings.count(), 1, "{report}");
    }
    let report = check(&[&ba], CheckOptions::default(), &mut |_| ControlFlow::Continue(()));
    assert_eq!((report.sets.len(), report.backings_alone.len()), (0, 1));
}

/// What scripts read.
#[test]
fn report_as_json() {
    let dir = "07-busy-killed";
    let (cache, backing) = (cache(dir), backing(dir));
    let (cache, backing) = (cache_source(&cache), backing_source(&backing));
    let devices: [&dyn ReadAt; 2] = [&cache, &backing];
    let mut seen = 0;
    let report = check(&devices, CheckOptions::default(), &mut |p| {
        seen = p.done.0;
        ControlFlow::Continue(())
    });
    assert_eq!(seen, 62464);
    let json: serde_json::Value = serde_json::from_str(&inspect::dump::to_json(&report)).unwrap();
    assert_eq!(
        (&json["schema_version"], &json["errors"], &json["notices"]),
        (&1.into(), &0.into(), &6.into())
    );
    let set = &json["sets"][0];
    assert_eq!(set["summary"]["buckets"]["data"], 961);
    assert_eq!(set["summary"]["journal"]["newest_seq"], 3311);
    assert_eq!(set["summary"]["devices"][0]["backing"]["attachment"], "attached");
    assert_eq!(set["summary"]["devices"][0]["backing"]["standing"], "attached", "for one release");
    assert_eq!(set["counts"][0]["invariant"]["name"], "clean-equal");
    assert_eq!(set["findings"][0]["severity"], "notice");
    assert_eq!(set["findings"][0]["place"]["device"], "cache");
    assert!(report.to_string().ends_with("no errors, 6 notices\n"), "{report}");

    let report = check(&devices, CheckOptions::default(), &mut |_| ControlFlow::Break(()));
    assert!(report.sets[0].summary.as_ref().unwrap().cancelled);
    let report = check(&devices, CheckOptions::METADATA, &mut |_| ControlFlow::Break(()));
    assert_eq!(report.notices, 0);
}
