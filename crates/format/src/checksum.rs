//! The checksum of every structure: CRC-64/WE (ECMA polynomial, most significant bit first); and that of a block of
//! data in a footer: CRC-32C.
//!
//! A structure keeps its checksum in its first eight bytes. The checksum covers the bytes from 8 on; each
//! structure defines where they end. The checksum of a bset of version 1 starts from the pointer that
//! leads to its node instead of all ones (see [`crc64_seeded`]); that ties the set to this pointer.

/// Checksum of `bytes`, starting from all ones.
pub fn crc64(bytes: &[u8]) -> u64 {
    crc64_seeded(u64::MAX, bytes)
}

/// Checksum of `bytes`, starting from `seed` instead of all ones.
///
/// The result is inverted at the end, as in [`crc64`]: `crc64_seeded(u64::MAX, b) == crc64(b)`.
pub fn crc64_seeded(seed: u64, bytes: &[u8]) -> u64 {
    #[cfg(feature = "fast-crc")]
    return fast(seed, bytes);
    #[cfg(not(feature = "fast-crc"))]
    return portable(seed, bytes);
}

/// Computes the checksum with the processor's carry-less multiplication, if it has one.
#[cfg(feature = "fast-crc")]
fn fast(seed: u64, bytes: &[u8]) -> u64 {
    use crc_fast::{CrcAlgorithm, Digest};
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64We, seed);
    digest.update(bytes);
    digest.finalize()
}

/// Computes the checksum with a table, on any processor. The tests compare the fast implementation with it.
#[cfg(any(test, not(feature = "fast-crc")))]
fn portable(seed: u64, bytes: &[u8]) -> u64 {
    use crc::{CRC_64_WE, Crc, Table};
    static CRC64: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_WE);
    let mut digest = CRC64.digest_with_initial(seed);
    digest.update(bytes);
    digest.finalize()
}

/// CRC-32C (Castagnoli) of a block of data, as iSCSI and ext4 use it.
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(feature = "fast-crc")]
    return crc_fast::crc32_iscsi(bytes);
    #[cfg(not(feature = "fast-crc"))]
    return portable32(bytes);
}

/// Computes the CRC-32C with a table, on any processor.
#[cfg(any(test, not(feature = "fast-crc")))]
fn portable32(bytes: &[u8]) -> u32 {
    use crc::{CRC_32_ISCSI, Crc, Table};
    static CRC32C: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);
    CRC32C.checksum(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalogue_check_value_of_blocks() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(portable32(b"123456789"), 0xe306_9283);
    }

    /// Computes the checksum bit by bit, as the definition does.
    fn reference(seed: u64, bytes: &[u8]) -> u64 {
        let mut crc = seed;
        for &b in bytes {
            crc ^= u64::from(b) << 56;
            for _ in 0..8 {
                let carry = crc >> 63 == 1;
                crc <<= 1;
                if carry {
                    crc ^= 0x42f0_e1eb_a9ea_3693;
                }
            }
        }
        !crc
    }

    #[test]
    fn catalogue_check_value() {
        assert_eq!(crc64(b"123456789"), 0x62ec_59e3_f1a4_f00a);
        assert_eq!(portable(u64::MAX, b"123456789"), 0x62ec_59e3_f1a4_f00a);
        assert_eq!(reference(u64::MAX, b"123456789"), 0x62ec_59e3_f1a4_f00a);
    }

    #[test]
    fn every_short_length_matches_the_definition_with_any_seed() {
        let bytes: Vec<u8> = (0..1500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for len in (0..400).chain([511, 512, 513, 1023, 1024, 1025, 1500]) {
            for seed in [0, 1, u64::MAX, 0x0000_0000_000a_8001, 0x8000_0000_0000_0000] {
                assert_eq!(
                    crc64_seeded(seed, &bytes[..len]),
                    reference(seed, &bytes[..len]),
                    "{len} {seed:#x}"
                );
            }
            assert_eq!(crc64(&bytes[..len]), reference(u64::MAX, &bytes[..len]), "{len}");
        }
    }

    proptest::proptest! {
        #[test]
        fn all_implementations_agree(
            seed: u64,
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..9000),
        ) {
            let expected = reference(seed, &bytes);
            proptest::prop_assert_eq!(portable(seed, &bytes), expected);
            proptest::prop_assert_eq!(crc64_seeded(seed, &bytes), expected);
            proptest::prop_assert_eq!(crc32c(&bytes), portable32(&bytes));
        }
    }
}
