//! The volumes of one thread: its session, and the exports of each volume.
//!
//! Owns the order of start (device, name, tunables, exports) and stop (exports, volume, device) of single volumes while
//! other volumes are served. Must not know the sender of orders.

mod cached;
mod copies;
mod damaged;
mod disabled;
mod exporting;
mod flash;
mod holders;
mod leaving;
mod members;
mod stops;
mod work;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use blockio::Driver;
use blockio::bridge::{RemoteReceiver, Reply, oneshot};
use blockio::users::{self, User};
use engine::figures::{CachedFigures, VolumeFigures};
use engine::{CacheSet, Volume};
use io::Nanos;
use io::sync::{Either, select};
use serve::exports::{Export, Force, Sharing, Spec, Way};
use serve::session::{Devices, Session, Simulation};
use serve::tunables::in_any_order;
use serve::{Answer, Command, Failure, Snapshot, message, plain};

use crate::config::{Key, Values};
use crate::order::{DiskTrace, InUse, KnownSlot, Order, Plan, Progress};
use crate::shared::{ServedKey, Shared};

use cached::CachedCount;
use copies::OneCopy;
use damaged::DamagedBuckets;
use disabled::Needs;
pub(crate) use holders::end_of_use;
use members::Member;
pub(crate) use members::Members;
use stops::Stops;

/// Time limit of running commands when the thread stops.
const TASKS_END_WITHIN: Nanos = Nanos::from_secs(10);
/// Time limit for the tasks of the engine to let go of a stopped volume.
const LET_GO_WITHIN: Nanos = Nanos::from_secs(2);
/// Time for which requests to a backing device are recorded after a client has asked for the record.
const TRACE_LEASE: Nanos = Nanos::from_secs(10);

/// A volume that is served.
struct Served {
    volume: Rc<Volume>,
    exports: Vec<RunningExport>,
    /// Why it cannot be reached as it should.
    problem: Option<String>,
    /// The addresses that a stop under way has ended.
    ended: Vec<String>,
    /// Whether an operator has stopped it: a flash-only volume stays in its set, and has no exports.
    stopped: bool,
    /// It keeps its label.
    _key: ServedKey,
}

/// An export of a volume, and what it was started by.
struct RunningExport {
    spec: Spec,
    sharing: Sharing,
    export: Box<dyn Export>,
}

/// See the module head.
pub(crate) struct Host<'a> {
    driver: &'a Driver,
    shared: &'a Arc<Shared>,
    plan: &'a Plan,
    session: Session,
    /// The sets of the thread.
    members: Rc<Members>,
    member: Option<Member>,
    served: RefCell<Vec<Served>>,
    /// Notes that the set is served, also if it has no flash-only volume.
    _set: Option<ServedKey>,
    /// The export that a stop of everything is ending: the name of its volume, and the ways that it still has.
    ending: RefCell<Option<(String, Vec<Way>)>>,
    /// The stops that have begun and have not ended.
    stops: Stops,
    force: Force,
    stopping: Cell<bool>,
    cached: CachedCount,
    damaged: DamagedBuckets,
    one_copy: OneCopy,
}

/// The orders that are being carried out concurrently.
#[derive(Default)]
pub(crate) struct Tasks<'a>(Vec<Pin<Box<dyn Future<Output = ()> + 'a>>>);

impl Tasks<'_> {
    fn poll(&mut self, cx: &mut TaskContext<'_>) {
        self.0.retain_mut(|task| task.as_mut().poll(cx).is_pending());
    }
}

/// A volume as messages name it.
fn shown(volume: &Volume) -> String {
    plain::named(&volume.tunables().label, volume.name())
}

/// The key of a volume: the UUID of its backing device, or set and slot of a flash-only volume.
fn key(session: &Session, volume: &Volume) -> Key {
    let id = match (volume.backing_uuid(), &session.set) {
        (Some(uuid), _) => uuid.to_string(),
        (None, Some(set)) => format!("{}/{}", set.uuid(), volume.inode().map_or(0, |i| i.0)),
        (None, None) => String::new(),
    };
    Key { id, label: volume.tunables().label, set: false }
}

