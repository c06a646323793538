//! Commands for a running set on standard input (`up --stdin`), for scripts and tests that have no daemon to talk to.
//!
//! One command a line, one JSON object a line as its answer, in order. Must not know where the lines come from.
//!
//! | command | does |
//! |---|---|
//! | `stats` | prints figures |
//! | `set KEY=VALUE` | changes a tunable, as `--set` does |
//! | `detach VOLUME` | writes everything back and lets the backing device go; it is served alone from then on |
//! | `create SIZE [LABEL]` | makes a flash-only volume, which is served from the next start on |
//! | `gc` | collects garbage now |

use std::io::BufRead;

use blockio::bridge::{self, RemoteReceiver};
use engine::stats::View;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::session::Session;
use crate::size;
use crate::tunables::Setting;

/// The lines of standard input. The thread that reads them ends with the input or with the process.
pub(crate) fn lines() -> Result<RemoteReceiver<String>, Failure> {
    let (sender, receiver) = bridge::channel(16);
    let read = move || {
        for line in std::io::stdin().lock().lines() {
            if line.map(|l| sender.send(l)).is_err() {
                return;
            }
        }
    };
    let spawned = std::thread::Builder::new().name("ubcache-stdin".into()).spawn(read);
    spawned.map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    Ok(receiver)
}

/// Carries out one line; an error is an answer too.
pub(crate) async fn obey(session: &Session, line: &str) -> Value {
    let words: Vec<&str> = line.split_whitespace().collect();
    let result = match words[..] {
        ["stats"] => return stats(session),
        ["set", setting] => set(session, setting).await,
        ["detach", volume] => detach(session, volume).await,
        ["create", size] => create(session, size, "").await,
        ["create", size, label] => create(session, size, label).await,
        ["gc"] => gc(session).await,
        _ => Err(Failure::Usage(
            "expected `stats`, `set KEY=VALUE`, `detach VOLUME`, `create SIZE [LABEL]` or `gc`".into(),
        )),
    };
    match result {
        Ok(()) => json!({"schema_version": 1, "event": "done", "command": line.trim()}),
        Err(e) => {
            let why = e.message().unwrap_or("it found a problem");
            json!({"schema_version": 1, "event": "error", "command": line.trim(), "error": why})
        }
    }
}

async fn set(session: &Session, setting: &str) -> Result<(), Failure> {
    let setting: Setting = setting.parse().map_err(Failure::Usage)?;
    session.apply(&setting).await
}

fn needs_set(session: &Session) -> Result<&engine::CacheSet, Failure> {
    session.set.as_ref().ok_or_else(|| Failure::Failed("there is no cache set".into()))
}

async fn detach(session: &Session, name: &str) -> Result<(), Failure> {
    let set = needs_set(session)?;
    let volume = session.volumes.iter().find(|v| v.name() == name);
    let volume = volume.ok_or_else(|| Failure::Failed(format!("there is no volume {name}")))?;
    Ok(set.detach(volume).await?)
}

async fn create(session: &Session, size: &str, label: &str) -> Result<(), Failure> {
    let set = needs_set(session)?;
    let sectors = size::parse_sectors(size).map_err(Failure::Usage)?;
    if label.len() > 32 {
        return Err(Failure::Usage(format!("a label has at most 32 bytes, found {}", label.len())));
    }
    let uuid = format::Uuid(*uuid::Uuid::new_v4().as_bytes());
    set.create_volume(uuid, sectors, label).await?;
    Ok(())
}

async fn gc(session: &Session) -> Result<(), Failure> {
    Ok(needs_set(session)?.gc().await?)
}

/// The figures of a session.
fn stats(session: &Session) -> Value {
    let set = session.set.as_ref().map(|set| {
        let s = set.status();
        json!({
            "uuid": s.set_uuid.to_string(),
            "in_use_percent": s.in_use_percent,
            "cached_bytes": s.cached_sectors.bytes(),
            "dirty_bytes": s.dirty.iter().map(|(_, n)| n.bytes()).sum::<u64>(),
            "btree_nodes": s.btree_nodes,
            "index_bytes": s.index_bytes,
            "journal_bytes_written": s.journal_written.1,
            "failed": s.failed,
        })
    });
    let volumes = session.volumes.iter().map(|v| {
        let total = v.with_stats(|s| s.view(View::Total));
        let requests = v.request_counters();
        json!({
            "name": v.name(),
            "state": v.state().map(|s| s.name()),
            "dirty_bytes": v.dirty_sectors().bytes(),
            "cache_hits": total.cache_hits,
            "cache_misses": total.cache_misses,
            "cache_bypass_hits": total.cache_bypass_hits,
            "cache_bypass_misses": total.cache_bypass_misses,
            "bypassed_bytes": total.bypassed_bytes,
            "reads": requests.reads.requests,
            "read_bytes": requests.reads.bytes,
            "writes": requests.writes.requests,
            "written_bytes": requests.writes.bytes,
            "flushes": requests.flushes,
        })
    });
    json!({
        "schema_version": 1,
        "event": "stats",
        "set": set,
        "volumes": volumes.collect::<Vec<_>>(),
    })
}
