//! Tests of the problems of sets and devices that a test makes.

mod unplug;
mod waits;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serve::Snapshot;
use serve::exports::{Opens, Way, WayKind};

use super::*;
use crate::components::views::{DeviceSizes, LabelOwner};
use crate::jobs::Jobs;
use crate::names::Named;
use crate::order::Holder;

fn volume(name: &str, label: &str) -> VolumeFigures {
    VolumeFigures {
        name: name.into(),
        label: label.into(),
        slot: Some(0),
        backing_device: Some("/dev/hdd".into()),
        backing_uuid: Some("u".into()),
        state: Some("clean"),
        attached: true,
        ..VolumeFigures::default()
    }
}

fn set(volumes: Vec<VolumeFigures>) -> SetView {
    let figures = Snapshot { set: Some(SetFigures::default()), volumes, ..Snapshot::default() };
    SetView {
        id: "s".into(),
        group: None,
        has_cache: true,
        state: "serving",
        why: None,
        holders: Vec::new(),
        disks: BTreeMap::new(),
        without_section: BTreeMap::new(),
        figures,
    }
}

fn device(path: &str, kind: &'static str, state: &'static str, why: &str) -> DeviceView {
    DeviceView {
        path: PathBuf::from(path),
        uuid: Some(path.into()),
        kind: Some(kind),
        set: Some("s".into()),
        label: String::new(),
        name: None,
        state,
        why: Some(why.to_owned()).filter(|w| !w.is_empty()),
        awaits: None,
        blank: None,
        cache_path: Some(PathBuf::from("/dev/ssd")),
        left_dirty_in: None,
        dirty: false,
        dirty_bytes: None,
        sizes: DeviceSizes::default(),
    }
}

fn on(key: &'static str) -> Vec<TunableFigure> {
    vec![TunableFigure { key, value: "1".into(), ..TunableFigure::default() }]
}

#[test]
fn damaged_dirty_data_is_a_problem_of_its_set() {
    use serve::snapshot::{ChecksumFigures, DamagedFigures};

    let mut damaged = set(vec![volume("bcache0", "one")]);
    let first = DamagedFigures { volume: "one".into(), registered: true, sector: 2048, sectors: 8, slot: 0 };
    let checksums = |bytes| ChecksumFigures {
        block_bytes: 4096,
        damaged_dirty_bytes: bytes,
        damaged: vec![first.clone()],
        ..ChecksumFigures::default()
    };
    for (bytes, blocks) in [(0, None), (8192, Some("2 blocks of dirty data are damaged"))] {
        damaged.figures.set.as_mut().unwrap().checksums = Some(checksums(bytes));
        let found = problems(&[damaged.clone()], &[]);
        assert_eq!(found.len(), usize::from(blocks.is_some()), "{found:?}");
        for problem in found {
            assert_eq!((problem.kind, &*problem.command), ("damaged", "ubcache damaged s"));
            assert!(problem.text.starts_with(blocks.unwrap()), "{problem:?}");
            assert!(problem.text.contains("sector 2048 of one"), "{problem:?}");
        }
    }
}

fn kinds_and_commands(sets: &[SetView], devices: &[DeviceView]) -> Vec<(&'static str, String)> {
    problems(sets, devices).into_iter().map(|p| (p.kind, p.command)).collect()
}

#[test]
fn a_healthy_set_has_no_problems() {
    let devices = [device("/dev/ssd", "cache", "served", ""), device("/dev/hdd", "backing", "stopped", "")];
    assert_eq!(problems(&[set(vec![volume("bcache0", "one")])], &devices), []);
}

/// Problems of a set began with its UUID although it had a label, and so did their commands.
#[test]
fn a_set_with_a_label_is_called_by_it() {
    let mut labelled = set(Vec::new());
    let figures = labelled.figures.set.as_mut().unwrap();
    figures.names.label = "fast".into();
    figures.tunables = on("io_disable");
    let found = problems(&[labelled], &[device("/dev/ssd", "cache", "served", "")]);
    assert!(found[0].text.starts_with("fast, cache set s (/dev/ssd) fails every request"), "{found:?}");
    assert_eq!(found[0].command, "ubcache set fast io_disable=0");
}