/// The slot that a set has for the backing device with this UUID. A text that is no UUID has no slot.
fn slot_of(set: &CacheSet, uuid: &str) -> Option<KnownSlot> {
    let slot = set.slot_of(uuid.parse().ok()?)?;
    Some(KnownSlot { dirty_bytes: set.dirty_sectors(slot).bytes() })
}

impl<'a> Host<'a> {
    /// Starts the cache device, or the backing device that is served alone, and the volumes that are present.
    pub(crate) async fn start(
        driver: &'a Driver,
        plan: &'a Plan,
        shared: &'a Arc<Shared>,
        members: &Rc<Members>,
    ) -> Result<Host<'a>, Failure> {
        let alone: Vec<_> = plan.alone.iter().cloned().collect();
        let devices =
            Devices::open(driver, plan.cache.as_deref().as_slice(), &alone, Simulation::default()).await?;
        let session = Session::start(devices).await?;
        let set = session
            .set
            .as_ref()
            .map(|_| shared.serves(&Key { id: plan.id.clone(), label: String::new(), set: true }));
        let host = Host {
            _set: set,
            members: members.clone(),
            member: session.set.as_ref().map(|set| members.join(set)),
            driver,
            shared,
            plan,
            session,
            served: RefCell::default(),
            ending: RefCell::default(),
            stops: Stops::default(),
            force: Force::default(),
            stopping: Cell::new(false),
            cached: CachedCount::new(driver),
            damaged: DamagedBuckets::new(shared, &plan.id),
            one_copy: OneCopy::default(),
        };
        // The messages of the start have the label, too.
        shared.hub.label(&plan.id, &host.label());
        message::speak_for(&host.label());
        if let Some(set) = &host.session.set {
            let key = Key { id: plan.id.clone(), label: String::new(), set: true };
            tune(
                &plain::named(&set.status().label, plan.title()),
                shared.tunables(&key),
                async |name, value| {
                    set.tunables().check(name, value).map_err(Failure::bad_value)?;
                    Ok(set.set(name, value).await?)
                },
            )
            .await;
        }
        for volume in host.session.volumes() {
            let served = match host.name(&volume).await {
                Ok(()) => host.serve(volume).await,
                Err(e) => Err(e),
            };
            if let Err(e) = served {
                // The error of this stop is less important than the first error.
                let _ = host.bring_down().await;
                return Err(e);
            }
        }
        members::make_copies(&host);
        Ok(host)
    }

    /// Label of the set, or of the backing device that is served alone.
    pub(crate) fn label(&self) -> String {
        match &self.session.set {
            Some(set) => set.status().label,
            None => self.session.volumes().first().map(|v| v.tunables().label).unwrap_or_default(),
        }
    }

    /// What events of the thread begin with: the label; of a device that is served alone and has none, the name of its volume.
    pub(crate) fn called(&self) -> String {
        match (self.label(), &self.session.set) {
            (label, None) if label.is_empty() => {
                self.session.volumes().first().map(|v| v.name().to_string()).unwrap_or_default()
            }
            (label, _) => label,
        }
    }

    /// Does work that may wait for a file system or for a network on another thread: what it waits for may be on a volume of
    /// this one. The thread ends with the work: a helper thread of the driver would stay as long as the set.
    ///
    /// # Errors
    /// If the thread cannot be started, or the work panics.
    async fn elsewhere<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let (shared, (reply, answer)) = (self.shared.clone(), oneshot());
        std::thread::Builder::new()
            .name("helper".into())
            .spawn(move || reply.send(work(&shared)))
            .map_err(|e| Failure::because("a thread cannot be started", e))?;
        let ended = || Failure::Failed("internal error: a helper thread has ended without a result".into());
        answer.await.map_err(|_| ended())
    }

    /// Serves a volume that is new in the set.
    async fn admit(&self, volume: Rc<Volume>) -> Result<(), Failure> {
        // The figures have the volumes of the session. Without its name a volume would be listed by that of its disk.
        self.name(&volume).await?;
        self.session.add(volume.clone());
        self.session.log_events();
        self.serve(volume).await
    }

    async fn name(&self, volume: &Volume) -> Result<(), Failure> {
        let id = key(&self.session, volume).id;
        volume.set_name(&self.elsewhere(move |shared| shared.name(&id)).await?);
        Ok(())
    }

    /// Sets the tunables of a volume, which has its name, and starts its exports.
    async fn serve(&self, volume: Rc<Volume>) -> Result<(), Failure> {
        let key = key(&self.session, &volume);
        let of = key.clone();
        let served = self.shared.serves(&key);
        self.elsewhere(move |shared| shared.claim_label(&of)).await?;
        let shown = shown(&volume);
        tune(&shown, self.shared.tunables(&key), async |tunable, value| {
            volume.tunables().check(tunable, value).map_err(Failure::bad_value)?;
            Ok(volume.set(tunable, value).await?)
        })
        .await;
        let (exports, problem) = exporting::exports_of(self, &volume, &key, &[]).await?;
        self.served.borrow_mut().push(Served {
            volume,
            exports,
            problem,
            ended: Vec::new(),
            stopped: false,
            _key: served,
        });
        Ok(())
    }

    /// Carries out orders until a stop, or until all senders of orders are dropped.
    pub(crate) async fn obey<'t>(&'t self, orders: &mut RemoteReceiver<Order>, tasks: &mut Tasks<'t>) {
        let rt = self.driver.handle();
        tasks.0.push(Box::pin(damaged::read_damaged_again(self)));
        while !self.stopping.get() {
            let next = async {
                let mut receive = pin!(orders.recv());
                poll_fn(|cx| {
                    tasks.poll(cx);
                    // A task may have received the order to stop everything.
                    if self.stopping.get() { Poll::Ready(None) } else { receive.as_mut().poll(cx) }
                })
                .await
            };
            let (events, moved) = (self.session.until_events(&rt), self.members.moved.changed());
            let events = pin!(async { select(pin!(events), pin!(moved)).await });
            let event = select(pin!(next), events).await;
            self.session.log_events();
            // The events may be those of a set that has taken a volume of another one over.
            members::move_volumes(self, matches!(event, Either::Right(Either::Left(()))));
            copies::note_copies(self);
            damaged::note_damaged(self);
            match event {
                Either::Left(Some(order)) => self.take(order, tasks),
                Either::Left(None) => self.stopping.set(true),
                Either::Right(_) => {}
            }
        }
    }

    fn take<'t>(&'t self, order: Order, tasks: &mut Tasks<'t>) {
        match order {
            Order::Stop => self.stopping.set(true),
            Order::Force => self.force.use_it(),
            #[cfg(test)]
            Order::Panic => panic!("by an order"),
            #[cfg(test)]
            Order::Hang(until) => drop(until.recv()),
            other if !other.is_wanted() => {}
            other => tasks.0.push(Box::pin(self.carry_out(other))),
        }
    }

    async fn carry_out(&self, order: Order) {
        match order {
            Order::Do(Command::Stats, reply) => {
                let cached = self.cached.get(&self.session).await;
                reply.send(Ok(Answer::Stats(Box::new(self.figures(&cached)))));
            }
            Order::Do(command, reply) => self.obey_command(&command, reply).await,
            Order::Figures(reply) => reply.send(Ok(self.engine_figures())),
            Order::Buckets(reply) => reply.send(self.session.needs_set().map(CacheSet::bucket_figures)),
            Order::BucketMap(cells, reply) => reply.send(match self.session.needs_set() {
                Ok(set) => Ok(set.bucket_map(cells).await),
                Err(e) => Err(e),
            }),
            Order::DiskTrace(name, since, reply) => reply.send(self.disk_trace(&name, since)),
            Order::Label(label, reply) => reply.send(self.set_label(&label).await),
            Order::ClearDeviceStats(reply) => {
                reply.send(self.session.needs_set().map(CacheSet::clear_device_stats));
            }
            Order::HandOver(reply) => reply.send(members::hand_over(self).await),
            Order::Group(order) => leaving::obey(self, order).await,
            Order::Add(path, own, reply) => reply.send(members::add(self, &path, own).await),
            Order::Slot(uuid, reply) => reply.send(self.session.needs_set().map(|set| slot_of(set, &uuid))),
            Order::Create(wanted, reply) => reply.send(flash::create(self, &wanted).await),
            Order::DeleteVolume(name, reply) => {
                let deleted = flash::delete(self, &name, || reply.is_awaited()).await;
                reply.send(deleted);
            }
            Order::Users(name, reply) => reply.send(Ok(self.users(name.as_deref()).await)),
            Order::Holders(reply) => reply.send(Ok(holders::of(self).await)),
            Order::StopVolume(name, reply) => {
                let stopped = self.stop_volume(&name, || reply.is_awaited()).await;
                reply.send(stopped);
            }
            Order::StartVolume(name, reply) => reply.send(flash::start(self, &name).await),
            Order::ExportAgain(reply) => reply.send(Ok(exporting::export_what_is_not_up(self).await)),
            Order::StopIfFree(reply) => {
                let released = stops::release_all(self, || reply.is_awaited()).await;
                if let (Err(_), Some(member), Some(set)) = (&released, &self.member, &self.session.set) {
                    member.stay(set);
                }
                reply.send(released);
            }
            Order::Detach(name, wipe, job) => {
                work::end_of(self, &job, self.detach(&name, wipe, &job.0).await)
            }
            Order::Wipe(job) => work::end_of(self, &job, self.wipe(&job.0).await),
            Order::Scrub(job) => work::end_of(self, &job, self.scrub(&job.0).await),
            Order::Flush(name, job) => work::end_of(self, &job, self.flush(name.as_deref(), &job.0).await),
            Order::Stop | Order::Force => {}
            #[cfg(test)]
            Order::StopWaits(until) => {
                let _stop = self.stops.begin(None, self.driver.handle().now());
                let _dropped = until.await;
            }
            #[cfg(test)]
            Order::Panic | Order::Hang(_) => {}
        }
    }

    async fn set_label(&self, label: &str) -> Result<(), Failure> {
        let labelled = self.session.needs_set()?.set_label(label).await;
        message::speak_for(&self.label());
        Ok(labelled?)
    }

    async fn obey_command(&self, command: &Command, reply: Reply<Result<Answer, Failure>>) {
        let needs_cache = matches!(command, Command::Gc);
        let refuse = || if needs_cache { disabled::refuse(self, &Needs::Cache) } else { Ok(()) };
        let done = match refuse() {
            Ok(()) => serve::obey(&self.session, command).await,
            Err(refused) => Err(refused),
        };
        // The set may have failed meanwhile.
        reply.send(done.map_err(|e| refuse().err().unwrap_or(e)));
        // The command may have changed the label of a device that is served alone, or decided about damaged data.
        message::speak_for(&self.label());
        damaged::note_damaged(self);
    }

    /// All figures, with the name, exports, cached data and problem of each volume.
    fn figures(&self, cached: &CachedFigures) -> Snapshot {
        copies::note_copies(self);
        let mut snapshot = Snapshot::of(&self.session);
        snapshot.add_cached(cached);
        // The snapshot has the volumes in the order of the session.
        for (figures, volume) in snapshot.volumes.iter_mut().zip(self.session.volumes()) {
            figures.problem = stops::problem_of(self, &volume);
            copies::add_since(self, &volume, figures);
            let served = self.served.borrow();
            let Some(one) = served.iter().find(|s| Rc::ptr_eq(&s.volume, &volume)) else { continue };
            figures.exports = holders::ways_of(self, one);
            figures.flash.stopped = one.stopped;
        }
        snapshot.stops = self.stops.figures(self.driver.handle().now());
        snapshot
    }

    fn engine_figures(&self) -> metrics::Figures {
        let volumes = self.session.volumes();
        let mut sets: Vec<_> = self.session.set.iter().map(engine::CacheSet::figures).collect();
        for set in &mut sets {
            // A volume that is being registered has no name yet, or only the label that its disk gave it.
            set.volumes.retain(|f| volumes.iter().any(|v| v.inode().is_some() && v.inode() == f.inode));
        }
        let alone = volumes.iter().filter(|v| v.inode().is_none());
        let alone = alone.map(VolumeFigures::of).collect();
        let not_exported = volumes.iter().filter(|v| stops::problem_of(self, v).is_some()).map(|v| v.name());
        let mut figures = metrics::Figures {
            sets,
            alone,
            not_exported: not_exported.collect(),
            ..metrics::Figures::default()
        };
        figures.load = stops::load_of(self, &figures);
        figures
    }

    fn disk_trace(&self, name: &str, since: u64) -> Result<DiskTrace, Failure> {
        let volume = self.session.volume(name)?;
        let trace = volume.backing_trace(since, TRACE_LEASE).zip(volume.backing_size());
        let none = || Failure::Failed(format!("{}: is flash-only and has no backing device", shown(&volume)));
        let (trace, size) = trace.ok_or_else(none)?;
        Ok(DiskTrace { device: volume.backing_name().unwrap_or_default(), size_sectors: size.0, trace })
    }

    /// The users of one volume, or of all, as text: of the block device, of the file, or by connection.
    async fn users(&self, name: Option<&str>) -> Option<InUse> {
        let (mut clients, mut ways) = (Vec::new(), Vec::new());
        for one in self.served.borrow().iter().filter(|s| name.is_none_or(|name| s.volume.name() == name)) {
            clients.extend(one.exports.iter().filter_map(|e| e.export.clients()));
            ways.extend(one.exports.iter().flat_map(|e| e.export.ways(&one.volume.name())));
        }
        let users = self.users_of(ways).await;
        let command = users.first().map(end_of_use);
        if !users.is_empty() {
            clients.push(users::in_words(&users));
        }
        (!clients.is_empty()).then(|| InUse { users: clients.join(", "), command })
    }

    /// The users of these exports, as far as the kernel reports them.
    async fn users_of(&self, ways: Vec<Way>) -> Vec<User> {
        let probe = move || ways.iter().flat_map(holders::users_of).collect();
        self.driver.reactor().blocking(probe).await
    }

    async fn stop_volume(&self, name: &str, is_wanted: impl Fn() -> bool) -> Result<(), Failure> {
        let volume = self.session.volume(name)?;
        if self.with(&volume, |s| s.stopped) == Some(true) {
            return Err(flash::is_stopped(&volume));
        }
        let stop = self.stops.begin(Some(volume.name()), self.driver.handle().now());
        stops::release(self, &stop, Some(&volume), is_wanted).await?;
        if volume.is_flash_only() {
            return flash::stop(self, &volume).await;
        }
        self.served.borrow_mut().retain(|s| !Rc::ptr_eq(&s.volume, &volume));
        self.let_go(volume).await
    }

    /// Does something with what is known of a volume that is served.
    fn with<T>(&self, volume: &Rc<Volume>, work: impl FnOnce(&mut Served) -> T) -> Option<T> {
        self.served.borrow_mut().iter_mut().find(|s| Rc::ptr_eq(&s.volume, volume)).map(work)
    }

    /// Stops a volume that nothing exports, and releases its device.
    async fn let_go(&self, volume: Rc<Volume>) -> Result<(), Failure> {
        let result = match &self.session.set {
            Some(set) => set.release(&volume).await,
            None => volume.stop().await,
        };
        self.session.log_events();
        if result.is_err() && volume.inode().is_some() {
            // The set and the session still have the volume. A failed flush stays failed; a stop of the set releases the
            // volume.
            return result.map_err(Failure::from);
        }
        self.session.forget(&volume);
        // The engine's tasks of the volume end within the next turns of the driver.
        let rt = self.driver.handle();
        let deadline = rt.now().after(LET_GO_WITHIN);
        while Rc::strong_count(&volume) > 1 && rt.now() < deadline {
            rt.sleep(Nanos::from_ms(5)).await;
        }
        result.map_err(Failure::from)
    }

    /// Ends running commands, removes the exports, and stops the set. Dirty data stays dirty.
    pub(crate) async fn stop<'t>(
        &'t self,
        orders: &mut RemoteReceiver<Order>,
        tasks: &mut Tasks<'t>,
    ) -> Result<(), Failure> {
        let _stop = self.stops.begin_final(self.driver.handle().now());
        let mut down = pin!(async {
            let rest = poll_fn(|cx| {
                tasks.poll(cx);
                if tasks.0.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            });
            select(pin!(rest), self.driver.handle().sleep(TASKS_END_WITHIN)).await;
            tasks.0.clear();
            // A change that had no event, such as the end of a command.
            copies::note_copies(self);
            damaged::note_damaged(self);
            self.bring_down().await
        });
        loop {
            // If all senders of orders are dropped, no order to force the stop can come.
            let order = pin!(async {
                match orders.recv().await {
                    Some(order) => order,
                    None => std::future::pending().await,
                }
            });
            match select(down.as_mut(), order).await {
                Either::Left(result) => return result,
                Either::Right(Order::Force) => self.force.use_it(),
                Either::Right(
                    order @ (Order::Do(Command::Stats, _) | Order::Figures(_) | Order::Holders(_)),
                ) => {
                    self.carry_out(order).await;
                }
                Either::Right(other) => other.refuse(self.ends_before(Progress::Waiting)),
            }
        }
    }

    /// Ends the use of the cache device. The thread goes on if it has other sets, so the tasks of this one end first.
    pub(crate) async fn let_device_go(self) {
        let (rt, members) = (self.driver.handle(), self.members.clone());
        let device = self.session.set.as_ref().map(CacheSet::device_in_use);
        drop(self);
        let deadline = rt.now().after(LET_GO_WITHIN);
        while !members.is_empty() && device.as_ref().is_some_and(|d| d.is_in_use()) && rt.now() < deadline {
            rt.sleep(Nanos::from_ms(5)).await;
        }
    }

    /// The answer to a command that this thread does not carry out to its end, because it stops.
    fn ends_before(&self, command: Progress) -> String {
        let title = plain::named(&self.label(), self.plan.title());
        self.plan.ends_before(&title, command, self.shared.is_stopping())
    }

    async fn bring_down(&self) -> Result<(), Failure> {
        let volumes: Vec<_> = self.served.borrow().iter().map(|s| s.volume.clone()).collect();
        let mut result = Ok(());
        for volume in volumes {
            let name = volume.name();
            let id = key(&self.session, &volume).id;
            result = result.and(self.elsewhere(move |shared| shared.links.remove(&id)).await);
            let next = || self.with(&volume, |s| s.exports.pop()).flatten();
            while let Some(running) = next() {
                *self.ending.borrow_mut() = Some((name.clone(), running.export.ways(&name)));
                let ended = running.export.stop(&self.force).await;
                self.ending.take();
                result = result.and(ended);
            }
        }
        self.served.take();
        if let (Some(member), Some(set)) = (&self.member, &self.session.set) {
            member.leave();
            member.exports_ended();
            if self.shared.is_stopping() {
                member.all_exports_ended().await;
            } else {
                // The volumes of the other sets are served without the copies in this one from now on.
                result = result.and(set.give_up_copies().await.map_err(Failure::from));
            }
        }
        result.and(self.session.stop().await)
    }
}

/// Sets configured and stored tunables. One that is refused keeps its value, with a warning.
async fn tune(whose: &str, values: Values, mut set: impl AsyncFnMut(&str, &str) -> Result<(), Failure>) {
    let wishes = values.into_iter().collect();
    let refused = in_any_order(wishes, async |(name, value): &(String, String)| set(name, value).await).await;
    for (_, e) in refused {
        message::warn(format!("{whose}: {e}; the value stays"));
    }
}

#[cfg(test)]
mod tests;
