//! `ubcache up`: serves a set in the foreground.
//!
//! Owns the order. Start: arguments, devices, set, settings, exports, and then the lines about ready volumes. Stop: exports
//! (which answer the requests in flight), volumes and set, devices.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::process::Command;
use std::time::Duration;

use blockio::{BusyPoll, Driver, DriverOptions, Signals};
use clap::Args;
use engine::CacheSet;
use export_ublk::Shape;
use io::Nanos;
use io::sync::{Either, select};
use serde_json::{Value, json};
use serve::group;
use serve::ram::MemoryLimit;

use crate::commands::nbd_args::NbdArgs;
use crate::console;
use crate::exports::{self, Context, Export, Force, NbdAccess, Sharing, Spec};
use crate::failure::Failure;
use crate::session::{self, Devices, Session, Simulation};
use crate::takeover;
use crate::tunables::{Owner, Setting};
use crate::{interrupt, out};

/// Time limit of exports that are in use to end after a second signal.
const GRACE: Duration = Duration::from_secs(3);

/// Time limit of exports that are stopped by force.
const FORCED_WITHIN: Nanos = Nanos::from_ms(2500);

/// The help of the option `--export`.
fn export_help() -> String {
    format!("How clients reach the volumes: {}", exports::forms())
}

/// Serve a cache set in the foreground
///
/// Volumes are named bcache0, bcache1 and so on: first those of the backing devices in the order given, then
/// flash-only volumes. When a volume is ready, a line on standard output has its export. Runs until SIGINT or SIGTERM; a
/// second signal ends it at once. A cache device that was never used is initialised.
///
/// A device of the kernel (ublk) stays when this process is killed: its users wait, and the same command serves it
/// again. `--takeover` takes the devices over from a running process: a new version of this program can replace the old
/// one under a mounted file system.
#[derive(Args, Debug)]
pub(crate) struct Up {
    /// Cache device; all of a group, as far as they work
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: Vec<PathBuf>,
    /// Backing device
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backing: Vec<PathBuf>,
    #[arg(long, value_name = "EXPORT", default_value = exports::DEFAULT, help = export_help())]
    export: Vec<Spec>,
    /// Value of a tunable, by the kernel's name
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Setting>,
    /// Serve backing devices without their cache; refused if they have dirty data in it
    #[arg(long, conflicts_with = "cache")]
    without_cache: bool,
    /// Switch checksums of cached data on, if the set was never used; refused for a used set that has none
    #[arg(long, requires = "cache")]
    checksums: bool,
    /// Attach backing devices to this set that were made for, or detached without their cache from, another one
    #[arg(long, requires = "cache")]
    attach: bool,
    /// Hardware queues of each ublk device [default: one for each processor, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    ublk_queues: Option<u16>,
    /// Requests in each queue at a time [default: 128, fewer on a host with little memory]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(8..=4096))]
    ublk_depth: Option<u16>,
    /// Poll for requests before sleeping, for at most this many microseconds; auto (at most twelve times the time that
    /// waking a thread takes) or never
    #[arg(long, value_name = "US", default_value = "auto")]
    busy_poll: BusyPoll,
    /// Size reserves, buffers and caches for a host with this much memory [default: the memory of the host or control group]
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<MemoryLimit>,
    /// Take over the ublk devices of the process that serves this set
    #[arg(long, requires = "cache")]
    takeover: bool,
    /// The root file system is on a volume of this set: systemd does not kill the process during shutdown
    #[arg(long, requires = "cache")]
    root_storage: bool,
    #[command(flatten)]
    nbd: NbdArgs,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Make the backing devices as slow as disks with a moving head
    #[arg(long, hide_short_help = true)]
    simulate_hdd: bool,
    /// Delay each request to the backing devices by this time
    #[arg(long, value_name = "MS", default_value_t = 0, hide_short_help = true)]
    simulate_delay_ms: u64,
    /// Take commands from standard input, one a line, and answer with JSON: `stats`, `set KEY=VALUE`,
    /// `detach VOLUME [--wipe]`, `wipe`, `scrub`, `damaged`, `accept|drop VOLUME [START+LENGTH]`, `create SIZE [LABEL]` (a
    /// flash-only volume), `gc`; the end of the input stops
    #[arg(long, hide_short_help = true)]
    stdin: bool,
}

