//! Uevents: events of the kernel and udev about devices that are added, changed and removed, and which devices to probe.
//!
//! Owns the socket, the check of the sender, and the wait until there are no more events of a device. An event is a hint: it
//! can prevent a probe, but the superblock alone decides how a device is used. If udev runs, only its events count, which it
//! sends after its rules: devices that these rules gave to the kernel's driver stay there. Must not know what is done with a
//! device.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind,
    recvmsg, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Multicast groups: the events of the kernel, and the events that udev sends after its rules.
const KERNEL_GROUP: u32 = 1;
const UDEV_GROUP: u32 = 2;
/// Limit of the bytes of an event: the kernel's events have up to 2 KiB, udev's some more.
const EVENT_BYTES: usize = 16 << 10;
/// Size of the receive buffer in bytes. If it overflows, all devices are probed.
const QUEUE_BYTES: usize = 1 << 20;
/// Time without events after which a device is probed, and the limit of that wait.
const QUIET: Duration = Duration::from_millis(300);
const AT_MOST: Duration = Duration::from_secs(3);
/// Limit of the devices that wait for the end of their events. If there are more, all devices are probed.
const MOST_WAITING: usize = 1024;
/// Interval at which the thread checks whether its receiver still exists.
const LOOKS_UP_EVERY_S: i64 = 1;
/// Capacity of the queue between the thread of the socket and its reader.
const HEARD_AT_ONCE: usize = 256;
/// The control socket of udev, which exists while udev runs.
const UDEV_CONTROL: &str = "/run/udev/control";
/// Directory of the database of udev.
const UDEV_DATA: &str = "/run/udev/data";
const SYS_CLASS_BLOCK: &str = "/sys/class/block";

/// The sender of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Speaker {
    Kernel,
    Udev,
}

/// The change of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Add,
    Change,
    Remove,
}

/// An event about a device that may have to be probed.
#[derive(Clone, PartialEq, Eq, Debug)]
struct DeviceEvent {
    action: Action,
    /// Path of the device in `/dev`.
    device: PathBuf,
    /// Whether the device is ready and no other program has it as a part.
    free: bool,
}

/// A message of the socket.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Heard {
    Event(DeviceEvent),
    /// The socket has lost events.
    Gap,
    /// A message that concerns no device that may have a superblock of bcache.
    Nothing,
}

/// The devices to probe now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Uevents {
    /// These devices; `true` if the device was added, not only changed.
    Devices(Vec<(PathBuf, bool)>),
    /// Some device was unplugged.
    Unplugged,
    /// Events were lost: probe all devices.
    Everything,
}

/// Finds the sender of a message by its address, which the kernel fills in, and its credentials.
///
/// Only the kernel has port 0. A message that a process sends to one process alone has no group, and udev runs as root.
fn speaker(port: u32, groups: u32, uid: Option<u32>) -> Option<Speaker> {
    match (groups, port, uid) {
        (KERNEL_GROUP, 0, Some(0)) => Some(Speaker::Kernel),
        (UDEV_GROUP, 1.., Some(0)) => Some(Speaker::Udev),
        _ => None,
    }
}

/// The properties of a message: `KEY=VALUE`, each ended by a zero.
fn properties(speaker: Speaker, bytes: &[u8]) -> Option<HashMap<&[u8], &[u8]>> {
    let list = match speaker {
        // The message begins with `ACTION@PATH`. Its properties repeat both.
        Speaker::Kernel => {
            let end = bytes.iter().position(|b| *b == 0)?;
            bytes.get(..end)?.contains(&b'@').then_some(())?;
            bytes.get(end + 1..)?
        }
        // The head has the offset of the properties. Its numbers are in native byte order, except the magic number.
        Speaker::Udev => {
            let number = |at: usize| -> Option<u32> {
                Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
            };
            let marked = bytes.starts_with(b"libudev\0") && number(8)? == 0xfeed_cafe_u32.to_be();
            marked.then_some(())?;
            let (at, length) = (usize::try_from(number(16)?).ok()?, usize::try_from(number(20)?).ok()?);
            bytes.get(at..at.checked_add(length)?)?
        }
    };
    Some(pairs(list.split(|b| *b == 0)))
}

/// Splits properties of the form `KEY=VALUE`.
fn pairs<'a>(lines: impl Iterator<Item = &'a [u8]>) -> HashMap<&'a [u8], &'a [u8]> {
    let pairs = lines.filter_map(|line| {
        let at = line.iter().position(|b| *b == b'=')?;
        Some((line.get(..at)?, line.get(at + 1..)?))
    });
    pairs.collect()
}

