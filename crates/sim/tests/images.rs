//! Short runs of the fuzz targets `image` and `stream`: seeded inputs, and the corpora in `tests/corpus`.

use io::Rng;
use sim::rot::{Images, fuzz_image, fuzz_stream, random_input};

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = format!("{}/tests/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> = std::fs::read_dir(&dir).expect(&dir).map(|f| f.expect(&dir).path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{dir} is empty");
    files.into_iter().map(|f| (f.display().to_string(), std::fs::read(&f).expect("an input"))).collect()
}

/// The engine refuses, fails or answers; it does not panic, hang, or write outside its device.
#[test]
fn damaged_images_end_no_process() {
    let images = Images::of_a_life(7);
    let rng = &mut Rng::new(7);
    let random = (0..1500).map(|i| (format!("random input {i}"), random_input(rng)));
    let all: Vec<_> = corpus("image").into_iter().chain(random).collect();
    for (name, input) in all {
        let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fuzz_image(&images, &input)));
        match opened {
            Ok(Ok(())) => {}
            Ok(Err(why)) => panic!("{name}: {input:?}: {why}"),
            Err(_) => panic!("{name}: {input:?}: the engine panicked"),
        }
    }
}

#[test]
fn an_image_as_it_was_left_is_served() {
    let images = Images::of_a_life(7);
    fuzz_image(&images, &[0]).unwrap();
    fuzz_image(&images, &[1]).unwrap();
    let (cache, backings) = images.damaged(&[1]);
    assert_eq!(cache.fingerprint(), images.cache.fingerprint(), "mended checksums are what they were");
    assert_eq!(backings[0].fingerprint(), images.backings[0].fingerprint());
}

#[test]
fn streams_of_a_fuzzer_pass() {
    let rng = &mut Rng::new(8);
    let random = (0..80).map(|i| {
        let bytes: Vec<u8> = (0..8 + rng.below(600)).map(|_| rng.next_u64() as u8).collect();
        (format!("random input {i}"), bytes)
    });
    let all: Vec<_> = corpus("stream").into_iter().chain(random).collect();
    for (name, input) in all {
        fuzz_stream(&input).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}
