//! The numbers of the generator SplitMix64, as hashes.
//!
//! Owns the function. Must not know what is hashed.
//!
//! Source: G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

/// The number that the generator yields from this state.
pub(crate) fn splitmix64(state: u64) -> u64 {
    let mut hash = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}
