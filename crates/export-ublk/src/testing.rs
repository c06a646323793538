//! Test doubles: a driver that behaves like the kernel's, as far as a server can observe.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use blockio::bridge::{self, Reply};
use io::Buffer;
use rig::{RamDisk, RamVolume};
use zerocopy::{FromBytes, IntoBytes};

use crate::abi::{self, DeviceInfo, IoDescriptor, Params};
use crate::control::{Command, Port};
use crate::device::Node;
use crate::error::UblkError;
use crate::server::Requests;

/// A volume in memory of `sectors` sectors, whose discards leave garbage.
pub(crate) fn ram(sectors: u64) -> Rc<RamVolume> {
    RamVolume::on(RamDisk::new("ram", sectors * 512).with_garbage().shared()).shared()
}

/// A request to the fake device.
pub(crate) struct Ask {
    pub(crate) op_flags: u32,
    pub(crate) sector: u64,
    pub(crate) sectors: u32,
    pub(crate) data: Vec<u8>,
}

/// Result of a request, and the data of a read.
pub(crate) type Answered = (i32, Vec<u8>);

#[derive(Default)]
struct Tag {
    /// Ends the fetch of a tag that has no request.
    waiting: Option<Reply<()>>,
    /// The request of the tag, and the receiver of its answer.
    current: Option<(Ask, Reply<Answered>)>,
    fetched: bool,
}

struct Dev {
    info: DeviceInfo,
    params: Params,
    open: bool,
    tags: Vec<Tag>,
    /// Requests that no tag has taken yet.
    queue: VecDeque<(Ask, Reply<Answered>)>,
    deleted: bool,
}

#[derive(Default)]
pub(crate) struct State {
    devices: BTreeMap<u32, Dev>,
    /// Every command that was sent, in order.
    pub(crate) log: Vec<Command>,
    /// A command that fails, and its error number.
    pub(crate) refuse: Option<(Command, i32)>,
    pub(crate) alive: Vec<i32>,
    pub(crate) unprivileged: bool,
}

/// A driver in memory. All clones are the same driver.
#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<(Mutex<State>, std::sync::Condvar)>);

impl Fake {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }

    fn changed(&self) {
        self.0.1.notify_all();
    }

    fn wait_while(&self, mut condition: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let timeout = std::time::Duration::from_secs(30);
        let (state, out) = self.0.1.wait_timeout_while(self.state(), timeout, |s| condition(s)).unwrap();
        assert!(!out.timed_out(), "the driver waits for ever: {:?}", state.log);
        state
    }

    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.state().devices.keys().copied().collect()
    }

    pub(crate) fn info(&self, number: u32) -> DeviceInfo {
        self.state().devices[&number].info
    }

    pub(crate) fn set_pid(&self, number: u32, pid: i32) {
        self.state().devices.get_mut(&number).unwrap().info.server_pid = pid;
    }

    pub(crate) fn params_of(&self, number: u32) -> Params {
        self.state().devices[&number].params
    }

    /// Sends a request to a device and returns the answer.
    pub(crate) async fn ask(&self, number: u32, ask: Ask) -> Answered {
        let (reply, answer) = bridge::oneshot();
        {
            let mut state = self.state();
            let dev = state.devices.get_mut(&number).unwrap();
            dev.queue.push_back((ask, reply));
            dev.pump();
        }
        answer.await.unwrap()
    }

    /// Ends the server: the device waits for the next one, with every unanswered request.
    pub(crate) fn server_died(&self, number: u32) {
        let mut state = self.state();
        let dev = state.devices.get_mut(&number).unwrap();
        dev.open = false;
        dev.info.state = abi::STATE_QUIESCED;
        dev.requeue();
        self.changed();
    }
}

impl Dev {
    /// Assigns requests to fetched tags.
    fn pump(&mut self) {
        if self.info.state != abi::STATE_LIVE {
            return;
        }
        while !self.queue.is_empty() {
            let Some(tag) = self.tags.iter_mut().find(|t| t.waiting.is_some()) else { return };
            tag.current = self.queue.pop_front();
            tag.waiting.take().unwrap().send(());
        }
    }

    fn requeue(&mut self) {
        for tag in &mut self.tags {
            self.queue.extend(tag.current.take());
            *tag = Tag::default();
        }
    }

    fn cancel(&mut self) {
        // The drop of the reply ends the fetch.
        self.tags.iter_mut().for_each(|t| t.waiting = None);
    }

    fn ready(&self) -> bool {
        self.tags.iter().all(|t| t.fetched)
    }
}

impl Port for Fake {
    fn send(&self, command: Command, device: u32, data: u64, payload: &mut [u8]) -> Result<(), i32> {
        let mut state = self.state();
        state.log.push(command);
        if let Some((_, errno)) = state.refuse.filter(|(c, _)| *c == command) {
            return Err(errno);
        }
        match command {
            Command::Features => payload.copy_from_slice(&0xffffu64.to_ne_bytes()),
            Command::Add => {
                let mut info = DeviceInfo::read_from_bytes(payload).unwrap();
                let free = (0..).find(|n| !state.devices.contains_key(n)).unwrap();
                let number = if device == abi::ANY_DEVICE { free } else { device };
                if state.devices.contains_key(&number) {
                    return Err(libc::EEXIST);
                }
                info.device = number;
                info.state = abi::STATE_DEAD;
                info.queues = info.queues.min(2);
                payload.copy_from_slice(info.as_bytes());
                let tags = (0..info.queues * info.depth).map(|_| Tag::default()).collect();
                let params = Params::default();
                let queue = VecDeque::new();
                state.devices.insert(number, Dev { info, params, open: false, tags, queue, deleted: false });
            }
            _ => {
                drop(state);
                return self.send_to(command, device, data, payload);
            }
        }
        Ok(())
    }

