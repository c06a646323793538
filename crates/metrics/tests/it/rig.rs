//! Figures of a real set on devices in memory.

use engine::figures::SetFigures;
use rig::{Rig, Shape};

/// The figures of a set after some work.
pub fn figures(work: impl AsyncFnOnce(&Rig)) -> SetFigures {
    let shape = Shape { backing_name: "a \"backing\" device", ..Shape::default() };
    shape.run(async |rig| {
        rig.set("writeback_running", "0").await;
        work(rig).await;
        rig.set.figures()
    })
}
