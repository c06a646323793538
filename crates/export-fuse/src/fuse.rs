//! The export as a whole: a mounted file system and the loop devices over its files.
//!
//! Owns the order of steps. Start: clean up after a dead process, mount, loop devices. Stop: check for users, loop devices,
//! unmount, threads of sessions, and then the tasks of volumes, so that the caller may stop the volumes after the stop. A stop
//! that is refused has changed nothing, except for users that arrive at that moment.
//!
//! Invariant: nothing that blocks runs on the caller's thread, because each step may wait for requests that
//! this very thread must answer. Blocking steps have a thread of their own each, also none of the driver's
//! helper threads: those may be what the requests wait for.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockio::bridge::{self, Answer};
use blockio::{mountinfo, users};
use fuser::BackgroundSession;

use crate::error::FuseError;
use crate::fs::VolumeFs;
use crate::hole::PunchHole;
use crate::loopdev::LoopDevice;
use crate::mount::{self, Mount, MountBy};
use crate::service::Served;
use crate::{session, stale};

/// Time limit of the kernel's loop driver to close a file after the command.
const LET_GO: Duration = Duration::from_secs(5);
const LET_GO_STEP: Duration = Duration::from_millis(5);

/// How a file system is to be mounted.
#[derive(Clone, Copy, Debug)]
pub struct FuseOptions {
    /// Threads that read requests. They only hand over, so a few are enough.
    pub threads: usize,
    /// The mounting user.
    pub mount_by: MountBy,
}

impl Default for FuseOptions {
    fn default() -> Self {
        FuseOptions { threads: 2, mount_by: MountBy::default() }
    }
}

/// A volume that can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exported {
    /// Name of the volume.
    pub name: String,
    /// Its file.
    pub file: PathBuf,
    /// Its loop device, once it has one.
    pub loop_device: Option<PathBuf>,
    /// Whether the loop device hands requests on as they come, many at a time.
    pub direct_io: bool,
}

/// A mounted file system of volumes.
///
/// Dropping it, or the future of [`Fuse::stop`], ends it under whoever uses it, without waiting: what was
/// written and not flushed is in the state of a crash.
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

/// A refused stop, with the export that is still in service.
pub struct Refused {
    /// The export, still in service.
    pub fuse: Fuse,
    /// Why.
    pub error: FuseError,
}

/// Everything that the stop removes. Shared with the threads that do so.
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
        // Each step leaves the state whole: what is listed exists.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` on a thread of its own. It runs to its end also if nobody waits any more.
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
    /// Mounts a file system at `dir` with a file for each of `volumes`. The directory is made if it does
    /// not exist; it must be empty. What a process that has died left there is cleaned up first.
    ///
    /// # Errors
    /// If names clash, the host has no FUSE or refuses to mount, or `dir` is not free.
    pub async fn mount(dir: &Path, volumes: Vec<Served>, options: FuseOptions) -> Result<Fuse, FuseError> {
        let asked = dir.to_path_buf();
        let at_dir = |source| FuseError::Directory { dir: asked.clone(), source };
        let dir = std::path::absolute(dir).map_err(at_dir)?;
        let fs = VolumeFs::new(&volumes)?;
        let (live, notes) = on_thread(&dir, {
            let dir = dir.clone();
            move || set_up(&dir, fs, options)
        })
        .await?;
        let (mut files, mut ended) = (Vec::new(), Vec::new());
        // From here on only the file system holds the volumes' queues: they end with it.
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

    /// Where it is mounted.
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

    /// Makes a loop device over the file of every volume that has none yet. Needs root.
    ///
    /// # Errors
    /// If there are no loop devices or they cannot be used. Those made before stay.
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
                    // Refused, as it should be.
                    let _ = device.try_discard();
                }
                let made = (device.path().to_path_buf(), device.has_direct_io());
                // Listed here and not by who waits: that one may have gone away.
                live.lock().loops.push((index, device));
                Ok(made)
            })
            .await?;
            let exported = &mut self.files[index].exported;
            (exported.loop_device, exported.direct_io) = (Some(path), direct_io);
        }
        Ok(())
    }

    /// Removes everything in order and waits for it, if no loop device and no file is in use.
    ///
    /// # Errors
    /// Returns the export, still in service, with its users.
    pub async fn stop(mut self) -> Result<(), Box<Refused>> {
        let live = self.live.clone();
        let stopped = on_thread(&live.dir.clone(), move || take_down(&live)).await;
        // Also if it was refused later than at the first look: what is gone is gone.
        self.forget_lost_loop_devices();
        if let Err(error) = stopped {
            return Err(Box::new(Refused { fuse: self, error }));
        }
        self.wait_for_volumes().await;
        Ok(())
    }

    /// Takes everything away at once and waits until the volumes have no more requests. Says who lost
    /// what: those see I/O errors from now on. Without root a program that keeps a file open may still
    /// send requests afterwards; a volume that is stopped refuses them.
    pub async fn stop_by_force(mut self) -> Vec<String> {
        let live = self.live.clone();
        match on_thread(&live.dir.clone(), move || Ok(tear_down(&live))).await {
            Ok((notes, ended)) => {
                if ended {
                    self.wait_for_volumes().await;
                }
                notes
            }
            Err(e) => vec![e.to_string()],
        }
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
            // The answer is that nobody is left to give one.
            let _ = ended.await;
        }
    }
}

