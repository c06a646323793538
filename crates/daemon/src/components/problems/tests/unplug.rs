//! Tests of the problems of devices that were unplugged or have died.

use super::*;

/// `unregister` of an SSD with dirty data was proposed although it was plugged in again, and the daemon waited for its users.
#[test]
fn the_cache_device_that_is_plugged_in_again_is_not_unregistered() {
    let umount = || "umount /mnt".to_owned();
    let back = DeviceView {
        awaits: Some(Awaited::EndOfUse(Some(umount()))),
        ..device("/dev/sdc", "cache", "waiting", "is plugged in again")
    };
    let stale = VolumeFigures { state: Some("inconsistent"), attached: false, ..volume("bcache1", "") };
    let mut of_set = set(vec![volume("bcache0", "one"), stale]);
    of_set.figures.set = Some(SetFigures { failed: Some("gone".into()), ..SetFigures::default() });
    for (dirty_bytes, words) in [
        (
            0,
            "gone; its volumes have no dirty data; the device is plugged in again, and the set starts again as",
        ),
        (
            4096,
            "gone; dirty data is on this cache device alone (4.0 KiB of one (bcache0)); the device is plugged ",
        ),
    ] {
        of_set.figures.volumes[0].held.dirty_bytes = dirty_bytes;
        let found = problems(std::slice::from_ref(&of_set), std::slice::from_ref(&back));
        let all: Vec<_> = found.iter().map(|p| (p.kind, p.command.clone())).collect();
        assert_eq!(all, ["set_failed", "device_waiting", "stale"].map(|kind| (kind, umount())));
        assert!(found[0].text.contains(words), "{found:?}");
        assert!(
            found[2].text.ends_with(
                "its cache device is plugged in again, and the set starts again as soon as its volumes are \
                 not in use"
            ),
            "{found:?}"
        );
    }
}

/// The dirty data of a disk that had died was in no problem.
#[test]
fn the_dirty_data_of_a_disk_that_has_failed_is_in_its_problem() {
    let failed = device("/dev/hdd", "backing", "failed", "/dev/hdd: cannot be found");
    let text = |device: DeviceView| problems(&[], &[device]).remove(0).text;
    assert_eq!(text(failed.clone()), "/dev/hdd failed: cannot be found");
    assert_eq!(
        text(DeviceView { dirty_bytes: Some(0), ..failed.clone() }),
        "/dev/hdd failed: cannot be found"
    );
    assert_eq!(
        text(DeviceView { dirty_bytes: Some(4096), ..failed.clone() }),
        "/dev/hdd failed: cannot be found; cache set s has 4.0 KiB of dirty data of it"
    );
    assert_eq!(
        text(DeviceView { left_dirty_in: Some("s".into()), ..failed }),
        "/dev/hdd failed: cannot be found; cache set s has dirty data of it, which is on its cache device (/dev/ssd) alone, and \
         that device is not registered"
    );
}