/// Why serving ends: a stop, or a handover to another process.
#[derive(Clone, Copy)]
enum End {
    Stop,
    HandOver,
}

impl Up {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if self.cache.is_empty() && self.backing.is_empty() {
            return Err(Failure::Usage("expected a cache device (-C) and its backing devices (-B)".into()));
        }
        if self.cache.is_empty() && !self.without_cache {
            return Err(Failure::Usage(
                "expected a cache device (-C): backing devices are served alone only with --without-cache"
                    .into(),
            ));
        }
        if self.without_cache && self.set.iter().any(|s| s.owner == Owner::Set) {
            return Err(Failure::Usage("there is no cache set whose tunables could be set".into()));
        }
        if self.takeover && !self.export.iter().any(|e| e.recovers()) {
            return Err(Failure::Usage("only ublk devices can be taken over: expected --export ublk".into()));
        }
        if self.export.iter().filter(|e| e.recovers()).count() > 1 {
            return Err(Failure::Usage(
                "a volume has one ublk device: expected --export ublk or auto once".into(),
            ));
        }
        self.check_labels()?;
        let nbd = self.nbd.access()?;
        // Errors of the command line are reported before errors of the host.
        let ports = self.export.iter().filter(|spec| spec.endpoint().is_some());
        ports.into_iter().try_for_each(|spec| spec.check(&nbd))?;
        if self.root_storage {
            marked_as_root_storage()?;
        }
        // The check opens a ring of the ublk driver, and the workers of a ring that exists already are not marked.
        if let Some(limit) = self.memory_limit {
            limit.apply();
        }
        serve::pressure::prepare_process();
        serve::pressure::prepare_this_thread();
        self.export.iter().try_for_each(|spec| spec.check(&nbd))?;
        interrupt::exit_at_second_signal(GRACE)?;
        let signals = interrupt::signals()?;
        let Shape { queues, depth } = self.ublk_shape();
        // The ring has room for all fetches of a device and for the requests that they cause. It takes memory for each
        // entry.
        let ring_entries = (u32::from(queues) * u32::from(depth) + 192).next_power_of_two().clamp(256, 8192);
        let (seed, busy_poll) = (session::seed(), self.busy_poll);
        let options = DriverOptions { seed, ring_entries, busy_poll, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
        out::note(format!("I/O by {}", driver.backend_note()));
        driver.block_on(self.serve(&driver, signals, nbd))
    }

    /// A label names one device.
    fn check_labels(&self) -> Result<(), Failure> {
        for label in self.set.iter().filter(|s| s.owner == Owner::Device && s.key == "label") {
            if !label.value.is_empty() {
                serve::label_is_fit(&label.value)?;
            }
            if self.backing.len() > 1 {
                return Err(Failure::Usage(
                    "label: is set on every backing device, and labels are unique: expected one -B".into(),
                ));
            }
        }
        Ok(())
    }