/// A set that was disabled was shown as serving, without a word of what to do.
#[test]
fn a_set_that_has_failed_is_the_first_problem() {
    let mut of_set = set(vec![VolumeFigures { problem: Some("no room".into()), ..volume("bcache0", "one") }]);
    of_set.figures.set =
        Some(SetFigures { failed: Some("ssd: read failed".into()), ..SetFigures::default() });
    let devices = [device("/dev/ssd", "cache", "served", "")];
    let found = problems(&[of_set], &devices);
    assert_eq!(found.iter().map(|p| p.kind).collect::<Vec<_>>(), ["set_failed", "not_exported"]);
    assert_eq!(
        found[0].text,
        "cache set s (/dev/ssd) is disabled: ssd: read failed; its volumes have no dirty data, so nothing is lost; if the device \
         does not come back, see the page dead-ssd-clean of the guide"
    );
    assert_eq!(found[0].command, "ubcache unregister /dev/ssd && ubcache register /dev/ssd");
    assert_eq!(found[1].text, "one (bcache0) is NOT EXPORTED: no room");
    assert_eq!(found[1].command, "ubcache reload");
}

/// The problem says how much dirty data is at stake, and what to unmount before the command is run.
#[test]
fn a_disabled_set_says_how_much_dirty_data_is_where() {
    let mut volumes = vec![volume("bcache0", "one"), volume("bcache1", "")];
    volumes[0].held.dirty_bytes = 12 << 10;
    static LOOP: WayKind = WayKind { name: "loop", opens: Opens::BlockDevice { prefix: "loop" } };
    volumes[0].exports = vec![Way { kind: &LOOP, address: "/dev/loop0".into() }];
    let mut of_set = set(volumes);
    of_set.figures.set =
        Some(SetFigures { failed: Some("ssd: read failed".into()), ..SetFigures::default() });
    let found = problems(&[of_set], &[device("/dev/ssd", "cache", "served", "")]);
    assert_eq!(
        found[0].text,
        "cache set s (/dev/ssd) is disabled: ssd: read failed; dirty data is on this cache device alone (12.0 KiB of one \
         (bcache0)), and these volumes fail every request until the device works again; first unmount or close what uses \
         /dev/loop0, then run the command; if it never does, see the page dead-ssd-dirty of the guide"
    );
    assert_eq!(found[0].command, "ubcache unregister /dev/ssd && ubcache register /dev/ssd");
}

/// The volume with the dirty data was stopped: `status` said that nothing is lost, and named the page of a clean disk.
#[test]
fn a_disabled_set_counts_the_dirty_data_of_all_its_disks() {
    let one = SlotDirty { dirty_bytes: 20 << 20, ..SlotDirty::default() };
    let slot = |slot, uuid: &str, label: &str| SlotDirty {
        slot,
        uuid: Some(uuid.into()),
        label: label.into(),
        ..one.clone()
    };
    let mut failed = set(vec![volume("bcache0", "one")]);
    failed.figures.set = Some(SetFigures {
        names: serve::snapshot::SetNames { uuid: "s".into(), ..Default::default() },
        failed: Some("ssd: read failed".into()),
        dirty_by_slot: vec![slot(1, "/dev/data", "data"), slot(2, "gone", "")],
        ..SetFigures::default()
    });
    let stopped =
        DeviceView { name: Some("bcache1".into()), ..device("/dev/data", "backing", "stopped", "") };
    let devices = [device("/dev/ssd", "cache", "served", ""), stopped];
    let text = |failed: &SetView| {
        let found = problems(std::slice::from_ref(failed), &devices);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].text.ends_with("the page dead-ssd-dirty of the guide"), "{found:?}");
        found[0].text.clone()
    };
    let said = text(&failed);
    let words = "dirty data is on this cache device alone (20.0 MiB of data (bcache1): stopped, 20.0 MiB of gone: not \
                 registered), and cannot be read until the device works again";
    assert!(said.contains(words), "{said}");
    failed.figures.volumes[0].held.dirty_bytes = 1 << 20;
    let (said, words) =
        (text(&failed), "alone (1.0 MiB of one (bcache0), 20.0 MiB of data (bcache1): stopped, ");
    assert!(said.contains(words), "{said}");
}

