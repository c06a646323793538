//! Compares both tables with the kernel's (semantics section 16), and tests the rules for all settings.

use format::{CacheMode, Replacement};
use proptest::prelude::*;

use super::*;
use crate::policy::replacement::InPlaceOfLru;

const MAX_U32: u64 = u32::MAX as u64;
const MAX_I32: u64 = i32::MAX as u64;

/// Name, shown value, stored value, unit, range: semantics section 16.2; the last ones are not in the kernel.
const DEVICE: &[(&str, &str, &str, Unit, Range)] = &[
    ("label", "", "", Unit::None, Range::Text(32)),
    (
        "cache_mode",
        "[writethrough] writeback writearound none",
        "writethrough",
        Unit::None,
        Range::Choices(&["writethrough", "writeback", "writearound", "none"]),
    ),
    ("readahead_cache_policy", "[all] meta-only", "all", Unit::None, Range::Choices(&["all", "meta-only"])),
    ("stop_when_cache_set_failed", "[auto] always", "auto", Unit::None, Range::Choices(&["auto", "always"])),
    ("sequential_cutoff", "4.0M", "4194304", Unit::Bytes, Range::Number(0, MAX_U32)),
    ("writeback_running", "1", "1", Unit::None, Range::Flag),
    ("writeback_delay", "30", "30", Unit::Seconds, Range::Number(0, MAX_U32)),
    ("writeback_percent", "10", "10", Unit::Percent, Range::Number(0, 40)),
    ("writeback_rate", "512.0k", "1024", Unit::SectorsPerSecond, Range::Number(1, MAX_I32)),
    ("writeback_rate_update_seconds", "5", "5", Unit::Seconds, Range::Number(1, 60)),
    ("writeback_rate_i_term_inverse", "10000", "10000", Unit::None, Range::Number(1, MAX_U32)),
    ("writeback_rate_p_term_inverse", "40", "40", Unit::None, Range::Number(1, MAX_U32)),
    ("writeback_rate_fp_term_low", "1", "1", Unit::None, Range::Number(1, 9)),
    ("writeback_rate_fp_term_mid", "10", "10", Unit::None, Range::Number(2, 999)),
    ("writeback_rate_fp_term_high", "1000", "1000", Unit::None, Range::Number(11, MAX_U32)),
    ("writeback_rate_minimum", "8", "8", Unit::SectorsPerSecond, Range::Number(1, MAX_U32)),
    ("writeback_consider_fragment", "1", "1", Unit::None, Range::Flag),
    ("writeback_metadata", "1", "1", Unit::None, Range::Flag),
    ("io_error_limit", "64", "64", Unit::None, Range::Number(0, MAX_I32)),
    ("io_disable", "0", "0", Unit::None, Range::Flag),
    ("admission", "kernel [cost]", "cost", Unit::None, Range::Choices(&["kernel", "cost"])),
    ("writeback_controller", "kernel [yield]", "yield", Unit::None, Range::Choices(&["kernel", "yield"])),
    ("writeback_latency_ms", "50", "50", Unit::Millis, Range::Number(1, 10_000)),
    ("writeback_bridge", "off [auto] always", "auto", Unit::None, Range::Choices(&["off", "auto", "always"])),
    ("writeback_bridge_limit", "1.0M", "1048576", Unit::Bytes, Range::Number(0, MAX_U32)),
];