/// Parses an event about a device that may have a superblock of bcache.
fn event(speaker: Speaker, bytes: &[u8]) -> Option<DeviceEvent> {
    let properties = properties(speaker, bytes)?;
    let is = |key: &str, value: &str| properties.get(key.as_bytes()) == Some(&value.as_bytes());
    if !is("SUBSYSTEM", "block") {
        return None;
    }
    let action = match *properties.get(&b"ACTION"[..])? {
        b"add" => Action::Add,
        b"change" => Action::Change,
        b"remove" => Action::Remove,
        _ => return None,
    };
    let device = device_of(properties.get(&b"DEVNAME"[..])?)?;
    Some(DeviceEvent { action, device, free: !is_of_others(&properties) })
}

/// Whether another program has the device as a part, or the device is not ready yet, by the properties of udev.
fn is_of_others(properties: &HashMap<&[u8], &[u8]>) -> bool {
    let is = |key: &str, value: &str| properties.get(key.as_bytes()) == Some(&value.as_bytes());
    let not_now = is("SYSTEMD_READY", "0")
        || is("DM_UDEV_DISABLE_OTHER_RULES_FLAG", "1")
        || is("DM_MULTIPATH_DEVICE_PATH", "1");
    let kind = properties.get(&b"ID_FS_TYPE"[..]);
    not_now || kind.is_some_and(|k| ![&b""[..], b"bcache", b"ubcache_member"].contains(k))
}

/// The path of the device with this name, which may be a path in `/dev`.
fn device_of(name: &[u8]) -> Option<PathBuf> {
    let name = Path::new(OsStr::from_bytes(name.strip_prefix(b"/dev/").unwrap_or(name)));
    let plain = name.components().all(|c| matches!(c, Component::Normal(_)));
    let first = name.components().next()?.as_os_str();
    (plain && crate::probe::may_be_ours(first)).then(|| Path::new("/dev").join(name))
}

/// Whether the kernel or another program uses the device.
///
/// In the kernel that is its bcache driver, the device mapper or md; else it is the program whose signature udev has found.
pub(crate) fn is_taken(device: &Path) -> bool {
    is_taken_by(Path::new(SYS_CLASS_BLOCK), Path::new(UDEV_DATA), device)
}

fn is_taken_by(sys_class_block: &Path, udev_data: &Path, device: &Path) -> bool {
    let Ok(name) = device.strip_prefix("/dev") else { return false };
    let about = sys_class_block.join(name.to_string_lossy().replace('/', "!"));
    let has_holders = |dir: PathBuf| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    // The entry of a device in the database of udev, by its numbers. Lines of properties begin with `E:`.
    let of_others = || {
        let numbers = std::fs::read_to_string(about.join("dev")).ok()?;
        let entry = std::fs::read(udev_data.join(format!("b{}", numbers.trim()))).ok()?;
        let lines = entry.split(|b| *b == b'\n').filter_map(|line| line.strip_prefix(b"E:"));
        Some(is_of_others(&pairs(lines)))
    };
    about.join("bcache").exists() || has_holders(about.join("holders")) || of_others().unwrap_or(false)
}

/// Devices whose events have not ended.
#[derive(Default)]
struct Waiting {
    /// Times of the first and last event of a device, and whether it was added.
    devices: BTreeMap<PathBuf, (Instant, Instant, bool)>,
    /// Devices that were added and are not ready. Those of the device mapper and of md are added without a table.
    empty: BTreeSet<PathBuf>,
    everything: Option<Instant>,
    /// Time of the next check for removed devices.
    unplugged: Option<Instant>,
}

impl Waiting {
    fn hear(&mut self, heard: Heard, now: Instant) {
        let event = match heard {
            Heard::Nothing => return,
            Heard::Gap => None,
            Heard::Event(event) => Some(event),
        };
        match event {
            Some(DeviceEvent { action: Action::Remove, device, .. }) => {
                self.devices.remove(&device);
                self.empty.remove(&device);
                self.unplugged.get_or_insert(now + QUIET);
            }
            Some(DeviceEvent { action, device, free: false }) => {
                let came = self.devices.remove(&device).is_some_and(|(_, _, came)| came);
                if (came || action == Action::Add) && self.empty.len() < MOST_WAITING {
                    self.empty.insert(device);
                }
            }
            Some(DeviceEvent { action, device, free: true }) if self.devices.len() < MOST_WAITING => {
                let was_empty = self.empty.remove(&device);
                let (_, last, came) = self.devices.entry(device).or_insert((now, now, false));
                *last = now;
                *came |= action == Action::Add || was_empty;
            }
            _ => {
                self.everything.get_or_insert(now + AT_MOST);
            }
        }
    }

