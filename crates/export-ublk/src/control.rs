//! Control commands: create, start, stop, recover and query devices.
//!
//! Owns the access to `/dev/ublk-control`. Each command goes through its own small ring, because it needs large entries, which
//! the ring of requests does not have. A command blocks the calling thread until it is answered, so only helper threads send
//! commands. Some commands wait until the server has served requests. Tests replace the kernel's driver with their own
//! ([`Port`]).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::abi::{self, ControlCommand, DeviceInfo, Params};
use crate::error::UblkError;
use crate::sysfs;

/// A control command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Features,
    Info,
    Add,
    SetParams,
    Params,
    Start,
    Stop,
    Delete,
    StartRecovery,
    EndRecovery,
}

impl Command {
    fn code(self) -> u32 {
        match self {
            Command::Features => abi::CMD_GET_FEATURES,
            Command::Info => abi::CMD_GET_INFO,
            Command::Add => abi::CMD_ADD,
            Command::SetParams => abi::CMD_SET_PARAMS,
            Command::Params => abi::CMD_GET_PARAMS,
            Command::Start => abi::CMD_START,
            Command::Stop => abi::CMD_STOP,
            Command::Delete => abi::CMD_DELETE,
            Command::StartRecovery => abi::CMD_START_RECOVERY,
            Command::EndRecovery => abi::CMD_END_RECOVERY,
        }
    }

    /// The name of the command in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Command::Features => "get features",
            Command::Info => "get information",
            Command::Add => "add",
            Command::SetParams => "set parameters",
            Command::Params => "get parameters",
            Command::Start => "start",
            Command::Stop => "stop",
            Command::Delete => "delete",
            Command::StartRecovery => "start recovery",
            Command::EndRecovery => "end recovery",
        }
    }

    /// Whether the command is about a device. Users without privileges must name the device by its path.
    fn names_device(self) -> bool {
        !matches!(self, Command::Features | Command::Add)
    }
}

/// The driver, as control commands use it. Every method may block.
pub(crate) trait Port: Send + Sync {
    /// Sends a command; the driver's answer is in the payload.
    ///
    /// # Errors
    /// The positive error number of the driver.
    fn send(&self, command: Command, device: u32, data: u64, payload: &mut [u8]) -> Result<(), i32>;

    /// Numbers of the existing devices.
    fn devices(&self) -> Vec<u32>;

    /// Whether a process runs. A process that has ended and waits for its parent does not run.
    fn is_alive(&self, pid: i32) -> bool;

    /// Whether this process may make devices that outlive it.
    fn is_privileged(&self) -> bool;
}

/// The kernel's driver.
struct Kernel {
    control: OwnedFd,
    privileged: bool,
}

impl Kernel {
    fn exchange(&self, command: Command, header: ControlCommand) -> io::Result<i32> {
        let mut ring: IoUring<squeue::Entry128, cqueue::Entry> = IoUring::builder().dontfork().build(2)?;
        let mut bytes = [0u8; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(header.as_bytes());
        let fd = types::Fd(self.control.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command.code()).cmd(bytes).build();
        // SAFETY: the caller has borrowed the buffer at the address in `header` for this call, and this function returns only
        // after the answer. So the buffer is valid as long as the driver accesses it.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        loop {
            match ring.submit_and_wait(1) {
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                // The ring has only this entry, and the kernel has not taken it.
                Err(e) => return Err(e),
                Ok(_) => {}
            }
            if let Some(answer) = ring.completion().next() {
                return Ok(answer.result());
            }
        }
    }
}

impl Port for Kernel {
    fn send(&self, command: Command, device: u32, data: u64, payload: &mut [u8]) -> Result<(), i32> {
        // The command `Info` demands the path from every user.
        let wants_path = command.names_device() && (!self.privileged || command == Command::Info);
        let path =
            if wants_path { sysfs::node(device).into_os_string().into_encoded_bytes() } else { Vec::new() };
        let mut bytes = [&path[..], payload].concat();
        let header = ControlCommand {
            device,
            queue: abi::NO_QUEUE,
            // A path and a structure of less than 100 bytes, so the length fits.
            len: bytes.len() as u16,
            address: if bytes.is_empty() { 0 } else { bytes.as_mut_ptr() as u64 },
            data,
            path_len: path.len() as u16,
            ..ControlCommand::default()
        };
        let result = self.exchange(command, header).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
        if result < 0 {
            return Err(-result);
        }
        payload.copy_from_slice(&bytes[path.len()..]);
        Ok(())
    }

    fn devices(&self) -> Vec<u32> {
        sysfs::devices()
    }

    fn is_alive(&self, pid: i32) -> bool {
        sysfs::is_alive(pid)
    }

    fn is_privileged(&self) -> bool {
        self.privileged
    }
}

/// Typed control commands. Cheap to clone, and passed to helper threads.
#[derive(Clone)]
pub(crate) struct Control {
    port: Arc<dyn Port>,
}

