//! `ubcache up`: serves a set in the foreground.
//!
//! Order of the start: arguments, devices, set, settings, exports, and only then the lines that say so. Order of the
//! stop: exports (which answer what is under way), volumes and set, devices.

use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::time::Duration;

use blockio::{Driver, DriverOptions, Signals};
use clap::Args;
use io::Nanos;
use io::sync::{Either, select};
use serde_json::{Value, json};

use crate::console;
use crate::exports::{self, Context, Running, Spec};
use crate::failure::Failure;
use crate::out;
use crate::session::{self, Devices, Session, Simulation};
use crate::tunables::{Owner, Setting};

/// How long a second signal gives the exports to be taken away from whoever uses them.
const GRACE: Duration = Duration::from_secs(3);

/// How often the engine's events are fetched.
const EVENTS_EVERY: Nanos = Nanos::from_ms(250);

/// Serve a cache set in the foreground
///
/// Volumes are named bcache0, bcache1 and so on: first those of the backing devices in the order given, then
/// flash-only volumes. One line per volume on standard output says when it is ready and how it is reached. Runs until
/// SIGINT or SIGTERM; a second one ends it at once. A cache device that was never used is initialised.
#[derive(Args, Debug)]
pub(crate) struct Up {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: Option<PathBuf>,
    /// Backing device
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backing: Vec<PathBuf>,
    /// How clients reach the volumes: auto, ublk, nbd=SOCKET, nbd=HOST:PORT or fuse=DIR
    #[arg(long, value_name = "EXPORT", default_value = "auto")]
    export: Vec<Spec>,
    /// Value of a tunable, by the kernel's name
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Setting>,
    /// Serve backing devices without their cache; refused if they have dirty data in it
    #[arg(long, conflicts_with = "cache")]
    without_cache: bool,
    /// Let other hosts connect; NBD has no password
    #[arg(long)]
    allow_remote: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Make the backing devices as slow as disks with a moving head
    #[arg(long, hide_short_help = true)]
    simulate_hdd: bool,
    /// Make each request to the backing devices take this much longer
    #[arg(long, value_name = "MS", default_value_t = 0, hide_short_help = true)]
    simulate_delay_ms: u64,
    /// Take commands from standard input, one a line, and answer with JSON: `stats`, `set KEY=VALUE`,
    /// `detach VOLUME`, `create SIZE [LABEL]` (a flash-only volume), `gc`; the end of the input stops
    #[arg(long, hide_short_help = true)]
    stdin: bool,
}

impl Up {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if self.cache.is_none() && self.backing.is_empty() {
            return Err(Failure::Usage("expected a cache device (-C) and its backing devices (-B)".into()));
        }
        if self.cache.is_none() && !self.without_cache {
            return Err(Failure::Usage(
                "expected a cache device (-C): backing devices are served alone only with --without-cache"
                    .into(),
            ));
        }
        if self.without_cache && self.set.iter().any(|s| s.owner == Owner::Set) {
            return Err(Failure::Usage("there is no cache set whose tunables could be set".into()));
        }
        self.export.iter().try_for_each(exports::check)?;
        session::exit_at_second_signal(GRACE)?;
        let signals = session::signals()?;
        let options = DriverOptions { seed: session::seed(), ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(|e| Failure::Failed(format!("cannot start: {e}")))?;
        out::note(format!("I/O by {}", driver.backend_note()));
        driver.block_on(self.serve(&driver, signals))
    }

    async fn serve(&self, driver: &Driver, mut signals: Signals) -> Result<(), Failure> {
        let simulation = Simulation { hdd: self.simulate_hdd, delay_ms: self.simulate_delay_ms };
        let devices = Devices::open(driver, self.cache.as_deref(), &self.backing, simulation).await?;
        let session = Session::start(devices).await?;
        let mut running = Vec::new();
        let result = match self.start(driver, &session, &mut running).await {
            Ok(()) => self.watch(driver, &session, &mut signals).await,
            Err(e) => Err(e),
        };
        let stop = Box::pin(async {
            let mut stopped = Ok(());
            for export in running {
                stopped = stopped.and(export.stop().await);
            }
            stopped.and(session.stop().await)
        });
        match select(stop, pin!(signals.next())).await {
            Either::Left(stopped) => result.and(stopped),
            // What was not stopped by now has been dropped.
            Either::Right(signal) => {
                out::warn("ended at once by a second signal; what was flushed before is safe");
                Err(Failure::Signalled(session::exit_code(signal)))
            }
        }
    }

    /// Settings, exports, and the lines that say ready.
    async fn start(
        &self,
        driver: &Driver,
        session: &Session,
        running: &mut Vec<Running>,
    ) -> Result<(), Failure> {
        if session.volumes.is_empty() {
            return Err(Failure::Failed(
                "there is nothing to serve: no backing device was given (-B), and the set has no volume"
                    .into(),
            ));
        }
        for setting in &self.set {
            session.apply(setting).await?;
        }
        for (i, volume) in session.volumes.iter().enumerate() {
            volume.set_name(&format!("bcache{i}"));
        }
        let id = match (&session.set, session.volumes.first()) {
            (Some(set), _) => set.uuid().to_string(),
            (None, first) => first.and_then(|v| v.backing_uuid()).unwrap_or_default().to_string(),
        };
        let context = Context { driver, volumes: &session.volumes, id, remote: self.allow_remote };
        for spec in &self.export {
            running.push(exports::start(spec, &context).await?);
        }
        session.log_events();
        for volume in &session.volumes {
            let name = volume.name();
            let ways: Vec<exports::Way> = running.iter().flat_map(|r| r.ways(&name)).collect();
            if self.json {
                let ways: Vec<_> =
                    ways.iter().map(|w| json!({"kind": w.kind, "address": w.address})).collect();
                out::print_json_line(&json!({
                    "schema_version": 1,
                    "event": "ready",
                    "volume": name,
                    "size_bytes": volume.size().bytes(),
                    "backing": volume.backing_name(),
                    "backing_uuid": volume.backing_uuid().map(|u| u.to_string()),
                    "set_uuid": session.set.as_ref().map(|s| s.uuid().to_string()),
                    "exports": ways,
                }))?;
            } else {
                out::print(&format!("{name} ready: {}\n", exports::in_words(&ways)))?;
            }
        }
        Ok(())
    }

    /// Until a signal or the end of the input.
    async fn watch(&self, driver: &Driver, session: &Session, signals: &mut Signals) -> Result<(), Failure> {
        let mut input = if self.stdin { Some(console::lines()?) } else { None };
        // The command that is being carried out: it must not be cut short by what else happens.
        let mut command: Option<Pin<Box<dyn Future<Output = Value> + '_>>> = None;
        loop {
            let event = {
                let next = pin!(async {
                    match (&mut command, &mut input) {
                        (Some(command), _) => Said::Answer(command.as_mut().await),
                        (None, Some(input)) => Said::Line(input.recv().await),
                        (None, None) => std::future::pending().await,
                    }
                });
                let tick = driver.handle().sleep(EVENTS_EVERY);
                let inner = pin!(select(next, tick));
                select(pin!(signals.next()), inner).await
            };
            session.log_events();
            match event {
                Either::Left(signal) => {
                    let name = match signal {
                        blockio::Signal::Interrupt => "SIGINT",
                        blockio::Signal::Terminate => "SIGTERM",
                    };
                    out::note(format!("{name}: stopping"));
                    return Ok(());
                }
                Either::Right(Either::Left(Said::Line(None))) => return Ok(()),
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

/// What comes of standard input.
enum Said {
    Line(Option<String>),
    Answer(Value),
}
