//! The dashboard and the alert rules that are shipped.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::tools::{promtool, root, skipped};

const DASHBOARD: &str = "packaging/grafana/ubcache.json";
const RULES: &str = "packaging/prometheus/ubcache.rules.yml";

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).expect(path)
}

/// Every name in a text that looks like a metric of ours.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|w| w.starts_with("ubcache_")).map(str::to_owned).collect()
}

#[track_caller]
fn all_exist(names: &BTreeSet<String>) {
    let known: BTreeSet<String> = ubcache_metrics::names().into_iter().collect();
    let unknown: Vec<_> = names.difference(&known).collect();
    assert!(unknown.is_empty(), "no such metric: {unknown:?}");
}

#[test]
fn every_metric_of_the_dashboard_exists() {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut names = BTreeSet::new();
    for panel in panels {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let found = named(target["expr"].as_str().unwrap());
            assert!(!found.is_empty(), "{}: a query without a metric", panel["title"]);
            names.extend(found);
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        names.extend(named(variable["query"].as_str().unwrap()));
    }
    assert!(names.len() >= 20, "{names:?}");
    all_exist(&names);
    // Panels do not lie over each other.
    let mut ids = BTreeSet::new();
    for panel in panels {
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(ids.insert((at("x"), at("y"))) && at("x") + at("w") <= 24, "{}", panel["title"]);
    }
}

#[test]
fn every_metric_of_the_alert_rules_exists() {
    let rules = read(RULES);
    let expressions: Vec<&str> = rules.lines().filter(|l| !l.trim_start().starts_with('#')).collect();
    all_exist(&named(&expressions.join("\n")));
    assert!(expressions.iter().filter(|l| l.contains("- alert:")).count() >= 8);
}

#[test]
fn promtool_accepts_the_alert_rules() {
    if !skipped() {
        let said = promtool(&["check", "rules", RULES], "");
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

/// Bit rot had no rule. Damaged dirty data is for a person at once, damaged clean data for the next working day.
#[test]
fn the_rules_report_bit_rot() {
    if skipped() {
        return;
    }
    let alert = |name: &str, severity: &str, fires: &str| {
        let labels =
            if fires.is_empty() { String::new() } else { format!("\n              severity: {severity}") };
        let expected = if fires.is_empty() {
            "[]".to_owned()
        } else {
            format!("\n          - exp_labels:\n              set: {fires}{labels}")
        };
        format!("      - eval_time: 1h\n        alertname: {name}\n        exp_alerts: {expected}\n")
    };
    let rules = root().join(RULES).canonicalize().unwrap();
    let group = |dirty: &str, clean: &str, expected: [String; 2]| {
        format!(
            "  - interval: 5m\n    input_series:\n\
             \x20     - series: 'ubcache_checksum_damaged_dirty_bytes{{set=\"s\"}}'\n        values: '{dirty}'\n\
             \x20     - series: 'ubcache_checksum_blocks_total{{set=\"s\",result=\"damaged\"}}'\n        values: '{clean}'\n\
             \x20   alert_rule_test:\n{}",
            expected.concat()
        )
    };
    let (page, warn) = ("UbcacheDamagedDirtyData", "UbcacheDamagedData");
    let mut text = format!("rule_files: [\"{}\"]\nevaluation_interval: 5m\ntests:\n", rules.display());
    text += &group("0x20", "0x20", [alert(page, "", ""), alert(warn, "", "")]);
    text += &group("0x5 4096x20", "0x20", [alert(page, "critical", "s"), alert(warn, "", "")]);
    text += &group("0x20", "0x5 3x20", [alert(page, "", ""), alert(warn, "warning", "s")]);
    // Promtool compares annotations as well; what they say is not this test's subject.
    let plain: String = read(RULES).lines().filter(|l| !is_annotation(l)).map(|l| format!("{l}\n")).collect();
    let dir = tempfile::tempdir().unwrap();
    let (plain_rules, tests) = (dir.path().join("rules.yml"), dir.path().join("tests.yml"));
    std::fs::write(&plain_rules, plain).unwrap();
    let text = text.replace(&rules.display().to_string(), &plain_rules.display().to_string());
    // The label `result` stays on the series of the second rule.
    let text = text.replace("severity: warning", "result: damaged\n              severity: warning");
    std::fs::write(&tests, text).unwrap();
    let said = promtool(&["test", "rules", tests.to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
}

/// Whether a line of the rules is an annotation.
fn is_annotation(line: &str) -> bool {
    let line = line.trim_start();
    ["annotations:", "summary:", "description:"].iter().any(|key| line.starts_with(key))
}

#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    if skipped() {
        return;
    }
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let mut rules = String::from("groups:\n- name: queries\n  rules:\n");
    let panels = dashboard["panels"].as_array().unwrap().iter();
    for target in panels.flat_map(|p| p["targets"].as_array().into_iter().flatten()) {
        let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
        let name = rules.lines().count();
        rules.push_str(&format!("  - record: query:{name}\n    expr: {}\n", Value::from(query)));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("queries.yml");
    std::fs::write(&file, rules).unwrap();
    let said = promtool(&["check", "rules", file.to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
}
