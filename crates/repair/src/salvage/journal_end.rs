//! The end of the journal.
//!
//! Owns the question whether an entry behind the newest one can have been destroyed. A writer puts an entry directly behind the
//! one before it, or at the start of the next bucket of the ring. If older entries are at both places, nothing was ever written
//! behind the newest one. Zeros and other bytes prove nothing: a destroyed entry looks like the end of the journal.

use format::journal::MAX_FOREIGN_JSET_BYTES;
use format::{JournalSeq, Sector, SetMagic, counted, parse_entry};
use inspect::view::JournalStop;
use inspect::{ReadAt, SetView};

/// What is known of the end of the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct JournalEnd {
    /// The newest entry that was found.
    pub(super) newest: JournalSeq,
    /// Whether older entries prove that it is the last one.
    pub(super) is_proven: bool,
    /// What says that there was a newer one.
    pub(super) contradicted: Option<String>,
}

/// What is at a place where the next entry would be.
enum Next {
    /// An older entry.
    Older,
    /// The header of a newer entry, without a valid checksum.
    Claimed(JournalSeq),
    /// Something else, or nothing that can be read.
    Other,
}

impl JournalEnd {
    /// Examines the end of the journal; `None` on a device without a journal.
    pub(super) fn of(view: &SetView, cache: &dyn ReadAt) -> Option<JournalEnd> {
        let journal = view.journal.as_ref()?;
        let (info, g) = (journal.newest_info()?, view.geometry());
        let magic = view.superblock.set_magic();
        let bucket_end = super::end_of(g.bucket_start(info.bucket), g.bucket_sectors);
        let behind = super::end_of(info.sector, info.sectors);
        let count = journal.buckets.len().max(1);
        let following = usize::try_from(info.journal_index).ok()?.checked_add(1)? % count;
        let next_bucket = journal.buckets.get(following)?.bucket;
        let mut places =
            vec![(g.bucket_start(next_bucket), super::end_of(g.bucket_start(next_bucket), g.bucket_sectors))];
        if behind < bucket_end {
            places.push((behind, bucket_end));
        }
        let at = |(from, end): &(Sector, Sector)| next(cache, (*from, *end), magic, view, journal.newest);
        let found: Vec<Next> = places.iter().map(at).collect();
        let claimed = found.iter().find_map(|next| match next {
            Next::Claimed(seq) => Some(format!(
                "behind journal entry {} lies entry {seq} with a wrong checksum: torn by a crash, or damaged",
                journal.newest
            )),
            _ => None,
        });
        let unreadable = journal.buckets.iter().filter(|b| b.stop == JournalStop::Unreadable).count();
        let unreadable = (unreadable > 0)
            .then(|| format!("{} of the journal cannot be read", counted(unreadable, "bucket")));
        Some(JournalEnd {
            newest: journal.newest,
            is_proven: found.iter().all(|next| matches!(next, Next::Older)),
            contradicted: unreadable.or(claimed),
        })
    }

    /// Why it is not certain that the newest entry is the last one.
    pub(super) fn doubt(&self) -> String {
        format!(
            "nothing proves that journal entry {} was the last one: if a newer one was destroyed, its writes are missing",
            self.newest
        )
    }
}

fn next(
    cache: &dyn ReadAt,
    (from, end): (Sector, Sector),
    magic: SetMagic,
    view: &SetView,
    newest: JournalSeq,
) -> Next {
    let room = end.checked_since(from).unwrap_or_default().bytes();
    let mut bytes = vec![0; usize::try_from(room).unwrap_or(0).min(MAX_FOREIGN_JSET_BYTES)];
    if cache.read_at(from, &mut bytes).is_err() {
        return Next::Other;
    }
    match parse_entry(&bytes, magic, view.geometry().block_sectors) {
        Ok((jset, _)) if jset.seq < newest => Next::Older,
        Ok((jset, _)) => Next::Claimed(jset.seq),
        Err(_) => {
            let field = |at: usize| bytes.get(at..)?.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
            match field(16) {
                Some(seq) if field(8) == Some(magic.jset()) && seq > newest.0 => {
                    Next::Claimed(JournalSeq(seq))
                }
                _ => Next::Other,
            }
        }
    }
}
