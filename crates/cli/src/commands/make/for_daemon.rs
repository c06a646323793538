//! `make` for the clients of the daemon, such as the dashboard.
//!
//! Owns the translation of the order of a client, so that its checks, refusals and texts are those of the command. The daemon has
//! checked who asks, and that it does not serve the devices.

use daemon::{MadeDevices, MakeOrder};
use serde_json::json;

use super::{BUCKET, Make, Notes, Policy, for_group};
use crate::failure::Failure;
use crate::size;

/// Carries out the order.
pub(crate) fn make(order: &MakeOrder) -> Result<MadeDevices, Failure> {
    let notes = Notes::default();
    let made = of(order)?.carry_out(&notes);
    let notes: Vec<String> = notes.take().into_iter().map(|(_, text)| text).collect();
    match made {
        Ok(report) => {
            let lines = report.to_string().lines().map(str::to_owned).chain(notes).collect();
            Ok(MadeDevices { report: json!(report), lines })
        }
        Err(e) if notes.is_empty() => Err(e),
        Err(e) => {
            let all: Vec<&str> = notes.iter().map(String::as_str).chain(e.message()).collect();
            Err(Failure::caused(all.join("\n"), e))
        }
    }
}

fn of(order: &MakeOrder) -> Result<Make, Failure> {
    if let (Some(join), Some(device)) = (&order.join, &order.cache) {
        return for_group::of_order(device, join, order);
    }
    let bucket = size::parse_sectors(order.bucket.as_deref().unwrap_or(BUCKET));
    let label = |label: &str| Some(label.to_owned()).filter(|l| !l.is_empty());
    Ok(Make {
        cache: order.cache.iter().cloned().collect(),
        backing: order.backing.clone(),
        bucket: bucket.map_err(|e| Failure::BadValue { text: format!("bucket: {e}"), source: e.into() })?,
        block: None,
        data_offset: None,
        writeback: order.writeback,
        discard: false,
        cache_replacement_policy: Policy::Lru,
        label: label(&order.label),
        set_label: label(&order.set_label),
        cset_uuid: None,
        wipe: order.wipe,
        wipe_dirty: false,
        force: order.force,
        dry_run: order.dry_run,
        json: false,
        as_bcache_tools: false,
        checksums: None,
        join: None,
        wipe_dirty_of: order.lose_dirty_data_of.clone(),
    })
}