impl Control {
    /// Opens the kernel's driver. If it is not loaded, this loads it if possible.
    pub(crate) fn open() -> Result<Control, UblkError> {
        let open = || File::options().read(true).write(true).open(abi::CONTROL);
        let opened = match open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound && sysfs::is_root() => {
                sysfs::load_driver();
                open()
            }
            other => other,
        };
        let control = opened.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => UblkError::NoDriver,
            io::ErrorKind::PermissionDenied => UblkError::NoPermission,
            // The node exists, and no driver serves it.
            _ if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => UblkError::NoDriver,
            _ => UblkError::Control { source: e },
        })?;
        let control =
            Control::over(Arc::new(Kernel { control: control.into(), privileged: sysfs::is_root() }));
        control.features()?;
        Ok(control)
    }

    /// Control commands for any driver.
    pub(crate) fn over(port: Arc<dyn Port>) -> Control {
        Control { port }
    }

    pub(crate) fn port(&self) -> &dyn Port {
        &*self.port
    }

    fn command(&self, command: Command, device: u32, data: u64, payload: &mut [u8]) -> Result<(), i32> {
        self.port.send(command, device, data, payload)
    }

    fn plain(&self, command: Command, device: u32, data: u64) -> Result<(), UblkError> {
        self.command(command, device, data, &mut []).map_err(|e| refused(device, command, e))
    }

    /// The features of the driver, as a set of `abi::F_*`.
    pub(crate) fn features(&self) -> Result<u64, UblkError> {
        let mut features = 0u64;
        match self.command(Command::Features, abi::ANY_DEVICE, 0, features.as_mut_bytes()) {
            Ok(()) => Ok(features),
            Err(libc::EPERM | libc::EACCES) => Err(UblkError::NoPermission),
            Err(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV) => {
                Err(UblkError::TooOld(Command::Features.name()))
            }
            Err(e) => Err(UblkError::Control { source: io::Error::from_raw_os_error(e) }),
        }
    }

    /// Adds a device; returns the parameters that the driver accepted.
    pub(crate) fn add(&self, wish: DeviceInfo) -> Result<DeviceInfo, UblkError> {
        let mut info = wish;
        match self.command(Command::Add, wish.device, 0, info.as_mut_bytes()) {
            Ok(()) => Ok(info),
            Err(libc::EEXIST) => {
                let pid = self.info(wish.device).ok().map(|i| i.server_pid).filter(|p| *p > 0);
                Err(UblkError::Taken { number: wish.device, pid })
            }
            Err(libc::EPERM) => Err(UblkError::NoPermission),
            Err(e) => {
                let source = io::Error::from_raw_os_error(e);
                Err(UblkError::Add { queues: wish.queues, depth: wish.depth, source })
            }
        }
    }

    pub(crate) fn info(&self, device: u32) -> Result<DeviceInfo, UblkError> {
        let mut info = DeviceInfo { device, ..DeviceInfo::default() };
        self.command(Command::Info, device, 0, info.as_mut_bytes())
            .map_err(|e| refused(device, Command::Info, e))?;
        Ok(info)
    }

    pub(crate) fn set_params(&self, device: u32, params: Params) -> Result<(), UblkError> {
        let mut params = params;
        self.command(Command::SetParams, device, 0, params.as_mut_bytes())
            .map_err(|e| refused(device, Command::SetParams, e))
    }

    pub(crate) fn params(&self, device: u32) -> Result<Params, UblkError> {
        let mut params = Params::new_zeroed();
        params.len = size_of::<Params>() as u32;
        let mut bytes = params.as_bytes().to_vec();
        self.command(Command::Params, device, 0, &mut bytes)
            .map_err(|e| refused(device, Command::Params, e))?;
        Params::read_from_bytes(&bytes).map_err(|_| refused(device, Command::Params, libc::EINVAL))
    }

    /// Puts a device into service. Waits until every tag is fetched.
    pub(crate) fn start(&self, device: u32, pid: i32) -> Result<(), UblkError> {
        self.plain(Command::Start, device, pid as u64)
    }

    /// Takes a device out of service. Waits until every request is answered.
    pub(crate) fn stop(&self, device: u32) -> Result<(), UblkError> {
        self.plain(Command::Stop, device, 0)
    }

    /// Deletes a device. Waits until the server has closed it.
    pub(crate) fn delete(&self, device: u32) -> Result<(), UblkError> {
        self.plain(Command::Delete, device, 0)
    }

    /// Begins the recovery of a device whose server has ended; false while the driver still waits for that server.
    pub(crate) fn start_recovery(&self, device: u32) -> Result<bool, UblkError> {
        match self.command(Command::StartRecovery, device, 0, &mut []) {
            Ok(()) => Ok(true),
            Err(libc::EBUSY) => Ok(false),
            Err(e) => Err(refused(device, Command::StartRecovery, e)),
        }
    }

    /// Puts a recovered device into service. Waits until every tag is fetched.
    pub(crate) fn end_recovery(&self, device: u32, pid: i32) -> Result<(), UblkError> {
        self.plain(Command::EndRecovery, device, pid as u64)
    }
}

fn refused(number: u32, command: Command, errno: i32) -> UblkError {
    UblkError::Refused { number, step: command.name(), source: io::Error::from_raw_os_error(errno) }
}

/// Opens the node that the driver makes for a device. An error if it does not exist yet, or may not be opened.
pub(crate) fn open_node(path: &Path) -> io::Result<OwnedFd> {
    File::options().read(true).write(true).open(path).map(OwnedFd::from)
}
