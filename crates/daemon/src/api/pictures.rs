//! Handlers for the data of charts: history, latencies, contents of buckets, requests to a backing device.
//!
//! Owns the shape of these answers: columns of equal length instead of objects, because they have many values and an open
//! dashboard requests them every second. Must not know how they are drawn.

use axum::extract::{Path, RawQuery, State};
use engine::figures::BucketMap;
use engine::stats::OpKind;
use io::{Histogram, Op, Purpose, Traced};
use serde_json::{Map, Value, json};

use super::context::SharedApi;
use crate::answer::{Answered, Refusal, ok};
use crate::components::Found;
use crate::history::{self, SeriesOf};
use crate::wall_clock;

/// Default and largest number of cells of the bucket picture.
const CELLS: (u64, u64) = (1024, 4096);

/// Parses a query whose only parameter is `name=number`.
fn number(query: Option<&str>, name: &str) -> Result<Option<u64>, Refusal> {
    let mut found = None;
    for part in query.unwrap_or_default().split('&').filter(|p| !p.is_empty()) {
        let value =
            part.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')).and_then(|v| v.parse().ok());
        let Some(value) = value else {
            return Err(Refusal::malformed(format!("query: expected {name}=NUMBER, found {part}")));
        };
        found = Some(value);
    }
    Ok(found)
}

fn samples(whose: &str, name: &str, columns: Map<String, Value>) -> Answered {
    let every = u64::try_from(history::EVERY.as_millis()).unwrap_or(u64::MAX);
    ok(json!({whose: name, "every_ms": every, "now_ms": wall_clock::now_ms(), "columns": columns}))
}

/// The history of all volumes together, and the latencies of each.
pub(super) async fn host_history(State(api): SharedApi, RawQuery(query): RawQuery) -> Answered {
    let since = number(query.as_deref(), "since_ms")?.unwrap_or(0);
    let history = &api.registry.history;
    ok(json!({
        "every_ms": u64::try_from(history::EVERY.as_millis()).unwrap_or(u64::MAX),
        "now_ms": wall_clock::now_ms(),
        "columns": history.after(SeriesOf::Host, "", since),
        "volumes": history.latencies(),
    }))
}

/// The latencies of the reads and writes of each volume since its start: the buckets of histograms that are not empty.
pub(super) async fn latencies(State(api): SharedApi) -> Answered {
    let figures = api.registry.scrape.figures().await;
    let of = |v: &engine::figures::VolumeFigures, op| buckets_of(&v.latencies.all_of(op));
    let each = figures
        .volumes()
        .map(|(_, v)| (v.name.clone(), json!({"read": of(v, OpKind::Read), "write": of(v, OpKind::Write)})));
    ok(json!({"volumes": each.collect::<Map<_, _>>()}))
}

/// Pairs of the end of a bucket in nanoseconds and the number of requests in it.
fn buckets_of(times: &Histogram) -> Vec<(u64, u64)> {
    times.buckets().map(|(end, n)| (end.0, n)).collect()
}

pub(super) async fn volume_history(
    State(api): SharedApi,
    Path(volume): Path<String>,
    RawQuery(query): RawQuery,
) -> Answered {
    let since = number(query.as_deref(), "since_ms")?.unwrap_or(0);
    let Found { name, .. } = api.registry.lookup.find(&volume).await?;
    samples("volume", &name, api.registry.history.after(SeriesOf::Volume, &name, since))
}

pub(super) async fn set_history(
    State(api): SharedApi,
    Path(set): Path<String>,
    RawQuery(query): RawQuery,
) -> Answered {
    let since = number(query.as_deref(), "since_ms")?.unwrap_or(0);
    let id = api.registry.lookup.set_of(&set).await?;
    samples("set", &id, api.registry.history.after(SeriesOf::Set, &id, since))
}

pub(super) async fn buckets(
    State(api): SharedApi,
    Path(set): Path<String>,
    RawQuery(query): RawQuery,
) -> Answered {
    let (usual, most) = CELLS;
    let cells = number(query.as_deref(), "cells")?.unwrap_or(usual).clamp(1, most);
    let worker = api.registry.lookup.set(&set).await?;
    let map = worker.bucket_map(u32::try_from(cells).unwrap_or(1)).await?;
    let mut value = map_of(&map);
    value["set"] = json!(worker.plan.id);
    ok(value)
}

