//! `POST /v1/make`: devices that a client of the daemon formats.

use serde_json::{Value, json};

use crate::place::*;
use crate::world::*;

#[test]
fn a_client_formats_devices_with_the_refusals_of_the_command() {
    let place = Place::new();
    let daemon = place.start_registered();
    let (ssd, hdd) = (place.dir.sparse("new-ssd", 16 << 20), place.dir.sparse("new-hdd", 32 << 20));
    let make = |order: Value| daemon.http("POST", "/v1/make", &order.to_string());
    #[track_caller]
    fn refused(said: (u16, Value), words: &str) {
        let text = said.1["error"].as_str().unwrap_or_default();
        assert!(said.0 >= 400 && text.contains(words), "{words}: {said:?}");
    }
    let order = |more: Value| {
        let mut order =
            json!({"cache": ssd, "backing": [hdd], "bucket": "8k", "label": "films", "writeback": true});
        order.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        order
    };
    let before = (read(&ssd), read(&hdd));
    let (status, said) = make(order(json!({"dry_run": true})));
    assert_eq!(status, 200, "{said}");
    let lines = said["lines"].to_string();
    let printed = run(&[
        "make",
        "-C",
        &ssd,
        "-B",
        &hdd,
        "--bucket",
        "8k",
        "--label",
        "films",
        "--writeback",
        "--dry-run",
    ]);
    for line in printed.ok().out.lines() {
        assert!(lines.contains(&json!(line).to_string()), "{line}: {lines}");
    }
    assert!(before == (read(&ssd), read(&hdd)), "nothing is written");

    // Devices of the daemon, relative paths, labels of others, and what the command refuses.
    refused(make(json!({"backing": [place.hdd], "wipe": true, "force": true})), "is registered");
    daemon.run(&["stop", "one"]).ok();
    refused(make(json!({"backing": [place.hdd], "wipe": true})), "is registered");
    refused(make(json!({"backing": ["new-hdd"]})), "expected an absolute path");
    refused(make(json!({"backing": [hdd], "label": "one"})), "label one: belongs to");
    refused(make(json!({})), "nothing to make");
    refused(make(json!({"backing": [hdd], "bucket": "7k"})), "bucket: expected a power of two");
    refused(make(json!({"backing": [hdd], "wipe_dirty": true})), "unknown key `wipe_dirty`");

    let (status, said) = make(order(json!({})));
    assert_eq!(status, 200, "{said}");
    assert_eq!(said["made"]["devices"][0]["kind"], "cache", "{said}");
    daemon.run(&["register", &ssd, &hdd]).ok();
    let name = daemon.volume("films")["name"].as_str().unwrap().to_owned();
    place.client(&name).write(0, &[7; 65536]).unwrap();
    daemon.run(&["unregister", &ssd]).ok();
    daemon.run(&["unregister", &hdd]).ok();

    // Dirty data is lost only by the name of its device.
    let before = (read(&ssd), read(&hdd));
    for (more, words) in [
        (json!({}), "--wipe-dirty"),
        (json!({"wipe": true, "force": true}), "--wipe-dirty"),
        (json!({"lose_dirty_data_of": ["new-hdd"], "wipe": true}), "64.0 KiB of"),
        (
            json!({"lose_dirty_data_of": ["hdd"]}),
            "expected the name of a device that is to be formatted, found",
        ),
    ] {
        refused(make(order(more)), words);
    }
    let both = json!({"lose_dirty_data_of": ["new-ssd", hdd], "dry_run": true});
    let (status, said) = make(order(both.clone()));
    assert!(
        status == 200 && said["lines"].to_string().contains("dirty data that exists nowhere else"),
        "{said}"
    );
    assert!(before == (read(&ssd), read(&hdd)), "nothing is written");
    let (status, said) = make(order(json!({"lose_dirty_data_of": ["new-ssd", hdd]})));
    assert_eq!(status, 200, "{said}");
    let audit = daemon.run(&["events", "--since", "1h"]).ok();
    audit.says(&["losing dirty data of new-ssd", "--dry-run"]);
    daemon.stop();
}
