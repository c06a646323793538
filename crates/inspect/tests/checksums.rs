//! Data against its checksums: images of a kernel get a key and footers, and then damage.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use common::{backing, backing_source, cache, cache_source, expected, initialised, open, sha256};
use format::{BlockSums, FooterId, FooterKey, FooterLayout, Inode, Sector, Sectors, encode_footer};
use inspect::check::{DamagedRange, DataSummary};
use inspect::extract::Extracted;
use inspect::{
    CheckOptions, DamagedDirty, ExtractError, ExtractOptions, Extraction, Invariant, PieceKind, ReadAt,
    SetReport, SetView, Severity, StreamSink, Target, check, check_set,
};

const KEY: FooterKey = FooterKey(0x1234_5678);

fn at(sector: Sector) -> usize {
    sector.bytes() as usize
}

/// Images with checksums.
#[derive(Clone)]
struct Set {
    cache: Vec<u8>,
    backing: Vec<u8>,
    view: SetView,
    layout: FooterLayout,
}

impl Set {
    /// Gives the set a key, and a footer to each bucket with data whose last blocks no live key names.
    fn new(dir: &str) -> Set {
        let mut cache = cache(dir);
        let mut superblock = open(&cache).superblock;
        superblock.set_checksum_key(Some(KEY));
        superblock.prepare_write(1);
        cache[4096..8192].copy_from_slice(&superblock.encode());
        let view = open(&cache);
        let layout = FooterLayout::of(view.geometry()).unwrap();
        let mut set = Set { cache, backing: backing(dir), view, layout };
        let geometry = *set.view.geometry();
        let mut ends = BTreeMap::new();
        for (_, piece, kind) in set.view.pieces().filter(|(_, _, kind)| kind.is_live()) {
            assert!(kind.is_live());
            let ptr = piece.ptr.unwrap();
            let bucket = geometry.bucket_of(ptr.offset()).unwrap();
            let end = geometry.offset_in_bucket(ptr.offset()).0 + piece.len.0;
            let (_, most) = ends.entry(bucket).or_insert((ptr.generation(), 0));
            *most = end.max(*most);
        }
        for (bucket, (generation, end)) in ends {
            if end > layout.data_sectors().0 {
                continue;
            }
            let start = geometry.bucket_start(bucket);
            let mut sums = BlockSums::unknown(layout.blocks());
            let data = &set.cache[at(start)..][..layout.data_sectors().bytes() as usize];
            sums.set_data(0, data, geometry.block_bytes() as usize);
            let id = FooterId { set_uuid: set.view.superblock.set_uuid(), bucket, generation };
            let (place, _) = layout.place(start);
            let footer = encode_footer(&layout, KEY, id, &sums);
            set.cache[at(place)..][..footer.len()].copy_from_slice(&footer);
        }
        set
    }

    fn check(&self) -> SetReport {
        let (cache, backing) = (cache_source(&self.cache), backing_source(&self.backing));
        check_set(&cache, &[&backing], CheckOptions::default())
    }

    fn extract(&self, damaged: DamagedDirty) -> Result<(Vec<u8>, Extracted), ExtractError> {
        let (cache, backing) = (cache_source(&self.cache), backing_source(&self.backing));
        let options = ExtractOptions { damaged, ..ExtractOptions::default() };
        let x = Extraction::new(&self.view, &cache, Target::Cached(&backing), options)?;
        let mut sink = StreamSink::new(Vec::new());
        let result = x.run(&mut sink, &mut |_| ControlFlow::Continue(()))?;
        Ok((sink.into_inner(), result))
    }

    /// The live extents of a kind in buckets with a footer: start as keys count, start on the cache device, length.
    fn extents(&self, kind: PieceKind) -> Vec<(u64, u64, u64)> {
        let g = *self.view.geometry();
        let live = self.view.pieces().filter(|(_, _, k)| *k == kind);
        let all = live.filter_map(|(_, piece, _)| {
            let place = piece.ptr.unwrap().offset();
            let (footer, _) = self.layout.place(g.bucket_start(g.bucket_of(place).unwrap()));
            let magic = self.view.superblock.set_magic().footer().to_le_bytes();
            let has_footer = self.cache[at(footer) + 8..][..8] == magic;
            has_footer.then_some((piece.start.0, place.0, piece.len.0))
        });
        all.collect()
    }

    fn flip(&mut self, sector: u64) {
        self.cache[at(Sector(sector)) + 100] ^= 8;
    }

    fn data_offset(&self) -> u64 {
        let backing = backing_source(&self.backing);
        match inspect::read_superblock(&backing).unwrap() {
            inspect::DeviceSuper::Backing(b) => b.data_offset().0,
            inspect::DeviceSuper::Cache(_) => panic!("a cache device"),
        }
    }
}

