//! The daemon: all sets and volumes of a host in one process, configured, watched and changed while it runs.
//!
//! Owns the control thread (this crate is the only one that knows tokio) and the threads of the sets, which it talks to
//! by bounded queues only. Must not know the format beyond superblocks, nor how a request is served.
//!
//! Where things are: `config` and `state` are what holds and what is remembered; `devices` looks, `registry` decides,
//! `worker` and `host` serve; `settings`, `jobs` and `hub` are tunables, long operations and events; `server` lets clients
//! in and `api` answers them. The decisions are in `docs/decisions/010-daemon.md`.
#![forbid(unsafe_code)]

mod api;
mod config;
mod devices;
mod history;
mod host;
mod hub;
mod jobs;
mod notify;
mod pictures;
mod registry;
mod server;
mod settings;
mod shared;
mod state;
mod sysfs;
#[cfg(test)]
mod testing;
mod web;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serve::{Failure, message};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::api::Api;
use crate::config::Config;
use crate::jobs::Job;
use crate::registry::Registry;
use crate::server::Access;
use crate::shared::Shared;
use crate::state::State;
use crate::worker::{Order, Phase};

/// Where the control socket is if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/ubcache/control.sock";
/// Where the configuration is if nothing else is said.
pub const DEFAULT_CONFIG: &str = "/etc/ubcache/ubcache.toml";
/// Where the daemon remembers things if nothing else is said.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/ubcache";

/// How long those who use a volume are given once a second signal says so.
const GRACE: Duration = Duration::from_secs(3);
/// How often a drain at the end says how far it is.
const DRAIN_SAYS_EVERY: Duration = Duration::from_secs(5);

/// How the daemon is called. What is given here counts more than the configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Configuration file.
    pub config: PathBuf,
    /// Control socket.
    pub socket: Option<PathBuf>,
    /// What is remembered.
    pub state_dir: Option<PathBuf>,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot begin, or something could not be stopped in good order.
pub fn run(options: &Options) -> Result<(), Failure> {
    let config = Config::read(&options.config)?;
    let place = |given: &Option<PathBuf>, configured: &Option<PathBuf>, default: &str| {
        given.clone().or_else(|| configured.clone()).unwrap_or_else(|| PathBuf::from(default))
    };
    let socket = place(&options.socket, &config.socket, DEFAULT_SOCKET);
    let state_dir = place(&options.state_dir, &config.state_dir, DEFAULT_STATE_DIR);
    let access = Access::new(config.group.as_deref())?;
    let state = State::open(&state_dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::Failed(format!("cannot start: {e}")))?;
    let shared = Arc::new(Shared::new(config, state));
    let result = runtime.block_on(control(options, &socket, access, shared));
    // A look at a device that hangs must not keep the process from ending.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Signals, Failure> {
        let listen =
            |kind| signal(kind).map_err(|e| Failure::Failed(format!("cannot listen for signals: {e}")));
        Ok(Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// The next one that says stop.
    async fn stop(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn control(
    options: &Options,
    socket: &std::path::Path,
    access: Access,
    shared: Arc<Shared>,
) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    let listener = server::bind(socket)?;
    let registry = Arc::new(Registry::new(shared.clone()));
    let api = Api { registry: registry.clone(), config_path: options.config.clone(), began: Instant::now() };
    let serving = tokio::spawn(server::serve(listener, api::router(Arc::new(api)), access));
    message::note(format!("control socket {}", socket.display()));

    let sampling = tokio::spawn(history::keep(registry.clone()));
    let view = sysfs::mount(&registry, shared.config().sysfs_view.as_deref());
    let scan = shared.config().scan;
    let beginning = registry.clone();
    let begun = tokio::spawn(async move {
        let found =
            if scan { tokio::task::spawn_blocking(devices::block_devices).await } else { Ok(Vec::new()) };
        beginning.begin(found.unwrap_or_default()).await;
        message::note("ready");
        notify::say("READY=1");
    });
    let alive = tokio::spawn(async {
        let Some(every) = notify::watchdog() else { return };
        loop {
            notify::say("WATCHDOG=1");
            tokio::time::sleep(every).await;
        }
    });
    let name = until_stop(&mut signals, &registry, &options.config).await;
    message::note(format!("{name}: stopping"));
    notify::say("STOPPING=1");
    let result = stop(&mut signals, &registry, &shared).await;
    // It asks the control thread, which must not wait for it.
    let _ = tokio::task::spawn_blocking(move || drop(view)).await;
    for task in [serving, begun, alive, sampling] {
        task.abort();
    }
    // Whoever looks for the daemon finds at once that it is gone.
    let _ = std::fs::remove_file(socket);
    result
}

async fn until_stop(
    signals: &mut Signals,
    registry: &Arc<Registry>,
    config: &std::path::Path,
) -> &'static str {
    loop {
        let hangup = tokio::select! {
            _ = signals.terminate.recv() => return "SIGTERM",
            _ = signals.interrupt.recv() => return "SIGINT",
            hangup = signals.hangup.recv() => hangup,
        };
        if hangup.is_some() {
            let (registry, config) = (registry.clone(), config.to_owned());
            tokio::spawn(async move {
                if let Err(e) = registry.reload(&config).await {
                    let why = e.message().unwrap_or_default();
                    message::message("error", why);
                    registry.shared.hub.publish("configuration", None, "error", why);
                }
            });
        }
    }
}

/// Everything down, dirty data written back first if that is wanted. A second signal ends the waiting.
async fn stop(signals: &mut Signals, registry: &Arc<Registry>, shared: &Shared) -> Result<(), Failure> {
    let (drain, seconds) = {
        let config = shared.config();
        (config.drain_on_stop, config.drain_deadline_s)
    };
    if drain {
        let jobs = begin_drain(registry);
        tokio::select! {
            () = drained(&jobs, Duration::from_secs(seconds)) => {}
            name = signals.stop() => message::warn(format!("{name}: what is still dirty stays dirty")),
        }
        jobs.iter().for_each(|job| job.cancel());
    }
    tokio::select! {
        result = registry.stop_all() => return result,
        _ = signals.stop() => {}
    }
    message::warn("a second signal: nobody is waited for any more; what was flushed before is safe");
    registry.force();
    let patience = tokio::time::timeout(GRACE, registry.stop_all());
    patience.await.unwrap_or_else(|_| Err(Failure::Failed("ended while volumes were in use".into())))
}

fn begin_drain(registry: &Arc<Registry>) -> Vec<Arc<Job>> {
    let workers = registry.all_workers().into_iter();
    let with_cache = workers.filter(|w| w.plan.cache.is_some() && w.phase() == Phase::Serving);
    let jobs = with_cache.filter_map(|worker| {
        let id = worker.plan.id.clone();
        registry.begin_job(&worker, "drain", &id, |job| Order::Flush(None, job)).ok()
    });
    jobs.collect()
}

async fn drained(jobs: &[Arc<Job>], patience: Duration) {
    let began = Instant::now();
    let mut said = began;
    while jobs.iter().any(|j| j.is_running()) {
        if began.elapsed() >= patience {
            message::warn(format!(
                "not everything was written back within {} seconds: what is still dirty stays dirty",
                patience.as_secs()
            ));
            return;
        }
        if said.elapsed() >= DRAIN_SAYS_EVERY {
            said = Instant::now();
            for job in jobs.iter().filter(|j| j.is_running()) {
                message::note(job.in_words());
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
