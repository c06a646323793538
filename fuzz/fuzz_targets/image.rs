//! A set on a damaged image: see `sim::rot`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sim::rot::{Images, fuzz_image};

thread_local! {
    static IMAGES: Images = Images::of_a_life(7);
}

fuzz_target!(|input: &[u8]| {
    if let Err(why) = IMAGES.with(|images| fuzz_image(images, input)) {
        panic!("{why}");
    }
});
