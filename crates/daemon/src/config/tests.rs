//! Tests of the configuration: which section applies to a volume, and what a mistake is called.

use engine::tunables::{DeviceTunables, SetTunables};

use super::*;

fn key(id: &str, label: &str, set: bool) -> Key {
    Key { id: id.into(), label: label.into(), set }
}

#[test]
fn the_nearer_setting_counts() {
    let config = Config::parse(
        "preset = \"latency\"\n\
         [tunables]\nwriteback_percent = 30\njournal_delay_ms = 5\n\
         [volume.fast]\npreset = \"throughput\"\nexports = [\"nbd=/run/{volume}.sock\"]\n\
         tunables.writeback_delay = 7\n\
         [set.aaaa.tunables]\njournal_delay_ms = 9\n",
    )
    .unwrap();
    let plain = config.tunables(&key("x", "", false));
    assert_eq!((&*plain["sequential_cutoff"], &*plain["writeback_percent"]), ("0", "30"));
    assert!(!plain.contains_key("journal_delay_ms"), "belongs to sets");
    let fast = config.tunables(&key("y", "Fast", false));
    assert_eq!((&*fast["sequential_cutoff"], &*fast["writeback_delay"]), ("1048576", "7"));
    assert_eq!(config.tunables(&key("aaaa", "", true))["journal_delay_ms"], "9");
    assert_eq!(config.tunables(&key("bbbb", "", true))["journal_delay_ms"], "5");
    assert_eq!(config.exports(&key("y", "fast", false), "bcache3"), ["nbd=/run/bcache3.sock"]);
    assert_eq!(config.exports(&key("x", "", false), "bcache0"), ["auto"]);
}

#[test]
fn tcp_is_for_those_with_a_token() {
    let text = "listen = [\"127.0.0.1:9420\", \"[::1]:0\"]\ntoken_file = \"/etc/token\"\n";
    let tcp = Config::parse(text).unwrap().tcp.unwrap();
    assert_eq!((tcp.listen.len(), tcp.token_file.line, tcp.tls.is_some()), (2, 2, false));
    assert!(!tcp.metrics_without_token);
    let more = "tls_certificate = \"/c\"\ntls_key = \"/k\"\nmetrics_without_token = true\n";
    let far = Config::parse(&(text.replace("[::1]", "[::]") + more)).unwrap().tcp.unwrap();
    assert!(far.tls.is_some_and(|(c, k)| (c.line, k.line) == (3, 4)) && far.metrics_without_token);
    assert_eq!(Config::parse("token_file = \"/t\"\n").unwrap().tcp, None);
}

#[test]
fn nbd_over_tcp_has_to_be_asked_for() {
    let export = "exports = [\"nbd=127.0.0.1:10809\"]\n";
    let open = Config::parse(&format!("nbd_allow_unauthenticated_tcp = true\n{export}")).unwrap();
    assert!(open.nbd.allow_unauthenticated);
    let files = "nbd_tls_certificate = \"/c\"\nnbd_tls_key = \"/k\"\nnbd_tls_client_ca = \"/a\"\n";
    let closed = Config::parse(&format!("{export}{files}")).unwrap().nbd;
    assert_eq!((closed.client_ca.map(|ca| ca.line), closed.allow_unauthenticated), (Some(4), false));
    assert!(Config::parse("exports = [\"nbd=/run/x\"]\n").is_ok());
}

#[test]
fn a_file_that_was_named_has_to_be_there() {
    let said = Config::read(Path::new("/nowhere/ubcache.toml")).unwrap_err();
    assert!(said.message().unwrap().contains("/nowhere/ubcache.toml"), "{said:?}");
}