    async fn serve(&self, driver: &Driver, mut signals: Signals, nbd: NbdAccess) -> Result<(), Failure> {
        let simulation = Simulation { hdd: self.simulate_hdd, delay_ms: self.simulate_delay_ms };
        if self.takeover {
            takeover::take_over(driver, &self.cache, &self.backing).await?;
        }
        let caches: Vec<&Path> = self.cache.iter().map(PathBuf::as_path).collect();
        let mut devices = Devices::open(driver, &caches, &self.backing, simulation).await?;
        if !self.attach {
            devices.refuse_strangers()?;
        }
        for (disk, cache) in devices.cache.iter_mut().chain(&mut devices.others).filter(|_| self.checksums) {
            serve::switch_checksums_on(disk, cache).await?;
        }
        let session = Session::start(devices).await?;
        let sets: Vec<CacheSet> = session.sets().cloned().collect();
        group::warn_if_alone(&sets);
        group::say_copies(&sets);
        let mut running = Vec::new();
        let ended = match self.start(driver, &session, nbd, &mut running).await {
            Ok(()) => {
                drop(driver.handle().spawn(group::make_copies(move || sets.clone())));
                self.watch(driver, &session, &mut signals, &running).await
            }
            Err(e) => Err(e),
        };
        let (end, result) = match ended {
            Ok(end) => (Some(end), Ok(())),
            Err(e) => (None, Err(e)),
        };
        let force = Force::default();
        let takes_force = running.iter().any(|export| export.takes_force());
        let mut stop = Box::pin(async {
            let mut stopped = Ok(());
            // The devices live until the end, because the ublk driver takes them back from the ended process.
            let mut handed_over = Vec::new();
            for export in running {
                match end {
                    Some(End::Stop) => stopped = stopped.and(export.stop(&force).await),
                    Some(End::HandOver) => handed_over.extend(export.hand_over().await),
                    None => stopped = stopped.and(export.give_up(&force).await),
                }
            }
            match end {
                Some(End::HandOver) => stopped.and(session.leave().await),
                _ => stopped.and(session.stop().await),
            }
        });
        let second = match select(stop.as_mut(), pin!(signals.next())).await {
            Either::Left(stopped) => return result.and(stopped),
            Either::Right(signal) => signal,
        };
        out::warn("ended at once by a second signal; flushed data is safe");
        if takes_force {
            force.use_it();
            // Exports that take longer are dropped.
            select(stop.as_mut(), driver.handle().sleep(FORCED_WITHIN)).await;
        }
        Err(Failure::Signalled(interrupt::exit_code(second)))
    }

    fn ublk_shape(&self) -> Shape {
        let default = serve::pressure::ublk_shape();
        Shape {
            queues: self.ublk_queues.unwrap_or(default.queues),
            depth: self.ublk_depth.unwrap_or(default.depth),
        }
    }

    /// Applies the settings, starts the exports, and prints the lines about ready volumes.
    async fn start(
        &self,
        driver: &Driver,
        session: &Session,
        nbd: NbdAccess,
        running: &mut Vec<Box<dyn Export>>,
    ) -> Result<(), Failure> {
        let volumes = session.volumes();
        if volumes.is_empty() {
            return Err(Failure::Failed(
                "there is nothing to serve: no backing device was given (-B), and the set has no volume"
                    .into(),
            ));
        }
        // Not wrong usage: the devices are open.
        session.apply_all(&self.set).await.map_err(Failure::of)?;
        for (i, volume) in volumes.iter().enumerate() {
            volume.set_name(&format!("bcache{i}"));
        }
        let id = match (&session.set, volumes.first()) {
            (Some(set), _) => set.uuid().to_string(),
            (None, first) => first.and_then(|v| v.backing_uuid()).unwrap_or_default().to_string(),
        };
        let ublk = Some(self.ublk_shape());
        let place = id.clone();
        let context = Context { driver, volumes: &volumes, id, place, sharing: Sharing::Alone, nbd, ublk };
        for spec in &self.export {
            running.push(exports::start(spec, &context).await?);
        }
        session.log_events();
        for volume in &volumes {
            let (name, label) = (volume.name(), volume.tunables().label);
            let ways: Vec<exports::Way> = running.iter().flat_map(|r| r.ways(&name)).collect();
            if self.json {
                let ways: Vec<_> =
                    ways.iter().map(|w| json!({"kind": w.kind.name, "address": w.address})).collect();
                out::print_json_line(&json!({
                    "schema_version": 1,
                    "event": "ready",
                    "volume": name,
                    "label": label,
                    "size_bytes": volume.size().bytes(),
                    "backing": volume.backing_name(),
                    "backing_uuid": volume.backing_uuid().map(|u| u.to_string()),
                    "set_uuid": volume.set_uuid().map(|set| set.to_string()),
                    "exports": ways,
                }))?;
            } else {
                let shown = serve::plain::named(&label, &name);
                out::print(&format!("{shown} ready: {}\n", exports::in_words(&ways)))?;
            }
        }
        Ok(())
    }

