//! `unregister`: the daemon stops serving devices and forgets them.
//!
//! Owns the request and the words of the answer. Must not know which devices may be unregistered.

use clap::Args;
use serde_json::{Value, json};

use super::job::ended_jobs;
use super::long_request::post;
use super::{answer, text};
use crate::client::{Control, described};
use crate::failure::Failure;
use crate::size;

/// Unregister devices
///
/// Unregistering a cache device stops its set, and unregistering a backing device stops its volume. Dirty data stays in the
/// cache; the answer says how much, and on which cache device.
#[derive(Args, Debug)]
pub(crate) struct Unregister {
    /// Devices, by path, UUID or label; the first that cannot be unregistered ends the command
    #[arg(value_name = "DEV", required = true)]
    devices: Vec<String>,
    #[command(flatten)]
    control: Control,
}

impl Unregister {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut not_stored = Ok(());
        for device in &self.devices {
            match self.unregister(device) {
                Err(e @ Failure::NotStored(_)) => not_stored = Err(e),
                result => result?,
            }
        }
        not_stored
    }

    fn unregister(&self, device: &str) -> Result<(), Failure> {
        let device = self.control.device_name(device)?;
        let command = format!("unregister {device}");
        let body = post(&self.control, &command, "/v1/unregister", &json!({"device": device}))?;
        answer(&self.control, &body, || {
            let stays = stays_dirty(&body["stays_dirty"], body["resolved"]["set"].is_string());
            let stopped = stopped(&body["stopped"]);
            let ended = ended_jobs(&body["ended_jobs"]);
            format!("{}: unregistered{stays}{stopped}{ended}\n", described(&body["resolved"]))
        })
    }
}

/// The volumes that are not served because their cache device was unregistered; empty if there are none.
fn stopped(volumes: &Value) -> String {
    let names: Vec<&str> = volumes.as_array().into_iter().flatten().map(text).collect();
    match names.len() {
        0 => String::new(),
        n => {
            format!("; {} {} served any more", names.join(", "), format::form(n as u64, "is not", "are not"))
        }
    }
}

/// How much dirty data stays on which cache device after the service of a device has ended; empty if there is none.
pub(super) fn stays_dirty(stays: &Value, is_cache: bool) -> String {
    if stays.is_null() {
        return String::new();
    }
    let amount = match stays["dirty_bytes"].as_u64() {
        Some(bytes) => format!("{} of dirty data stay", size::human(bytes)),
        None => "dirty data stays".to_owned(),
    };
    let cache = match stays["cache_device"].as_str() {
        Some(path) => path.to_owned(),
        None => format!("the cache device of set {}, which is not registered", text(&stays["set"])),
    };
    let flash_only = stays["flash_only_bytes"].as_u64().unwrap_or(0);
    let of_disks = stays["dirty_bytes"].as_u64().map(|all| all.saturating_sub(flash_only));
    match is_cache {
        true if of_disks == Some(0) => {
            format!("; {} of data of flash-only volumes stay on it", size::human(flash_only))
        }
        true => {
            let flash_only = match flash_only {
                0 => String::new(),
                bytes => format!(" ({} of it of flash-only volumes)", size::human(bytes)),
            };
            format!(
                "; {amount} on it{flash_only}, and its backing devices are out of date until it is registered again"
            )
        }
        false => format!("; {amount} on {cache}, and this disk is out of date until it is registered again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_if_nothing_stays_dirty() {
        assert_eq!(stays_dirty(&Value::Null, false), "");
    }

    #[test]
    fn unregister_says_where_dirty_data_stays() {
        let stays = json!({"dirty_bytes": 4096, "cache_device": "/dev/c", "set": "s"});
        assert!(
            stays_dirty(&stays, false).starts_with("; 4.0 KiB of dirty data stay on /dev/c, and this disk")
        );
        assert!(stays_dirty(&stays, true).starts_with("; 4.0 KiB of dirty data stay on it, and its backing"));
        // Backing devices were called out of date that had nothing dirty.
        let mut volumes = json!({"dirty_bytes": 4096, "flash_only_bytes": 4096, "cache_device": "/dev/c"});
        let expected = "; 4.0 KiB of data of flash-only volumes stay on it";
        assert_eq!(stays_dirty(&volumes, true), expected);
        volumes["dirty_bytes"] = json!(8192);
        let expected =
            "; 8.0 KiB of dirty data stay on it (4.0 KiB of it of flash-only volumes), and its backing";
        assert!(stays_dirty(&volumes, true).starts_with(expected));
        let unknown = json!({"dirty_bytes": null, "cache_device": null, "set": "s"});
        let expected =
            "; dirty data stays on the cache device of set s, which is not registered, and this disk";
        assert!(stays_dirty(&unknown, false).starts_with(expected));
    }
}