/// A stop of the daemon waited for a mount, and `status` had no problem.
#[test]
fn the_wait_of_a_stop_is_the_first_problem() {
    let volumes = vec![VolumeFigures { problem: Some("no room".into()), ..volume("bcache0", "one") }];
    let users = "/dev/loop0 is mounted at /mnt".to_owned();
    let holder = Holder { name: "bcache0".into(), label: "one".into(), users, command: "umount /mnt".into() };
    let found = problems(&[SetView { state: "stopping", holders: vec![holder], ..set(volumes) }], &[]);
    assert_eq!(found.iter().map(|p| p.kind).collect::<Vec<_>>(), ["stopping", "not_exported"]);
    assert_eq!(
        found[0].text,
        "the daemon is stopping, and waits until one (bcache0) is not in use: /dev/loop0 is mounted at /mnt; unmount or close it, \
         and the stop continues"
    );
    assert_eq!(found[0].command, "umount /mnt");
}

/// Two disks with one label, and the link by that label led to one of them.
#[test]
fn a_label_of_two_volumes_is_a_problem() {
    let volumes = vec![volume("bcache0", "data"), volume("bcache1", "data"), volume("bcache2", "")];
    let found = problems(&[set(volumes), set(vec![volume("bcache3", ""), volume("bcache4", "other")])], &[]);
    assert_eq!(found.len(), 1, "{found:?}");
    let both = "2 volumes have the label data (bcache0 (/dev/hdd), bcache1 (/dev/hdd)): no command takes it as a name, and /dev/ubcache has";
    assert!(found[0].text.starts_with(both), "{found:?}");
    // The volume with the higher number may be the older one.
    assert!(found[0].text.ends_with("; give another label to the one that you choose"), "{found:?}");
    assert_eq!((found[0].kind, &*found[0].command), ("label_shared", "ubcache set-label NAME data-2"));
}

/// A served and a stopped volume had one label, and every command refused it, but it was no problem.
#[test]
fn a_label_of_a_served_and_a_stopped_volume_is_a_problem() {
    let sets = [set(vec![volume("bcache0", "twin")])];
    let other = |uuid: &str, state| DeviceView {
        label: "twin".into(),
        uuid: Some(uuid.into()),
        name: Some("bcache1".into()),
        ..device("/dev/sdb", "backing", state, "")
    };
    for (device, expected) in
        [(other("v", "stopped"), 1), (other("u", "stopped"), 0), (other("v", "failed"), 0)]
    {
        let found = problems(&sets, &[device]);
        let found: Vec<_> = found.iter().filter(|p| p.kind == "label_shared").collect();
        assert_eq!(found.len(), expected, "{found:?}");
        for problem in found {
            let words = "2 volumes have the label twin (bcache0 (/dev/hdd), bcache1 (/dev/sdb, stopped)): no command takes it as a \
                         name, and the link of this name in /dev/ubcache is that of the served one; give another";
            assert!(problem.text.starts_with(words), "{problem:?}");
        }
    }
}

