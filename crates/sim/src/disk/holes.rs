//! A disk that says that it has holes, as a sparse file does.
//!
//! Owns that one property. Must not know what the disk does with a request.

use std::rc::Rc;

use io::{Completer, Device, DeviceInfo, Request};

use super::SimDisk;

/// See the module head.
pub struct WithHoles {
    disk: Rc<SimDisk>,
    info: DeviceInfo,
}

impl WithHoles {
    /// Makes `disk` say that it has holes.
    pub fn new(disk: Rc<SimDisk>) -> Rc<WithHoles> {
        let info = DeviceInfo { sparse: true, ..disk.info().clone() };
        Rc::new(WithHoles { disk, info })
    }
}

impl Device for WithHoles {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, request: Request, completer: Completer) {
        self.disk.submit(request, completer);
    }
}