/// Name, shown value, stored value, unit, range: semantics section 16.3, semantics section 16.4, semantics section
/// 16.6; the last ones are not in the kernel.
const SET: &[(&str, &str, &str, Unit, Range)] = &[
    ("synchronous", "1", "1", Unit::None, Range::Flag),
    ("journal_delay_ms", "100", "100", Unit::Millis, Range::Number(0, 65535)),
    ("errors", "[unregister] panic", "unregister", Unit::None, Range::Choices(&["unregister", "panic"])),
    ("io_error_limit", "8", "8", Unit::None, Range::Number(0, MAX_U32)),
    ("io_error_halflife", "0", "0", Unit::Ios, Range::Number(0, MAX_U32)),
    ("congested_read_threshold_us", "2000", "2000", Unit::Micros, Range::Number(0, MAX_U32)),
    ("congested_write_threshold_us", "20000", "20000", Unit::Micros, Range::Number(0, MAX_U32)),
    ("gc_always_rewrite", "0", "0", Unit::None, Range::Flag),
    ("btree_shrinker_disabled", "0", "0", Unit::None, Range::Flag),
    ("copy_gc_enabled", "0", "0", Unit::None, Range::Flag),
    ("idle_max_writeback_rate", "1", "1", Unit::None, Range::Flag),
    ("gc_after_writeback", "0", "0", Unit::None, Range::Flag),
    ("io_disable", "0", "0", Unit::None, Range::Flag),
    ("discard", "0", "0", Unit::None, Range::Flag),
    (
        "cache_replacement_policy",
        "[lru] fifo random",
        "lru",
        Unit::None,
        Range::Choices(&["lru", "fifo", "random"]),
    ),
    ("cutoff_writeback", "40", "40", Unit::Percent, Range::Number(0, 70)),
    ("cutoff_writeback_sync", "70", "70", Unit::Percent, Range::Number(0, 90)),
    (
        "overwrite_in_place",
        "off [auto] always",
        "auto",
        Unit::None,
        Range::Choices(&["off", "auto", "always"]),
    ),
    ("replacement", "", "kernel", Unit::None, Range::Choices(InPlaceOfLru::names())),
    ("btree_cache_limit", "1.0G", "1073741824", Unit::Bytes, Range::Number(16 << 20, 1 << 50)),
    ("scrub_rate", "0", "0", Unit::BytesPerSecond, Range::Number(0, 1 << 40)),
    ("scrub_share", "50", "50", Unit::Percent, Range::Number(1, 100)),
    ("scrub_interval_days", "30", "30", Unit::None, Range::Number(0, 3650)),
    ("group_timeout_ms", "20000", "20000", Unit::Millis, Range::Number(0, 3_600_000)),
    ("writeback_batch_sectors", "65536", "65536", Unit::Sectors, Range::Number(8, 2 << 20)),
];

fn is_as_specified(infos: Vec<TunableInfo>, table: &[(&str, &str, &str, Unit, Range)]) {
    assert_eq!(infos.len(), table.len());
    for (info, (name, shown, raw, unit, range)) in infos.iter().zip(table) {
        assert_eq!(info.name, *name);
        // The table of policies has the choices of `replacement`.
        let policies = InPlaceOfLru::names().join(" ").replacen("kernel", "[kernel]", 1);
        let shown = if *name == "replacement" { &policies } else { *shown };
        assert_eq!((&*info.value, &*info.raw, &*info.default), (shown, *raw, *raw), "{name}");
        assert_eq!((info.unit, &info.range), (*unit, range), "{name}");
        assert!(!info.doc.is_empty() && !info.doc.contains('\n') && !info.doc.ends_with('.'), "{name}");
    }
}

#[test]
fn every_default_unit_and_range_is_as_specified() {
    is_as_specified(DeviceTunables::default().iter().collect(), DEVICE);
    is_as_specified(SetTunables::default().iter().collect(), SET);
}

#[test]
fn listings_tell_what_is_stored_where() {
    let device = DeviceTunables::new(CacheMode::Writeback, "data");
    let stored: Vec<_> =
        device.iter().filter(|k| k.stored == Stored::Superblock).map(|k| (k.name, k.raw)).collect();
    assert_eq!(stored, [("label", "data".to_owned()), ("cache_mode", "writeback".to_owned())]);
    let set = SetTunables::default();
    let stored: Vec<_> = set.iter().filter(|k| k.stored == Stored::Superblock).map(|k| k.name).collect();
    assert_eq!(stored, ["synchronous", "discard", "cache_replacement_policy"]);
    let own: Vec<_> = set.iter().filter(|k| !k.in_kernel).map(|k| k.name).collect();
    assert_eq!(
        own,
        [
            "overwrite_in_place",
            "replacement",
            "btree_cache_limit",
            "scrub_rate",
            "scrub_share",
            "scrub_interval_days",
            "group_timeout_ms",
            "writeback_batch_sectors"
        ]
    );
    let own: Vec<_> = device.iter().filter(|k| !k.in_kernel).map(|k| k.name).collect();
    assert_eq!(
        own,
        [
            "admission",
            "writeback_controller",
            "writeback_latency_ms",
            "writeback_bridge",
            "writeback_bridge_limit"
        ]
    );
}