/// Two sets with one label, or a set and a volume, were no problem.
#[test]
fn a_label_of_two_sets_is_a_problem() {
    let labelled = |id: &str, label: &str, volumes| {
        let mut set = SetView { id: id.into(), ..set(volumes) };
        set.figures.set.as_mut().unwrap().names.label = label.into();
        set
    };
    let cache =
        |path: &str, id: &str| DeviceView { set: Some(id.into()), ..device(path, "cache", "served", "") };
    let devices = [cache("/dev/ssd", "s"), cache("/dev/nvme", "t")];
    let found = problems(&[labelled("s", "fast", Vec::new()), labelled("t", "fast", Vec::new())], &devices);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        found[0].text,
        "2 sets have the label fast (set s (/dev/ssd), set t (/dev/nvme)): no command takes it as a name; give another label to the one \
         that you choose"
    );
    assert_eq!((found[0].kind, &*found[0].command), ("label_shared", "ubcache set-label NAME fast-2"));
    let mixed =
        [labelled("s", "fast", vec![volume("bcache0", "fast-2")]), labelled("t", "fast-2", Vec::new())];
    let found = problems(&mixed, &devices);
    assert!(
        found[0].text.starts_with("1 volume and 1 set have the label fast-2 (bcache0 (/dev/hdd), set t "),
        "{found:?}"
    );
    assert_eq!(found[0].command, "ubcache set-label NAME fast-2-2");
    assert_eq!(problems(&[labelled("s", "a", Vec::new()), labelled("t", "b", Vec::new())], &devices), []);
}

/// Each volume with a label got the section of the configuration that the label names.
#[test]
fn a_section_that_applies_to_another_volume_is_a_problem() {
    let mut shared =
        set(vec![volume("bcache0", "data"), volume("bcache1", "data"), volume("bcache2", "films")]);
    let owner = |name: &str, is_served, forget: Option<&str>| LabelOwner {
        name: name.into(),
        label: None,
        is_served,
        forget: forget.map(str::to_owned),
    };
    let away = owner("bcache9", false, Some("ubcache unregister /dev/away"));
    shared.without_section =
        [("bcache0".into(), owner("bcache1", true, None)), ("bcache2".into(), away)].into();
    let text_by = |owner: LabelOwner| {
        let mut films = set(vec![volume("bcache2", "films")]);
        films.without_section = [("bcache2".into(), owner)].into();
        problems(&[films], &[]).remove(0).text
    };
    let found = problems(&[shared], &[]);
    assert_eq!(found.iter().map(|p| p.kind).collect::<Vec<_>>(), ["label_shared"; 2]);
    assert!(
        found[0].text.starts_with("2 volumes have the label data (bcache0 (/dev/hdd), bcache1 (/dev/hdd))"),
        "{found:?}"
    );
    assert!(
        found[0].text.ends_with("; [volume.data] of the configuration applies to bcache1 alone"),
        "{found:?}"
    );
    assert_eq!(found[0].command, "ubcache set-label bcache0 data-2");
    assert!(found[1].text.starts_with("bcache2 has the label films, which bcache9 had first"), "{found:?}");
    assert!(found[1].text.contains("`ubcache unregister /dev/away`"), "{found:?}");
    // A label that differs in capital letters only selects the same section, and its owner does not have to come back.
    let said = text_by(LabelOwner { label: Some("Films".into()), ..owner("bcache9", true, None) });
    assert!(said.contains("had first, written in other capital or small letters; [volume.films]"), "{said}");
    let said = text_by(LabelOwner { label: Some("films".into()), ..owner("bcache9", true, None) });
    assert!(said.contains("had first; [volume.films]"), "its set does not answer: {said}");
    let said = text_by(owner("bcache9", false, None));
    assert!(said.contains("had first; [volume.films]"), "no command would forget it: {said}");
    assert_eq!(found[1].command, "ubcache set-label bcache2 films-2");
}

/// The command to attach a stale disk had `CACHE-DEVICE` in the place of the only set.
#[test]
fn a_command_has_the_set_if_there_is_one() {
    let stale = VolumeFigures { state: Some("inconsistent"), attached: false, ..volume("bcache0", "") };
    let alone = SetView { id: "u".into(), has_cache: false, ..set(vec![stale]) };
    let found = problems(&[alone.clone(), set(Vec::new())], &[]);
    assert_eq!((found[0].kind, &*found[0].command), ("stale", "ubcache attach s /dev/hdd"));
    let two = [alone, set(Vec::new()), SetView { id: "t".into(), ..set(Vec::new()) }];
    assert_eq!(problems(&two, &[])[0].command, "ubcache attach CACHE-DEVICE /dev/hdd");
}

