//! `ubcache daemon`: all sets and volumes of a host, in the foreground of a service manager.

use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;

/// Hold all cache sets of this host
///
/// Serves the devices that were registered, or that the configuration names, until SIGTERM; dirty data stays dirty
/// unless the configuration says to write it back first. After a crash the same command brings every volume back where
/// it was. SIGHUP reads the configuration again.
#[derive(Args, Debug)]
pub(crate) struct Daemon {
    /// Configuration file; none is needed
    #[arg(long, value_name = "FILE", default_value = daemon::DEFAULT_CONFIG)]
    config: PathBuf,
    /// Control socket [default: /run/ubcache/control.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Directory for registered devices, names and tunables [default: /var/lib/ubcache]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl Daemon {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        daemon::run(&daemon::Options {
            config: self.config.clone(),
            socket: self.socket.clone(),
            state_dir: self.state_dir.clone(),
        })
    }
}