#[test]
fn values_are_read_and_clamped_as_the_kernel_does() {
    for (name, value, raw) in [
        ("sequential_cutoff", "0", "0"),
        ("sequential_cutoff", "4294967296", "4294967295"),
        ("sequential_cutoff", "8M", "8388608"),
        ("sequential_cutoff", "0.5k", "512"),
        ("writeback_percent", "41", "40"),
        ("writeback_percent", " 7\n", "7"),
        ("writeback_rate", "0", "1"),
        ("writeback_rate", "99999999999", "2147483647"),
        ("writeback_rate_update_seconds", "61", "60"),
        ("writeback_rate_update_seconds", "0", "1"),
        ("writeback_rate_p_term_inverse", "0", "1"),
        ("io_error_limit", "4294967295", "2147483647"),
        ("writeback_running", "0", "0"),
        ("writeback_running", "17", "1"),
        ("cache_mode", "writearound\n", "writearound"),
        ("readahead_cache_policy", "meta-only", "meta-only"),
        ("stop_when_cache_set_failed", "always", "always"),
        ("label", "two words \n", "two words "),
        ("label", "12345678901234567890123456789012", "12345678901234567890123456789012"),
    ] {
        let mut t = DeviceTunables::default();
        t.set(name, value).unwrap();
        assert_eq!(t.raw(name).unwrap(), raw, "{name}={value}");
    }
    for (name, value, raw) in [
        ("journal_delay_ms", "70000", "65535"),
        ("io_error_halflife", "87", "0"),
        ("io_error_halflife", "1000", "968"),
        ("io_error_halflife", "4294967295", "4294967248"),
        ("cache_replacement_policy", "random", "random"),
        ("errors", "panic", "panic"),
        ("btree_cache_limit", "1", "16777216"),
        ("btree_cache_limit", "256M", "268435456"),
        ("cutoff_writeback", "71", "70"),
        ("cutoff_writeback", "0", "40"),
        ("cutoff_writeback_sync", "91", "90"),
        ("cutoff_writeback_sync", "0", "70"),
        ("gc_after_writeback", "2", "1"),
    ] {
        let mut t = SetTunables::default();
        t.set(name, value).unwrap();
        assert_eq!(t.raw(name).unwrap(), raw, "{name}={value}");
    }
}

#[test]
fn refusals_name_key_value_and_range() {
    let mut t = DeviceTunables::default();
    for (name, value, message) in [
        (
            "writeback_percent",
            "ten",
            "writeback_percent: expected a decimal number, 0 to 40 %, found \"ten\"",
        ),
        ("writeback_percent", "-1", "writeback_percent: expected a decimal number, 0 to 40 %, found \"-1\""),
        (
            "writeback_rate",
            "4k",
            "writeback_rate: expected a decimal number, also with a unit such as 4MiB/s, 1 to 2147483647 sectors/s, \
             found \"4k\"",
        ),
        (
            "sequential_cutoff",
            "4 MB",
            "sequential_cutoff: expected a decimal number, also with a unit such as 512KiB or 4MiB, \
             0 to 4294967295 bytes, found \"4 MB\"",
        ),
        ("writeback_running", "yes", "writeback_running: expected a decimal number, 0 or 1, found \"yes\""),
        (
            "cache_mode",
            "Writeback",
            "cache_mode: expected one of writethrough, writeback, writearound, none, found \"Writeback\"",
        ),
        (
            "label",
            "123456789012345678901234567890123",
            "label: expected at most 32 bytes, without zero bytes, found \"123456789012345678901234567890123\"",
        ),
        ("label", "a\0b", "label: expected at most 32 bytes, without zero bytes, found \"a\\0b\""),
        ("dirty_data", "0", "unknown tunable dirty_data"),
        ("", "", "unknown tunable \"\""),
        ("writeback_precent", "5", "unknown tunable writeback_precent; did you mean writeback_percent?"),
        ("running", "1", "unknown tunable running; did you mean writeback_running?"),
        ("writeback", "1", "unknown tunable writeback"),
    ] {
        assert_eq!(t.set(name, value).unwrap_err().to_string(), message);
    }
    assert_eq!(t, DeviceTunables::default(), "nothing has changed");
    assert_eq!(t.get("Label"), Err(TunableError::Unknown { name: "Label".into(), nearest: Some("label") }));
    assert!(t.raw("io_errors").is_err());
}