/// The failure of a set is not listed again for each of its devices.
#[test]
fn a_thread_that_has_failed_is_listed_once() {
    let failed = SetView { state: "failed", why: Some("no journal".into()), ..set(Vec::new()) };
    let failed = SetView { figures: Snapshot::default(), ..failed };
    let devices = [
        device("/dev/ssd", "cache", "failed", "no journal"),
        device("/dev/hdd", "backing", "failed", "no journal"),
    ];
    let expected = [("set_failed", "ubcache register /dev/ssd".to_owned())];
    assert_eq!(kinds_and_commands(&[failed], &devices), expected);
    let silent = SetView { why: Some("no answer".into()), ..set(Vec::new()) };
    assert_eq!(kinds_and_commands(&[silent], &devices)[2].0, "set_silent");
}

#[test]
fn a_device_that_waits_says_for_what_and_what_to_do() {
    for (awaits, command) in [
        (Awaited::Cache, "ubcache register /dev/ssd"),
        (Awaited::FailedCache, "ubcache status"),
        (Awaited::Operator, "ubcache register /dev/hdd"),
        // `ubcache unregister` was proposed, which would give the replugged device up.
        (Awaited::EndOfUse(Some("umount /mnt".into())), "umount /mnt"),
        (Awaited::EndOfUse(None), "journalctl -u ubcache -n 50"),
    ] {
        let waiting = device("/dev/hdd", "backing", "waiting", "the reason");
        let found = problems(&[], &[DeviceView { awaits: Some(awaits), ..waiting }]);
        assert_eq!((&*found[0].text, &*found[0].command), ("/dev/hdd waiting: the reason", command));
    }
    let stopped = device("/dev/hdd", "backing", "stopped", "");
    assert_eq!(next_step(&stopped), "it was stopped; run `ubcache register /dev/hdd`");
}

#[test]
fn disabled_stale_and_failing_volumes_are_problems() {
    let mut volumes = vec![volume("bcache0", ""), volume("bcache1", ""), volume("bcache2", "")];
    (volumes[0].tunables, volumes[0].io_errors) = (on("io_disable"), 65);
    volumes[1].state = Some("inconsistent");
    volumes[2].io_errors = 3;
    let expected = [
        ("io_disabled", "ubcache set bcache0 io_disable=0".to_owned()),
        ("stale", "ubcache attach s /dev/hdd".to_owned()),
        ("io_errors", "ubcache explain bcache2".to_owned()),
    ];
    assert_eq!(kinds_and_commands(&[set(volumes)], &[]), expected);
    let mut disabled = set(Vec::new());
    disabled.figures.set = Some(SetFigures { tunables: on("io_disable"), ..SetFigures::default() });
    let expected = [("io_disabled", "ubcache set s io_disable=0".to_owned())];
    assert_eq!(kinds_and_commands(&[disabled], &[]), expected);
}

/// A cache device that fails some reads was no problem until its set was disabled.
#[test]
fn errors_of_a_cache_device_are_a_problem() {
    use serve::snapshot::CacheDeviceFigures;

    let mut failing = set(vec![volume("bcache0", "one")]);
    let limit = TunableFigure { key: "io_error_limit", value: "8".into(), ..TunableFigure::default() };
    failing.figures.set = Some(SetFigures {
        device: CacheDeviceFigures { io_errors: 3, cache_flushes: 0 },
        tunables: vec![limit],
        ..SetFigures::default()
    });
    let devices = [device("/dev/ssd", "cache", "served", "")];
    let found = problems(std::slice::from_ref(&failing), &devices);
    assert_eq!(
        found.iter().map(|p| (p.kind, &*p.text, &*p.command)).collect::<Vec<_>>(),
        [(
            "io_errors",
            "cache set s (/dev/ssd): 3 requests to its cache device failed; the set is disabled at 8 (io_error_limit)",
            "ubcache events --since 1d"
        )]
    );
    failing.figures.set.as_mut().unwrap().failed = Some("ssd: read failed".into());
    assert_eq!(kinds_and_commands(&[failing], &devices).len(), 1, "its failure is the problem");
}

