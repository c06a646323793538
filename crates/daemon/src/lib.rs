//! The daemon: all sets and volumes of a host in one process, configured, watched and changed while it runs.
//!
//! Owns the control thread (only this crate uses tokio) and the threads of the sets, to which it sends orders through
//! bounded queues only. Must not know the format beyond superblocks, nor how a request is served.
//!
//! Modules: `config` has the configuration and `state` the stored state; `probe` reads superblocks and `uevents` receives
//! hotplug events; `registry` decides what is served; `worker` is the thread of a set and `host` the volumes on it; `names`
//! resolves the names of devices and `identity` distinguishes a device from its copies; `links` makes links to block devices, and
//! `published` tells udev their labels;
//! `settings` and `reload` change tunables; `jobs` has long operations, `hub` events and `event_log` those of the past, `audit`
//! the record of changes; `server` and `tcp` accept clients and `api` answers them, and
//! `expected` has the words for what is malformed; `stop` ends the daemon; `why` has the
//! failure that a state stores; `process` has the figures of the process, `wall_clock` the time. Modules name each other in
//! one direction only. The decisions are in `docs/decisions/010-daemon.md`.
#![forbid(unsafe_code)]

mod answer;
mod api;
mod asked;
mod audit;
mod components;
mod config;
mod event_log;
mod expected;
mod history;
mod host;
mod hub;
mod identity;
mod jobs;
mod links;
mod load;
mod names;
mod notify;
mod order;
mod places;
mod probe;
mod process;
mod published;
mod registry;
mod reload;
mod remote;
mod server;
mod settings;
mod shared;
mod signals;
mod state;
mod stop;
mod sysfs;
mod tcp;
#[cfg(test)]
mod testing;
mod uevents;
mod wall_clock;
mod web;
mod why;
mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serve::{Failure, message};

pub use crate::config::{CONFIG_KEYS, ConfigKey, DEFAULT_CONFIG};
pub use crate::hub::EVENT_KINDS;
pub use crate::order::{JoinOrder, MadeDevices, Make, MakeOrder};

use crate::api::Api;
use crate::event_log::EventLog;
use crate::hub::Kind;
use crate::load::{Read, read};
use crate::registry::Registry;
use crate::server::Access;
use crate::shared::Shared;
use crate::signals::{Received, Signals};
use crate::state::{STORED_AGAIN_EVERY, State};

/// Default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/ubcache/control.sock";
/// Default state directory.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/ubcache";

/// Options of the daemon; they override the configuration.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the configuration file.
    pub config: PathBuf,
    /// Path of the control socket.
    pub socket: Option<PathBuf>,
    /// The state directory.
    pub state_dir: Option<PathBuf>,
    /// Formats devices: the program does this without the daemon, too.
    pub make: Make,
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// If the daemon cannot start, or something could not be stopped without an error.
pub fn run(options: &Options) -> Result<(), Failure> {
    process::start_seconds();
    let Read { config, remote, nbd } = read(&options.config)?;
    if let Some(limit) = config.memory_limit {
        limit.apply();
    }
    serve::pressure::prepare_process();
    let place = |given: &Option<PathBuf>, configured: &Option<PathBuf>, default: &str| {
        given.clone().or_else(|| configured.clone()).unwrap_or_else(|| PathBuf::from(default))
    };
    let socket = place(&options.socket, &config.socket, DEFAULT_SOCKET);
    let state_dir = place(&options.state_dir, &config.state_dir, DEFAULT_STATE_DIR);
    let access = Access::new(config.group.as_deref())?;
    let state = state::say_if_late(&state_dir, || State::open(&state_dir))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::because("cannot start", e))?;
    let shared = Arc::new(Shared::new(config, state));
    shared.remote.send_replace(remote);
    shared.set_nbd_tls(nbd);
    match state::say_if_late(&state_dir, || EventLog::open(&state_dir)) {
        Ok(log) => shared.hub.store_in(log),
        // The daemon serves without a history.
        Err(e) => message::warn(format!("events are not stored: {e}")),
    }
    let test = shared.state().check_writable(true);
    // The names of the first volumes depend on it. It is reported.
    let _why = test.not_stored();
    remove_left_links(&shared);
    let hub = shared.hub.clone();
    let paths = Paths { socket: &socket, state_dir: &state_dir };
    runtime.spawn(free_unused_memory());
    let result = runtime.block_on(control(options, &paths, access, shared));
    // The probe of a device that hangs must not delay the end of the process.
    runtime.shutdown_timeout(Duration::from_millis(100));
    hub.close_log();
    result
}

/// Removes the links that a daemon that was killed has left, also where the configuration had them then.
fn remove_left_links(shared: &Shared) {
    let default = || PathBuf::from(links::DEFAULT_LINKS);
    let now = shared.config().links.clone().unwrap_or_else(default);
    let before = shared.state().set_links(Some(now.clone()).filter(|dir| *dir != default()));
    let before = before.unwrap_or_else(default);
    if before != now {
        links::remove_left_in(&before);
    }
    shared.links.remove_stale();
}