/// A value can be typed as it is printed, in one table of names for both kinds of settings.
#[test]
fn values_with_units_are_taken() {
    let mut device = DeviceTunables::default();
    for (name, value, raw) in [
        ("writeback_delay", "10s", "10"),
        ("writeback_delay", "5min", "300"),
        ("sequential_cutoff", "512KiB", "524288"),
        ("writeback_rate_minimum", "1MiB/s", "2048"),
        ("writeback_latency_ms", "2s", "2000"),
        ("writeback_percent", "20%", "20"),
    ] {
        device.check(name, value).unwrap();
        device.set(name, value).unwrap();
        assert_eq!(device.raw(name).unwrap(), raw, "{name}={value}");
        assert_eq!(number(name, value).map(|n| n.to_string()).as_deref(), Some(raw), "{name}={value}");
    }
    let mut set = SetTunables::default();
    set.set("journal_delay_ms", "500ms").unwrap();
    set.set("btree_cache_limit", "64MiB").unwrap();
    set.set("scrub_rate", "10 MiB/s").unwrap();
    assert_eq!((set.journal_delay_ms, set.btree_cache_limit, set.scrub_rate), (500, 64 << 20, 10 << 20));
    assert_eq!(number("journal_delay_ms", "1s"), Some(1000));
    assert_eq!((number("label", "5"), number("nothing", "5")), (None, None));
    let said = device.check("writeback_delay", "5min30").unwrap_err().to_string();
    assert!(said.contains("also with a unit such as 10s or 5min"), "{said}");
}

/// `4194304 bytes`, as `get` prints it, was refused.
#[test]
fn every_value_can_be_typed_with_the_unit_that_is_printed() {
    type Check = fn(&str, &str) -> Result<(), TunableError>;
    let (devices, sets) = (DeviceTunables::default(), SetTunables::default());
    let of_devices = devices.iter().map(|info| (info, DeviceTunables::check_alone as Check));
    let of_sets = sets.iter().map(|info| (info, SetTunables::check_alone as Check));
    let mut checked = 0;
    for (info, check) in of_devices.chain(of_sets) {
        let mut values = vec![info.raw.clone()];
        if let Range::Number(least, most) = info.range {
            values.extend([least.to_string(), most.to_string()]);
        }
        for value in values {
            let printed = format!("{value}{}", info.unit.suffix());
            assert_eq!(check(info.name, &printed), Ok(()), "{}={printed}", info.name);
        }
        checked += 1;
    }
    assert_eq!(checked, DEVICE.len() + SET.len());
}

/// An operator who typed 99 got 40 without a word. `check` refuses each value that `set` would clamp, and nothing else.
#[test]
fn a_value_out_of_range_is_refused_with_the_range() {
    let device = DeviceTunables::default();
    for (name, value, message) in [
        (
            "writeback_percent",
            "99",
            "writeback_percent: expected 0 to 40 %, found 99; the set's cutoff_writeback is the upper limit",
        ),
        (
            "writeback_delay",
            "9999999999",
            "writeback_delay: expected 0 to 4294967295 s, found 9999999999; give a",
        ),
        (
            "sequential_cutoff",
            "1T",
            "sequential_cutoff: expected 0 to 4294967295 bytes, found 1T; give a number",
        ),
        (
            "writeback_running",
            "2",
            "writeback_running: expected 0 or 1, found 2; give a number in this range",
        ),
        (
            "writeback_rate_fp_term_low",
            "10",
            "1 to 9, found 10; the factors low, mid and high have to ascend",
        ),
    ] {
        let refused = device.check(name, value).expect_err(name);
        assert!(matches!(refused, TunableError::OutOfRange { .. }), "{refused:?}");
        assert!(refused.to_string().contains(message), "{refused}");
    }
    for (name, value) in [
        ("writeback_percent", "40"),
        ("sequential_cutoff", "4M"),
        ("label", "a"),
        ("io_disable", "0"),
        ("io_disable", "1"),
    ] {
        assert_eq!(device.check(name, value), Ok(()), "{name}={value}");
    }
    for (name, value) in [("cache_mode", "sideways"), ("writeback_percent", "x"), ("nothing", "1")] {
        assert!(device.check(name, value).is_err(), "{name}={value}");
    }
    assert!(SetTunables::default().check("cutoff_writeback", "71").is_err());
    assert!(SetTunables::default().check("btree_cache_limit", "1M").is_err());
}