/// The dirty data of a disk that was taken away is in the cache alone.
#[test]
fn dirty_data_without_its_disk_is_a_problem_unless_the_disk_was_stopped() {
    let slot = SlotDirty {
        slot: 7,
        uuid: Some("/dev/gone".into()),
        label: "films".into(),
        dirty_bytes: 512,
        is_copy: false,
    };
    let mut of_set = set(vec![volume("bcache0", "one")]);
    of_set.figures.set = Some(SetFigures { dirty_by_slot: vec![slot], ..SetFigures::default() });
    let found = problems(std::slice::from_ref(&of_set), &[]);
    assert_eq!(found[0].kind, "dirty_without_disk");
    assert!(found[0].text.starts_with("512 B of dirty data in cache set s belong"), "{}", found[0].text);
    assert!(found[0].text.contains("(films, UUID /dev/gone)"), "{}", found[0].text);
    assert_eq!(found[0].command, "ubcache register DISK", "it was never served here");
    of_set.disks = [("/dev/gone".to_owned(), PathBuf::from("/dev/sdx"))].into();
    assert_eq!(problems(std::slice::from_ref(&of_set), &[])[0].command, "ubcache register /dev/sdx");
    assert_eq!(problems(&[of_set], &[device("/dev/gone", "backing", "stopped", "")]), []);
}

/// A disk was formatted by `make --wipe-dirty`: `register` of its path was proposed, which has another UUID.
#[test]
fn a_disk_that_was_formatted_is_not_proposed() {
    let slot = SlotDirty { slot: 7, uuid: Some("old".into()), dirty_bytes: 512, ..SlotDirty::default() };
    let mut of_set = set(vec![volume("bcache0", "one")]);
    of_set.figures.set = Some(SetFigures { dirty_by_slot: vec![slot], ..SetFigures::default() });
    of_set.disks = [("old".to_owned(), PathBuf::from("/dev/slow"))].into();
    let found = problems(&[of_set], &[device("/dev/slow", "backing", "served", "")]);
    assert_eq!((found[0].kind, &*found[0].command), ("dirty_without_disk", "ubcache super /dev/slow"));
    assert!(found[0].text.contains("/dev/slow has UUID /dev/slow now: it was formatted"), "{found:?}");
}

/// `attach` to the disabled set itself was proposed, which refuses it.
#[test]
fn a_stale_disk_of_a_disabled_set_is_not_attached_to_it() {
    let stale = VolumeFigures { state: Some("inconsistent"), attached: false, ..volume("bcache0", "") };
    let mut failed = set(vec![stale]);
    let figures = failed.figures.set.as_mut().unwrap();
    (figures.failed, figures.names.device) = (Some("gone".into()), "/dev/ssd".into());
    let command = |sets: &[SetView]| problems(sets, &[])[1].command.clone();
    let expected = "ubcache unregister /dev/ssd && ubcache register /dev/ssd /dev/hdd";
    assert_eq!(command(std::slice::from_ref(&failed)), expected);
    // A set that has nothing to do with the disk was proposed, and what stopped the command was not named.
    let other = SetView { id: "t".into(), ..set(Vec::new()) };
    static LOOP: WayKind = WayKind { name: "loop", opens: Opens::File };
    failed.figures.volumes[0].exports = vec![Way { kind: &LOOP, address: "/run/one/image".into() }];
    let found = problems(&[failed, other], &[]);
    assert_eq!(found[1].command, expected);
    assert!(found[1].text.contains("; first unmount or close what uses /run/one/image, then"), "{found:?}");
}

