//! Compares the arithmetic of an entry with the model, at its limits and at random.
//!
//! The limits are tested exhaustively: the first and the last positions, sizes up to [`MAX_EXTENT`], the first and the
//! last sector of the largest cache, each flag. Values between them are sampled. `proofs` has the same properties for a model
//! checker, which has not proved them yet.

use format::{Gen, JournalSeq, Ptr, Sector, Sectors};
use proptest::prelude::*;

use super::model::{
    CACHE_END, EntryTarget, FLAGS, Model, build, check_clipped, check_cuts, check_halves, check_join,
};
use super::{Entry, MAX_EXTENT, MAX_POSITION, PTR_MASK};

/// Targets of an extent of `size` sectors at the edges of the largest cache, and of holes.
fn edge_targets(size: u64) -> Vec<EntryTarget> {
    let mut all = vec![EntryTarget::Hole { seq: 1 }, EntryTarget::Hole { seq: PTR_MASK }];
    for offset in [0, 1, 127, CACHE_END / 2 - 1, CACHE_END - size - 1, CACHE_END - size] {
        all.extend([0, 1, 255].map(|generation| EntryTarget::Cache { offset, generation }));
    }
    all
}

/// Sizes with their largest ends.
const SIZES: [u64; 8] = [1, 2, 3, 8, 128, 32768, 65534, 65535];

fn edge_ends(size: u64) -> [u64; 5] {
    [size, size + 1, 1 << 46, MAX_POSITION.0 - 1, MAX_POSITION.0]
}

fn for_each_edge(mut check: impl FnMut(Entry)) {
    for size in SIZES {
        for end in edge_ends(size) {
            for target in edge_targets(size) {
                for flags in FLAGS {
                    for dirty in [false, true] {
                        if !(dirty && matches!(target, EntryTarget::Hole { .. })) {
                            check(build((end, size, dirty), target, flags));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn edges_are_cut_and_clipped_as_the_model_says() {
    for_each_edge(|e| {
        let (start, end, size) = (e.start().0, e.end().0, e.size().0);
        for n in [0, 1, 2, size / 2, size.saturating_sub(2), size - 1] {
            if n < size {
                check_cuts(e, n);
            }
        }
        let inner = [start, start + 1, start + size / 2, end - 1];
        for from in inner.into_iter().chain([0, start.saturating_sub(1)]) {
            for to in inner.map(|s| s + 1).into_iter().chain([u64::MAX]) {
                if from < to && from < end && to > start {
                    check_clipped(e, from, to);
                }
            }
        }
    });
}

/// Right neighbours of `left` that differ in at most one property from the one that can be joined.
fn neighbours(left: Entry, size: u64) -> Vec<Entry> {
    let m = Model::of(left);
    let mut targets = vec![EntryTarget::Hole { seq: 1 }, EntryTarget::Hole { seq: PTR_MASK }];
    for generation in [0, 1, 255] {
        // A sum that overflows the bits of the pointer must not be taken for the flags of a pointer to sector 0, or for a
        // hole.
        targets.push(EntryTarget::Cache { offset: 0, generation });
        targets.push(EntryTarget::Hole { seq: u64::from(generation) });
        if let EntryTarget::Cache { offset, .. } = m.target {
            let next = offset + m.size();
            targets.extend([next, next + 1].map(|offset| EntryTarget::Cache { offset, generation }));
        }
    }
    let fits = |t: &EntryTarget| match t {
        EntryTarget::Cache { offset, .. } => offset + size <= CACHE_END,
        EntryTarget::Hole { .. } => true,
    };
    let ends = [m.end + size, m.end + size + 1].into_iter().filter(|&end| end <= MAX_POSITION.0);
    ends.flat_map(|end| {
        targets.iter().filter(|t| fits(t)).flat_map(move |&target| {
            FLAGS.into_iter().flat_map(move |flags| {
                let hole = matches!(target, EntryTarget::Hole { .. });
                [false, true]
                    .into_iter()
                    .filter(move |&d| !(d && hole))
                    .map(move |d| build((end, size, d), target, flags))
            })
        })
    })
    .collect()
}

/// Regression: a sum that overflowed the bits of the pointer turned the end of the largest cache into a hole, and an
/// assertion failed.
#[test]
fn edges_join_as_the_model_says() {
    let mut joins = 0;
    for_each_edge(|left| {
        for size in [1, 7, 65535 - left.size().0, 65535] {
            if size == 0 {
                continue;
            }
            for right in neighbours(left, size) {
                for shift in [3, 7, 31] {
                    check_join(left, right, shift);
                    joins += usize::from({ left }.try_join(right, shift));
                }
            }
        }
    });
    assert!(joins > 1000, "{joins} pairs joined: the neighbours miss what they are to try");
}

fn entries() -> impl Strategy<Value = Entry> {
    let size = prop_oneof![1..=65535u64, 1..=16u64, 65500..=65535u64];
    let target = (any::<bool>(), any::<u64>(), any::<u8>());
    (size, any::<u64>(), target, 0..3usize, any::<bool>()).prop_map(|(size, at, target, flags, dirty)| {
        let end = size + at % (MAX_POSITION.0 - size + 1);
        let (is_hole, number, generation) = target;
        let target = match is_hole {
            true => EntryTarget::Hole { seq: number & PTR_MASK },
            false => EntryTarget::Cache { offset: number % (CACHE_END - size + 1), generation },
        };
        build((end, size, dirty && !is_hole), target, FLAGS[flags])
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_part_is_what_the_model_says(e in entries(), a in any::<u64>(), b in any::<u64>()) {
        let size = e.size().0;
        check_cuts(e, a % size);
        let from = a % size;
        let to = from + 1 + b % (size - from);
        check_clipped(e, e.start().0 + from, e.start().0 + to);
    }

    #[test]
    fn two_halves_join_to_the_whole(e in entries(), at in any::<u64>(), shift in 3..=31u32) {
        prop_assume!(e.size().0 > 1);
        check_halves(e, 1 + at % (e.size().0 - 1), shift);
    }

    #[test]
    fn strangers_join_as_the_model_says(a in entries(), b in entries(), shift in 3..=31u32) {
        check_join(a, b, shift);
    }
}

#[test]
#[should_panic(expected = "ending at")]
fn positions_end_at_47_bits() {
    let _ = Entry::extent(Sector(MAX_POSITION.0 + 1), Sectors(1), false, Ptr::new(0, Sector(0), Gen(0)));
}

#[test]
#[should_panic(expected = "extent of 65536 sectors")]
fn sizes_end_at_16_bits() {
    let _ = Entry::hole(Sector(1 << 20), MAX_EXTENT + Sectors(1), JournalSeq(1));
}

#[test]
#[should_panic(expected = "leaves nothing")]
fn a_cut_leaves_a_sector() {
    Entry::hole(Sector(8), Sectors(8), JournalSeq(1)).cut_front(Sectors(8));
}