/// Where the daemon has its control socket and its state.
struct Paths<'a> {
    socket: &'a Path,
    state_dir: &'a Path,
}

/// Whether to register the devices that a scan finds at the start, and those that are plugged in later.
fn scans(shared: &Shared) -> (bool, bool) {
    let config = shared.config();
    (config.scan, config.scan_on_events)
}

async fn control(
    options: &Options,
    paths: &Paths<'_>,
    access: Access,
    shared: Arc<Shared>,
) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    let listener = server::bind(paths.socket)?;
    let registry = Arc::new(Registry::new(shared.clone()));
    let history = registry.history.clone();
    let api = Api::new(registry.clone(), options.config.clone(), options.make);
    let router = server::with_limits(api::router(Arc::new(api)));
    let serving = tokio::spawn(server::serve(listener, router.clone(), access, shared.hub.clone()));
    message::note(format!("control socket {}", paths.socket.display()));
    let serving_tcp = tokio::spawn(tcp::serve(router, shared.clone()));

    let storing = history::load_and_store(&history, paths.state_dir);
    let (workers, silences) = (registry.inventory.workers.clone(), registry.overview.silences.clone());
    let sampling = tokio::spawn(history::record(workers, history.clone(), silences));
    let view = sysfs::mount(&registry, shared.config().sysfs_view.as_deref());
    let (scan, take_all) = scans(&shared);
    // The monitor starts before the first scan, so that no event is missed.
    let monitor = uevents::Monitor::new();
    let beginning = registry.clone();
    let begun = tokio::spawn(async move {
        let found = if scan {
            tokio::task::spawn_blocking(components::hotplug::free_devices).await
        } else {
            Ok(Vec::new())
        };
        beginning.startup.begin(found.unwrap_or_default(), probe::block_devices).await;
        message::note("ready");
        notify::ready();
        beginning.exports.say_unmatched().await;
        match monitor {
            Ok(monitor) => beginning.hotplug.watch(monitor, take_all).await,
            Err(e) => message::warn(format!("cannot receive hotplug events: {e}")),
        }
    });
    let storing_again = tokio::spawn(store_again(shared.clone()));
    let alive = tokio::spawn(notify_watchdog());
    let follows = tokio::spawn(registry.reload.follow_takeovers());
    let name = until_stop(&mut signals, &registry, &options.config).await;
    message::note(format!("{name}: stopping"));
    notify::stopping();
    let result = stop::stop(&mut signals, &registry).await;
    // The view asks the control thread, so the control thread must not wait for the end of the view.
    let _ = tokio::task::spawn_blocking(move || drop(view)).await;
    for task in [serving, serving_tcp, begun, alive, sampling, storing, storing_again, follows] {
        task.abort();
    }
    let stored = last_store(&shared).await;
    // If the directory does not answer, the program must end all the same.
    if stored.is_ok() {
        history.store(paths.state_dir);
    }
    // Without the socket, clients get an error at once instead of a connection that is not answered.
    let _ = std::fs::remove_file(paths.socket);
    result.and(stored)
}

/// Writes the state for the last time, if it could not be written before. The program must not end as if nothing were lost.
async fn last_store(shared: &Shared) -> Result<(), Failure> {
    shared.state().store_again();
    match shared.not_stored().await {
        Some(why) => Err(Failure::Failed(format!(
            "{why}; the next start of the daemon does not know the last changes"
        ))),
        None => Ok(()),
    }
}

/// Frees memory that exports do not use, from time to time.
async fn free_unused_memory() {
    loop {
        tokio::time::sleep(Duration::from_secs(serve::pressure::FREES_EVERY_S)).await;
        serve::pressure::free_unused();
    }
}

/// Tells the service manager that the control thread works.
async fn notify_watchdog() {
    let Some(every) = notify::watchdog() else { return };
    loop {
        notify::say("WATCHDOG=1");
        tokio::time::sleep(every).await;
    }
}

/// Writes the state again from time to time while it could not be written, and looks whether it could be.
async fn store_again(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(STORED_AGAIN_EVERY).await;
        let check = shared.state().check_writable(false);
        check.say_what_is_late();
    }
}

async fn until_stop(signals: &mut Signals, registry: &Arc<Registry>, config: &Path) -> &'static str {
    loop {
        if let Received::Stop(name) = signals.next().await {
            return name;
        }
        let (registry, config) = (registry.clone(), config.to_owned());
        tokio::spawn(async move {
            let reloaded = registry.reload.reload(&config, &asked::Asked::inside("reload by SIGHUP")).await;
            let (hub, peer) = (&registry.shared.hub, audit::Peer::Other("a signal"));
            let result = reloaded.as_ref().map(|_| "done").map_err(|e| e.message().unwrap_or_default());
            audit::tell(hub, peer, "reload", &[], result);
            if let Err(e) = reloaded {
                let why = e.message().unwrap_or_default();
                message::message("error", why);
                registry.shared.hub.publish(Kind::Configuration, None, "error", why);
            }
        });
    }
}
