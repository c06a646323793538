//! `check` and `extract` on damaged images: they find what they find, but they end, and in bounded memory.
#![no_main]

use std::ops::ControlFlow;

use inspect::extract::Progress;
use inspect::{
    CheckOptions, DamagedDirty, ExtractOptions, Extraction, Mode, ReadAt, SetView, StreamSink, Target, check_set,
};
use libfuzzer_sys::fuzz_target;
use sim::rot::Images;

thread_local! {
    static IMAGES: Images = Images::of_a_life(7);
}

fuzz_target!(|input: &[u8]| {
    IMAGES.with(|images| {
        let (cache, backings) = images.damaged(input);
        let sources: Vec<&dyn ReadAt> = backings.iter().map(|b| b as &dyn ReadAt).collect();
        let report = check_set(&cache, &sources, CheckOptions::default());
        let _ = report.to_string();
        let Ok(view) = SetView::open(&cache, Mode::BestEffort) else { return };
        let volumes = view.volumes().map(|(inode, _)| Target::Volume(inode)).take(4);
        for target in backings.iter().map(|b| Target::Cached(b)).chain(volumes) {
            let options = ExtractOptions { best_effort: true, damaged: DamagedDirty::AsIs, dirty_only: false };
            let Ok(extraction) = Extraction::new(&view, &cache, target, options) else { continue };
            // A volume may claim to be of any size: the user gives up after so much.
            let mut progress = |p: Progress| {
                if p.done.0 < 1 << 16 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let _ = extraction.run(&mut StreamSink::new(std::io::sink()), &mut progress);
        }
    });
});
