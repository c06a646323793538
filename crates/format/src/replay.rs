//! Chooses the journal entries that are replayed after a start.
//!
//! Owns the choice among all entries found in the journal's buckets. The `last_seq` of the newest entry
//! names the oldest entry that is still needed, and every entry in between must exist. The choice uses
//! every entry, so it needs no assumption about the order of the ring.

use crate::bytes::as_u64;
use crate::error::{Corrupt, Structure, Value};
use crate::journal::Jset;
use crate::units::JournalSeq;

/// The entries to replay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replay {
    /// Sequence number of the newest entry, whose roots count.
    pub newest: JournalSeq,
    /// Sequence number that the newest entry names as the oldest one needed.
    pub oldest: JournalSeq,
    /// The entries in `[oldest, newest]`, in order; never empty.
    pub entries: Vec<Jset>,
    /// How many entries are missing at the start of the range; 0 without discard.
    ///
    /// With discard, a journal bucket may be discarded as soon as no entry in it is needed, before a newer
    /// entry records that.
    pub missing_at_start: u64,
}

impl Replay {
    /// The entry whose roots count; `None` never happens in a value made by [`select_replay`].
    pub fn newest_entry(&self) -> Option<&Jset> {
        self.entries.last()
    }
}

/// Largest sequence number that is accepted. Numbers count up from 1, so no device ever reaches it.
const MAX_SEQ: u64 = (1 << 63) - 1;

/// Chooses the entries to replay from all entries found in the journal, in any order.
///
/// `discard` is true if the cache device discards buckets.
///
/// # Errors
/// If there is no entry; if the range lacks an entry (except at its start with `discard`) or has one
/// twice; if the newest entry's `seq` exceeds 2^63 - 1 or its `last_seq` exceeds its `seq`. Duplicates
/// older than the range are ignored.
pub fn select_replay(entries: impl IntoIterator<Item = Jset>, discard: bool) -> Result<Replay, Corrupt> {
    let bad = |field, expected, found| Err(Corrupt::new(Structure::Journal, field, 0, expected, found));
    let mut entries: Vec<Jset> = entries.into_iter().collect();
    // The sort is stable, so that with two equal numbers the error depends only on the input.
    entries.sort_by_key(|jset| jset.seq);
    let Some(last) = entries.last() else {
        return bad("entries", Value::Text("a valid entry"), Value::Text("none"));
    };
    let (newest, oldest) = (last.seq, last.last_seq);
    if newest.0 > MAX_SEQ {
        return bad("seq", Value::AtMost(MAX_SEQ), Value::Num(newest.0));
    }
    if oldest > newest {
        return bad("last_seq", Value::AtMost(newest.0), Value::Num(oldest.0));
    }
    entries.retain(|jset| jset.seq >= oldest);
    let mut missing_at_start = 0;
    let mut expected = oldest;
    for (i, jset) in entries.iter().enumerate() {
        if jset.seq < expected {
            return bad("seq", Value::Num(expected.0), Value::Num(jset.seq.0));
        }
        if jset.seq > expected {
            if i > 0 || !discard {
                let found = Value::Num(jset.seq.0);
                return bad("seq (entries missing)", Value::Num(expected.0), found);
            }
            missing_at_start = jset.seq.0.saturating_sub(expected.0);
        }
        expected = JournalSeq(jset.seq.0.saturating_add(1));
    }
    Ok(Replay { newest, oldest, entries, missing_at_start })
}

/// Checks that `last_seq` never decreases from one entry to the next and never exceeds its entry's `seq`.
///
/// A set that breaks this rule starts; a checker reports it.
///
/// # Errors
/// The first entry that breaks the rule; `offset_bytes` is its index in `replay.entries`.
pub fn check_last_seq(replay: &Replay) -> Result<(), Corrupt> {
    let mut before = JournalSeq(0);
    for (i, jset) in replay.entries.iter().enumerate() {
        if jset.last_seq < before || jset.last_seq > jset.seq {
            return Err(Corrupt::new(
                Structure::Journal,
                "last_seq",
                as_u64(i),
                Value::Range(before.0, jset.seq.0),
                Value::Num(jset.last_seq.0),
            ));
        }
        before = jset.last_seq;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(seq: u64, last_seq: u64) -> Jset {
        Jset { seq: JournalSeq(seq), last_seq: JournalSeq(last_seq), ..Jset::default() }
    }

    fn select(list: &[(u64, u64)], discard: bool) -> Result<(Vec<u64>, u64), String> {
        select_replay(list.iter().map(|&(s, l)| entry(s, l)), discard)
            .map(|r| (r.entries.iter().map(|j| j.seq.0).collect(), r.missing_at_start))
            .map_err(|e| e.to_string())
    }

    #[test]
    fn the_newest_entry_decides_how_far_back() {
        assert_eq!(select(&[(7, 5), (4, 1), (5, 5), (6, 5)], false), Ok((vec![5, 6, 7], 0)));
        assert_eq!(select(&[(1, 1)], false), Ok((vec![1], 0)));
        // Numbers of an earlier lap behind the newest entry.
        assert_eq!(select(&[(90, 90), (10, 3), (11, 3)], false), Ok((vec![90], 0)));
    }

    #[test]
    fn gaps_are_fatal_except_at_the_start_with_discard() {
        assert!(select(&[(7, 5), (6, 5)], false).is_err());
        assert_eq!(select(&[(7, 4), (6, 4)], true), Ok((vec![6, 7], 2)));
        let e = select(&[(7, 4), (4, 4), (5, 4)], true).unwrap_err();
        assert_eq!(e, "journal, seq (entries missing) (at byte 0): expected 6, found 7");
    }

    #[test]
    fn doubles_count_only_inside_the_range() {
        assert!(select(&[(7, 6), (6, 6), (6, 6)], false).is_err());
        assert!(select(&[(7, 7), (7, 7)], false).is_err());
        assert_eq!(select(&[(7, 7), (6, 6), (6, 6)], false), Ok((vec![7], 0)));
    }

    #[test]
    fn impossible_numbers_are_refused() {
        assert!(select(&[], false).is_err());
        assert!(select(&[(7, 8)], false).is_err());
        assert!(select(&[(u64::MAX, u64::MAX)], false).is_err());
    }

    #[test]
    fn last_seq_must_not_go_back() {
        let replay = |list: &[(u64, u64)]| Replay {
            newest: JournalSeq(9),
            oldest: JournalSeq(1),
            entries: list.iter().map(|&(s, l)| entry(s, l)).collect(),
            missing_at_start: 0,
        };
        assert!(check_last_seq(&replay(&[(5, 4), (6, 4), (7, 7)])).is_ok());
        assert!(check_last_seq(&replay(&[(5, 4), (6, 3)])).is_err());
        assert!(check_last_seq(&replay(&[(5, 6)])).is_err());
    }
}
