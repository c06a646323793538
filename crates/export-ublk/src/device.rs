//! The life cycle of a device: made, started, recovered, handed over, removed.
//!
//! Owns the order of the driver's commands. A new device: add, set parameters, open the character device, fetch every tag, start.
//! A device of a process that has ended: wait until the driver has released that process, begin the recovery, open, fetch, end
//! the recovery; the driver sends unanswered requests again. The removal: stop (while requests are still served), wait for the
//! tags, close, delete.
//!
//! Invariants: a new device that could not be started is deleted; only [`Device::remove`] deletes a device that was recovered.

use std::cell::OnceCell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use ::io::{BlockVolume, Buffer, Handle, Nanos};
use blockio::{CommandFile, CommandFuture, Reactor};
use zerocopy::IntoBytes;

use crate::abi::{self, DeviceInfo, IoCommand, IoDescriptor};
use crate::control::{self, Control};
use crate::descriptors::Descriptors;
use crate::error::UblkError;
use crate::find::{self, Identities, Identity};
use crate::server::{Requests, Server, Tags};
use crate::shape::{MAX_IO_BYTES, Shape};
use crate::{params, sysfs};

/// Longest wait until the driver releases an ended process: its timeout of requests, and a margin.
const QUIET_WITHIN: Nanos = Nanos::from_ms(45_000);
/// Longest wait until device nodes appear and get their owner.
const NODE_WITHIN: Nanos = Nanos::from_ms(5_000);
/// Time after which the driver's thread has submitted all queued entries.
const A_TURN: Nanos = Nanos::from_ms(1);
/// Interval between two checks.
const AGAIN: Nanos = Nanos::from_ms(5);

/// The source of a device's requests.
pub(crate) trait Node: 'static {
    type Requests: Requests;

    /// Opens the character device of `info`.
    fn open(&self, info: &DeviceInfo) -> Result<Self::Requests, UblkError>;

    /// What is to be done for a device that has just been started; what did not work. Called on a helper
    /// thread: changing a queue waits for every request in it, and a process may be reading the new device already.
    fn started(info: &DeviceInfo) -> Result<(), sysfs::SettingError>;
}

/// The kernel's devices.
pub(crate) struct KernelNode(pub(crate) Reactor);

/// Length of the part of each tag's buffer that is registered with the ring.
///
/// Registration saves time for each request, which matters for small ones; registered memory is locked.
const SMALL_BYTES: usize = 16 << 10;

/// Requests through the ring of the volume's thread.
pub(crate) struct RingRequests {
    commands: CommandFile,
    shape: Shape,
    descriptors: OnceCell<Descriptors>,
}

impl Node for KernelNode {
    type Requests = RingRequests;

    fn open(&self, info: &DeviceInfo) -> Result<RingRequests, UblkError> {
        let path = sysfs::node(info.device);
        let failed = |source| UblkError::Node { path: path.clone(), source };
        let file = control::open_node(&path).map_err(failed)?;
        let memory_bytes = info.max_io_bytes as usize;
        // SAFETY: `file` is a device of the ublk driver. Its commands copy one request's data from or to the address that they
        // carry: `max_io_bytes` at most, because the driver limits requests to that. They copy only before the fetch of the
        // request completes, or while the command that answers the request is submitted.
        let commands = unsafe { CommandFile::new(&self.0, file, memory_bytes) }.map_err(UblkError::NoRing)?;
        let shape = Shape { queues: info.queues, depth: info.depth };
        Ok(RingRequests { commands, shape, descriptors: OnceCell::new() })
    }

    fn started(info: &DeviceInfo) -> Result<(), sysfs::SettingError> {
        if info.flags & abi::F_USER_RECOVERY == 0 {
            return Ok(());
        }
        sysfs::leave_one_tag_free(info.device, info.depth)
    }
}

impl Requests for RingRequests {
    type Next = CommandFuture;

    fn prepare(&self) -> io::Result<()> {
        let descriptors = Descriptors::map(self.commands.file(), self.shape.queues, self.shape.depth)?;
        // This method is called once, so the cell is empty.
        let _ = self.descriptors.set(descriptors);
        Ok(())
    }

    fn next(&self, queue: u16, tag: u16, answer: Option<i32>, mut buffer: Buffer) -> CommandFuture {
        // The first fetch is not registered: a recovered device waits for the first fetches of all tags.
        if answer.is_some() && buffer.registration().is_none() {
            self.commands.register(&mut buffer, SMALL_BYTES);
        }
        let code = if answer.is_some() { abi::IO_COMMIT_AND_FETCH } else { abi::IO_FETCH };
        let command = IoCommand { queue, tag, result: answer.unwrap_or(-1), address: 0 };
        let mut head = [0u8; 8];
        head.copy_from_slice(&command.as_bytes()[..8]);
        self.commands.send(code, head, buffer)
    }

