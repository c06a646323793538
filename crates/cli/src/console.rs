//! Commands for a running set on standard input (`up --stdin`), for scripts and tests without a daemon.
//!
//! One command a line, one JSON object a line as its answer, in order. Owns the syntax of commands and answers. Must not
//! know the source of the lines, nor how a command is carried out.
//!
//! | command | does |
//! |---|---|
//! | `stats` | prints figures |
//! | `set KEY=VALUE` | changes a tunable, as `--set` does |
//! | `detach VOLUME [--wipe]` | writes all dirty data back and detaches the backing device, which is then served alone |
//! | `wipe` | overwrites with zeros all data on the cache device that no volume needs |
//! | `scrub` | reads all cached data and compares it with its checksums |
//! | `damaged` | lists damaged dirty data |
//! | `accept VOLUME [START+LENGTH]`, `drop …` | accepts or drops damaged dirty data |
//! | `create SIZE [LABEL]` | creates a flash-only volume, which is served from the next start on |
//! | `gc` | collects garbage now |

use std::io::BufRead;

use blockio::bridge::{self, RemoteReceiver};
use serde_json::{Value, json};
use serve::tunables::Beyond;
use serve::{Answer, Command, Resolve, Session, Snapshot};

use crate::failure::Failure;
use crate::size;

/// Reads the lines of standard input on a thread, which ends with the input or with the process.
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
    spawned.map_err(|e| Failure::because("cannot start a thread", e))?;
    Ok(receiver)
}

/// Carries out one line. The answer to a failed command is its error.
pub(crate) async fn obey(session: &Session, line: &str) -> Value {
    let result = match parse(line) {
        Ok(command) => serve::obey(session, &command).await,
        Err(e) => Err(e),
    };
    match result {
        Ok(Answer::Stats(snapshot)) => stats(&snapshot),
        Ok(Answer::Wiped(wiped)) => {
            json!({"schema_version": 1, "event": "done", "command": line.trim(), "wiped": wiped})
        }
        Ok(Answer::Scrubbed(scrubbed)) => {
            json!({"schema_version": 1, "event": "done", "command": line.trim(), "scrubbed": scrubbed})
        }
        Ok(Answer::Damaged(damaged)) => {
            json!({"schema_version": 1, "event": "done", "command": line.trim(), "damaged": damaged})
        }
        Ok(Answer::Resolved { sectors }) => {
            json!({"schema_version": 1, "event": "done", "command": line.trim(), "sectors": sectors})
        }
        Ok(Answer::Done) => json!({"schema_version": 1, "event": "done", "command": line.trim()}),
        Err(e) => {
            let why = e.message().unwrap_or("the command found a problem; see the messages before");
            json!({"schema_version": 1, "event": "error", "command": line.trim(), "error": why})
        }
    }
}

fn parse(line: &str) -> Result<Command, Failure> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["stats"] => Ok(Command::Stats),
        ["set", setting] => {
            let setting = setting.parse().map_err(Failure::bad_value)?;
            Ok(Command::Set { setting, beyond: Beyond::Refused })
        }
        ["detach", volume] => Ok(Command::Detach { volume: volume.to_owned(), wipe: false }),
        ["detach", volume, "--wipe"] | ["detach", "--wipe", volume] => {
            Ok(Command::Detach { volume: volume.to_owned(), wipe: true })
        }
        ["wipe"] => Ok(Command::Wipe),
        ["scrub"] => Ok(Command::Scrub),
        ["damaged"] => Ok(Command::Damaged { volume: None }),
        [word @ ("accept" | "drop"), volume] => decision(word, volume, None),
        [word @ ("accept" | "drop"), volume, range] => decision(word, volume, Some(range)),
        ["create", size] => create(size, ""),
        ["create", size, label] => create(size, label),
        ["gc"] => Ok(Command::Gc),
        _ => Err(Failure::Usage(
            "expected `stats`, `set KEY=VALUE`, `detach VOLUME [--wipe]`, `wipe`, `scrub`, `damaged`, \
             `accept|drop VOLUME [START+LENGTH]`, `create SIZE [LABEL]` or `gc`"
                .into(),
        )),
    }
}