/// A value that needs another value of a second setting is possible, until the settings are known.
#[test]
fn a_value_that_depends_on_others_is_checked_with_them() {
    for (name, value) in [
        ("writeback_percent", "70"),
        ("writeback_rate_fp_term_low", "4294967293"),
        ("writeback_rate_fp_term_mid", "4294967294"),
        ("writeback_rate_fp_term_high", "3"),
    ] {
        assert_eq!(DeviceTunables::check_alone(name, value), Ok(()), "{name}={value}");
        assert!(DeviceTunables::default().check(name, value).is_err(), "{name}={value}");
    }
    assert!(DeviceTunables::check_alone("writeback_percent", "71").is_err());
    assert!(DeviceTunables::check_alone("writeback_rate_fp_term_high", "2").is_err());
    assert_eq!(SetTunables::check_alone("cutoff_writeback_sync", "90"), Ok(()));
    assert!(SetTunables::check_alone("cutoff_writeback_sync", "91").is_err());
}

#[test]
fn the_current_choice_is_in_brackets() {
    let mut t = SetTunables::default();
    t.set("cache_replacement_policy", "fifo").unwrap();
    assert_eq!(t.cache_replacement_policy, Replacement::Fifo);
    assert_eq!(t.get("cache_replacement_policy").unwrap(), "lru [fifo] random");
    let t = DeviceTunables::new(CacheMode::None, "");
    assert_eq!(t.get("cache_mode").unwrap(), "writethrough writeback writearound [none]");
}

#[test]
fn settings_that_limit_each_other_stay_in_order() {
    let mut t = DeviceTunables::default();
    t.set("writeback_rate_fp_term_low", "500").unwrap();
    assert_eq!(t.writeback_rate_fp_term_low, 9);
    t.set("writeback_rate_fp_term_mid", "1").unwrap();
    assert_eq!(t.writeback_rate_fp_term_mid, 10);
    t.set("writeback_rate_fp_term_high", "1").unwrap();
    assert_eq!(t.writeback_rate_fp_term_high, 11);
    t.set("writeback_rate_fp_term_mid", "99").unwrap();
    assert_eq!(t.writeback_rate_fp_term_mid, 10, "9 < 10 < 11 leaves no room");

    t.set("writeback_percent", "35").unwrap();
    t.set_cutoff_writeback(20);
    assert_eq!(t.writeback_percent, 20);
    t.set("writeback_percent", "35").unwrap();
    assert_eq!(t.writeback_percent, 20);

    let mut t = SetTunables::default();
    t.set("cutoff_writeback_sync", "30").unwrap();
    assert_eq!((t.cutoff_writeback, t.cutoff_writeback_sync), (30, 30));
    t.set("cutoff_writeback", "0").unwrap();
    assert_eq!(t.cutoff_writeback, 30, "the default is above the other one");
}

#[test]
fn several_settings_at_once_are_taken_over_in_any_order() {
    let settings = [
        ("writeback_rate_fp_term_low", "2000"),
        ("writeback_rate_fp_term_mid", "3000"),
        ("writeback_rate_fp_term_high", "4000"),
    ];
    let mut forward = DeviceTunables::default();
    forward.set_all(settings.into_iter()).unwrap();
    let low_mid_high = |t: &DeviceTunables| {
        (t.writeback_rate_fp_term_low, t.writeback_rate_fp_term_mid, t.writeback_rate_fp_term_high)
    };
    assert_eq!(low_mid_high(&forward), (2000, 3000, 4000));
    let mut back = forward.clone();
    back.set_all(
        [
            ("writeback_rate_fp_term_high", "3"),
            ("writeback_rate_fp_term_mid", "2"),
            ("writeback_rate_fp_term_low", "1"),
        ]
        .into_iter(),
    )
    .unwrap();
    assert_eq!(low_mid_high(&back), (1, 2, 3));
    let before = back.clone();
    let half_wrong = [("writeback_delay", "1"), ("writeback_percent", "?")];
    assert!(back.set_all(half_wrong.into_iter()).is_err());
    assert_eq!(back, before, "all or nothing");

    let mut set = SetTunables::default();
    set.set_all([("cutoff_writeback", "70"), ("cutoff_writeback_sync", "80")].into_iter()).unwrap();
    set.set_all([("cutoff_writeback", "10"), ("cutoff_writeback_sync", "20")].into_iter()).unwrap();
    assert_eq!((set.cutoff_writeback, set.cutoff_writeback_sync), (10, 20));
}

