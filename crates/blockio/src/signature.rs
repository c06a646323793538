//! Foreign signatures on a device, so that a formatter can refuse to overwrite them.
//!
//! Owns a table of magic bytes and a few checks beyond it. It reads only some pieces at the beginning and at the end of the
//! device. It must not change anything, and must not decide whether a signature matters. A false match would teach operators to
//! override the check, so other fields confirm short magics; a missed signature is less harmful.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The format that was found on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Name of the format, as the format's own tools print it.
    pub kind: &'static str,
    /// Position of the magic bytes.
    pub offset_bytes: u64,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (at byte {})", self.kind, self.offset_bytes)
    }
}

/// Magic bytes at fixed places. The first matching entry names the device.
///
/// A format that contains another one comes before it: the boot block of a file system can look like a partition table.
const TABLE: &[(&str, u64, &[u8])] = &[
    ("bcache", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("bcachefs", 4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("LUKS encryption", 0, b"LUKS\xba\xbe"),
    ("BitLocker encryption", 3, b"-FVE-FS-"),
    ("Ceph BlueStore OSD", 0, b"bluestore block device\n"),
    ("VDO", 0, b"dmvdo001"),
    ("dm-integrity", 0, b"integrt\0"),
    ("dm-verity", 0, b"verity\0\0"),
    ("Stratis pool", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("Linux RAID member (metadata 1.1)", 0, b"\xfc\x4e\x2b\xa9\x01\0\0\0"),
    ("Linux RAID member (metadata 1.2)", 4096, b"\xfc\x4e\x2b\xa9\x01\0\0\0"),
    ("xfs", 0, b"XFSB"),
    ("btrfs", 0x1_0040, b"_BHRfS_M"),
    ("f2fs", 0x400, b"\x10\x20\xf5\xf2"),
    ("erofs", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("squashfs", 0, b"hsqs"),
    ("jfs", 0x8000, b"JFS1"),
    ("reiserfs", 0x1_0034, b"ReIsEr"),
    ("gfs2", 0x1_0000, b"\x01\x16\x19\x70\0\0\0\x01"),
    ("ocfs2", 0x400, b"OCFSV2"),
    ("ocfs2", 0x800, b"OCFSV2"),
    ("ocfs2", 0x1000, b"OCFSV2"),
    ("ocfs2", 0x2000, b"OCFSV2"),
    ("apfs", 32, b"NXSB"),
    ("hfs+", 0x400, b"H+\0\x04"),
    ("hfs+", 0x400, b"HX\0\x05"),
    ("ntfs", 3, b"NTFS    "),
    ("exfat", 3, b"EXFAT   "),
    ("vfat", 0x52, b"FAT32   "),
    ("vfat", 0x36, b"FAT16   "),
    ("vfat", 0x36, b"FAT12   "),
    ("vfat", 0x36, b"MSDOS"),
    ("iso9660", 0x8001, b"CD001"),
    ("udf", 0x8001, b"BEA01"),
    ("swap", 4096 - 10, b"SWAPSPACE2"),
    ("swap", 8192 - 10, b"SWAPSPACE2"),
    ("swap", 16384 - 10, b"SWAPSPACE2"),
    ("swap", 65536 - 10, b"SWAPSPACE2"),
    ("swap", 4096 - 10, b"SWAP-SPACE"),
    ("swap (hibernated system)", 4096 - 10, b"S1SUSPEND"),
    ("swap (hibernated system)", 4096 - 10, b"LINHIB0001"),
    ("qcow2 image", 0, b"QFI\xfb"),
    ("VMDK image", 0, b"KDMV"),
    ("VHDX image", 0, b"vhdxfile"),
    ("VDI image", 0x40, b"\x7f\x10\xda\xbe"),
    ("GPT partition table", 512, b"EFI PART"),
    ("GPT partition table", 4096, b"EFI PART"),
];

/// A device or file from which pieces are read.
struct Source<'a> {
    file: &'a File,
    bytes: u64,
}

impl Source<'_> {
    /// Reads `N` bytes at `offset`; `None` if the device ends before the last of them.
    fn read<const N: usize>(&self, offset: u64) -> io::Result<Option<[u8; N]>> {
        let mut out = [0u8; N];
        let inside = offset.checked_add(N as u64).is_some_and(|end| end <= self.bytes);
        if !inside {
            return Ok(None);
        }
        self.file.read_exact_at(&mut out, offset)?;
        Ok(Some(out))
    }

    fn has(&self, offset: u64, magic: &[u8]) -> io::Result<bool> {
        if offset.saturating_add(magic.len() as u64) > self.bytes {
            return Ok(false);
        }
        let mut out = vec![0u8; magic.len()];
        self.file.read_exact_at(&mut out, offset)?;
        Ok(out == magic)
    }
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// Looks for a signature on the device or file at `path`.
///
/// # Errors
/// If the device cannot be opened or read. An error does not mean that the device has no signature.
pub fn probe_signature(path: &Path) -> io::Result<Option<Signature>> {
    let mut file = File::open(path)?;
    let bytes = file.seek(SeekFrom::End(0))?;
    search(&Source { file: &file, bytes })
}

/// Looks for a signature in the 4 KiB before the superblock of a bcache device.
///
/// Formatters of bcache erase these bytes, so a signature there is newer than the superblock.
///
/// # Errors
/// If the device cannot be opened or read.
pub fn probe_before_bcache(path: &Path) -> io::Result<Option<Signature>> {
    let mut file = File::open(path)?;
    let bytes = file.seek(SeekFrom::End(0))?.min(format::superblock::SUPERBLOCK_SECTOR.bytes());
    search(&Source { file: &file, bytes })
}

fn search(source: &Source<'_>) -> io::Result<Option<Signature>> {
    for (kind, offset_bytes, magic) in TABLE.iter().take_while(|(kind, ..)| !kind.starts_with("GPT")) {
        if source.has(*offset_bytes, magic)? {
            return Ok(Some(Signature { kind, offset_bytes: *offset_bytes }));
        }
    }
    for probe in [ext, lvm, zfs, raid_at_end] {
        if let Some(found) = probe(source)? {
            return Ok(Some(found));
        }
    }
    for (kind, offset_bytes, magic) in TABLE.iter().skip_while(|(kind, ..)| !kind.starts_with("GPT")) {
        if source.has(*offset_bytes, magic)? {
            return Ok(Some(Signature { kind, offset_bytes: *offset_bytes }));
        }
    }
    for probe in [gpt_backup, mbr] {
        if let Some(found) = probe(source)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn ext(source: &Source<'_>) -> io::Result<Option<Signature>> {
    let Some(s) = source.read::<1024>(1024)? else { return Ok(None) };
    let (log_block, revision) = (le32(&s, 0x18), le32(&s, 0x4c));
    if s[0x38..0x3a] != [0x53, 0xef] || log_block > 6 || revision > 1 {
        return Ok(None);
    }
    let (compat, incompat, read_only) = (le32(&s, 0x5c), le32(&s, 0x60), le32(&s, 0x64));
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    // The features of ext3: filetype, recover, meta_bg; sparse_super, large_file.
    const INCOMPAT_EXT3: u32 = 0x2 | 0x4 | 0x10;
    const READ_ONLY_EXT3: u32 = 0x1 | 0x2;
    let kind = if incompat & JOURNAL_DEVICE != 0 {
        "ext journal"
    } else if incompat & !INCOMPAT_EXT3 != 0 || read_only & !READ_ONLY_EXT3 != 0 {
        "ext4"
    } else if compat & HAS_JOURNAL != 0 {
        "ext3"
    } else {
        "ext2"
    };
    Ok(Some(Signature { kind, offset_bytes: 0x438 }))
}

fn lvm(source: &Source<'_>) -> io::Result<Option<Signature>> {
    for sector in 0..4u64 {
        let Some(b) = source.read::<32>(sector * 512)? else { continue };
        if b.starts_with(b"LABELONE") && b.ends_with(b"LVM2 001") {
            return Ok(Some(Signature { kind: "LVM2 physical volume", offset_bytes: sector * 512 }));
        }
    }
    Ok(None)
}

/// Searches the array of uberblocks in the first label: 128 KiB of them, each of at least 1 KiB.
fn zfs(source: &Source<'_>) -> io::Result<Option<Signature>> {
    const MAGIC: u64 = 0x00ba_b10c;
    for slot in 0..128u64 {
        let offset_bytes = (128 << 10) + (slot << 10);
        let Some(b) = source.read::<8>(offset_bytes)? else { break };
        if u64::from_le_bytes(b) == MAGIC || u64::from_be_bytes(b) == MAGIC {
            return Ok(Some(Signature { kind: "zfs pool member", offset_bytes }));
        }
    }
    Ok(None)
}

/// Searches for RAID metadata at the end of the device.
fn raid_at_end(source: &Source<'_>) -> io::Result<Option<Signature>> {
    const MD: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];
    let sectors = source.bytes / 512;
    let v1 = (sectors.saturating_sub(16) & !7) * 512;
    let v0 = (source.bytes & !0xffff).saturating_sub(0x1_0000);
    let intel = (sectors * 512).saturating_sub(1024);
    let [v1_bytes, v0_bytes] = [source.read::<8>(v1)?, source.read::<8>(v0)?];
    let found = |kind, offset_bytes| Ok(Some(Signature { kind, offset_bytes }));
    // A little-endian major version follows the magic: 1, or 0 in the old format.
    if v1 > 0 && v1_bytes.is_some_and(|b| b[..4] == MD && le32(&b, 4) == 1) {
        return found("Linux RAID member (metadata 1.0)", v1);
    }
    if v0 > 0 && v0_bytes.is_some_and(|b| b[..4] == MD && le32(&b, 4) == 0) {
        return found("Linux RAID member (metadata 0.90)", v0);
    }
    if source.read::<24>(intel)?.is_some_and(|b| &b == b"Intel Raid ISM Cfg Sig. ") {
        return found("Intel RAID member", intel);
    }
    Ok(None)
}

fn gpt_backup(source: &Source<'_>) -> io::Result<Option<Signature>> {
    for block in [512u64, 4096] {
        let offset_bytes = (source.bytes / block * block).saturating_sub(block);
        if source.read::<8>(offset_bytes)?.is_some_and(|b| &b == b"EFI PART") {
            return Ok(Some(Signature { kind: "GPT partition table (backup)", offset_bytes }));
        }
    }
    Ok(None)
}

fn mbr(source: &Source<'_>) -> io::Result<Option<Signature>> {
    let Some(b) = source.read::<512>(0)? else { return Ok(None) };
    if b[510..] != [0x55, 0xaa] {
        return Ok(None);
    }
    // Boot code without a table ends in 55 aa too. A table has valid status bytes and at least one used entry.
    let entries = b[446..510].chunks_exact(16);
    let sane = entries.clone().all(|e| matches!(e[0], 0 | 0x80));
    let used = entries.clone().any(|e| e[4] != 0 && le32(e, 12) != 0);
    Ok((sane && used).then_some(Signature { kind: "MBR partition table", offset_bytes: 510 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const SIZE: u64 = 4 << 20;

    fn probe(pieces: &[(u64, &[u8])]) -> Option<Signature> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SIZE).unwrap();
        for (offset, bytes) in pieces {
            file.seek(SeekFrom::Start(*offset)).unwrap();
            file.write_all(bytes).unwrap();
        }
        probe_signature(file.path()).unwrap()
    }

    fn kind(pieces: &[(u64, &[u8])]) -> &'static str {
        probe(pieces).map_or("nothing", |s| s.kind)
    }

    #[test]
    fn every_entry_of_the_table_is_found_where_it_is() {
        for (kind, offset_bytes, magic) in TABLE {
            assert_eq!(
                probe(&[(*offset_bytes, magic)]),
                Some(Signature { kind, offset_bytes: *offset_bytes })
            );
        }
    }

    #[test]
    fn an_empty_device_and_a_tiny_file_have_none() {
        assert_eq!(probe(&[]), None);
        let tiny = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(tiny.path(), b"XFS").unwrap();
        assert_eq!(probe_signature(tiny.path()).unwrap(), None);
        std::fs::write(tiny.path(), b"XFSB").unwrap();
        assert_eq!(probe_signature(tiny.path()).unwrap().unwrap().kind, "xfs");
        assert!(probe_signature(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn generations_of_ext_are_told_apart() {
        let with = |compat: u8, incompat: u8, read_only: u8| {
            let features = [compat, 0, 0, 0, incompat, 0, 0, 0, read_only, 0, 0, 0];
            kind(&[(0x438, &[0x53, 0xef]), (0x44c, &[1]), (0x45c, &features)])
        };
        assert_eq!(with(0, 2, 1), "ext2");
        assert_eq!(with(4, 2, 3), "ext3");
        assert_eq!(with(4, 0x42, 3), "ext4", "extents");
        assert_eq!(with(4, 2, 0x13), "ext4", "group checksums");
        assert_eq!(with(0, 8, 0), "ext journal");
        assert_eq!(kind(&[(0x438, &[0x53, 0xef]), (0x418, &[200])]), "nothing", "two bytes by accident");
    }

    #[test]
    fn volumes_raid_and_pools() {
        let mut label = *b"LABELONE................LVM2 001";
        assert_eq!(kind(&[(512, &label)]), "LVM2 physical volume");
        label[24] = b'X';
        assert_eq!(kind(&[(512, &label)]), "nothing");
        assert_eq!(kind(&[((128 << 10) + 1024, &0x00ba_b10cu64.to_le_bytes())]), "zfs pool member");
        assert_eq!(kind(&[(128 << 10, &0x00ba_b10cu64.to_be_bytes())]), "zfs pool member");
        let md = |major: u8| [0xfc, 0x4e, 0x2b, 0xa9, major, 0, 0, 0];
        assert_eq!(kind(&[(SIZE - 8192, &md(1))]), "Linux RAID member (metadata 1.0)");
        assert_eq!(kind(&[(SIZE - 65536, &md(0))]), "Linux RAID member (metadata 0.90)");
        assert_eq!(kind(&[(SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.0")]), "Intel RAID member");
    }

    #[test]
    fn partition_tables_come_last() {
        let mut mbr = [0u8; 512];
        mbr[446..462].copy_from_slice(&[0x80, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0]);
        mbr[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(kind(&[(0, &mbr)]), "MBR partition table");
        assert_eq!(kind(&[(0, &mbr), (512, b"EFI PART")]), "GPT partition table");
        assert_eq!(kind(&[(0, &mbr), (0x52, b"FAT32   ")]), "vfat");
        assert_eq!(kind(&[(SIZE - 512, b"EFI PART")]), "GPT partition table (backup)");
        mbr[446] = 0x13;
        assert_eq!(kind(&[(0, &mbr)]), "nothing", "boot code, no table");
        assert_eq!(kind(&[(510, &[0x55, 0xaa])]), "nothing", "no partition in it");
    }
}
