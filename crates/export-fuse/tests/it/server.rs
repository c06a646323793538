//! An export on a thread of its own, which the tests start, stop and stop by force.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;

use blockio::bridge::{RemoteSender, Reply, channel};
use blockio::{Driver, DriverOptions};
use export_fuse::{Exported, Fuse, FuseOptions, MountBy, PunchHole, ServeOptions, serve};

use rig::{RamDisk, RamVolume};

enum Command {
    Stop(Reply<Result<(), String>>),
    Force(Reply<Vec<String>>),
    /// Begins to stop and gives up after 100 ms.
    Abandon(Reply<()>),
}

/// How the export is to be made.
#[derive(Clone, Copy)]
pub struct Setup {
    pub loops: bool,
    pub punch_hole: PunchHole,
    pub mount_by: MountBy,
}

pub const FILES: Setup = Setup { loops: false, punch_hole: PunchHole::Zero, mount_by: MountBy::Auto };
pub const LOOPS: Setup = Setup { loops: true, ..FILES };

pub struct Server {
    commands: Option<RemoteSender<Command>>,
    thread: Option<JoinHandle<()>>,
    pub exports: Vec<Exported>,
    pub notes: Vec<String>,
    pub dir: PathBuf,
}

struct Ready {
    exports: Vec<Exported>,
    notes: Vec<String>,
    dir: PathBuf,
}

impl Server {
    pub fn start(dir: &Path, disks: &[&Arc<RamDisk>], setup: Setup) -> Server {
        Self::try_start(dir, disks, setup).unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn try_start(dir: &Path, disks: &[&Arc<RamDisk>], setup: Setup) -> Result<Server, String> {
        let (commands, inbox) = channel(1);
        let (ready, started) = blockio::bridge::oneshot();
        let disks: Vec<Arc<RamDisk>> = disks.iter().map(|d| Arc::clone(d)).collect();
        let dir = dir.to_path_buf();
        let thread = std::thread::spawn(move || {
            let driver = Driver::new(DriverOptions::default()).expect("a driver");
            let options = ServeOptions { punch_hole: setup.punch_hole, ..ServeOptions::default() };
            let volumes: Vec<Rc<RamVolume>> = disks.into_iter().map(|d| RamVolume::on(d).shared()).collect();
            let served = volumes.iter().map(|v| serve(&driver.handle(), v.clone(), options)).collect();
            let stopped = driver.block_on(async {
                let options = FuseOptions { mount_by: setup.mount_by, ..FuseOptions::default() };
                let mounted = Fuse::mount(&dir, served, options).await;
                let mut fuse = match mounted {
                    Ok(fuse) => fuse,
                    Err(e) => {
                        ready.send(Err(e.to_string()));
                        return false;
                    }
                };
                if setup.loops
                    && let Err(e) = fuse.attach_loop_devices().await
                {
                    fuse.stop_by_force().await.expect("a thread");
                    ready.send(Err(e.to_string()));
                    return true;
                }
                ready.send(Ok(Ready {
                    exports: fuse.exports().cloned().collect(),
                    notes: fuse.notes().to_vec(),
                    dir: fuse.dir().to_path_buf(),
                }));
                obey(driver.handle(), fuse, inbox).await;
                true
            });
            for volume in volumes {
                assert!(
                    !stopped || Rc::strong_count(&volume) == 1,
                    "a stopped export has let go of its volumes"
                );
            }
        });
        let Ready { exports, notes, dir } = started.wait().expect("the server starts or says why")?;
        Ok(Server { commands: Some(commands), thread: Some(thread), exports, notes, dir })
    }

    pub fn file(&self) -> &Path {
        &self.exports[0].file
    }

    pub fn device(&self) -> &Path {
        self.exports[0].loop_device.as_deref().expect("a loop device")
    }

    /// Stops in good order. A server that refuses to stop says why, and runs on.
    pub fn stop(&mut self) -> Result<(), String> {
        let commands = self.commands.as_ref().expect("still running");
        let stopped = commands.call(Command::Stop).expect("the server answers");
        if stopped.is_ok() {
            self.join();
        }
        stopped
    }

    pub fn force(&mut self) -> Vec<String> {
        let commands = self.commands.as_ref().expect("still running");
        let notes = commands.call(Command::Force).expect("the server answers");
        self.join();
        notes
    }

    /// Begins to stop and drops that before it has come to an end.
    pub fn abandon(&mut self) {
        let commands = self.commands.as_ref().expect("still running");
        commands.call(Command::Abandon).expect("the server answers");
        self.commands = None;
    }

    fn join(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server's thread does not panic");
        }
    }
}

async fn obey(rt: io::Handle, fuse: Fuse, mut inbox: blockio::bridge::RemoteReceiver<Command>) {
    let mut fuse = Some(fuse);
    while let Some(command) = inbox.recv().await {
        let Some(running) = fuse.take() else { return };
        match command {
            Command::Stop(reply) => match running.stop().await {
                Ok(()) => return reply.send(Ok(())),
                Err(refused) => {
                    fuse = Some(refused.fuse);
                    reply.send(Err(refused.error.to_string()));
                }
            },
            Command::Abandon(reply) => {
                let deadline = std::pin::pin!(rt.sleep(io::Nanos::from_ms(100)));
                io::sync::select(Box::pin(running.stop()), deadline).await;
                return reply.send(());
            }
            Command::Force(reply) => return reply.send(running.stop_by_force().await.expect("a thread")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After a failed test: whatever is in use is taken away, by force.
        if let Some(commands) = self.commands.take() {
            let _ = commands.call(Command::Force);
            drop(commands);
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
