//! `probe-bcache` of bcache-tools: which devices have a superblock of bcache, for udev and for scripts.

use std::fmt::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::IN_USE;
use crate::failure::Failure;
use crate::out;
use crate::read_only::ReadOnlyOpener;

/// The form of the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Form {
    /// `KEY=value` lines that udev imports.
    Udev,
}

/// Name the devices that have a superblock of bcache
#[derive(Args, Debug)]
pub(crate) struct ProbeBcache {
    /// Print lines that udev imports
    #[arg(short = 'o', value_name = "FORM")]
    form: Option<Form>,
    /// Devices
    #[arg(value_name = "DEV", required = true)]
    devices: Vec<PathBuf>,
}

impl ProbeBcache {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let opener = ReadOnlyOpener::new(true, IN_USE)?;
        let mut text = String::new();
        for path in &self.devices {
            let device = opener.open(path)?;
            // A device that is too small or has other contents is not named, and is no error.
            let Ok(doc) = inspect::dump::superblock(&device.source) else { continue };
            if !doc.magic_ok || doc.problem.is_some() {
                continue;
            }
            let uuid = &doc.uuid;
            // Writing to a string cannot fail.
            let _ = match self.form {
                Some(Form::Udev) => {
                    writeln!(text, "ID_FS_UUID={uuid}\nID_FS_UUID_ENC={uuid}\nID_FS_TYPE=bcache")
                }
                None => writeln!(text, "{}: UUID=\"{uuid}\" TYPE=\"bcache\"", path.display()),
            };
        }
        out::print(&text)
    }
}