#[test]
fn mistakes_are_named_with_their_line() {
    for (text, line, words) in [
        ("scan = true\nsocked = \"/x\"\n", 2, "socked"),
        ("\n[tunables]\nwriteback_percents = 5\n", 3, "writeback_percents"),
        ("[tunables]\nwriteback_percent = \"x\"\n", 2, "writeback_percent"),
        ("[volume.a]\npreset = \"fast\"\n", 2, "quiet-disk"),
        ("[volume.a]\n\ncolour = 1\n", 3, "colour"),
        ("[set.a.tunables]\nsequential_cutoff = 5\n", 2, "sequential_cutoff is a tunable of volumes"),
        ("[volume.a.tunables]\njournal_delay_ms = 5\n", 2, "write it in [tunables] or [set.ID.tunables]"),
        ("[tunables]\nwriteback_precent = 5\n", 2, "did you mean writeback_percent?"),
        ("[tunables]\nlabel = \"data\"\n", 2, "set it with `ubcache set-label`"),
        ("[volume.a.tunables]\nlabel = \"/dev/sda\"\n", 2, "set it with `ubcache set-label`"),
        ("[tunables]\nwriteback_percent = 99\n", 2, "expected 0 to 70 %, found 99"),
        ("[tunables]\nwriteback_percent = 50\n", 2, "expected 0 to 40 %, found 50"),
        ("[volume.a.tunables]\nwriteback_running = 2\n", 2, "expected 0 or 1, found 2"),
        (
            "scan = true\ndrain_deadline_s = \"5m\"\n",
            2,
            "drain_deadline_s: expected seconds, such as `drain_deadline_s = 300`, found \"5m\"",
        ),
        ("scan = 1\n", 1, "scan: expected true or false, such as `scan = false`, found 1"),
        ("[tunables]\nwriteback_percent = true\n", 2, "expected a decimal number, 0 to 70 %, found"),
        ("[tunables]\ncache_mode = true\n", 2, "cache_mode"),
        (
            "drain_deadline_s = -5\n",
            1,
            "drain_deadline_s: expected seconds, such as `drain_deadline_s = 300`, found -5",
        ),
        (
            "scan = true\ndevices = [\n1]\n",
            3,
            "devices: expected list of paths, such as `devices = []`, found 1",
        ),
        ("tunables = 5\n", 1, "tunables: expected a section of names and values, found 5"),
        ("volume = 5\n", 1, "volume: expected sections [volume.UUID] or [volume.LABEL], found 5"),
        ("[volume]\na = 5\n", 2, "expected a section of names and values, found 5"),
        ("scan = true\nlinks = \"/\"\n", 2, "links: expected a directory for the links alone"),
        ("links = \"/dev\"\n", 1, "found \"/dev\""),
        ("links = \"dev/ubcache\"\n", 1, "links: expected"),
        ("links = \"/dev/ubcache/..\"\n", 1, "links: expected"),
        ("sysfs_view = \"/\"\n", 1, "sysfs_view: expected the absolute path of a directory of its own"),
        ("state_dir = \"/\"\n", 1, "state_dir: expected the absolute path"),
        ("socket = 1\n", 1, "socket: expected path, such as `socket = \"/"),
        ("scan = true\nexports = \"auto\"\n", 2, "exports takes a list: [\"auto\"]"),
        ("[volume.a]\nexports = \"auto\"\n", 2, "exports takes a list: [\"auto\"]"),
        ("devices = \"/dev/sda\"\n", 1, "devices takes a list: [\"/dev/sda\"]"),
        ("listen = \"127.0.0.1:1\"\n", 1, "listen takes a list: [\"127.0.0.1:9420\"]"),
        ("exports = [\"nbd\"]\n", 1, "expected auto"),
        ("\nexports = [\"nbd=127.0.0.1:1\"]\n", 2, "nbd_allow_unauthenticated_tcp = true"),
        ("[volume.a]\nexports = [\"nbd=localhost:1\"]\n", 2, "nbd_tls_client_ca"),
        ("nbd_allow_unauthenticated_tcp = true\nexports = [\"nbd=0.0.0.0:1\"]\n", 2, "other hosts can"),
        (
            "exports = [\"nbd=[::1]:1\"]\nnbd_tls_certificate = \"/c\"\nnbd_tls_key = \"/k\"",
            1,
            "does not authenticate clients",
        ),
        ("nbd_tls_certificate = \"/c\"\n", 1, "expected nbd_tls_key as well"),
        ("\nnbd_tls_client_ca = \"/c\"\n", 2, "expected nbd_tls_certificate"),
        ("scan = maybe\n", 1, ""),
        ("[tunables]\nwriteback_percent = [1]\n", 2, "cannot be"),
        ("listen = [\"127.0.0.1:1\",\n\"localhost:1\"]\ntoken_file = \"/t\"\n", 2, "in numbers"),
        ("scan = true\nlisten = [\"127.0.0.1:1\"]\n", 2, "expected token_file"),
        ("token_file = \"/t\"\nlisten = [\"10.0.0.1:1\"]\n", 2, "expected tls_certificate and tls_key"),
        ("token_file = \"/t\"\nlisten = [\"127.0.0.1:1\",\n \"[::]:1\"]\n", 3, "from other hosts"),
        ("token_file = \"/t\"\nlisten = [\"[::ffff:1.2.3.4]:1\"]\n", 2, "from other hosts"),
        ("token_file = \"/t\"\ntls_key = \"/k\"\n", 2, "expected tls_certificate as well"),
        ("tls_certificate = \"/c\"\n", 1, "expected tls_key as well"),
        ("metrics_without_token = 1\n", 1, ""),
    ] {
        let said = Config::parse(text).unwrap_err().to_string();
        assert!(said.starts_with(&format!("line {line}: ")) && said.contains(words), "{text:?}: {said}");
    }
}

#[test]
fn switches_take_words_and_old_words_become_present_ones() {
    let config = Config::parse("[tunables]\nwriteback_running = false\nreplacement = \"reuse\"\n").unwrap();
    assert_eq!(config.tunables(&key("x", "", false))["writeback_running"], "0");
    assert_eq!(config.tunables(&key("x", "", true))["replacement"], "cost_benefit");
    assert_eq!(Config::parse("links = \"\"\n").unwrap().links, Some(PathBuf::new()));
}

