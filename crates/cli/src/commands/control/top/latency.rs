//! Latencies of the requests between two updates of `top`.
//!
//! Owns the histograms of the last update, which the daemon counts from the start of each volume. Must not know how latencies are
//! shown.

use std::collections::BTreeMap;

use io::{Histogram, Nanos};
use serde_json::Value;

use crate::client::Control;
use crate::failure::Failure;

/// The histograms of all volumes by name: of the reads and of the writes.
#[derive(Default)]
pub(super) struct Latencies(BTreeMap<String, [Histogram; 2]>);

impl Latencies {
    /// Asks the daemon. A daemon of an older version has no histograms.
    pub(super) fn ask(control: &Control) -> Result<Latencies, Failure> {
        let reply = control.ask("GET", "/v1/latencies", None)?;
        if reply.status == 404 { Ok(Latencies::default()) } else { Ok(Latencies::of(&reply.ok()?)) }
    }

    fn of(answer: &Value) -> Latencies {
        let volumes = answer["volumes"].as_object().into_iter().flatten();
        Latencies(
            volumes
                .map(|(name, v)| (name.clone(), [histogram(&v["read"]), histogram(&v["write"])]))
                .collect(),
        )
    }

    /// The latencies of a volume since `before`; none for a volume that was not there then.
    pub(super) fn since(&self, before: &Latencies, volume: &str) -> [Histogram; 2] {
        let (Some(now), Some(then)) = (self.0.get(volume), before.0.get(volume)) else {
            return <[Histogram; 2]>::default();
        };
        [0, 1].map(|op| match now[op].count() < then[op].count() {
            // The volume was restarted, and counts from zero.
            true => now[op],
            false => now[op].since(&then[op]),
        })
    }
}

/// A histogram from pairs of the end of a bucket in nanoseconds and its count.
fn histogram(buckets: &Value) -> Histogram {
    let pair = |pair: &Value| Some((Nanos(pair[0].as_u64()?), pair[1].as_u64()?));
    Histogram::of_buckets(buckets.as_array().into_iter().flatten().filter_map(pair))
}

/// A latency in milliseconds that this share of the requests did not exceed; `None` without any.
pub(super) fn quantile_ms(times: &Histogram, share: f64) -> Option<f64> {
    (!times.is_empty()).then(|| times.quantile(share).0 as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn latencies(reads: &Value) -> Latencies {
        Latencies::of(&json!({"volumes": {"bcache0": {"read": reads, "write": []}}}))
    }

    /// Old requests must not count: 1000 fast reads before the last update hide the slow ones after it.
    #[test]
    fn percentiles_are_those_of_the_last_interval() {
        let then = latencies(&json!([[65_536, 1000]]));
        let now = latencies(&json!([[65_536, 1001], [1_048_576, 1], [10_485_760, 1]]));
        let [reads, writes] = now.since(&then, "bcache0");
        assert_eq!(reads.count(), 3);
        assert_eq!((quantile_ms(&reads, 0.5), quantile_ms(&reads, 0.99)), (Some(1.048_576), Some(10.485_76)));
        assert_eq!(quantile_ms(&writes, 0.5), None);
        // The volume was restarted.
        let [reads, _] = then.since(&latencies(&json!([[65_536, 2000]])), "bcache0");
        assert_eq!(reads.count(), 1000);
        assert!(now.since(&Latencies::default(), "bcache0")[0].is_empty(), "the first update");
        assert!(latencies(&json!([[1], "x", [-1, 2]])).since(&Latencies::default(), "bcache0")[0].is_empty());
    }
}
