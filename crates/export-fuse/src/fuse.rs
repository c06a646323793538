//! The export: a mounted file system and the loop devices over its files.
//!
//! Owns the order of steps. Start: clean up after a process that has ended, mount, set up loop devices. Stop: check for users,
//! remove loop devices, unmount, end the threads of sessions, and then the tasks of volumes, so that the caller may stop the
//! volumes after the stop. A refused stop has changed nothing, unless a user arrived during the stop.
//!
//! Invariant: no blocking call runs on the caller's thread, because each step may wait for requests that this thread must
//! answer. Each blocking step has its own thread. It does not use the driver's helper threads, because the requests may wait for
//! those.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockio::bridge::{self, Answer};
use blockio::{mountinfo, users};
use fuser::BackgroundSession;

use crate::error::FuseError;
use crate::fs::{RequestLimits, VolumeFs};
use crate::hole::PunchHole;
use crate::loopdev::LoopDevice;
use crate::mount::{self, Mount, MountBy};
use crate::service::Served;
use crate::{session, stale};

/// Time in which the kernel's loop driver must close a file after the command.
const LET_GO: Duration = Duration::from_secs(5);
const LET_GO_STEP: Duration = Duration::from_millis(5);

/// How a file system is to be mounted.
#[derive(Clone, Copy, Debug)]
pub struct FuseOptions {
    /// Number of threads that read requests. They only pass requests on, so a few are enough.
    pub threads: usize,
    /// The way to mount.
    pub mount_by: MountBy,
    /// The limits of the requests.
    pub limits: RequestLimits,
}

impl Default for FuseOptions {
    fn default() -> Self {
        FuseOptions { threads: 2, mount_by: MountBy::default(), limits: RequestLimits::default() }
    }
}

/// A volume that the export offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exported {
    /// Name of the volume.
    pub name: String,
    /// Path of its file.
    pub file: PathBuf,
    /// Path of its loop device, once it is set up.
    pub loop_device: Option<PathBuf>,
    /// Whether the loop device passes requests on with direct I/O, many at a time.
    pub direct_io: bool,
}

/// A mounted file system of volumes.
///
/// If this, or the future of [`Fuse::stop`], is dropped, the file system is removed without waiting, even in use. Data that was
/// written and not flushed is then in the same state as after a crash.
pub struct Fuse {
    live: Arc<Live>,
    files: Vec<FileInfo>,
    notes: Vec<String>,
    ended: Vec<Answer<()>>,
}

struct FileInfo {
    exported: Exported,
    block_bytes: u32,
    read_only: bool,
    punch_hole: PunchHole,
}

/// A refused stop.
pub struct Refused {
    /// The export, still in service.
    pub fuse: Fuse,
    /// The reason.
    pub error: FuseError,
}

/// Everything that a stop removes. The threads of the stop share it.
struct Live {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    mount: Option<Mount>,
    session: Option<BackgroundSession>,
    loops: Vec<(usize, LoopDevice)>,
}

