//! The life of one device: created, started, recovered, removed, handed over.
//!
//! Owns the order of the driver's commands. A new device: add, set parameters, open its character device, fetch every
//! tag, start. One that a dead process left: wait until the driver has let go of that process, begin the recovery, open,
//! fetch, end the recovery; the driver sends unanswered requests again. The end: stop (while requests are still
//! served), wait for the tags, close, delete.
//!
//! Invariants: a device that was made and could not be started is deleted; one that was found is never deleted but by
//! [`Device::remove`].

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
use crate::find::{self, Identity};
use crate::server::{Requests, Server, Tags};
use crate::{params, sysfs};

/// Largest request, in bytes. Each tag has a buffer of that size, whose memory is taken up as far as it is used.
pub(crate) const MAX_IO_BYTES: u32 = 512 << 10;

/// How long the driver may take to let go of a dead process: its timeout for requests, and some.
const QUIET_WITHIN: Nanos = Nanos::from_ms(45_000);
/// How long nodes may take to appear and to get their owner.
const NODE_WITHIN: Nanos = Nanos::from_ms(5_000);
/// Long enough for the driver's thread to submit what is queued.
const A_TURN: Nanos = Nanos::from_ms(1);
/// Interval of the checks.
const AGAIN: Nanos = Nanos::from_ms(5);

/// Queues of a device and their depth. All are served by the thread of the volume; several keep the processors that
/// send requests out of each other's way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Hardware queues; the driver makes no more than there are processors.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
}

impl Shape {
    /// Queues that can be asked for.
    pub const QUEUES: std::ops::RangeInclusive<u16> = 1..=64;
    /// Depths that can be asked for: below eight the block layer could not leave a tag free.
    pub const DEPTH: std::ops::RangeInclusive<u16> = 8..=abi::MAX_QUEUE_DEPTH;
}

/// The default depth, if memory suffices.
const USUAL_DEPTH: u16 = 128;

impl Shape {
    /// A queue for each processor, at most four, and as deep as the buffers of all requests together stay within so many
    /// bytes: every request has one of the largest size.
    pub fn within(bytes: u64) -> Shape {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = processors.min(4) as u16;
        let depths = std::iter::successors(Some(USUAL_DEPTH), |depth| Some(depth / 2));
        let mut possible = depths.take_while(|depth| *depth > *Shape::DEPTH.start());
        let depth = possible.find(|depth| Shape { queues, depth: *depth }.buffer_bytes() <= bytes);
        Shape { queues, depth: depth.unwrap_or(*Shape::DEPTH.start()) }
    }

    /// The buffers of all requests of a device.
    pub fn buffer_bytes(self) -> u64 {
        u64::from(self.queues) * u64::from(self.depth) * u64::from(MAX_IO_BYTES)
    }
}

impl Default for Shape {
    fn default() -> Self {
        Shape::within(u64::MAX)
    }
}

/// Where requests of a device come from.
pub(crate) trait Node: 'static {
    type Requests: Requests;

    /// Opens the character device of `info`.
    fn open(&self, info: &DeviceInfo) -> Result<Self::Requests, UblkError>;

    /// What is to be done for a device that has just been started; what did not work. Called on a helper
    /// thread: changing a queue waits for every request in it, and somebody may be reading the new device already.
    fn started(info: &DeviceInfo) -> Result<(), sysfs::SettingError>;
}

/// The kernel's devices.
pub(crate) struct KernelNode(pub(crate) Reactor);

/// As much of each tag's buffer is registered with the ring: with small requests the cost of each counts, and
/// registered memory is locked.
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
        // SAFETY: `file` is a device of the ublk driver. Its commands copy one request's data from or to the address
        // that they carry, at most `max_io_bytes` (by that the driver limits requests), and only before the fetch of the
        // request completes or while the command that answers it is submitted.
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
        // Done once.
        let _ = self.descriptors.set(descriptors);
        Ok(())
    }

    fn next(&self, queue: u16, tag: u16, answer: Option<i32>, mut buffer: Buffer) -> CommandFuture {
        // Not for the first fetch: a device that comes back after its server's death waits for all of those.
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

/// The driver and the thread on which devices are served.
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
    /// The process that served it before, if it was recovered.
    pub(crate) recovered_from: Option<i32>,
    /// Messages for the operator.
    pub(crate) note: Option<String>,
}

impl<V: BlockVolume, N: Node> Device<V, N> {
    /// Makes a device for a volume, or recovers the one that it had.
    pub(crate) async fn start(
        host: &Rc<Host<N>>,
        volume: Rc<V>,
        identity: Identity,
        number: Option<u32>,
        shape: Shape,
    ) -> Result<Device<V, N>, UblkError> {
        let found = host.control(move |c| find::find(c, identity)).await;
        match found {
            Some(info) if info.state == abi::STATE_DEAD => {
                refuse_if_alive(host, &info).await?;
                host.control(move |c| c.delete(info.device)).await?;
            }
            Some(info) => return Device::recover(host, volume, info).await,
            None => {}
        }
        Device::make(host, volume, identity, number, shape).await
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
                // The first error is the one that matters.
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
                // Of users without privileges the driver wants to see that the node is theirs, which udev makes it.
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
                // Ends the fetches: the device is out of service, whatever `stop` says of that. Deleting it would wait
                // for the character device to be closed.
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

    /// Opens the character device, has every tag fetched, and only then maps the descriptors: so a process that dies on
    /// the way can be followed by another (Linux 6.12 lets nobody map after one that mapped and did not fetch).
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
        let shape = (info.queues, info.depth);
        let (server, tags) = Server::start(host.rt.clone(), volume, requests, shape, info.max_io_bytes);
        // A timer fires after the thread's turn with the kernel.
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

    /// The block device.
    pub(crate) fn path(&self) -> PathBuf {
        sysfs::disk(self.info.device)
    }

    /// Whether the memory of all its buffers is there, and stays.
    pub(crate) fn holds_buffers(&self) -> bool {
        self.server.holds_buffers()
    }

    /// Queues and depth, as the driver made them.
    pub(crate) fn shape(&self) -> Shape {
        Shape { queues: self.info.queues, depth: self.info.depth }
    }

    /// Makes every request fail from now on: for a device that is removed while in use.
    pub(crate) fn fail_everything(&self) {
        self.server.fail_everything();
    }

    /// Answers the requests under way and begins no more; the others wait for the next process.
    pub(crate) async fn leave(&self) {
        self.server.leave().await;
    }

    /// Takes the device away. Requests are served until the driver has none any more.
    pub(crate) async fn remove(self) -> Result<(), UblkError> {
        let Device { host, info, server, tags, .. } = self;
        let number = info.device;
        match host.control(move |c| c.stop(number)).await {
            // Somebody else has taken it away.
            Err(UblkError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {}
            result => result?,
        }
        tags.ended().await;
        let broken = server.broken();
        // Closes the character device, for which deleting waits.
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

/// A node that has just been made may lack its owner yet; one that was just left may still be open.
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

/// Whether the driver has let go of the old server; begins the recovery then.
fn is_quiet(control: &Control, number: u32) -> Result<bool, UblkError> {
    if control.info(number)?.state != abi::STATE_QUIESCED {
        return Ok(false);
    }
    match control.start_recovery(number) {
        // What Linux 6.12 says to the second beginning, after a process that died between beginning and fetching:
        // the first one still holds.
        Err(UblkError::Refused { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => Ok(true),
        other => other,
    }
}
