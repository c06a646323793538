//! Salvage of the disks of a set, and the rules that every map keeps.

use std::ops::ControlFlow;

use format::Uuid;
use inspect::{ExtractOptions, Extraction, ReadAt, SliceSource, StreamSink, Target};
use repair::{MapLine, Salvage, SalvageError, SalvageOptions, SalvageTarget, Salvaged, State, plan};

use super::Set;

/// The disks of a set, with the contents that the intact set gives.
pub fn disks(set: &Set) -> Vec<(SalvageTarget, Vec<u8>)> {
    let (c, b) = (SliceSource::new("cache", &set.cache), SliceSource::new("backing", &set.backing));
    let volumes = set.view.volumes().map(|(inode, _)| (SalvageTarget::Volume(inode), Target::Volume(inode)));
    let all = std::iter::once((SalvageTarget::Backing(0), Target::Cached(&b))).chain(volumes);
    all.map(|(disk, target)| {
        let extraction = Extraction::new(&set.view, &c, target, ExtractOptions::default()).unwrap();
        let mut sink = StreamSink::new(Vec::new());
        extraction.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
        (disk, sink.into_inner())
    })
    .collect()
}

/// The result of a salvage.
pub struct Got {
    pub image: Vec<u8>,
    pub map: Vec<MapLine>,
    pub summary: Salvaged,
}

/// Salvages a disk.
pub fn salvaged(
    cache: &dyn ReadAt,
    backing: &dyn ReadAt,
    disk: SalvageTarget,
    trust: bool,
) -> Result<Got, SalvageError> {
    let plan = plan(cache, &[backing], Uuid([3; 16]));
    let options = SalvageOptions { trust_journal_end: trust, ..SalvageOptions::default() };
    let salvage = Salvage::new(&plan, disk, options)?;
    let (mut sink, mut map) = (StreamSink::new(Vec::new()), Vec::new());
    let mut line = |line: &MapLine| {
        map.push(line.clone());
        Ok(())
    };
    let summary = salvage.run(&mut sink, &mut line, &mut |_| ControlFlow::Continue(()))?;
    let image = sink.into_inner();
    well_formed(&map, &summary, image.len() as u64 / 512);
    Ok(Got { image, map, summary })
}

/// The map covers the disk without gaps, in order, with equal lines merged, and the summary has its sums.
fn well_formed(map: &[MapLine], summary: &Salvaged, sectors: u64) {
    let mut at = 0;
    for line in map {
        assert_eq!(line.start_sector, at);
        assert!(line.sectors > 0);
        assert_eq!(line.why.is_none(), line.state == State::Certain, "{line:?}");
        at += line.sectors;
    }
    assert_eq!((at, summary.sectors), (sectors, sectors));
    let differ = |a: &MapLine, b: &MapLine| (a.state, a.from, &a.why) != (b.state, b.from, &b.why);
    assert!(map.windows(2).all(|pair| differ(&pair[0], &pair[1])));
    for (state, part) in [
        (State::Certain, summary.certain),
        (State::Uncertain, summary.uncertain),
        (State::Lost, summary.lost),
    ] {
        let of_state = map.iter().filter(|l| l.state == state);
        assert_eq!(of_state.clone().map(|l| l.sectors).sum::<u64>(), part.sectors, "{state:?}");
        assert_eq!(of_state.count() as u64, part.ranges, "{state:?}");
    }
}

/// The sectors that the map calls certain and that have other bytes than `good`.
pub fn wrong(got: &Got, good: &[u8]) -> Vec<u64> {
    let certain = got.map.iter().filter(|l| l.state == State::Certain);
    let sector = |s: u64| s as usize * 512..(s as usize + 1) * 512;
    let each = certain.flat_map(|l| l.start_sector..l.start_sector + l.sectors);
    each.filter(|s| good.get(sector(*s)) != got.image.get(sector(*s))).collect()
}
