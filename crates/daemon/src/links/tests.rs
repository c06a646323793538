//! Tests of links, and of the labels that udev gets with them.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn target(dir: &Path, label: &str) -> Option<PathBuf> {
    std::fs::read_link(dir.join(label)).ok()
}

#[test]
fn links_follow_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("ubcache");
    let links = Links::new(dir.clone());
    let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
    links.add("a", "data", zero);
    assert_eq!(target(&dir, "data").as_deref(), Some(zero));
    links.relabel("a", "archive");
    assert_eq!((target(&dir, "data"), target(&dir, "archive").as_deref()), (None, Some(zero)));
    links.remove("a");
    links.add("b", "archive", one);
    assert_eq!(target(&dir, "archive").as_deref(), Some(one));
    links.remove("b");
    links.remove("unknown");
    assert!(!dir.exists(), "an empty directory goes");
}

/// udev knew no links, so systemd had no unit for them, and a mount by `/dev/ubcache/LABEL` waited for ever.
#[test]
fn udev_is_told_the_label_that_has_a_link() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ubcache");
    let published = Some(PublishedLabels::below(root.path()));
    let links = Links { published, ..Links::new(dir.clone()) };
    let label = |name| std::fs::read_to_string(root.path().join("labels").join(name)).ok();
    let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
    links.add("a", "data", zero);
    assert_eq!(label("ublkb0").as_deref(), Some("UBCACHE_LABEL=data\n"));
    links.add("b", "data", one);
    assert_eq!((label("ublkb0"), label("ublkb1")), (None, None), "two volumes have it");
    links.relabel("b", "films");
    assert_eq!(label("ublkb0").as_deref(), Some("UBCACHE_LABEL=data\n"));
    assert_eq!(label("ublkb1").as_deref(), Some("UBCACHE_LABEL=films\n"));
    // udev has replaced the link by its own.
    std::fs::remove_file(dir.join("films")).unwrap();
    symlink("../ublkb1", dir.join("films")).unwrap();
    links.remove("b");
    assert_eq!((std::fs::read_link(dir.join("films")).ok(), label("ublkb1")), (None, None));
}

/// The label was removed and published again, with an event for each. For the first event, udev removed the directory, which
/// could be the one that the daemon had just made for the new link. Then the volume had no link, and udev no label.
#[test]
fn a_label_takes_the_place_of_another_one_in_one_step() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ubcache");
    let links = Links { published: Some(PublishedLabels::below(root.path())), ..Links::new(dir.clone()) };
    let label = root.path().join("labels/ublkb0");
    let zero = Path::new("/dev/ublkb0");
    links.add("a", "data", zero);
    let opened = File::open(&dir).unwrap();
    let (done, missing) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                missing.fetch_or(!label.exists(), Ordering::Relaxed);
            }
        });
        for _ in 0..500 {
            links.relabel("a", "other");
            links.relabel("a", "data");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(!missing.load(Ordering::Relaxed), "udev found the volume without a label");
    assert!(is_at(&dir, &opened), "the directory was empty");
    assert_eq!((target(&dir, "data").as_deref(), target(&dir, "other")), (Some(zero), None));
    links.relabel("a", "da ta");
    assert_eq!((target(&dir, "da ta").as_deref(), label.exists()), (Some(zero), false), "not for udev");
}

/// The link was not made, and the label not published, when udev removed the directory between two calls of the daemon.
#[test]
fn a_link_is_made_while_udev_removes_empty_directories() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ubcache");
    let links = Links { published: Some(PublishedLabels::below(root.path())), ..Links::new(dir.clone()) };
    let (zero, done) = (Path::new("/dev/ublkb0"), AtomicBool::new(false));
    let mut missing = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = std::fs::remove_dir(&dir);
            }
        });
        for _ in 0..200 {
            links.add("a", "data", zero);
            let is_published = root.path().join("labels/ublkb0").exists();
            missing += u32::from(target(&dir, "data").as_deref() != Some(zero) || !is_published);
            links.remove("a");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(missing, 0, "links of 200");
}