fn data(report: &SetReport) -> DataSummary {
    let mut sum = DataSummary::default();
    for d in &report.summary.as_ref().unwrap().devices {
        let data = d.data.as_ref().unwrap();
        sum.verified_blocks += data.verified_blocks;
        sum.unverified_blocks += data.unverified_blocks;
        sum.damaged_dirty_blocks += data.damaged_dirty_blocks;
        sum.damaged_clean_blocks += data.damaged_clean_blocks;
        sum.damaged.extend(&data.damaged);
    }
    sum
}

#[test]
fn intact_data_is_verified() {
    let mut verified = 0;
    for dir in initialised() {
        let set = Set::new(dir);
        let report = set.check();
        assert!(report.is_ok(), "{dir}: {report}");
        assert_eq!(report.count_of(Invariant::DataChecksum), 0, "{dir}");
        let data = data(&report);
        println!("{dir}: {} verified, {} unverified", data.verified_blocks, data.unverified_blocks);
        let block = set.view.geometry().block_sectors.0;
        let live = set.view.totals();
        assert!(
            (data.verified_blocks + data.unverified_blocks) * block
                >= live.dirty_sectors + live.clean_sectors
        );
        verified += data.verified_blocks;
        if let Some(device) = expected(dir)["devices"]
            .as_array()
            .and_then(|all| all.iter().find(|d| d["kind"] != "volume").cloned())
        {
            let (bytes, result) = set.extract(DamagedDirty::Refuse).unwrap();
            assert_eq!(sha256(&bytes), device["sha256"].as_str().unwrap(), "{dir}");
            assert!(result.verified_blocks <= data.verified_blocks, "a volume may have some");
        }
    }
    assert!(verified > 4000, "{verified}");
}

/// Without a key, and with `METADATA`, no data is read for its checksum, and there are no figures.
#[test]
fn sets_without_checksums_have_no_figures() {
    let set = Set::new("04-writeback-killed");
    let (plain, backing) = (cache("04-writeback-killed"), backing_source(&set.backing));
    for (bytes, options) in [(&plain, CheckOptions::default()), (&set.cache, CheckOptions::METADATA)] {
        let report = check_set(&cache_source(bytes), &[&backing], options);
        assert!(report.summary.unwrap().devices.iter().all(|d| d.data.is_none()));
    }
}

#[test]
fn damaged_dirty_data_is_an_error_and_is_not_extracted() {
    let intact = Set::new("04-writeback-killed");
    let (good, _) = intact.extract(DamagedDirty::Refuse).unwrap();
    let first = intact.data_offset();
    let mut extents = intact.extents(PieceKind::Dirty);
    extents.retain(|(_, _, len)| *len > 2);
    assert!(extents.len() > 10);
    let block = intact.view.geometry().block_sectors.0;
    assert_eq!(block, 1, "each damaged sector is a range of its own");
    for &(start, place, len) in extents.iter().step_by(extents.len() / 9) {
        let mut set = intact.clone();
        set.flip(place);
        set.flip(place + len - 1);
        let report = set.check();
        assert_eq!((report.errors, report.count_of(Invariant::DataChecksum)), (1, 1), "{report}");
        let found = report.findings.iter().find(|f| f.invariant == Invariant::DataChecksum).unwrap();
        assert!(found.severity == Severity::Error && found.field == "checksum of dirty data");
        let data = data(&report);
        assert_eq!((data.damaged_dirty_blocks, data.damaged_clean_blocks), (2, 0), "{report}");
        let range =
            |position| DamagedRange { position, sector: Some(position - first), sectors: 1, dirty: true };
        assert_eq!(data.damaged, [range(start), range(start + len - 1)]);
        assert!(report.to_string().contains(&format!("sectors {}+1 of the volume", start - first)));

        let refused = set.extract(DamagedDirty::Refuse).unwrap_err().to_string();
        let last = start - first + len - 1;
        let named = format!("2 damaged sectors: {}+1, {last}+1 of", start - first);
        assert!(refused.contains(&named), "{refused}");
        for damaged in [DamagedDirty::Zeros, DamagedDirty::Older, DamagedDirty::AsIs] {
            let (bytes, result) = set.extract(damaged).unwrap();
            assert_eq!((result.lost_sectors, result.lost.len()), (2, 2), "{:?}", result.lost);
            for (n, (a, b)) in bytes.chunks(512).zip(good.chunks(512)).enumerate() {
                let n = n as u64;
                if n != start - first && n != last {
                    assert!(a == b, "sector {n}");
                    continue;
                }
                let from = at(Sector(if n == last { place + len - 1 } else { place }));
                let expected = match damaged {
                    DamagedDirty::Zeros => &[0; 512][..],
                    DamagedDirty::Older => &set.backing[at(Sector(n + first))..][..512],
                    _ => &set.cache[from..][..512],
                };
                assert_eq!(a, expected, "{damaged:?}");
            }
        }
    }
}