    fn descriptor(&self, queue: u16, tag: u16) -> IoDescriptor {
        let descriptors = self.descriptors.get().expect("mapped before the device is in service");
        descriptors.get(queue, tag)
    }
}

/// The driver, and the thread that serves devices.
pub(crate) struct Host<N> {
    pub(crate) control: Control,
    pub(crate) node: N,
    pub(crate) rt: Handle,
    pub(crate) reactor: Reactor,
}

impl<N: Node> Host<N> {
    /// Runs control commands on a helper thread.
    async fn control<T: Send + 'static>(&self, work: impl FnOnce(&Control) -> T + Send + 'static) -> T {
        let control = self.control.clone();
        self.reactor.blocking(move || work(&control)).await
    }
}

/// A device that is served.
pub(crate) struct Device<V, N: Node> {
    host: Rc<Host<N>>,
    info: DeviceInfo,
    server: Rc<Server<V, N::Requests>>,
    tags: Tags,
    /// The process that served the device before, if the device was recovered.
    pub(crate) recovered_from: Option<i32>,
    /// Messages for the operator.
    pub(crate) note: Option<String>,
}

impl<V: BlockVolume, N: Node> Device<V, N> {
    /// Makes a device for a volume, or recovers the device that an earlier process made for it.
    pub(crate) async fn start(
        host: &Rc<Host<N>>,
        volume: Rc<V>,
        identities: Identities,
        number: Option<u32>,
        shape: Shape,
    ) -> Result<Device<V, N>, UblkError> {
        for identity in identities.all() {
            match host.control(move |c| find::find(c, identity)).await {
                Some(info) if info.state == abi::STATE_DEAD => {
                    refuse_if_alive(host, &info).await?;
                    host.control(move |c| c.delete(info.device)).await?;
                }
                Some(info) => return Device::recover(host, volume, info).await,
                None => {}
            }
        }
        Device::make(host, volume, identities.new, number, shape).await
    }

    async fn make(
        host: &Rc<Host<N>>,
        volume: Rc<V>,
        identity: Identity,
        number: Option<u32>,
        shape: Shape,
    ) -> Result<Device<V, N>, UblkError> {
        let privileged = host.control.port().is_privileged();
        let flags = match privileged {
            true => abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE,
            false => abi::F_UNPRIVILEGED_DEV,
        };
        let wish = DeviceInfo {
            queues: shape.queues,
            depth: shape.depth,
            max_io_bytes: MAX_IO_BYTES,
            device: number.unwrap_or(abi::ANY_DEVICE),
            server_pid: own_pid(),
            flags,
            server_flags: identity.bits(),
            ..DeviceInfo::default()
        };
        let info = host.control(move |c| c.add(wish)).await?;
        let number = info.device;
        match Device::make_added(host, volume, info).await {
            Ok(mut device) => {
                if let Err(why) = host.reactor.blocking(move || N::started(&info)).await {
                    device.note = Some(format!(
                        "/dev/ublkb{number}: if this process dies under full load, the driver may need up to \
                         30 seconds to detect it: {why}"
                    ));
                }
                Ok(device)
            }
            Err(e) => {
                // The caller gets the first error, which is the cause.
                let _ = host.control(move |c| c.delete(number)).await;
                Err(e)
            }
        }
    }

    async fn make_added(
        host: &Rc<Host<N>>,
        volume: Rc<V>,
        info: DeviceInfo,
    ) -> Result<Device<V, N>, UblkError> {
        let number = info.device;
        let params = params::of(&*volume, info.max_io_bytes);
        let deadline = host.rt.now().after(NODE_WITHIN);
        loop {
            match host.control(move |c| c.set_params(number, params)).await {
                // The driver demands that the node belongs to a user without privileges. udev changes the owner.
                Err(UblkError::Refused { source, .. }) if is_early(&source) && !is_privileged(&info) => {
                    if host.rt.now() >= deadline {
                        return Err(UblkError::NotOwner { number });
                    }
                    host.rt.sleep(AGAIN).await;
                }
                other => break other?,
            }
        }
        let device = Device::serve(host, volume, info).await?;
        match host.control(move |c| c.start(number, own_pid())).await {
            Ok(()) => Ok(device),
            Err(e) => {
                // Ends the fetches: the device is out of service even if `stop` fails. A delete would wait until the
                // character device is closed.
                let _ = device.remove().await;
                Err(e)
            }
        }
    }