/// Cleans up, mounts, and starts to answer.
fn set_up(dir: &Path, fs: VolumeFs, options: FuseOptions) -> Result<(Arc<Live>, Vec<String>), FuseError> {
    let located = mountinfo::located(dir);
    let dir = located.map_err(|source| FuseError::Directory { dir: dir.to_path_buf(), source })?;
    let notes = stale::clean_up(&dir)?;
    let (device, mount) = mount::mount(&dir, options.mount_by)?;
    // Whatever fails from here on, dropping this takes the mount away.
    let live = Arc::new(Live { dir: dir.clone(), state: Mutex::default() });
    live.lock().mount = Some(mount);
    let failed = |source| FuseError::Session { dir: dir.clone(), source };
    let session = session::start(fs, device, options.threads).map_err(failed)?;
    live.lock().session = Some(session);
    // Answered by the threads that were just started: a look that they work.
    rustix::fs::statfs(&dir).map_err(|e| failed(e.into()))?;
    Ok((live, notes))
}

/// The stop in order. It ends soon if its caller was dropped, so that the stop by force follows.
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
            // The loop driver holds the file until the last look at the device has ended.
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
    /// Whether the kernel has ended the connection: then nothing of ours is mounted any more.
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

    /// Waits until the session's threads have ended, as they do when the file system is mounted nowhere.
    /// False if they do not, and everything is as before.
    fn end_session(&mut self) -> bool {
        let ended = self.ends_within(LET_GO) || {
            // Unmounted, but somebody else still sees the file system.
            let mount = self.mount.as_ref();
            mount.is_some_and(|m| m.end_connection().is_ok()) && self.ends_within(LET_GO)
        };
        if ended {
            self.mount = None;
            if let Some(session) = self.session.take() {
                // A thread that ended badly has no requests any more either.
                let _ = session.join();
            }
        }
        ended
    }
}

/// The hard way: nothing here waits for a request to be answered, so it may run on any thread.
fn abort(state: &mut State, dir: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(mount) = &state.mount
        && !state.has_ended()
        && let Err(e) = mount.abort()
    {
        notes.push(format!("{}: cannot be unmounted: {e}", dir.display()));
    }
    // After the mount: with that gone, what is to be written back to a loop device fails at once.
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

/// The hard way, and waits for the session's threads. False if they did not end.
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
        // Nobody is left who could be told. The session's threads end by themselves: waiting for them
        // could mean waiting for this thread.
        let _ = abort(state, &self.dir);
    }
}