/// One of two exports works: the other one was the whole of `Reached by`.
#[test]
fn a_volume_with_one_of_its_exports_is_reached_by_it() {
    static NBD: WayKind = WayKind { name: "nbd", opens: Opens::Connection };
    let ways = vec![Way { kind: &NBD, address: "/run/one.sock".into() }];
    let half = VolumeFigures { problem: Some("no room".into()), exports: ways, ..volume("bcache0", "one") };
    let said = &problems(&[set(vec![half])], &[])[0].text;
    assert_eq!(said, "one (bcache0) is reached by /run/one.sock only, NOT EXPORTED as configured: no room");
}

/// Clients link a problem to its page.
#[test]
fn a_problem_says_whose_it_is() {
    let mut volumes = vec![VolumeFigures { problem: Some("no room".into()), ..volume("bcache0", "one") }];
    volumes[0].io_errors = 1;
    let waiting =
        DeviceView { awaits: Some(Awaited::Cache), ..device("/dev/hdd", "backing", "waiting", "why") };
    let found = problems(&[set(volumes)], &[waiting]);
    let whose = |set: &str, volume: Option<&str>, device: Option<&str>| Subject {
        set: Some(set.into()),
        volume: volume.map(str::to_owned),
        device: device.map(PathBuf::from),
    };
    let expected = [
        whose("s", None, Some("/dev/hdd")),
        whose("s", Some("bcache0"), None),
        whose("s", Some("bcache0"), None),
    ];
    assert_eq!(found.into_iter().map(|p| p.of).collect::<Vec<_>>(), expected);
}

