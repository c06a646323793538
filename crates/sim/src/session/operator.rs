//! The operator actions in a boot, while clients send requests.
//!
//! Owns the execution of each action, and its consequences for the clients of the volume. Must not know which actions come.

use std::rc::Rc;

use engine::{CacheSet, EngineError, Volume};
use format::Sectors;
use io::Nanos;
use io::sync::{Either, select};

use super::{FLASH, Session};
use crate::disk::Retained;
use crate::hardware::uuid_of;
use crate::plan::{DeviceNumber, NOT_AGAIN, OperatorAction};
use crate::violation::Violation;

impl Session {
    pub(super) async fn operate(self: &Rc<Self>) -> Result<(), Violation> {
        for (after, action) in &self.boot.actions {
            self.issued_more.wait_until(|| self.clients_done.get() || self.issued.get() >= *after).await;
            self.given.world.log(|| format!("operator: {action:?}"));
            let result = self.action(action).await;
            self.given.world.log(|| format!("operator: {action:?} ends"));
            if let Err(e) = result {
                if !self.tolerant() {
                    return Err(Violation::Action { action: Box::new(action.clone()), source: Box::new(e) });
                }
                self.given.world.log(|| format!("operator: {action:?}: {e}"));
            }
        }
        Ok(())
    }

    async fn action(self: &Rc<Self>, action: &OperatorAction) -> Result<(), EngineError> {
        let Some(set) = self.set() else { return Ok(()) };
        let volume =
            |i: usize| self.given.clients.get(i).filter(|_| i < self.given.parts.backings.len())?.volume();
        match action {
            OperatorAction::Tune { volume: i, name, value } => match volume(*i) {
                Some(v) => v.set(name, value).await,
                None => Ok(()),
            },
            OperatorAction::TuneSet { name, value } => set.set(name, value).await,
            OperatorAction::Gc => set.gc().await,
            OperatorAction::Detach { volume: i, ns } => match volume(*i) {
                Some(v) => self.detach(&set, *i, v, *ns).await,
                None => Ok(()),
            },
            OperatorAction::Recreate => self.recreate(&set).await,
            OperatorAction::Release { volume: i, ns } => match volume(*i) {
                Some(v) => self.release(&set, *i, v, *ns).await,
                None => Ok(()),
            },
            OperatorAction::GiveUpDetach { volume: i, ns } => match volume(*i) {
                Some(v) => self.give_up_detach(&set, v, *ns).await,
                None => Ok(()),
            },
            OperatorAction::Drain { volume: i, ns } => match volume(*i) {
                Some(v) => match select(std::pin::pin!(v.drained()), self.rt.sleep(Nanos(*ns))).await {
                    Either::Left(drained) => drained,
                    Either::Right(()) => Ok(()),
                },
                None => Ok(()),
            },
            OperatorAction::Wipe { ns: 0 } => set.wipe().await.map(drop),
            OperatorAction::Wipe { ns } => {
                match select(std::pin::pin!(set.wipe()), self.rt.sleep(Nanos(*ns))).await {
                    Either::Left(wiped) => wiped.map(drop),
                    Either::Right(()) => Ok(()),
                }
            }
            // A plan of a set without checksums has scrubs if the plan was edited.
            OperatorAction::Scrub { .. } if !set.has_checksums() => Ok(()),
            OperatorAction::Scrub { ns: 0 } => set.scrub().await.map(drop),
            OperatorAction::Scrub { ns } => {
                match select(std::pin::pin!(set.scrub()), self.rt.sleep(Nanos(*ns))).await {
                    Either::Left(scrubbed) => scrubbed.map(drop),
                    Either::Right(()) => Ok(()),
                }
            }
            OperatorAction::NextFlushLoses { device } => {
                self.lose_in_next_flush(*device);
                Ok(())
            }
            OperatorAction::PowerFails => {
                self.given.world.cut_power();
                Ok(())
            }
            OperatorAction::Attach { volume: i } => self.attach(&set, *i).await,
        }
    }

