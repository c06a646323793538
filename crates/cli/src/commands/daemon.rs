//! `ubcache daemon`: all sets and volumes of a host, in the foreground of a service manager.

use std::path::PathBuf;

use clap::Args;

use crate::client::environment;
use crate::failure::Failure;

/// Serve all cache sets of this host
///
/// Serves the devices that were registered or that the configuration names, until SIGTERM. Dirty data stays dirty at the
/// stop unless the configuration asks for a drain. After a crash the same command serves every volume again under its
/// name. SIGHUP reloads the configuration.
#[derive(Args, Debug)]
pub(crate) struct Daemon {
    /// Configuration file [default: the built-in settings]
    #[arg(long, value_name = "FILE", default_value = daemon::DEFAULT_CONFIG)]
    config: PathBuf,
    /// Control socket [environment: UBCACHE_SOCKET] [default: /run/ubcache/control.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Directory of the daemon's state: registered devices, names and tunables [default: /var/lib/ubcache]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl Daemon {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        daemon::run(&daemon::Options {
            config: self.config.clone(),
            socket: self.socket.clone().or_else(|| environment("UBCACHE_SOCKET").map(PathBuf::from)),
            state_dir: self.state_dir.clone(),
            make: super::make::for_daemon::make,
        })
    }
}
