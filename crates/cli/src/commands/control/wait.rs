//! `wait`: waits until a volume is served, before a mount.

use std::time::{Duration, Instant};

use clap::Args;
use format::counted;
use serve::plain;

use super::{answer, text};
use crate::client::{Control, segment};
use crate::failure::Failure;
use crate::when;

/// Interval of requests to the daemon.
const EVERY: Duration = Duration::from_millis(100);

/// Wait until a volume is served
///
/// Also waits until the daemon has started.
#[derive(Args, Debug)]
pub(crate) struct Wait {
    /// Volume, by name, label, UUID or backing device
    volume: String,
    /// Seconds after which waiting fails
    #[arg(long, value_name = "SECONDS", value_parser = when::timeout)]
    timeout: Option<u64>,
    #[command(flatten)]
    control: Control,
}

impl Wait {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            let found = self.control.device_name(&self.volume);
            let found = found.and_then(|name| self.control.get(&format!("/v1/volumes/{}", segment(&name))));
            let refused = match found {
                Ok(body) => match body["volume"]["exports"].as_array().and_then(|ways| ways.first()) {
                    Some(way) => {
                        return answer(&self.control, &body, || {
                            format!("{}: {}\n", self.volume, text(&way["address"]))
                        });
                    }
                    None => {
                        let volume = &body["volume"];
                        let problem = match (volume["problem"].as_str(), volume["stopped"] == true) {
                            (Some(problem), _) => problem.to_owned(),
                            (None, true) => {
                                let typed = plain::typed(text(&volume["label"]), text(&volume["name"]));
                                format!("it was stopped; run `ubcache register {typed}`")
                            }
                            (None, false) => "nothing exports it".to_owned(),
                        };
                        Failure::Failed(problem)
                    }
                },
                Err(why @ (Failure::Failed(_) | Failure::Caused { .. })) => why,
                Err(other) => return Err(other),
            };
            if let Some(seconds) = self.timeout.filter(|s| began.elapsed() >= Duration::from_secs(*s)) {
                let what = format!("{} was not served within {}", self.volume, counted(seconds, "second"));
                return Err(Failure::because(what, refused));
            }
            std::thread::sleep(EVERY);
        }
    }
}
