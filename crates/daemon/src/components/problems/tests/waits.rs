//! Tests of the problems of devices that do not answer, and of stops that wait for them.

use serve::snapshot::StopFigures;

use super::*;
use crate::components::silences::Silent;

fn silent(volume: Option<&str>) -> Silent {
    Silent {
        thread: "s".into(),
        volume: volume.map(str::to_owned),
        device: "/dev/hdd".into(),
        label: "one".into(),
        requests: 2,
        seconds: 90,
    }
}

/// `status` had no problems while requests of clients waited for ten minutes.
#[test]
fn a_device_that_does_not_answer_is_a_problem() {
    let sets = [set(vec![volume("bcache0", "one")])];
    let found = silent_devices(&[silent(Some("bcache0"))], &sets);
    let [problem] = found.as_slice() else { panic!("{found:?}") };
    assert!(problem.text.starts_with("one, /dev/hdd has not answered for 90 s: 2 requests to it wait; "));
    assert_eq!((problem.kind, &*problem.command), ("device_silent", "journalctl -k -n 50"));
    let of =
        Subject { set: Some("s".into()), volume: Some("bcache0".into()), device: Some("/dev/hdd".into()) };
    assert_eq!(problem.of, of);
    assert_eq!(counts(&found)["device_silent"], 1);
}

/// The command that stopped a set had failed, because a device did not answer, and nothing said that the set was stopping.
#[test]
fn a_stop_that_waits_is_a_problem_also_after_its_command() {
    let volumes = vec![VolumeFigures { problem: Some("it was ended".into()), ..volume("bcache0", "one") }];
    let mut stopping = set(volumes);
    let devices = [device("/dev/ssd", "cache", "served", "")];
    let stop = |volume: Option<&str>, seconds, is_final| StopFigures {
        volume: volume.map(str::to_owned),
        seconds,
        is_final,
    };
    let all = [silent(Some("bcache0")), silent(Some("bcache7"))];
    for (stops, expected) in [
        (vec![stop(None, 9, false)], None),
        (
            vec![stop(None, 59, false)],
            Some(("cache set s (/dev/ssd) has been stopping for 59 s: ", "the stop ends")),
        ),
        (
            vec![stop(None, 75, false)],
            Some(("cache set s (/dev/ssd) ", "and what it has ended is exported again")),
        ),
        (
            vec![stop(None, 75, true), stop(None, 20, true)],
            Some(("cache set s ", "wait; the stop ends after that")),
        ),
        (
            vec![stop(Some("bcache0"), 75, true)],
            Some(("one (bcache0) has been", "2 requests to it wait; the stop")),
        ),
    ] {
        stopping.figures.stops = stops;
        let found = stops_that_wait(&[stopping.clone()], &devices, &all);
        assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
        for (problem, (begin, words)) in found.iter().zip(expected) {
            assert_eq!((problem.kind, &*problem.command), ("stop_waits", "journalctl -k -n 50"));
            assert!(problem.text.starts_with(begin) && problem.text.contains(words), "{problem:?}");
            assert!(problem.text.contains("one, /dev/hdd has not answered for 90 s"), "{problem:?}");
        }
        // No reload exports it.
        let found = problems(&[stopping.clone()], &devices);
        assert_eq!((found[0].kind, &*found[0].command), ("not_exported", "journalctl -k -n 50"));
    }
}

/// A set that was being stopped, and whose thread did not answer, was no problem.
#[test]
fn a_stopping_set_that_does_not_answer_is_a_problem() {
    let mut of_set = set(Vec::new());
    (of_set.state, of_set.why) = ("stopping", Some("it did not answer within 3 seconds".into()));
    let found = problems(&[of_set], &[device("/dev/ssd", "cache", "served", "")]);
    assert_eq!(found[0].kind, "set_silent", "{found:?}");
}