    /// Waits for a signal or for the end of the input, and carries out commands meanwhile.
    async fn watch(
        &self,
        driver: &Driver,
        session: &Session,
        signals: &mut Signals,
        running: &[Box<dyn Export>],
    ) -> Result<End, Failure> {
        let mut input = if self.stdin { Some(console::lines()?) } else { None };
        // The running command. Other events must not interrupt it.
        let mut command: Option<Pin<Box<dyn Future<Output = Value> + '_>>> = None;
        let rt = driver.handle();
        let has_files = session.volumes().iter().any(|volume| {
            let mut ways = running.iter().flat_map(|export| export.ways(&volume.name()));
            ways.any(|way| way.kind.opens == exports::Opens::File)
        });
        if has_files {
            drop(rt.spawn(free_unused_memory(rt.clone())));
        }
        loop {
            let event = {
                let next = pin!(async {
                    match (&mut command, &mut input) {
                        (Some(command), _) => Said::Answer(command.as_mut().await),
                        (None, Some(input)) => Said::Line(input.recv().await),
                        (None, None) => std::future::pending().await,
                    }
                });
                let events = pin!(session.until_events(&rt));
                let inner = pin!(select(next, events));
                select(pin!(signals.next()), inner).await
            };
            session.log_events();
            match event {
                Either::Left(blockio::Signal::HandOver) => {
                    if running.iter().all(|export| export.can_be_handed_over()) {
                        out::note("SIGUSR2: another process takes over");
                        return Ok(End::HandOver);
                    }
                    out::warn("SIGUSR2: a FUSE export cannot be handed over: serving on");
                }
                Either::Left(signal) => {
                    let name = match signal {
                        blockio::Signal::Interrupt => "SIGINT",
                        blockio::Signal::Terminate | blockio::Signal::HandOver => "SIGTERM",
                    };
                    out::note(format!("{name}: stopping"));
                    return Ok(End::Stop);
                }
                Either::Right(Either::Left(Said::Line(None))) => return Ok(End::Stop),
                Either::Right(Either::Left(Said::Line(Some(line)))) => {
                    command = Some(Box::pin(async move { console::obey(session, &line).await }));
                }
                Either::Right(Either::Left(Said::Answer(answer))) => {
                    command = None;
                    out::print_json_line(&answer)?;
                }
                Either::Right(Either::Right(())) => {}
            }
        }
    }
}

/// Frees memory that exports do not use, from time to time. Only exports of files have such memory.
async fn free_unused_memory(rt: io::Handle) {
    loop {
        rt.sleep(Nanos::from_secs(serve::pressure::FREES_EVERY_S)).await;
        serve::pressure::free_unused();
    }
}

/// Starts this program again under a name that begins with "@", unless it has such a name.
///
/// By this name systemd recognises processes that root file systems depend on. It ends them neither at a shutdown nor when
/// the root file system replaces the initramfs.
fn marked_as_root_storage() -> Result<(), Failure> {
    let mut words = std::env::args_os();
    if words.next().is_some_and(|name| name.as_encoded_bytes().starts_with(b"@")) {
        return Ok(());
    }
    let e = Command::new("/proc/self/exe").arg0("@ubcache").args(words).exec();
    Err(Failure::because("cannot be started again as @ubcache", e))
}

/// An event of standard input: a line, its end, or the answer to a command.
enum Said {
    Line(Option<String>),
    Answer(Value),
}