    fn due_at(&(first, last, _): &(Instant, Instant, bool)) -> Instant {
        (last + QUIET).min(first + AT_MOST)
    }

    /// Time at which the next device is due.
    fn next(&self) -> Option<Instant> {
        self.devices.values().map(Waiting::due_at).chain(self.everything).chain(self.unplugged).min()
    }

    /// The devices whose events have ended.
    fn due(&mut self, now: Instant) -> Option<Uevents> {
        if self.everything.is_some_and(|at| at <= now) {
            *self = Waiting { empty: std::mem::take(&mut self.empty), ..Waiting::default() };
            return Some(Uevents::Everything);
        }
        if self.unplugged.is_some_and(|at| at <= now) {
            self.unplugged = None;
            return Some(Uevents::Unplugged);
        }
        let due = |state: &(Instant, Instant, bool)| Waiting::due_at(state) <= now;
        let ready: Vec<_> =
            self.devices.iter().filter(|(_, s)| due(s)).map(|(path, s)| (path.clone(), s.2)).collect();
        self.devices.retain(|_, s| !due(s));
        (!ready.is_empty()).then_some(Uevents::Devices(ready))
    }
}

/// Receives uevents, and tells which devices to probe.
pub(crate) struct Monitor {
    heard: mpsc::Receiver<io::Result<Heard>>,
    waiting: Waiting,
}

/// Opens a socket that receives the events of the kernel and udev.
fn open() -> io::Result<OwnedFd> {
    let protocol = SockProtocol::NetlinkKObjectUEvent;
    let fd = socket(AddressFamily::Netlink, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&fd, sockopt::PassCred, &true)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(LOOKS_UP_EVERY_S))?;
    // The host may limit the size. A smaller buffer overflows earlier, which is handled.
    let _ = setsockopt(&fd, sockopt::RcvBuf, &QUEUE_BYTES);
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP | UDEV_GROUP))?;
    Ok(fd)
}

/// Receives events until the socket fails or the receiver is dropped.
fn hear(fd: &OwnedFd, to: &mpsc::Sender<io::Result<Heard>>) {
    while !to.is_closed() {
        let heard = receive(fd);
        let over = heard.is_err();
        // An event waits in the socket while the channel is full. If the socket is full, the kernel drops events and
        // reports a gap.
        if !matches!(heard, Ok(Heard::Nothing)) && to.blocking_send(heard).is_err() || over {
            return;
        }
    }
}

impl Monitor {
    /// Starts to listen, on a thread of its own.
    ///
    /// # Errors
    /// If the socket cannot be opened.
    pub(crate) fn new() -> io::Result<Monitor> {
        let fd = open()?;
        let (sender, heard) = mpsc::channel(HEARD_AT_ONCE);
        std::thread::Builder::new().name("uevents".into()).spawn(move || hear(&fd, &sender))?;
        Ok(Monitor { heard, waiting: Waiting::default() })
    }

    /// Waits until there are devices to probe.
    ///
    /// # Errors
    /// If the socket has failed.
    pub(crate) async fn uevents(&mut self) -> io::Result<Uevents> {
        loop {
            if let Some(uevents) = self.waiting.due(Instant::now()) {
                return Ok(uevents);
            }
            let next = self.waiting.next();
            let until = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let heard = tokio::select! {
                () = until => continue,
                heard = self.heard.recv() => heard.unwrap_or_else(|| Err(io::ErrorKind::BrokenPipe.into()))?,
            };
            self.waiting.hear(heard, Instant::now());
        }
    }
}