/// The error of a value was turned into text.
#[test]
fn a_mistake_has_its_cause() {
    use std::error::Error;
    let cause_of = |text: &str| {
        let mistake = Config::parse(text).expect_err(text);
        mistake.source().and_then(Error::source).map(ToString::to_string).expect(text)
    };
    assert!(cause_of("busy_poll = \"x\"").contains("`x`"));
    assert!(cause_of("exports = [\"ublk=x\"]").contains("expected a device number"));
    assert!(cause_of("listen = [\"x\"]\ntoken_file = \"/t\"").contains("socket address"));
    assert!(cause_of("scan = 1").contains("boolean"));
}

/// Ranges that depend on other tunables are checked with the values of the whole file, in any order.
#[test]
fn values_that_need_each_other_are_accepted_together() {
    for text in [
        "[tunables]\nwriteback_percent = 50\ncutoff_writeback = 60\n",
        "[set.a.tunables]\ncutoff_writeback = 60\n[volume.b.tunables]\nwriteback_percent = 50\n",
        "[tunables]\ncutoff_writeback = 70\ncutoff_writeback_sync = 80\n",
        "[volume.a.tunables]\nwriteback_rate_fp_term_low = 2000\nwriteback_rate_fp_term_mid = 3000\n\
         writeback_rate_fp_term_high = 4000\n",
        "[tunables]\nwriteback_rate_fp_term_mid = 500\n[volume.a.tunables]\nwriteback_rate_fp_term_low = 400\n",
    ] {
        assert!(Config::parse(text).is_ok(), "{text}: {:?}", Config::parse(text));
    }
    let text = "[volume.a.tunables]\nwriteback_rate_fp_term_low = 400\n";
    let said = Config::parse(text).expect_err(text).to_string();
    assert!(said.starts_with("line 2: ") && said.contains("have to ascend"), "{said}");
}

#[test]
fn presets_hold_what_they_say() {
    for (name, values) in PRESETS {
        assert!(Config::parse(&format!("preset = \"{name}\"")).is_ok());
        for (key, value) in *values {
            let (set, device) = owners(key);
            assert!(set != device, "{key}");
            let kept = if set {
                let mut t = SetTunables::default();
                t.set(key, value).unwrap();
                t.raw(key).unwrap()
            } else {
                let mut t = DeviceTunables::default();
                t.set(key, value).unwrap();
                t.raw(key).unwrap()
            };
            assert_eq!(kept, *value, "{name}: {key} is not cut off");
        }
    }
}

#[test]
fn memory_limit_takes_a_size() {
    assert_eq!(Config::parse("").unwrap().memory_limit, None);
    let limit: MemoryLimit = "256MiB".parse().unwrap();
    assert_eq!(Config::parse("memory_limit = \"256MiB\"").unwrap().memory_limit, Some(limit));
    // A number is one of bytes.
    assert_eq!(Config::parse("memory_limit = 268435456").unwrap().memory_limit, Some(limit));
    let said = Config::parse("memory_limit = true").unwrap_err().to_string();
    assert!(said.ends_with("found \"true\""), "{said}");
    let said = Config::parse("\nmemory_limit = \"1M\"").unwrap_err().to_string();
    assert!(said.starts_with("line 2: memory_limit: expected a size of at least 64 MiB"), "{said}");
}

#[test]
fn busy_poll_takes_words_and_microseconds() {
    assert_eq!(Config::default().busy_poll, BusyPoll::Auto);
    assert_eq!(Config::parse("").unwrap().busy_poll, BusyPoll::Auto);
    assert_eq!(Config::parse("busy_poll = \"never\"").unwrap().busy_poll, BusyPoll::Never);
    let fifty: BusyPoll = "50".parse().unwrap();
    assert_eq!(Config::parse("busy_poll = 50").unwrap().busy_poll, fifty);
    for bad in ["scan = true\nbusy_poll = 20000", "\nbusy_poll = true", "\nbusy_poll = \"much\""] {
        let said = Config::parse(bad).unwrap_err().to_string();
        assert!(said.starts_with("line 2: busy_poll: "), "{said}");
    }
}

/// An export that cannot come up names the key that gives it another place.
#[test]
fn the_key_of_the_exports_of_a_volume() {
    let text = "exports = [\"auto\"]\n[volume.films]\nexports = [\"ublk\"]\n[volume.\"my music\"]\nexports = [\"ublk\"]\n\
                [volume.other]\npreset = \"latency\"\n";
    let config = Config::parse(text).unwrap();
    for (label, key) in [
        ("Films", "`exports` in [volume.films]"),
        ("my music", "`exports` in [volume.\"my music\"]"),
        ("other", "`exports`"),
        ("", "`exports`"),
    ] {
        let of = Key { id: "u".into(), label: label.into(), set: false };
        assert_eq!(config.exports_key(&of), key, "{label}");
    }
}