    async fn recover(host: &Rc<Host<N>>, volume: Rc<V>, info: DeviceInfo) -> Result<Device<V, N>, UblkError> {
        let (number, pid) = (info.device, info.server_pid);
        if info.state == abi::STATE_LIVE {
            refuse_if_alive(host, &info).await?;
        }
        let found = host.control(move |c| c.params(number)).await?.basic.device_sectors;
        let expected = volume.sectors().0;
        if found != expected {
            return Err(UblkError::Changed { number, expected, found });
        }
        let deadline = host.rt.now().after(QUIET_WITHIN);
        while !host.control(move |c| is_quiet(c, number)).await? {
            if host.rt.now() >= deadline {
                return Err(UblkError::NotQuiet { number, pid });
            }
            host.rt.sleep(AGAIN).await;
        }
        let mut device = Device::serve(host, volume, info).await?;
        host.control(move |c| c.end_recovery(number, own_pid())).await?;
        device.recovered_from = Some(pid);
        Ok(device)
    }

    /// Opens the character device, fetches every tag, and only then maps the descriptors.
    ///
    /// With this order, another process can recover the device if this one ends in between. Linux 6.12 lets no process map
    /// after one that mapped and did not fetch.
    async fn serve(host: &Rc<Host<N>>, volume: Rc<V>, info: DeviceInfo) -> Result<Device<V, N>, UblkError> {
        let deadline = host.rt.now().after(NODE_WITHIN);
        let requests = loop {
            match host.node.open(&info) {
                Err(UblkError::Node { source, .. }) if is_early(&source) && host.rt.now() < deadline => {
                    host.rt.sleep(AGAIN).await;
                }
                other => break other?,
            }
        };
        let shape = Shape { queues: info.queues, depth: info.depth };
        let (server, tags) = Server::start(host.rt.clone(), volume, requests, shape, info.max_io_bytes);
        // A timer fires after the driver's thread has submitted its entries.
        host.rt.sleep(A_TURN).await;
        let device = Device { host: host.clone(), info, server, tags, recovered_from: None, note: None };
        match device.server.prepare() {
            Ok(()) => Ok(device),
            Err(source) => {
                device.leave().await;
                Err(UblkError::Node { path: sysfs::node(info.device), source })
            }
        }
    }

    pub(crate) fn number(&self) -> u32 {
        self.info.device
    }

    /// The path of the block device.
    pub(crate) fn path(&self) -> PathBuf {
        sysfs::disk(self.info.device)
    }

    /// Whether the memory of all buffers is resident and stays resident.
    pub(crate) fn holds_buffers(&self) -> bool {
        self.server.holds_buffers()
    }

    /// Number of queues and depth, as the driver made them.
    pub(crate) fn shape(&self) -> Shape {
        Shape { queues: self.info.queues, depth: self.info.depth }
    }

    /// Makes every later request fail, for a device that is removed while in use.
    pub(crate) fn fail_everything(&self) {
        self.server.fail_everything();
    }

    /// Answers the requests under way and begins no others. The driver gives those to the next process.
    pub(crate) async fn leave(&self) {
        self.server.leave().await;
    }

    /// Removes the device. Requests are served until the driver has none.
    pub(crate) async fn remove(self) -> Result<(), UblkError> {
        let Device { host, info, server, tags, .. } = self;
        let number = info.device;
        match host.control(move |c| c.stop(number)).await {
            // Another process has removed the device.
            Err(UblkError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {}
            result => result?,
        }
        tags.ended().await;
        let broken = server.broken();
        // Closes the character device, because the delete waits for that.
        drop(server);
        match host.control(move |c| c.delete(number)).await {
            Err(UblkError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {}
            result => result?,
        }
        match broken {
            Some(errno) => Err(UblkError::Refused {
                number,
                step: "fetch requests",
                source: io::Error::from_raw_os_error(errno),
            }),
            None => Ok(()),
        }
    }
}

fn is_privileged(info: &DeviceInfo) -> bool {
    info.flags & abi::F_UNPRIVILEGED_DEV == 0
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Whether the node may be usable soon: a new node may not exist or not have its owner yet, and an old one may still be open.
fn is_early(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EACCES | libc::EBUSY))
}

async fn refuse_if_alive<N: Node>(host: &Host<N>, info: &DeviceInfo) -> Result<(), UblkError> {
    let (number, pid) = (info.device, info.server_pid);
    if pid > 0 && pid != own_pid() && host.control(move |c| c.port().is_alive(pid)).await {
        return Err(UblkError::InService { number, pid });
    }
    Ok(())
}

/// Whether the driver has released the old server; if so, begins the recovery.
fn is_quiet(control: &Control, number: u32) -> Result<bool, UblkError> {
    if control.info(number)?.state != abi::STATE_QUIESCED {
        return Ok(false);
    }
    match control.start_recovery(number) {
        // Linux 6.12 gives this error if an earlier process began the recovery and ended before it fetched. That recovery is
        // still valid.
        Err(UblkError::Refused { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => Ok(true),
        other => other,
    }
}