/// Which disk the link named was a matter of the order of their starts.
#[test]
fn a_label_of_two_volumes_has_no_link() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("ubcache");
    let links = Links::new(dir.clone());
    let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
    links.add("a", "data", zero);
    links.add("b", "data", one);
    assert_eq!(target(&dir, "data"), None);
    links.relabel("b", "other");
    assert_eq!((target(&dir, "data").as_deref(), target(&dir, "other").as_deref()), (Some(zero), Some(one)));
    links.relabel("a", "other");
    assert_eq!((target(&dir, "data"), target(&dir, "other")), (None, None));
    links.remove("b");
    assert_eq!(target(&dir, "other").as_deref(), Some(zero));
}

/// A second daemon, with another state directory, took the links of the first one for stale.
#[test]
fn links_of_another_daemon_stay() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("ubcache");
    let (first, second) = (Links::new(dir.clone()), Links::new(dir.clone()));
    let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
    first.add("a", "data", zero);
    second.remove_stale();
    second.add("b", "data", one);
    second.add("c", "films", one);
    assert_eq!((target(&dir, "data").as_deref(), target(&dir, "films")), (Some(zero), None));
    second.remove("b");
    assert_eq!(target(&dir, "data").as_deref(), Some(zero));
    first.remove("a");
    assert!(!dir.exists(), "an empty directory goes");
}

/// The first daemon was killed. Its links led to loop devices that the second one used for other volumes.
#[test]
fn a_second_daemon_takes_over_when_the_first_one_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("ubcache");
    let (first, second) = (Links::new(dir.clone()), Links::new(dir.clone()));
    let (zero, one, two) = (Path::new("/dev/loop0"), Path::new("/dev/loop1"), Path::new("/dev/loop2"));
    first.add("a", "data", zero);
    first.add("b", "films", one);
    second.add("c", "music", two);
    assert_eq!(target(&dir, "music"), None);
    drop(first);
    second.add("d", "data", one);
    let found = ["data", "films", "music"].map(|label| target(&dir, label));
    assert_eq!(found, [Some(one.to_owned()), None, Some(two.to_owned())]);
}

/// A crash left `data -> /dev/loop0`. Later, `/dev/loop0` was another volume, and an entry of fstab mounted it as `data`.
#[test]
fn links_of_an_earlier_daemon_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("ubcache");
    std::fs::create_dir(&dir).unwrap();
    for (label, to) in [("data", "/dev/loop0"), ("films", "/dev/ublkb3"), ("other", "/dev/sda1")] {
        symlink(to, dir.join(label)).unwrap();
    }
    std::fs::write(dir.join("loop"), "a file").unwrap();
    let links = Links::new(dir.clone());
    links.remove_stale();
    assert_eq!((target(&dir, "data"), target(&dir, "films")), (None, None));
    assert!(target(&dir, "other").is_some() && dir.join("loop").exists(), "they are not of this program");
    std::fs::remove_file(dir.join("other")).unwrap();
    std::fs::remove_file(dir.join("loop")).unwrap();
    links.remove_stale();
    assert!(!dir.exists(), "an empty directory goes");
}

/// Regression: the setting `links` was changed after a crash, and the links in the old directory stayed.
#[test]
fn links_in_a_directory_of_an_earlier_configuration_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("old");
    let killed = Links::new(dir.clone());
    killed.add("a", "data", Path::new("/dev/loop0"));
    remove_left_in(&dir);
    assert!(target(&dir, "data").is_some(), "a daemon uses them");
    drop(killed);
    symlink("/dev/sda1", dir.join("other")).unwrap();
    remove_left_in(&dir);
    assert_eq!((target(&dir, "data"), target(&dir, "other").is_some()), (None, true));
    std::fs::remove_file(dir.join("other")).unwrap();
    remove_left_in(&dir);
    assert!(!dir.exists(), "an empty directory goes");
    remove_left_in(&dir);
}