    /// Makes the next flush of a device fail and lose data.
    fn lose_in_next_flush(&self, device: DeviceNumber) {
        let disk = match device.checked_sub(1) {
            Some(i) => self.given.backings.get(i),
            None => Some(&self.given.cache),
        };
        if let Some(disk) = disk.filter(|_| self.tolerant()) {
            disk.lose_in_flush(0, Retained::Nothing);
        }
    }

    /// Releases a device without draining it, and registers it again some time later.
    async fn release(
        &self,
        set: &CacheSet,
        i: usize,
        volume: Rc<Volume>,
        pause_ns: u64,
    ) -> Result<(), EngineError> {
        let client = &self.given.clients[i];
        client.pause().await;
        client.set_volume(None);
        // A volume that has lost its cache does not report whether its device could be flushed.
        let says = volume.inode().is_some();
        let released = set.release(&volume).await;
        drop(volume);
        match &released {
            Ok(()) if says => client.oracle.borrow_mut().released(),
            Ok(()) => {}
            Err(_) => client.loss_reported(),
        }
        if pause_ns == NOT_AGAIN {
            client.resume();
            return released;
        }
        self.rt.sleep(Nanos(pause_ns)).await;
        let again = self.register(set, i).await;
        client.resume();
        released.and(again)
    }

    /// Registers a device with the running set, with the settings of this boot.
    async fn register(&self, set: &CacheSet, i: usize) -> Result<(), EngineError> {
        let volume = set.register(self.given.parts.backings[i].clone()).await?;
        self.given.clients[i].set_volume(Some(volume.clone()));
        self.tune(&volume).await
    }

    /// Begins to detach a device, and cancels that.
    async fn give_up_detach(&self, set: &CacheSet, volume: Rc<Volume>, ns: u64) -> Result<(), EngineError> {
        let begun = set.begin_detach(&volume);
        match select(std::pin::pin!(begun), self.rt.sleep(Nanos(ns))).await {
            Either::Left(begun) => begun.map(drop),
            Either::Right(()) => Ok(()),
        }
    }

    /// Registers a device that was absent, and starts its clients.
    async fn attach(self: &Rc<Self>, set: &CacheSet, i: usize) -> Result<(), EngineError> {
        if self.boot.alone || !self.boot.absent.contains(&i) || i >= self.given.parts.backings.len() {
            return Ok(());
        }
        if self.given.clients[i].volume().is_some() {
            return Ok(());
        }
        self.register(set, i).await?;
        let workers = self.workers(i);
        self.late_clients.borrow_mut().extend(workers);
        Ok(())
    }

    /// Detaches a device under load, and attaches it again some time later.
    async fn detach(
        &self,
        set: &CacheSet,
        i: usize,
        volume: Rc<Volume>,
        pause_ns: u64,
    ) -> Result<(), EngineError> {
        let client = &self.given.clients[i];
        set.detach(&volume).await?;
        self.count(|c| c.detaches += 1);
        self.rt.sleep(Nanos(pause_ns)).await;
        client.pause().await;
        let stopped = volume.stop().await;
        if stopped.is_err() {
            client.loss_reported();
        }
        let again = self.register(set, i).await;
        client.resume();
        stopped.and(again)
    }

    /// Deletes the flash-only volume and makes a new one, which has zeros.
    async fn recreate(&self, set: &CacheSet) -> Result<(), EngineError> {
        let Some(client) = self.given.clients.get(self.given.parts.backings.len()) else { return Ok(()) };
        let Some(volume) = client.volume() else { return Ok(()) };
        let Some(inode) = volume.inode() else { return Ok(()) };
        client.pause().await;
        // Between the deletion and the new volume, any contents are allowed.
        let size = client.size();
        let id = client.oracle.borrow_mut().begin(crate::oracle::ChangeKind::Zero, 0, size);
        self.given.flash_made.set(false);
        client.set_volume(None);
        let made = async {
            set.delete_volume(inode).await?;
            set.create_volume(uuid_of(FLASH), Sectors(size), "flash").await
        };
        let made = made.await;
        client.oracle.borrow_mut().end(id, made.is_ok(), made.is_ok());
        if let Ok(volume) = &made {
            self.given.flash_made.set(true);
            client.set_volume(Some(volume.clone()));
        }
        client.resume();
        made.map(drop)
    }
}