/// A decision about the damaged data of a volume: the blocks that overlap a range of sectors, or all.
fn decision(word: &str, volume: &str, range: Option<&str>) -> Result<Command, Failure> {
    let decision = if word == "accept" { Resolve::Accept } else { Resolve::Drop };
    let parts = |range: &str| {
        let (sector, sectors) = range.split_once('+')?;
        Some((sector.parse().ok()?, sectors.parse().ok()?))
    };
    let range = match range {
        None => None,
        Some(text) => Some(parts(text).ok_or_else(|| {
            Failure::Usage(format!("range: expected START+LENGTH in sectors, found {text}"))
        })?),
    };
    Ok(Command::ResolveDamaged { volume: Some(volume.to_owned()), range, decision })
}

fn create(size: &str, label: &str) -> Result<Command, Failure> {
    let size_sectors = size::parse_sectors(size).map_err(Failure::bad_value)?.0;
    if !label.is_empty() {
        serve::label_is_fit(label)?;
    }
    if label.len() > 32 {
        return Err(Failure::Usage(format!("a label has at most 32 bytes, found {}", label.len())));
    }
    Ok(Command::Create { size_sectors, label: label.to_owned() })
}

/// The figures of a set in the form that scripts read.
fn stats(snapshot: &Snapshot) -> Value {
    let set = snapshot.set.as_ref().map(|s| {
        json!({
            "uuid": s.names.uuid,
            "in_use_percent": s.in_use_percent,
            "cached_bytes": s.held.cached_bytes,
            "dirty_bytes": s.held.dirty_bytes,
            "btree_nodes": s.index.btree_nodes,
            "index_bytes": s.index.index_bytes,
            "journal_bytes_written": s.journal.journal_bytes_written,
            "failed": s.failed,
            "checksums": s.checksums,
        })
    });
    let volumes = snapshot.volumes.iter().map(|v| {
        json!({
            "name": v.name,
            "state": v.state,
            "dirty_bytes": v.held.dirty_bytes,
            "cache_hits": v.stats.total.cache_hits,
            "cache_misses": v.stats.total.cache_misses,
            "cache_bypass_hits": v.stats.total.cache_bypass_hits,
            "cache_bypass_misses": v.stats.total.cache_bypass_misses,
            "bypassed_bytes": v.stats.total.bypassed_bytes,
            "reads": v.requests.reads,
            "read_bytes": v.requests.read_bytes,
            "writes": v.requests.writes,
            "written_bytes": v.requests.written_bytes,
            "flushes": v.requests.flushes,
            "metadata_requests": v.requests.metadata_requests,
        })
    });
    json!({
        "schema_version": 1,
        "event": "stats",
        "set": set,
        "volumes": volumes.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands() {
        assert_eq!(parse(" stats ").ok(), Some(Command::Stats));
        assert_eq!(
            parse("detach bcache0").ok(),
            Some(Command::Detach { volume: "bcache0".into(), wipe: false })
        );
        assert_eq!(
            parse("detach bcache0 --wipe").ok(),
            Some(Command::Detach { volume: "bcache0".into(), wipe: true })
        );
        assert_eq!(parse("wipe").ok(), Some(Command::Wipe));
        let drop = |range| Command::ResolveDamaged {
            volume: Some("bcache0".into()),
            range,
            decision: Resolve::Drop,
        };
        assert_eq!(parse("drop bcache0").ok(), Some(drop(None)));
        assert_eq!(parse("drop bcache0 8+16").ok(), Some(drop(Some((8, 16)))));
        let create = Command::Create { size_sectors: 8, label: String::new() };
        assert_eq!(parse("create 4k").ok(), Some(create));
        assert!(matches!(parse("set writeback_percent=5"), Ok(Command::Set { .. })));
        for bad in [
            "",
            "stats now",
            "create 5",
            "set x",
            "set nothing=1",
            "detach",
            "wipe x",
            "drop",
            "accept v 8",
            "scrub x",
        ] {
            assert!(matches!(parse(bad), Err(Failure::Usage(_) | Failure::BadValue { .. })), "{bad:?}");
        }
    }
}