/// All blocks of an extent are one range; a report lists all of them in JSON and some in the text.
#[test]
fn ranges_are_joined_and_bounded() {
    let mut set = Set::new("04-writeback-killed");
    let extents = set.extents(PieceKind::Dirty);
    for &(_, place, len) in &extents {
        (0..len).for_each(|n| set.flip(place + n));
    }
    let (cache, backing) = (cache_source(&set.cache), backing_source(&set.backing));
    let devices: [&dyn ReadAt; 2] = [&cache, &backing];
    let report = check(&devices, CheckOptions::default(), &mut |_| ControlFlow::Continue(()));
    let of_set = data(&report.sets[0]);
    let sectors: u64 = extents.iter().map(|(_, _, len)| len).sum();
    assert_eq!(of_set.damaged_dirty_blocks, sectors);
    assert_eq!(of_set.damaged.iter().map(|r| r.sectors).sum::<u64>(), sectors);
    let touching = |w: &[DamagedRange]| w[0].position + w[0].sectors >= w[1].position;
    assert!(!of_set.damaged.windows(2).any(touching), "joined and in order");
    assert!(of_set.damaged.len() > 20);
    let more = format!("and {} more ranges, which --json lists", of_set.damaged.len() - 20);
    assert!(report.to_string().contains(&more), "{report}");
    let json: serde_json::Value = serde_json::from_str(&inspect::dump::to_json(&report)).unwrap();
    let listed = json["sets"][0]["summary"]["devices"][0]["data"]["damaged"].as_array().unwrap().len();
    assert_eq!(listed, of_set.damaged.len());
    let Err(ExtractError::DamagedData { sectors: refused, ranges, .. }) = set.extract(DamagedDirty::Refuse)
    else {
        panic!("the damage was not refused");
    };
    assert_eq!((refused, ranges.listed.len(), ranges.more), (Sectors(sectors), 50, true));
    // A caller that ends the check early gets a report that says so.
    let report = check(&devices, CheckOptions::default(), &mut |_| ControlFlow::Break(()));
    assert!(report.sets[0].summary.as_ref().unwrap().cancelled);
}

#[test]
fn damaged_clean_data_is_a_notice_and_comes_from_the_backing_device() {
    let mut set = Set::new("05-clean-only");
    let (good, _) = set.extract(DamagedDirty::Refuse).unwrap();
    let extents = set.extents(PieceKind::Clean);
    extents.iter().for_each(|(_, place, _)| set.flip(*place));
    let report = set.check();
    assert!(report.is_ok(), "{report}");
    let data = data(&report);
    assert_eq!((data.damaged_dirty_blocks, data.damaged_clean_blocks), (0, extents.len() as u64));
    assert!(report.notices >= extents.len() as u64);
    let (bytes, result) = set.extract(DamagedDirty::Refuse).unwrap();
    assert!(bytes == good, "damaged clean data was extracted");
    let block = set.view.geometry().block_sectors.0;
    assert!(
        result.damaged_clean_sectors >= extents.len() as u64
            && result.damaged_clean_sectors.is_multiple_of(block)
    );
    assert!(result.warnings[0].contains("was read from the backing device: "), "{:?}", result.warnings);
    // Without the backing device there is nothing else.
    let cache = cache_source(&set.cache);
    let options = ExtractOptions { best_effort: true, ..ExtractOptions::default() };
    let x = Extraction::new(&set.view, &cache, Target::without_backing(Inode(0)), options).unwrap();
    let mut sink = StreamSink::new(Vec::new());
    let lost = x.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(lost.lost_sectors, result.damaged_clean_sectors);
    assert_eq!(&sink.into_inner()[at(Sector(lost.lost[0].start))..][..512], &[0; 512]);
}

/// A footer that is damaged, or of another generation, key or set, verifies nothing, so nothing counts as damaged.
#[test]
fn a_footer_that_does_not_belong_to_the_bucket_is_none() {
    let set = Set::new("04-writeback-killed");
    let (_, place, _) = set.extents(PieceKind::Dirty)[0];
    let g = *set.view.geometry();
    let (footer, _) = set.layout.place(g.bucket_start(g.bucket_of(Sector(place)).unwrap()));
    let before = data(&set.check());
    for byte in [0, 8, 16, 20, 24, 40, 44, 48, 60] {
        let mut set = set.clone();
        set.cache[at(footer) + byte] ^= 1;
        set.flip(place);
        let report = set.check();
        let after = data(&report);
        assert!(report.is_ok(), "byte {byte}: {report}");
        assert!(after.verified_blocks < before.verified_blocks);
        assert_eq!(
            after.verified_blocks + after.unverified_blocks,
            before.verified_blocks + before.unverified_blocks
        );
    }
}