impl Live {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each step leaves the state consistent: every listed item exists.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` on its own thread. The thread runs to its end even if the future is dropped.
async fn on_thread<T: Send + 'static>(
    dir: &Path,
    work: impl FnOnce() -> Result<T, FuseError> + Send + 'static,
) -> Result<T, FuseError> {
    let failed = |source| FuseError::Session { dir: dir.to_path_buf(), source };
    let (reply, answer) = bridge::oneshot();
    std::thread::Builder::new()
        .name("ubcache-fuse".into())
        .spawn(move || reply.send(work()))
        .map_err(failed)?;
    answer.await.unwrap_or_else(|_| Err(failed(io::Error::other("a thread panicked"))))
}

impl Fuse {
    /// Mounts a file system at `dir` with a file for each of `volumes`.
    ///
    /// The directory is created if it does not exist, and must be empty. The mount of a process that has ended is removed first.
    ///
    /// # Errors
    /// If names clash, the host has no FUSE or refuses to mount, or `dir` is not free.
    pub async fn mount(dir: &Path, volumes: Vec<Served>, options: FuseOptions) -> Result<Fuse, FuseError> {
        let asked = dir.to_path_buf();
        let at_dir = |source| FuseError::Directory { dir: asked.clone(), source };
        let dir = std::path::absolute(dir).map_err(at_dir)?;
        let fs = VolumeFs::new(&volumes)?.limited(options.limits);
        let (live, notes) = on_thread(&dir, {
            let dir = dir.clone();
            move || set_up(&dir, fs, options)
        })
        .await?;
        let (mut files, mut ended) = (Vec::new(), Vec::new());
        // From here on, only the file system holds the volumes' queues, so they end with it.
        for v in volumes {
            let file = live.dir.join(&v.name);
            files.push(FileInfo {
                exported: Exported { name: v.name, file, loop_device: None, direct_io: false },
                block_bytes: v.block_bytes,
                read_only: v.read_only,
                punch_hole: v.punch_hole,
            });
            ended.push(v.ended);
        }
        Ok(Fuse { live, files, notes, ended })
    }

    /// The mount point.
    pub fn dir(&self) -> &Path {
        &self.live.dir
    }

    /// Messages about the start, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The volumes, in the order in which they were given.
    pub fn exports(&self) -> impl Iterator<Item = &Exported> {
        self.files.iter().map(|f| &f.exported)
    }

    /// Sets up a loop device over the file of every volume that has none. Needs root.
    ///
    /// # Errors
    /// If the host has no loop devices or they cannot be used. Devices that were set up before the error stay.
    pub async fn attach_loop_devices(&mut self) -> Result<(), FuseError> {
        for index in 0..self.files.len() {
            let info = &self.files[index];
            if info.exported.loop_device.is_some() {
                continue;
            }
            let (file, block_bytes) = (info.exported.file.clone(), info.block_bytes);
            let (read_only, discards) = (info.read_only, info.punch_hole == PunchHole::Zero);
            let live = self.live.clone();
            let (path, direct_io) = on_thread(&self.live.dir, move || {
                let device = LoopDevice::attach(&file, block_bytes, read_only)?;
                if !discards {
                    // The file refuses the discard, as intended.
                    let _ = device.try_discard();
                }
                let made = (device.path().to_path_buf(), device.has_direct_io());
                // This thread lists the device, because the future that waits for it may have been dropped.
                live.lock().loops.push((index, device));
                Ok(made)
            })
            .await?;
            let exported = &mut self.files[index].exported;
            (exported.loop_device, exported.direct_io) = (Some(path), direct_io);
        }
        Ok(())
    }

    /// Removes everything in order, if no loop device and no file is in use, and waits for the end.
    ///
    /// # Errors
    /// Returns the export, still in service, and the error with the users.
    pub async fn stop(mut self) -> Result<(), Box<Refused>> {
        let live = self.live.clone();
        let stopped = on_thread(&live.dir.clone(), move || take_down(&live)).await;
        // Needed also if a later step than the first check has refused: some loop devices may be gone.
        self.forget_lost_loop_devices();
        if let Err(error) = stopped {
            return Err(Box::new(Refused { fuse: self, error }));
        }
        self.wait_for_volumes().await;
        Ok(())
    }

    /// Removes everything at once, and waits until the volumes have no more requests. Returns messages about the users.
    ///
    /// The users get I/O errors from now on. Without root, a program that keeps a file open may still send requests
    /// afterwards; a stopped volume refuses them.
    ///
    /// # Errors
    /// If no thread can do the work.
    pub async fn stop_by_force(mut self) -> Result<Vec<String>, FuseError> {
        let live = self.live.clone();
        let (notes, ended) = on_thread(&live.dir.clone(), move || Ok(tear_down(&live))).await?;
        if ended {
            self.wait_for_volumes().await;
        }
        Ok(notes)
    }

    fn forget_lost_loop_devices(&mut self) {
        let state = self.live.lock();
        for (index, file) in self.files.iter_mut().enumerate() {
            if !state.loops.iter().any(|(i, _)| *i == index) {
                file.exported.loop_device = None;
            }
        }
    }

    async fn wait_for_volumes(&mut self) {
        for ended in std::mem::take(&mut self.ended) {
            // The service never replies: the wait ends when its last task drops the reply.
            let _ = ended.await;
        }
    }
}

/// Cleans up, mounts, and starts the session.
fn set_up(dir: &Path, fs: VolumeFs, options: FuseOptions) -> Result<(Arc<Live>, Vec<String>), FuseError> {
    let located = mountinfo::located(dir);
    let dir = located.map_err(|source| FuseError::Directory { dir: dir.to_path_buf(), source })?;
    let notes = stale::clean_up(&dir)?;
    let (device, mount) = mount::mount(&dir, options.mount_by)?;
    // If a later step fails, the drop of this value removes the mount.
    let live = Arc::new(Live { dir: dir.clone(), state: Mutex::default() });
    live.lock().mount = Some(mount);
    let failed = |source| FuseError::Session { dir: dir.clone(), source };
    let session = session::start(fs, device, options.threads).map_err(failed)?;
    live.lock().session = Some(session);
    // The threads that were just started answer this call, which shows that they work.
    rustix::fs::statfs(&dir).map_err(|e| failed(e.into()))?;
    Ok((live, notes))
}

/// Stops in order. It returns early if its caller was dropped; the removal by force then follows.
fn take_down(live: &Arc<Live>) -> Result<(), FuseError> {
    let waits = || Arc::strong_count(live) > 1;
    let mut state = live.lock();
    let busy = users::of_directory(&live.dir);
    if !busy.is_empty() {
        return Err(FuseError::FilesInUse { dir: live.dir.clone(), users: busy });
    }
    for (_, device) in &state.loops {
        device.refuse_users(&waits)?;
    }
    while let Some((_, device)) = state.loops.last() {
        device.detach(&waits)?;
        state.loops.pop();
    }
    let deadline = Instant::now() + LET_GO;
    while let Some(mount) = &state.mount
        && !state.has_ended()
    {
        match mount.unmount() {
            Ok(()) => break,
            // The loop driver holds the file until the last access to the device has ended.
            Err(FuseError::FilesInUse { users, .. })
                if users.is_empty() && Instant::now() < deadline && waits() =>
            {
                std::thread::sleep(LET_GO_STEP);
            }
            Err(e) => return Err(e),
        }
    }
    if state.end_session() {
        return Ok(());
    }
    let source = io::Error::other("it is still mounted in another mount namespace");
    Err(FuseError::Session { dir: live.dir.clone(), source })
}

impl State {
    /// Whether the kernel has ended the connection: then no mount of this file system is left.
    fn has_ended(&self) -> bool {
        self.session.as_ref().is_none_or(|s| s.guard.is_finished())
    }

    fn ends_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < deadline {
            std::thread::sleep(LET_GO_STEP);
        }
        self.has_ended()
    }

    /// Waits until the session's threads have ended. They end when the file system is mounted nowhere.
    ///
    /// Returns false if they do not end; the session then stays as it was.
    fn end_session(&mut self) -> bool {
        let ended = self.ends_within(LET_GO) || {
            // The file system is unmounted here, and another mount namespace still has it.
            let mount = self.mount.as_ref();
            mount.is_some_and(|m| m.end_connection().is_ok()) && self.ends_within(LET_GO)
        };
        if ended {
            self.mount = None;
            if let Some(session) = self.session.take() {
                // A thread that ended with an error has no more requests either.
                let _ = session.join();
            }
        }
        ended
    }
}

/// Removes by force. It waits for no request, so it may run on any thread.
fn abort(state: &mut State, dir: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(mount) = &state.mount
        && !state.has_ended()
        && let Err(e) = mount.abort()
    {
        notes.push(format!("{}: cannot be unmounted: {e}", dir.display()));
    }
    // After the mount, because write-back to a loop device then fails at once.
    for (_, device) in state.loops.drain(..) {
        let path = device.path().display();
        match device.abandon() {
            Err(e) => notes.push(format!("{path}: cannot be removed: {e}")),
            Ok(users) if users.is_empty() => {}
            Ok(users) => notes.push(format!(
                "{path} was unmounted by force while in use ({}): every access fails now",
                users::in_words(&users)
            )),
        }
    }
    notes
}

/// Removes by force, and waits for the session's threads. The second value is false if they did not end.
fn tear_down(live: &Live) -> (Vec<String>, bool) {
    let mut state = live.lock();
    let mut notes = abort(&mut state, &live.dir);
    let ended = state.end_session();
    if !ended {
        notes.push(format!("{}: the files are still in use in another mount namespace", live.dir.display()));
    }
    (notes, ended)
}

impl Drop for Live {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The messages have no receiver here. The session's threads end by themselves; to wait for them could be to wait for
        // this thread.
        let _ = abort(state, &self.dir);
    }
}
