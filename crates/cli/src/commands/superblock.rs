//! `ubcache super`: shows a superblock, decoded and checked.

use std::path::PathBuf;

use clap::Args;

use super::IN_USE;
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::{out, superblock};

/// Show the superblock of a device
///
/// Shows as much as the bytes allow; exit status 1 if the superblock breaks a rule. Also works on a device in use.
#[derive(Args, Debug)]
pub(crate) struct Super {
    /// Cache or backing device
    #[arg(value_name = "DEV")]
    device: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Super {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        // A superblock is one block, which is written as a unit. So it is not torn even on a device in use.
        let device = ReadOnlyOpener::new(true, IN_USE)?.open(&self.device)?;
        superblock::has_room(&device.source)?;
        let doc = inspect::dump::superblock(&device.source)?;
        out::document(self.json, &doc)?;
        match &doc.problem {
            None => Ok(()),
            Some(problem) => Err(Failure::Failed(problem.to_string())),
        }
    }
}
