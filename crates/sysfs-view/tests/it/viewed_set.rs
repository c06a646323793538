//! A real set on a thread of its own, and its view, mounted.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use blockio::bridge::{self, RemoteReceiver, RemoteSender, Reply};
use engine::figures::BucketFigures;
use engine::{CacheSet, Volume};
use export_fuse::{MountBy, Tree};
use format::{Sectors, Uuid};
use rig::Shape;
use sysfs_view::{DeviceOrder, Errno, Order, Owner, SetOrder, Snapshot, SysfsView, VolumeId, Writer};

pub const SET: &str = "07070707-0707-0707-0707-070707070707";

enum Job {
    Snapshot(Reply<Snapshot>),
    Buckets(Reply<BucketFigures>),
    Obey(Order, Reply<Result<(), Errno>>),
    Read(u64, u64, Reply<()>),
    Write(u64, u64, Reply<()>),
}

/// Asks the set's thread, and remembers what was ordered.
struct Remote {
    jobs: RemoteSender<Job>,
    orders: Mutex<Vec<Order>>,
}

impl Remote {
    fn ask<T: Send>(&self, make: impl FnOnce(Reply<T>) -> Job) -> Result<T, Errno> {
        let (reply, answer) = bridge::oneshot();
        self.jobs.send(make(reply)).map_err(|_| Errno::EIO)?;
        answer.wait().map_err(|_| Errno::EIO)
    }
}

impl Owner for Remote {
    fn snapshot(&self) -> Result<Snapshot, Errno> {
        self.ask(Job::Snapshot)
    }

    fn buckets(&self, set: Uuid) -> Result<BucketFigures, Errno> {
        assert_eq!(set.to_string(), SET);
        self.ask(Job::Buckets)
    }

    fn obey(&self, order: Order, by: Writer) -> Result<(), Errno> {
        // The tests and their shells are processes of this user.
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if (by.uid, by.gid) != (uid, gid) || by.pid.is_none() {
            return Err(Errno(1));
        }
        self.orders.lock().unwrap().push(order.clone());
        self.ask(|reply| Job::Obey(order, reply))?
    }
}

/// A set with a cached device and a flash-only volume, and its view.
pub struct ViewedSet {
    owner: Arc<Remote>,
    tree: Option<Tree>,
    dir: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl ViewedSet {
    pub fn new() -> ViewedSet {
        let (jobs, receiver) = bridge::channel(16);
        let thread = std::thread::spawn(move || serve(receiver));
        let owner = Arc::new(Remote { jobs, orders: Mutex::default() });
        let dir = tempfile::tempdir().unwrap();
        let view = SysfsView::new(owner.clone());
        let tree =
            Tree::mount(&dir.path().join("sys"), view, MountBy::Auto).unwrap_or_else(|e| panic!("{e}"));
        ViewedSet { owner, tree: Some(tree), dir, thread: Some(thread) }
    }

    /// Where it is mounted.
    pub fn root(&self) -> PathBuf {
        self.dir.path().join("sys")
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.root().join(path)
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> String {
        match std::fs::read_to_string(self.path(path)) {
            Ok(text) => text.strip_suffix('\n').unwrap_or(&text).to_owned(),
            Err(e) => panic!("{path}: {e}"),
        }
    }

    /// As `echo value > path` does; the errno of a refusal.
    pub fn put(&self, path: &str, value: &str) -> Result<(), i32> {
        write(&self.path(path), &format!("{value}\n"))
    }

    pub fn orders(&self) -> Vec<Order> {
        std::mem::take(&mut *self.owner.orders.lock().unwrap())
    }

    pub fn read(&self, at: u64, sectors: u64) {
        self.owner.ask(|reply| Job::Read(at, sectors, reply)).unwrap();
    }

    pub fn write(&self, at: u64, sectors: u64) {
        self.owner.ask(|reply| Job::Write(at, sectors, reply)).unwrap();
    }
}

/// Writes to a file that is there.
pub fn write(path: &Path, text: &str) -> Result<(), i32> {
    use std::io::Write;
    let mut file = std::fs::File::options().write(true).truncate(true).open(path).map_err(errno)?;
    file.write_all(text.as_bytes()).map_err(errno)
}

pub fn errno(e: std::io::Error) -> i32 {
    e.raw_os_error().unwrap_or(-1)
}

impl Drop for ViewedSet {
    fn drop(&mut self) {
        drop(self.tree.take());
        // The thread ends with the last sender, which the view has held until now.
        let (jobs, _) = bridge::channel(1);
        self.owner = Arc::new(Remote { jobs, orders: Mutex::default() });
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the set's thread panicked");
        }
    }
}

fn serve(mut jobs: RemoteReceiver<Job>) {
    let shape = Shape {
        cache_name: "/dev/vda",
        cache_sectors: Sectors(1 << 17),
        backing_name: "/dev/vdb",
        backing_sectors: Sectors(1 << 18),
        block_sectors: Sectors(1),
        ..Shape::default()
    };
    shape.run(async |rig| {
        rig.volume.set_name("bcache0");
        let flash_only = rig.set.create_volume(Uuid([3; 16]), Sectors(16384), "").await.unwrap();
        flash_only.set_name("bcache1");
        while let Some(job) = jobs.recv().await {
            match job {
                Job::Snapshot(reply) => {
                    reply.send(Snapshot { sets: vec![rig.set.figures()], alone: Vec::new() });
                }
                Job::Buckets(reply) => reply.send(rig.set.bucket_figures()),
                Job::Obey(order, reply) => reply.send(obey(&rig.set, &rig.volume, order).await),
                Job::Read(at, sectors, reply) => {
                    rig.read(at, sectors).await;
                    reply.send(());
                }
                Job::Write(at, sectors, reply) => {
                    rig.write(at, sectors).await;
                    reply.send(());
                }
            }
        }
    });
}

async fn obey(set: &CacheSet, cached: &Rc<Volume>, order: Order) -> Result<(), Errno> {
    match order {
        Order::Device(VolumeId { backing, .. }, what) => {
            let found = set.volumes().into_iter().find(|v| v.backing_uuid() == backing);
            let volume = found.unwrap_or_else(|| cached.clone());
            match what {
                DeviceOrder::Tune { key, value } => volume.set(key, &value).await.map_err(|_| Errno::EINVAL),
                DeviceOrder::ClearStats => {
                    volume.clear_stats();
                    Ok(())
                }
                DeviceOrder::Run => Err(Errno::EBUSY),
                _ => Ok(()),
            }
        }
        Order::Set(_, SetOrder::Tune { key, value }) => set.set(key, &value).await.map_err(|_| Errno::EINVAL),
        Order::Set(_, SetOrder::Gc) => set.gc().await.map_err(|_| Errno::EIO),
        Order::Register { .. } => Err(Errno::EINVAL),
        _ => Ok(()),
    }
}
