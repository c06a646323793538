//! `ubcache check`: verifies every structure and invariant of sets. Never writes.

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use inspect::{CheckOptions, ReadAt};

use super::IN_USE;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out;
use crate::read_only::ReadOnlyOpener;

/// Verify every structure and invariant of a cache set
///
/// Give the cache device and, to check them as well, its backing devices, in any order. The command never writes. Exit
/// code 1 if there are errors; with notices alone it is 0.
#[derive(Args, Debug)]
pub(crate) struct Check {
    /// Cache and backing devices
    #[arg(value_name = "DEV", required = true)]
    devices: Vec<PathBuf>,
    /// Metadata only: read no cached data, so neither verify its checksums nor compare it with the backing devices
    #[arg(long)]
    quick: bool,
    /// Read devices that another process writes to; the findings may be wrong
    #[arg(long)]
    in_use: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let opener = ReadOnlyOpener::new(self.in_use, IN_USE)?;
        let devices = self.devices.iter().map(|p| opener.open(p)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<&dyn ReadAt> = devices.iter().map(|d| &d.source as &dyn ReadAt).collect();
        let mut progress = out::Progress::new("reading cached data");
        let mut interrupt = Interrupt::new()?;
        let options = CheckOptions { compare_clean: !self.quick, verify_data: !self.quick };
        let report = inspect::check(&sources, options, &mut |p| {
            progress.bytes(p.done.bytes(), p.total.bytes());
            if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        progress.clear();
        out::document(self.json, &report)?;
        if interrupt.came() {
            return Err(Failure::Failed("interrupted before all cached data was read".into()));
        }
        if report.is_ok() { Ok(()) } else { Err(Failure::Found) }
    }
}