fn map_of(map: &BucketMap) -> Value {
    let bucket_bytes = map.bucket_sectors.bytes();
    let column = |of: fn(&engine::figures::BucketCell) -> u32| map.cells.iter().map(of).collect::<Vec<_>>();
    let live = map.cells.iter().map(|c| {
        let all = u64::from(c.unused + c.clean + c.dirty + c.metadata) * bucket_bytes;
        (c.live.bytes() * 100).checked_div(all).unwrap_or(0)
    });
    json!({
        "total": map.total,
        "bucket_bytes": bucket_bytes,
        "columns": {
            "unused": column(|c| c.unused),
            "clean": column(|c| c.clean),
            "dirty": column(|c| c.dirty),
            "metadata": column(|c| c.metadata),
            "live_percent": live.collect::<Vec<_>>(),
        },
    })
}

pub(super) async fn disk_trace(
    State(api): SharedApi,
    Path(volume): Path<String>,
    RawQuery(query): RawQuery,
) -> Answered {
    let since = number(query.as_deref(), "since")?.unwrap_or(0);
    let Found { worker, name, .. } = api.registry.lookup.find(&volume).await?;
    let probe = worker.disk_trace(&name, since).await?;
    let of = |of: fn(&Traced) -> u64| probe.trace.requests.iter().map(of).collect::<Vec<_>>();
    ok(json!({
        "volume": name,
        "device": probe.device,
        "size_sectors": probe.size_sectors,
        "now_us": probe.trace.now.0 / 1000,
        "now_ms": wall_clock::now_ms(),
        "next": probe.trace.next,
        "missed": probe.trace.missed,
        "columns": {
            "at_us": of(|r| r.at.0 / 1000),
            "sector": of(|r| r.sector.0),
            "sectors": of(|r| r.sectors.0),
            "kind": probe.trace.requests.iter().map(kind).collect::<Vec<_>>(),
        },
    }))
}

fn kind(request: &Traced) -> &'static str {
    match (request.op, request.purpose) {
        (Op::Flush, _) => "flush",
        (_, Purpose::Metadata) => "metadata",
        (Op::Discard, _) => "discard",
        (Op::Read, Purpose::Client) => "read",
        (Op::Write { .. } | Op::WriteZeroes { .. }, Purpose::Client) => "write",
        (Op::Read, Purpose::Writeback) => "gap_read",
        (Op::Write { .. } | Op::WriteZeroes { .. }, Purpose::Writeback) => "writeback",
    }
}

#[cfg(test)]
mod tests {
    use engine::figures::BucketCell;
    use format::{Sector, Sectors};
    use io::Nanos;

    use super::*;

    #[test]
    fn a_query_has_one_number() {
        assert_eq!(number(None, "since").ok().flatten(), None);
        assert_eq!(number(Some("since=17"), "since").ok().flatten(), Some(17));
        for wrong in ["since", "since=", "since=x", "since=-1", "sincerely=1", "x=1", "since=1&x=2"] {
            assert!(number(Some(wrong), "since").is_err(), "{wrong}");
        }
    }

    #[test]
    fn buckets_are_pairs() {
        let mut times = Histogram::default();
        [1, 1, 3000].into_iter().for_each(|us| times.record(Nanos::from_us(us)));
        assert_eq!(json!(buckets_of(&times)), json!([[1024, 2], [3_145_728, 1]]));
    }

    #[test]
    fn requests_have_the_kind_that_is_drawn() {
        let traced =
            |op, purpose| kind(&Traced { at: Nanos(0), op, purpose, sector: Sector(0), sectors: Sectors(8) });
        assert_eq!(traced(Op::Read, Purpose::Client), "read");
        assert_eq!(traced(Op::Write { fua: true }, Purpose::Client), "write");
        assert_eq!(traced(Op::WriteZeroes { may_unmap: true }, Purpose::Client), "write");
        assert_eq!(traced(Op::Write { fua: false }, Purpose::Writeback), "writeback");
        assert_eq!(traced(Op::Read, Purpose::Writeback), "gap_read");
        assert_eq!(traced(Op::Write { fua: true }, Purpose::Metadata), "metadata");
        assert_eq!(traced(Op::Flush, Purpose::Client), "flush");
        assert_eq!(traced(Op::Discard, Purpose::Client), "discard");
    }

    #[test]
    fn cells_become_columns() {
        let cell = |dirty, live| BucketCell { dirty, live: Sectors(live), ..BucketCell::default() };
        let map = BucketMap { total: 3, bucket_sectors: Sectors(16), cells: vec![cell(2, 24), cell(1, 16)] };
        let value = map_of(&map);
        assert_eq!(value["bucket_bytes"], 8192);
        assert_eq!(value["columns"]["dirty"], json!([2, 1]));
        assert_eq!(value["columns"]["live_percent"], json!([75, 100]));
    }
}