fn receive(fd: &OwnedFd) -> io::Result<Heard> {
    let mut bytes = [0; EVENT_BYTES];
    let mut control = cmsg_space!(nix::sys::socket::UnixCredentials);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg::<NetlinkAddr>(fd.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty());
    let received = match received {
        Ok(received) => received,
        Err(Errno::ENOBUFS) => return Ok(Heard::Gap),
        Err(Errno::EINTR | Errno::EAGAIN) => return Ok(Heard::Nothing),
        Err(e) => return Err(e.into()),
    };
    let (length, from) = (received.bytes, received.address);
    let whole = !received.flags.contains(MsgFlags::MSG_TRUNC);
    let uid = received.cmsgs().ok().and_then(|mut all| {
        all.find_map(|c| match c {
            ControlMessageOwned::ScmCredentials(who) => Some(who.uid()),
            _ => None,
        })
    });
    let by = from.and_then(|a| speaker(a.pid(), a.groups(), uid)).filter(|_| whole);
    let udev_runs = Path::new(UDEV_CONTROL).exists();
    let by = by.filter(|by| *by == Speaker::Udev || !udev_runs);
    let event = by.and_then(|by| event(by, bytes.get(..length)?));
    Ok(event.map_or(Heard::Nothing, Heard::Event))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(lines: &[&str]) -> Vec<u8> {
        let mut bytes = b"add@/devices/virtual/block/sdx\0".to_vec();
        lines.iter().for_each(|l| bytes.extend([l.as_bytes(), b"\0"].concat()));
        bytes
    }

    fn udev(lines: &[&str]) -> Vec<u8> {
        let list: Vec<u8> = lines.iter().flat_map(|l| [l.as_bytes(), b"\0"].concat()).collect();
        let mut bytes = b"libudev\0".to_vec();
        bytes.extend(0xfeed_cafe_u32.to_be_bytes());
        for number in [40, 40, u32::try_from(list.len()).unwrap(), 0, 0, 0, 0] {
            bytes.extend(number.to_ne_bytes());
        }
        [bytes, list].concat()
    }

    const OF_OTHERS: [&str; 6] = [
        "ID_FS_TYPE=ext4",
        "ID_FS_TYPE=mpath_member",
        "ID_FS_TYPE=linux_raid_member",
        "SYSTEMD_READY=0",
        "DM_UDEV_DISABLE_OTHER_RULES_FLAG=1",
        "DM_MULTIPATH_DEVICE_PATH=1",
    ];

    const DISK: [&str; 3] = ["ACTION=add", "SUBSYSTEM=block", "DEVNAME=sdx"];

    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        DISK.iter().copied().chain(more.iter().copied()).collect()
    }

    #[test]
    fn only_the_kernel_and_udev_are_believed() {
        for (port, groups, uid, wanted) in [
            (0, 1, Some(0), Some(Speaker::Kernel)),
            (77, 2, Some(0), Some(Speaker::Udev)),
            // Senders: a process that pretends to be the kernel, a user other than root, a message to one process, no
            // credentials.
            (77, 1, Some(0), None),
            (77, 2, Some(1000), None),
            (0, 1, Some(1000), None),
            (77, 0, Some(0), None),
            (0, 0, Some(0), None),
            (0, 2, Some(0), None),
            (77, 3, Some(0), None),
            (0, 1, None, None),
            (77, 2, None, None),
        ] {
            assert_eq!(speaker(port, groups, uid), wanted, "port {port}, groups {groups}, user {uid:?}");
        }
    }

    #[test]
    fn events_of_both_are_understood() {
        let came = |action| Some(DeviceEvent { action, device: "/dev/sdx".into(), free: true });
        assert_eq!(event(Speaker::Kernel, &kernel(&DISK)), came(Action::Add));
        let full = ["ACTION=change", "SUBSYSTEM=block", "DEVNAME=/dev/sdx", "ID_FS_TYPE=bcache"];
        assert_eq!(event(Speaker::Udev, &udev(&full)), came(Action::Change));
        assert_eq!(event(Speaker::Udev, &udev(&with(&["ID_FS_TYPE=ubcache_member"]))), came(Action::Add));
        let unplugged = ["ACTION=remove", "SUBSYSTEM=block", "DEVNAME=sdx"];
        assert_eq!(event(Speaker::Udev, &udev(&unplugged)), came(Action::Remove));
        // A message in the form of the other sender.
        assert_eq!(event(Speaker::Udev, &kernel(&DISK)), None);
        assert_eq!(event(Speaker::Kernel, &udev(&DISK)), None);
    }

    #[test]
    fn events_of_other_devices_are_left_alone() {
        for more in [
            "SUBSYSTEM=net",
            "ACTION=offline",
            "DEVNAME=loop3",
            "DEVNAME=ublkb0p1",
            "DEVNAME=/dev/bcache0",
            "DEVNAME=sr0",
            "DEVNAME=../etc/shadow",
            "DEVNAME=/etc/shadow",
            "DEVNAME=/dev/../etc/shadow",
            "DEVNAME=",
            "DEVNAME=/",
            "DEVNAME=./sdx",
        ] {
            // The last of two values of a property applies.
            assert_eq!(event(Speaker::Udev, &udev(&with(&[more]))), None, "{more}");
            assert_eq!(event(Speaker::Kernel, &kernel(&with(&[more]))), None, "{more}");
        }
        for more in OF_OTHERS {
            let not_free = |e: Option<DeviceEvent>| e.is_some_and(|e| !e.free);
            assert!(not_free(event(Speaker::Udev, &udev(&with(&[more])))), "{more}");
            assert!(not_free(event(Speaker::Kernel, &kernel(&with(&[more])))), "{more}");
        }
        assert_eq!(device_of(b"cciss/c0d0"), Some("/dev/cciss/c0d0".into()));
    }

    #[test]
    fn malformed_messages_are_nothing() {
        let good = udev(&DISK);
        for n in 0..good.len() {
            let _ = event(Speaker::Udev, &good[..n]);
            let _ = event(Speaker::Kernel, &good[..n]);
            assert_eq!(event(Speaker::Udev, &good[..n]), None, "{n} bytes of {}", good.len());
            let mut bent = good.clone();
            for value in [0, 1, 0x7f, 0xff] {
                bent[n] = value;
                let _ = event(Speaker::Udev, &bent);
                let _ = event(Speaker::Kernel, &bent);
            }
        }
        let far = |at: usize, number: u32| {
            let mut bent = good.clone();
            bent[at..at + 4].copy_from_slice(&number.to_ne_bytes());
            event(Speaker::Udev, &bent)
        };
        assert_eq!((far(16, u32::MAX), far(20, u32::MAX), far(20, 0)), (None, None, None));
        for bytes in
            [&b""[..], b"\0", b"add@", b"add@/x\0", b"no at\0ACTION=add\0", b"a@b\0=\0==\0\xff\xfe=\0"]
        {
            assert_eq!(event(Speaker::Kernel, bytes), None, "{bytes:?}");
        }
    }

    fn heard(action: Action, name: &str) -> Heard {
        Heard::Event(DeviceEvent { action, device: Path::new("/dev").join(name), free: true })
    }

    fn not_yet(action: Action, name: &str) -> Heard {
        Heard::Event(DeviceEvent { action, device: Path::new("/dev").join(name), free: false })
    }

    #[test]
    fn a_device_that_came_empty_has_come_when_it_is_ready() {
        let start = Instant::now();
        let mut waiting = Waiting::default();
        for name in ["dm-0", "dm-1"] {
            waiting.hear(not_yet(Action::Add, name), start);
        }
        assert_eq!(waiting.next(), None);
        let later = start + Duration::from_secs(60);
        waiting.hear(heard(Action::Change, "dm-0"), later);
        waiting.hear(heard(Action::Change, "md0"), later);
        let ready = vec![("/dev/dm-0".into(), true), ("/dev/md0".into(), false)];
        assert_eq!(waiting.due(later + QUIET), Some(Uevents::Devices(ready)));
        // dm-0 counts as added only once. dm-1 was removed, so it is another device now. Another program has sdx, so it is
        // skipped.
        waiting.hear(heard(Action::Change, "dm-0"), later);
        waiting.hear(not_yet(Action::Remove, "dm-1"), later);
        waiting.hear(heard(Action::Change, "dm-1"), later);
        waiting.hear(heard(Action::Add, "sdx"), later);
        waiting.hear(not_yet(Action::Change, "sdx"), later);
        assert_eq!(waiting.due(later + QUIET), Some(Uevents::Unplugged));
        let known = vec![("/dev/dm-0".into(), false), ("/dev/dm-1".into(), false)];
        assert_eq!(waiting.due(later + QUIET), Some(Uevents::Devices(known)));
        assert_eq!(waiting.next(), None);
        waiting.hear(heard(Action::Change, "sdx"), later);
        assert_eq!(waiting.due(later + QUIET), Some(Uevents::Devices(vec![("/dev/sdx".into(), true)])));
    }

    #[test]
    fn a_device_is_looked_at_when_it_is_quiet_about_it() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut waiting = Waiting::default();
        assert_eq!((waiting.next(), waiting.due(at(0))), (None, None));
        waiting.hear(heard(Action::Add, "sdx"), at(0));
        waiting.hear(heard(Action::Change, "sdx"), at(200));
        waiting.hear(heard(Action::Change, "sdy"), at(250));
        assert_eq!((waiting.next(), waiting.due(at(400))), (Some(at(500)), None));
        assert_eq!(waiting.due(at(500)), Some(Uevents::Devices(vec![("/dev/sdx".into(), true)])));
        assert_eq!(waiting.due(at(600)), Some(Uevents::Devices(vec![("/dev/sdy".into(), false)])));
        // A device with continuous events is probed after a limit. A removed device is forgotten.
        for ms in (1000..4000).step_by(100) {
            waiting.hear(heard(Action::Change, "sdz"), at(ms));
            assert_eq!(waiting.due(at(ms)), None, "{ms}");
        }
        assert_eq!(waiting.due(at(4000)), Some(Uevents::Devices(vec![("/dev/sdz".into(), false)])));
        waiting.hear(heard(Action::Add, "sdx"), at(5000));
        waiting.hear(heard(Action::Remove, "sdx"), at(5001));
        waiting.hear(heard(Action::Remove, "sdy"), at(5100));
        assert_eq!((waiting.next(), waiting.due(at(5300))), (Some(at(5301)), None));
        assert_eq!(waiting.due(at(5301)), Some(Uevents::Unplugged));
        assert_eq!(waiting.next(), None);
    }

    #[test]
    fn lost_events_are_made_up_for() {
        let start = Instant::now();
        let mut waiting = Waiting::default();
        waiting.hear(heard(Action::Add, "sdx"), start);
        waiting.hear(Heard::Gap, start);
        assert!(matches!(waiting.due(start + QUIET), Some(Uevents::Devices(_))));
        assert_eq!(waiting.due(start + AT_MOST), Some(Uevents::Everything));
        assert_eq!(waiting.next(), None);
        for n in 0..=MOST_WAITING {
            waiting.hear(heard(Action::Add, &format!("sd{n}")), start);
        }
        assert_eq!(waiting.devices.len(), MOST_WAITING);
        assert_eq!(waiting.due(start + AT_MOST), Some(Uevents::Everything));
    }

    #[test]
    fn devices_that_the_kernel_holds_are_seen() {
        let sys = tempfile::tempdir().unwrap();
        for dir in ["sda/bcache", "sdb/holders/dm-0", "sdc/holders", "cciss!c0d0/bcache"] {
            std::fs::create_dir_all(sys.path().join(dir)).unwrap();
        }
        let taken = |device: &str| is_taken_by(sys.path(), &sys.path().join("udev"), Path::new(device));
        assert!(taken("/dev/sda") && taken("/dev/sdb") && taken("/dev/cciss/c0d0"));
        assert!(!taken("/dev/sdc") && !taken("/dev/sdd"));
        std::fs::write(sys.path().join("sdc/dev"), "8:32\n").unwrap();
        std::fs::create_dir(sys.path().join("udev")).unwrap();
        for (more, wanted) in OF_OTHERS.map(|m| (m, true)).into_iter().chain([("ID_FS_TYPE=bcache", false)]) {
            let kept = format!("S:disk/by-id/x\nE:ID_MODEL=x\nE:{more}\nG:systemd\n");
            std::fs::write(sys.path().join("udev/b8:32"), kept).unwrap();
            assert_eq!(taken("/dev/sdc"), wanted, "{more}");
        }
    }

    #[test]
    fn a_message_of_another_process_is_not_believed() {
        let ours = match open() {
            Ok(socket) => socket,
            Err(e) => return rig::skipped(format_args!("uevents of the kernel cannot be received: {e}")),
        };
        let port = nix::sys::socket::getsockname::<NetlinkAddr>(ours.as_raw_fd()).unwrap().pid();
        let theirs = open().unwrap();
        // Every process may send to the port of another process. Root alone may send to all, and still is not the kernel.
        for to in [NetlinkAddr::new(port, 0), NetlinkAddr::new(0, KERNEL_GROUP)] {
            let sent = nix::sys::socket::sendto(theirs.as_raw_fd(), &kernel(&DISK), &to, MsgFlags::empty());
            // A refusal of the send is as good. Events of other processes may come between.
            for _ in 0..if sent.is_ok() { 100 } else { 0 } {
                let came = heard(Action::Add, "sdx");
                match receive(&ours).unwrap() {
                    Heard::Nothing => break,
                    heard => assert_ne!(heard, came, "{to}"),
                }
            }
        }
    }
}
