//! `ubcache super`: shows a superblock, decoded and checked.

use std::path::PathBuf;

use clap::Args;

use super::IN_USE;
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::{out, superblock};

/// Show the superblock of a device
///
/// Shows as much as the bytes allow; exit code 1 if the superblock breaks a rule. Also works on a device in use.
#[derive(Args, Debug)]
pub(crate) struct Super {
    /// Cache or backing device
    #[arg(value_name = "DEV")]
    device: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// End with the exit codes of bcache-super-show
    #[arg(long, hide = true)]
    as_bcache_tools: bool,
    /// Accept a wrong checksum, as bcache-super-show does with -f
    #[arg(long, hide = true)]
    any_checksum: bool,
}

impl Super {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self.show() {
            Err(failure) if self.as_bcache_tools => {
                Err(Failure::OfBcacheTools(2, failure.message().unwrap_or_default().to_owned()))
            }
            result => result,
        }
    }

    fn show(&self) -> Result<(), Failure> {
        // A superblock is one block, which is written as a unit. So it is not torn even on a device in use.
        let device = ReadOnlyOpener::new(true, IN_USE)?.open(&self.device)?;
        superblock::has_room(&device.source)?;
        let doc = inspect::dump::superblock(&device.source)?;
        out::document(self.json, &doc)?;
        let wrong_checksum = doc.csum_expected.as_ref().is_some_and(|csum| *csum != doc.csum);
        match &doc.problem {
            None => Ok(()),
            Some(_) if self.any_checksum && doc.magic_ok && wrong_checksum => Ok(()),
            Some(problem) => Err(Failure::Failed(problem.to_string())),
        }
    }
}