/// The description of the API lists the kinds.
#[test]
fn the_document_has_the_kinds() {
    let document: serde_json::Value = serde_json::from_str(crate::api::OPENAPI).unwrap();
    let problem = &document["components"]["schemas"]["Problem"]["properties"];
    assert_eq!(problem["kind"]["enum"], serde_json::json!(KINDS));
    let made = serde_json::to_value(&problems(&[], &[device("/d", "cache", "failed", "why")])[0]).unwrap();
    let keys = |of: &serde_json::Value| {
        of.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(keys(&made), keys(problem));
}

/// Commands named a volume by its number although it has a label.
#[test]
fn a_command_names_a_volume_by_its_label() {
    let command = |labels: [&str; 2]| {
        let mut volumes = vec![volume("bcache0", labels[0]), volume("bcache1", labels[1])];
        volumes[0].tunables = on("io_disable");
        problems(&[set(volumes)], &[])[0].command.clone()
    };
    assert_eq!(command(["films", "music"]), "ubcache set films io_disable=0");
    assert_eq!(command(["my films", "music"]), "ubcache set bcache0 io_disable=0");
    assert_eq!(command(["films", "films"]), "ubcache set bcache0 io_disable=0");
}

/// The path of a device that cannot be found was in its problem twice.
#[test]
fn the_path_of_a_device_is_said_once() {
    let missing =
        device("/dev/ssd", "cache", "failed", "/dev/ssd: cannot be found: No such file or directory");
    let found = problems(&[], &[missing]);
    assert_eq!(found[0].text, "/dev/ssd failed: cannot be found: No such file or directory");
}

/// A disk without a superblock was to be registered again, which had the same end each time.
#[test]
fn a_disk_that_was_overwritten_is_let_go_of() {
    let mut disk = device("/dev/slow", "backing", "failed", "expected a superblock of bcache, found ext4");
    assert_eq!(problems(&[], std::slice::from_ref(&disk))[0].command, "ubcache register /dev/slow");
    disk.blank = Some(Blank::Overwritten);
    assert_eq!(problems(&[], std::slice::from_ref(&disk))[0].command, "ubcache unregister /dev/slow");
    // The kernel has given the path to another disk.
    disk.blank = Some(Blank::Another);
    let found = problems(&[], &[disk]).remove(0);
    assert!(found.text.contains("may be another device") && found.command.starts_with("lsblk "), "{found:?}");
}

/// A file system over the device of a daemon that was killed was dead, and `status` said that there are no problems.
#[test]
fn a_device_of_a_dead_process_that_is_in_use_is_a_problem() {
    let user = blockio::users::User::Mount { device: "/dev/loop10".into(), at: "/mnt/media".into() };
    let dead =
        |volume: &str, users| DeadExport { device: "/dev/loop10".into(), volume: volume.into(), users };
    let sets = [set(vec![volume("bcache0", "media")])];
    let found = dead_exports(&[dead("bcache0", vec![user]), dead("bcache7", Vec::new())], &sets);
    assert!(
        found[0].text.starts_with(
            "media (bcache0): /dev/loop10 is of a process that has ended, and every access to it fails, but it is in use: \
             /dev/loop10 is mounted at /mnt/media; unmount or close it"
        ),
        "{found:?}"
    );
    assert_eq!((found[0].kind, &*found[0].command), ("dead_export", "umount /mnt/media"));
    assert_eq!(found[0].of.volume.as_deref(), Some("bcache0"));
    assert_eq!((&*found[1].command, &found[1].of.volume), ("lsblk /dev/loop10", &None));
    let mut all = vec![found[0].clone(), Problem::new("set_failed", String::new(), String::new())];
    in_order(&mut all);
    assert_eq!(all[1].kind, "dead_export");
}

/// The `stop` of a volume whose disk did not answer was in no status.
#[test]
fn a_command_that_takes_long_is_a_problem() {
    let hung = CommandUnderWay { command: "stop hung".into(), seconds: 31, changes: vec!["/dev/hdd".into()] };
    let devices = [
        device("/dev/ssd", "cache", "served", ""),
        DeviceView { label: "hung".into(), ..device("/dev/hdd", "backing", "served", "") },
    ];
    let short = CommandUnderWay { seconds: 9, ..hung.clone() };
    let of_set =
        CommandUnderWay { command: "unregister /dev/ssd".into(), changes: vec!["s".into()], ..hung.clone() };
    let found = commands_that_wait(&[short, hung, of_set], &devices);
    assert_eq!(found.len(), 2);
    let text = "`stop hung` has been under way for 31 s, and goes on: hung (/dev/hdd) may not answer; ";
    assert!(found[0].text.starts_with(text), "{found:?}");
    assert_eq!((found[0].kind, &found[0].of.device), ("command_waits", &Some("/dev/hdd".into())));
    assert!(found[1].text.contains("/dev/ssd or hung (/dev/hdd) may not answer"), "{found:?}");
}

/// The `detach` of a volume whose disk did not answer was in the list of jobs, and no problem.
#[test]
fn a_job_without_progress_is_a_problem() {
    let jobs = Jobs::new(Arc::default());
    let on = Named { label: "hung".into(), ..Named::default() };
    jobs.begin("detach", "bcache0", Some(&Named { uuid: Some("/dev/hdd".into()), ..on.clone() })).unwrap();
    jobs.begin("scrub", "s", Some(&on)).unwrap();
    let mut all = jobs.all();
    assert_eq!(jobs_that_wait(&all, &[]), []);
    all[0].idle_seconds = 75;
    all[1].idle_seconds = 59;
    let found = jobs_that_wait(&all, &[device("/dev/hdd", "backing", "served", "")]);
    assert_eq!(found.len(), 1);
    let text = "job 1 (detach hung, bcache0) has made no progress for 75 s: a device may not answer, or ";
    assert!(
        found[0].text.starts_with(text) && found[0].text.ends_with("`ubcache cancel 1` ends the job"),
        "{found:?}"
    );
    assert_eq!((found[0].kind, found[0].of.set.as_deref()), ("job_waits", Some("s")));
    assert_eq!((counts(&found)["job_waits"], counts(&found)["stale"]), (1, 0));
}