/// The setting `links` was changed after a crash. udev had the labels still, and made links to devices of other volumes.
#[test]
fn labels_for_udev_go_with_the_links_of_an_earlier_configuration() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ubcache");
    let published = || PublishedLabels::below(root.path());
    let label = root.path().join("labels/ublkb0");
    let daemon = Links { published: Some(published()), ..Links::new(dir.clone()) };
    std::fs::create_dir_all(root.path().join("sys/ublkb0")).unwrap();
    daemon.add("a", "data", Path::new("/dev/ublkb0"));
    remove_left(&dir, Some(&published()));
    assert!(label.exists(), "a daemon uses them");
    drop(daemon);
    remove_left(&dir, None);
    assert!(label.exists(), "the rule of udev names another directory");
    remove_left(&dir, Some(&published()));
    assert!(!label.exists(), "also if the directory has gone");
    assert!(published_in(Path::new(DEFAULT_LINKS)).is_some() && published_in(&dir).is_none());
}

/// A symbolic link that another user has put in the place of the directory would let the daemon, which is root, make and
/// remove files in any directory.
#[test]
fn a_symbolic_link_in_the_place_of_the_directory_is_not_followed() {
    let outer = tempfile::tempdir().unwrap();
    let [dir, moved, foreign] = ["ubcache", "moved", "foreign"].map(|name| outer.path().join(name));
    std::fs::create_dir(&foreign).unwrap();
    symlink("/dev/loop0", foreign.join("data")).unwrap();
    let links = Links::new(dir.clone());
    let (zero, one) = (Path::new("/dev/loop0"), Path::new("/dev/loop1"));
    links.add("a", "data", zero);
    std::fs::rename(&dir, &moved).unwrap();
    symlink(&foreign, &dir).unwrap();
    links.add("b", "films", one);
    links.relabel("a", "archive");
    links.remove("a");
    remove_left_in(&dir);
    Links::new(dir.clone()).remove_stale();
    assert_eq!(target(&foreign, "data").as_deref(), Some(zero), "nothing is removed there");
    assert_eq!(std::fs::read_dir(&foreign).unwrap().count(), 1, "nothing is made there");
    assert_eq!(std::fs::read_dir(&moved).unwrap().count(), 0, "its own links are removed");
    // When the place is free again, the links of all volumes are made again.
    std::fs::remove_file(&dir).unwrap();
    links.add("c", "music", one);
    assert_eq!(
        ["films", "music"].map(|label| target(&dir, label)),
        [Some(one.to_owned()), Some(one.to_owned())]
    );
    // A directory that every user may write is refused, too.
    let open = outer.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    Links::new(open.clone()).add("d", "data", zero);
    assert_eq!(target(&open, "data"), None);
}

/// A label is written on the disk, also by other hosts.
#[test]
fn a_hostile_label_gets_no_link() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("ubcache");
    let links = Links::new(dir.clone());
    for label in [
        "--force",
        "da\u{200b}ta",
        "../escaped",
        "..",
        ".",
        "",
        "/etc/x",
        "a/b",
        "a\nb",
        "a\u{1b}[2J",
        "bcache0",
        " x",
        "\u{1}new",
    ] {
        links.add("a", label, Path::new("/dev/ublkb0"));
        assert!(!dir.exists() && !outer.path().join("escaped").exists(), "{label:?}");
        links.remove("a");
    }
    // A stale link is replaced, and what is no link stays.
    std::fs::create_dir(&dir).unwrap();
    symlink("/dev/ublkb9", dir.join("data")).unwrap();
    std::fs::write(dir.join("file"), "x").unwrap();
    links.add("a", "data", Path::new("/dev/ublkb0"));
    links.add("b", "file", Path::new("/dev/ublkb1"));
    assert_eq!(target(&dir, "data").as_deref(), Some(Path::new("/dev/ublkb0")));
    links.remove("b");
    assert_eq!(std::fs::read_to_string(dir.join("file")).unwrap(), "x");
    // The directory itself is no link.
    let other = outer.path().join("other");
    symlink(&dir, &other).unwrap();
    Links::new(other).add("c", "more", Path::new("/dev/ublkb2"));
    assert_eq!(target(&dir, "more"), None);
}