/// A value for a setting: plausible, out of range, or not a value.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<u64>().prop_map(|n| n.to_string()),
        (0u64..2000).prop_map(|n| n.to_string()),
        "[a-z0-9.+ -]{0,40}",
        prop::sample::select(vec!["writeback", "none", "random", "panic", "always", "meta-only", "64M"])
            .prop_map(str::to_owned),
    ]
}

proptest! {
    #[test]
    fn no_sequence_of_settings_leaves_the_ranges(
        steps in prop::collection::vec((any::<prop::sample::Index>(), any_value(), 0u8..=70), 1..60)
    ) {
        let mut device = DeviceTunables::default();
        let mut set = SetTunables::default();
        for (index, value, cutoff) in steps {
            let _ = device.set(DEVICE[index.index(DEVICE.len())].0, &value);
            let _ = set.set(SET[index.index(SET.len())].0, &value);
            device.set_cutoff_writeback(cutoff);
            for info in device.iter().chain(set.iter()) {
                if let Range::Number(min, max) = info.range {
                    let value: u64 = info.raw.parse().unwrap();
                    prop_assert!((min..=max).contains(&value), "{}: {value} in {min}..={max}", info.name);
                }
            }
            prop_assert!(device.writeback_rate_fp_term_low < device.writeback_rate_fp_term_mid);
            prop_assert!(device.writeback_rate_fp_term_mid < device.writeback_rate_fp_term_high);
            prop_assert!(device.writeback_percent <= cutoff);
            prop_assert!(set.cutoff_writeback <= set.cutoff_writeback_sync);
            prop_assert_eq!(set.io_error_halflife % 88, 0);
        }
    }

    /// The values in a listing restore the same settings.
    #[test]
    fn raw_values_restore_everything(
        steps in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..60)
    ) {
        let mut device = DeviceTunables::default();
        let mut set = SetTunables::default();
        for (index, value) in steps {
            let _ = device.set(DEVICE[index.index(DEVICE.len())].0, &value);
            let _ = set.set(SET[index.index(SET.len())].0, &value);
        }
        let saved: Vec<_> = device.iter().collect();
        let mut restored = DeviceTunables::default();
        restored.set_all(saved.iter().map(|k| (k.name, &*k.raw))).unwrap();
        prop_assert_eq!(restored, device);
        let saved: Vec<_> = set.iter().collect();
        let mut restored = SetTunables::default();
        restored.set_all(saved.iter().map(|k| (k.name, &*k.raw))).unwrap();
        prop_assert_eq!(restored, set);
    }
}

/// A policy of our own applies only in place of lru, and only if it is set.
#[test]
fn a_policy_of_our_own_takes_the_place_of_lru() {
    let of_the_kernel =
        [("lru", "kernel", "lru"), ("fifo", "kernel", "fifo"), ("random", "kernel", "random")];
    let own = InPlaceOfLru::names()[1..].iter();
    let own =
        own.flat_map(|name| [("lru", *name, *name), ("fifo", name, "fifo"), ("random", name, "random")]);
    for (policy, replacement, in_use) in of_the_kernel.into_iter().chain(own) {
        let mut t = SetTunables::default();
        t.set("cache_replacement_policy", policy).unwrap();
        t.set("replacement", replacement).unwrap();
        assert_eq!(t.policy().name, in_use, "{policy}, {replacement}");
    }
}

/// Settings that an operator or a state directory has from the release before are accepted, and shown with the new name.
#[test]
fn the_former_name_of_a_policy_is_accepted() {
    let mut t = SetTunables::default();
    t.set("replacement", "reuse").unwrap();
    assert_eq!(t.policy().name, "cost_benefit");
    let shown = t.iter().find(|tunable| tunable.name == "replacement").unwrap();
    assert!(shown.value.starts_with("kernel [cost_benefit]"), "{}", shown.value);
    assert_eq!(shown.raw, "cost_benefit");
    assert!(t.set("replacement", "reused").unwrap_err().to_string().contains("kernel, cost_benefit"));
}
