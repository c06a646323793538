//! The line of `status` about the group of a set: whether dirty data is on two cache devices.
//!
//! Owns the words. Must not know how the daemon finds it out.

use serde_json::Value;

use crate::size;
use crate::when::Utc;

/// Characters of the UUID of a group that are shown: enough to see which sets belong together.
const SHOWN: usize = 8;

/// The elements of a list; none if it is no list.
fn each(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Whether the dirty data of the volumes of a set is on two cache devices; empty for a set without a group.
pub(super) fn line(set: &Value, status: &Value) -> String {
    let Some(group) = set["group"].as_str() else { return String::new() };
    let group = group.get(..SHOWN).unwrap_or(group);
    let copies: Vec<&Value> = each(&set["volumes"]).map(|v| &v["copy"]).filter(|c| c.is_object()).collect();
    let alone: Vec<&&Value> = copies.iter().filter(|copy| copy["complete"] != true).collect();
    if copies.is_empty() {
        return format!("  group {group}: no disks of this set\n");
    }
    if alone.is_empty() {
        let on: Vec<String> = seconds(copies.iter().copied(), status);
        return format!("  group {group}: protected, dirty data is also on {}\n", on.join(", "));
    }
    let sum = |key: &str| alone.iter().filter_map(|copy| copy[key].as_u64()).sum::<u64>();
    let since = alone.iter().filter_map(|copy| copy["one_copy_since_unix_seconds"].as_u64()).min();
    let since = since.map_or_else(String::new, |at| format!(" since {}", Utc(at.saturating_mul(1000))));
    let dirty = size::human(sum("one_copy_bytes"));
    let mut said =
        format!("  group {group}: DEGRADED{since}, {dirty} of dirty data on this cache device only");
    let making = alone.iter().filter(|copy| copy["copied_percent"].is_number());
    for copy in making {
        let on = seconds(std::iter::once(**copy), status).join(", ");
        let amount = |key: &str| size::human(copy[key].as_u64().unwrap_or(0));
        let (done, all) = (amount("copied_bytes"), amount("one_copy_bytes"));
        said.push_str(&format!("; copying to {on}: {done} of {all} ({} %)", copy["copied_percent"]));
    }
    said + "\n"
}

/// The cache devices that have the second copies, each once.
fn seconds<'a>(copies: impl Iterator<Item = &'a Value>, status: &Value) -> Vec<String> {
    let mut on: Vec<String> = copies
        .filter_map(|copy| copy["second_set"].as_str())
        .map(|id| {
            let set = each(&status["sets"]).find(|set| set["id"] == id);
            let device = set.and_then(|set| set["set"]["device"].as_str());
            device.map_or_else(|| format!("set {id}"), str::to_owned)
        })
        .collect();
    on.sort();
    on.dedup();
    on
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(copies: &[Value]) -> Value {
        let volumes: Vec<Value> = copies.iter().map(|copy| json!({ "copy": copy })).collect();
        let group = "99999999-1111-2222-3333-444444444444";
        json!({"sets": [
            {"id": "a", "group": group, "set": {"device": "/dev/a"}, "volumes": volumes},
            {"id": "b", "group": group, "set": {"device": "/dev/b"}, "volumes": []},
            {"id": "c", "set": {"device": "/dev/c"}, "volumes": []},
        ]})
    }

    fn line_of(set: usize, status: &Value) -> String {
        line(&status["sets"][set], status)
    }

    /// The line names the cache device with the second copies, or the time since which there is none.
    #[test]
    fn a_set_of_a_group_is_protected_or_degraded_since_a_time() {
        let complete = json!({"second_set": "b", "complete": true, "one_copy_bytes": 0});
        let both = status(&[complete.clone(), complete.clone()]);
        assert_eq!(line_of(0, &both), "  group 99999999: protected, dirty data is also on /dev/b\n");
        assert_eq!(line_of(1, &both), "  group 99999999: no disks of this set\n");
        assert_eq!(line_of(2, &both), "", "it is in no group");

        let lost = json!({"second_set": null, "complete": false, "one_copy_bytes": 2048,
            "one_copy_since_unix_seconds": 1_795_615_500_u64});
        let later = json!({"second_set": null, "complete": false, "one_copy_bytes": 1024,
            "one_copy_since_unix_seconds": 1_795_615_600_u64});
        assert_eq!(
            line_of(0, &status(&[complete, later, lost])),
            "  group 99999999: DEGRADED since 2026-11-25T14:05:00Z, 3.0 KiB of dirty data on this cache device only\n"
        );
        let making = json!({"second_set": "b", "complete": false, "one_copy_bytes": 4096, "copied_bytes": 1024,
            "copied_percent": 25.0, "one_copy_since_unix_seconds": 1_795_615_500_u64});
        let said = line_of(0, &status(&[making]));
        assert!(said.ends_with("; copying to /dev/b: 1.0 KiB of 4.0 KiB (25.0 %)\n"), "{said}");
    }
}