    fn devices(&self) -> Vec<u32> {
        self.numbers()
    }

    fn is_alive(&self, pid: i32) -> bool {
        self.state().alive.contains(&pid)
    }

    fn is_privileged(&self) -> bool {
        !self.state().unprivileged
    }
}

impl Fake {
    fn send_to(&self, command: Command, number: u32, data: u64, payload: &mut [u8]) -> Result<(), i32> {
        if !self.state().devices.contains_key(&number) {
            return Err(libc::ENODEV);
        }
        if matches!(command, Command::Start | Command::EndRecovery) {
            drop(self.wait_while(|s| !s.devices[&number].ready()));
        }
        let mut state = self.state();
        let dev = state.devices.get_mut(&number).unwrap();
        match command {
            Command::Info => payload.copy_from_slice(dev.info.as_bytes()),
            Command::SetParams => dev.params = Params::read_from_bytes(payload).unwrap(),
            Command::Params => payload.copy_from_slice(dev.params.as_bytes()),
            Command::Start | Command::EndRecovery => {
                dev.info.state = abi::STATE_LIVE;
                dev.info.server_pid = data as i32;
                dev.pump();
            }
            Command::Stop => {
                drop(state);
                // Requests under way are answered before the device stops.
                let mut state =
                    self.wait_while(|s| s.devices[&number].tags.iter().any(|t| t.current.is_some()));
                let dev = state.devices.get_mut(&number).unwrap();
                dev.info.state = abi::STATE_DEAD;
                dev.cancel();
            }
            Command::Delete => {
                dev.cancel();
                dev.deleted = true;
                drop(state);
                self.wait_while(|s| s.devices[&number].open).devices.remove(&number);
            }
            Command::StartRecovery if dev.open || dev.info.state != abi::STATE_QUIESCED => {
                return Err(libc::EBUSY);
            }
            Command::StartRecovery => dev.requeue(),
            Command::Features | Command::Add => unreachable!("not about a device"),
        }
        Ok(())
    }
}

thread_local! {
    /// Whether this is the thread that answers requests.
    static SERVES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Node for Fake {
    type Requests = FakeRequests;

    fn open(&self, info: &DeviceInfo) -> Result<FakeRequests, UblkError> {
        self.state().devices.get_mut(&info.device).unwrap().open = true;
        SERVES.set(true);
        Ok(FakeRequests(Rc::new(Opened { fake: self.clone(), number: info.device })))
    }

    fn started(_: &DeviceInfo) -> Result<(), crate::sysfs::SettingError> {
        assert!(!SERVES.get(), "changing a queue waits for its requests, which this thread answers");
        Ok(())
    }
}

struct Opened {
    fake: Fake,
    number: u32,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(dev) = self.fake.state().devices.get_mut(&self.number) {
            dev.open = false;
        }
        self.fake.changed();
    }
}

pub(crate) struct FakeRequests(Rc<Opened>);

impl FakeRequests {
    fn at(&self, state: &State, queue: u16, tag: u16) -> usize {
        usize::from(queue * state.devices[&self.0.number].info.depth + tag)
    }
}

impl Requests for FakeRequests {
    type Next = Pin<Box<dyn Future<Output = (i32, Option<Buffer>)>>>;

    fn prepare(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn next(&self, queue: u16, tag: u16, answer: Option<i32>, buffer: Buffer) -> Self::Next {
        let (reply, waiting) = bridge::oneshot();
        {
            let mut state = self.0.fake.state();
            let at = self.at(&state, queue, tag);
            let Some(dev) = state.devices.get_mut(&self.0.number) else {
                return Box::pin(async { (abi::RESULT_ABORT, None) });
            };
            let slot = &mut dev.tags[at];
            assert_eq!(answer.is_some(), slot.current.is_some(), "an answer for each request");
            if let (Some(result), Some((ask, to))) = (answer, slot.current.take()) {
                let read = ask.op_flags & 0xff == u32::from(abi::OP_READ);
                let bytes = if read { usize::try_from(result).unwrap_or(0) } else { 0 };
                to.send((result, buffer.as_slice()[..bytes].to_vec()));
            }
            slot.fetched = true;
            slot.waiting = Some(reply);
            if dev.info.state == abi::STATE_DEAD && dev.deleted {
                dev.cancel();
            }
            dev.pump();
        }
        self.0.fake.changed();
        let requests = FakeRequests(self.0.clone());
        Box::pin(async move {
            let mut buffer = buffer;
            if waiting.await.is_err() {
                return (abi::RESULT_ABORT, Some(buffer));
            }
            let state = requests.0.fake.state();
            let at = requests.at(&state, queue, tag);
            let (ask, _) = state.devices[&requests.0.number].tags[at].current.as_ref().unwrap();
            buffer.as_mut()[..ask.data.len()].copy_from_slice(&ask.data);
            drop(state);
            (abi::RESULT_OK, Some(buffer))
        })
    }

    fn descriptor(&self, queue: u16, tag: u16) -> IoDescriptor {
        let state = self.0.fake.state();
        let at = self.at(&state, queue, tag);
        let (ask, _) = state.devices[&self.0.number].tags[at].current.as_ref().unwrap();
        IoDescriptor { op_flags: ask.op_flags, sectors: ask.sectors, start_sector: ask.sector, address: 0 }
    }
}
