//! Defects of the kernel's bcache: metadata that it leaves in unused places.

use format::{BackingState, CacheMode, Sector, Sectors};
use sim::hardware::Layout;

use crate::stage::play;

/// Defect 23. The kernel rewrites a backing superblock from memory that it did not clear, and copies a short label
/// over a long one without ending it. Tools showed labels with the tail of older ones, and unused fields held bytes
/// of the kernel's memory. Here unused fields are zeros, and a label is followed by zeros, in both places.
#[test]
fn d23_unused_fields_stay_zeros_and_labels_end() {
    play(Layout::small(CacheMode::Writeback), |b| async move {
        b.tune("label", "a label that is rather long").await;
        b.tune("label", "short").await;
        b.write(0, 8, 1).await;
        b.v.drained().await.unwrap();
        b.tune("cache_mode", "writethrough").await;
        assert_eq!(b.v.state(), Some(BackingState::Clean));
        let sb = b.backing().image().read_vec(Sector(8), Sectors(8));
        assert_eq!(&sb[72..104], &padded(b"short"), "label of the superblock");
        assert_eq!(&sb[120..144], &[0; 24], "feature bits");
        let words: Vec<_> =
            sb[144..160].chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect();
        assert!(
            words[0] > 0 && words[1] == !words[0],
            "how new the cache is, and the same inverted: {words:?}"
        );
        assert_eq!(&sb[160..176], &[0; 16], "padding");
        let registered = b.hardware.layout.backings[0].data_sectors;
        assert_eq!(sb[176..184], registered.to_le_bytes(), "size of the data area at the registration");
        assert!(
            sb[208..].iter().all(|x| *x == 0),
            "the place of journal buckets, which a backing device has not"
        );
        // The table of slots: every copy that has the new label has nothing behind it.
        let cache = b.hardware.cache.image();
        let cache = cache.read_vec(Sector(0), cache.size());
        let (places, ok): (Vec<_>, Vec<_>) = cache
            .chunks(16)
            .enumerate()
            .filter(|(_, c)| c.starts_with(b"short"))
            .map(|(i, _)| (i, cache[i * 16..i * 16 + 32] == padded(b"short")))
            .unzip();
        assert!(!places.is_empty() && ok.iter().all(|ok| *ok), "{places:?} {ok:?}");
    });
}

fn padded(label: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..label.len()].copy_from_slice(label);
    bytes
}
