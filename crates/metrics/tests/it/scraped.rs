//! What is scraped.

use std::collections::BTreeSet;

use format::Sector;
use ubcache_metrics::{Figures, Format, HostFigures, render};

use crate::rig;
use crate::tools::{promtool, skipped};

fn busy() -> Figures {
    let set = rig::figures(async |rig| {
        rig.write(0, 8).await;
        rig.read(0, 8).await;
        rig.read(0, 16).await;
        rig.read(4096, 8).await;
        rig.volume.flush().await.unwrap();
        rig.volume.discard(Sector(8192), format::Sectors(8)).await.unwrap();
        rig.volume.set("cache_mode", "none").await.unwrap();
        rig.read(3072, 8).await;
        rig.set.gc().await.unwrap();
    });
    Figures { sets: vec![set], alone: Vec::new(), ..Figures::default() }
}

/// The value of a series.
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|l| l.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().unwrap()
}

#[test]
fn promtool_has_no_complaint() {
    if skipped() {
        return;
    }
    assert_eq!(promtool(&["check", "metrics"], &render(&busy(), Format::Prometheus)), "");
}

#[test]
fn series_say_what_happened() {
    let text = render(&busy(), Format::Prometheus);
    let set = "set=\"07070707-0707-0707-0707-070707070707\"";
    let volume = format!("{set},volume=\"bcache\"");
    let of = |name: &str, more: &str| value(&text, &format!("{name}{{{volume}{more}}}"));
    assert_eq!(of("ubcache_requests_total", ",op=\"read\",outcome=\"hit\""), 1.0);
    assert_eq!(of("ubcache_requests_total", ",op=\"read\",outcome=\"partial\""), 1.0);
    assert_eq!(of("ubcache_request_bytes_total", ",op=\"write\",outcome=\"writeback\""), 4096.0);
    assert_eq!(of("ubcache_request_duration_seconds_count", ",op=\"flush\",outcome=\"done\""), 1.0);
    let le = ",op=\"read\",outcome=\"bypass\",reason=\"mode_none\",le=\"+Inf\"";
    assert_eq!(of("ubcache_request_duration_seconds_bucket", le), 1.0);
    assert_eq!(of("ubcache_bypassed_requests_total", ",reason=\"mode_none\""), 1.0);
    assert_eq!(of("ubcache_bypassed_bytes_total", ",reason=\"discard\""), 4096.0);
    assert_eq!(
        of("ubcache_bypassed_requests_total", ",reason=\"congested\""),
        0.0,
        "also what has not happened"
    );
    assert_eq!(of("ubcache_cache_misses_total", ""), 2.0);
    assert_eq!(of("ubcache_dirty_bytes", ""), 4096.0);
    assert_eq!(of("ubcache_writeback_rate_reason", ",reason=\"stopped\""), 1.0);
    assert_eq!(of("ubcache_writeback_pace", ",pace=\"stopped\""), 1.0, "the name of the release before");
    assert_eq!(of("ubcache_volume_state", ",state=\"dirty\""), 1.0);
    let backing = format!("{{{set},device=\"a \\\"backing\\\" device\",role=\"backing\",op=\"read\"}}");
    assert!(value(&text, &format!("ubcache_device_bytes_total{backing}")) >= 12288.0);
    assert_eq!(value(&text, &format!("ubcache_gc_duration_seconds_count{{{set}}}")), 1.0);
    assert!(
        value(&text, &format!("ubcache_background_slice_duration_seconds_count{{{set},work=\"journal\"}}"))
            > 0.0
    );
}

#[test]
fn both_formats_have_the_same_samples() {
    let figures = busy();
    let samples = |format| {
        let text = render(&figures, format);
        text.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(samples(Format::Prometheus), samples(Format::OpenMetrics));
    assert!(render(&figures, Format::OpenMetrics).ends_with("\n# EOF\n"));
}

#[test]
fn a_device_without_a_cache_is_there_too() {
    let set = rig::figures(async |rig| rig.write(0, 8).await);
    let mut alone = set.volumes.into_iter().next().unwrap();
    alone.name = "alone".into();
    let text =
        render(&Figures { sets: Vec::new(), alone: vec![alone], ..Figures::default() }, Format::Prometheus);
    assert_eq!(value(&text, "ubcache_volume_size_bytes{volume=\"alone\"}"), ((1 << 16) - 16) as f64 * 512.0);
}

/// The names of the labels of a series.
fn labels(series: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let mut rest = series.split_once('{').map_or("", |(_, labels)| labels);
    while let Some((name, value)) = rest.split_once("=\"") {
        names.insert(name.trim_start_matches(','));
        let mut escaped = false;
        let end = value.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        rest = &value[end.unwrap() + 1..];
    }
    names
}

/// The guide lists the labels of each metric, from the same table.
#[test]
fn series_have_the_labels_of_their_families() {
    let mut figures = many(1);
    figures.sets[0].volumes[0].tunables.label = "data".into();
    figures.sets[0].status.label = "fast".into();
    let times = &mut figures.sets[0].times;
    times.work.writeback_batches = times.journal_writes;
    figures.sets[0].checksums = Some(engine::figures::ChecksumState::default());
    let mut host = HostFigures { version: "1.2.3", ..HostFigures::default() };
    host.devices.insert("served", 2);
    host.waiting.insert("operator", 2);
    host.problems.insert("dead_export", 1);
    figures.host = Some(host);
    let text = render(&figures, Format::Prometheus);
    for family in ubcache_metrics::families() {
        let declared: BTreeSet<&str> = family.labels.iter().copied().collect();
        let mut found = BTreeSet::new();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            let ends = if family.kind == "histogram" { &["_bucket", "_sum", "_count"][..] } else { &[""] };
            if ends.iter().any(|end| name.strip_suffix(end) == Some(family.name)) {
                found.extend(labels(line));
            }
        }
        found.remove("le");
        assert_eq!(found, declared, "{}", family.name);
    }
}

/// Volumes with every kind of request that a client makes, `count` of them.
fn many(count: usize) -> Figures {
    let mut figures = busy();
    let set = figures.sets.first_mut().expect("a set");
    let one = set.volumes.first().expect("a volume").clone();
    set.volumes = (0..count)
        .map(|n| {
            let mut volume = one.clone();
            volume.name = format!("bcache{n}");
            volume.backing_name = Some(format!("/dev/disk/by-id/ata-example-of-a-long-name-{n:04}"));
            volume
        })
        .collect();
    figures
}

/// Series and bytes of the text.
fn size(figures: &Figures) -> (usize, usize) {
    let text = render(figures, Format::Prometheus);
    (text.lines().filter(|l| !l.starts_with('#')).count(), text.len())
}

/// Four volumes had 255 KB of metrics, most of it bounds of histograms. The guide has these numbers of series.
#[test]
fn the_size_for_each_volume_is_bounded() {
    let (four, eight) = (size(&many(4)), size(&many(8)));
    let (series, bytes) = ((eight.0 - four.0) / 4, (eight.1 - four.1) / 4);
    assert!(series <= 155 && bytes <= 22_500, "{series} series and {bytes} bytes for each volume");
    let alone = size(&many(0));
    assert!(alone.0 <= 105 && alone.1 <= 21_500, "{alone:?} for a set without volumes");
}

/// Most sets do a part of the work that there is: 244 KB for four sets with a volume each.
#[test]
fn an_operation_that_never_occurred_has_no_histogram() {
    let sets = (0..4).map(|_| rig::figures(async |rig| rig.write(0, 8).await)).collect();
    let text = render(&Figures { sets, ..Figures::default() }, Format::Prometheus);
    let of_reads =
        text.lines().find(|l| l.starts_with("ubcache_request_duration_seconds") && l.contains("read"));
    assert_eq!(of_reads, None);
    assert!(!text.contains("ubcache_gc_duration_seconds_"), "nothing was collected");
    assert!(text.contains("op=\"write\",outcome=\"writeback\",le=\"+Inf\"} 1\n"));
    assert!(text.len() <= 100_000, "{} bytes", text.len());
}

#[test]
fn volumes_and_sets_have_an_info() {
    let mut figures = busy();
    let set = figures.sets.first_mut().expect("a set");
    set.volumes.first_mut().expect("a volume").tunables.label = "da\"ta\u{7}".into();
    let text = render(&figures, Format::Prometheus);
    let volume = text.lines().find(|l| l.starts_with("ubcache_volume_info{")).expect("an info");
    for words in
        [",volume=\"bcache\",label=\"da\\\"ta\\\\u{7}\",uuid=\"", ",device=\"a \\\"backing\\\" device\"} 1"]
    {
        assert!(volume.contains(words), "{words}: {volume}");
    }
    let set = text.lines().find(|l| l.starts_with("ubcache_set_info{")).expect("an info");
    assert!(set.contains("set=\"07070707-") && set.contains(",device=\"") && set.ends_with("\"} 1"), "{set}");
}

/// A set whose cache device could not be served had no series at all, so that no alert fired.
#[test]
fn a_set_that_could_not_start_has_failed() {
    let (down, up) = ("11111111-1111-1111-1111-111111111111", "07070707-0707-0707-0707-070707070707");
    let mut host = HostFigures { version: "1.2.3", ..HostFigures::default() };
    host.failed_sets.extend([down.to_owned(), up.to_owned()]);
    host.waiting.insert("operator", 2);
    host.problems.extend([("dead_export", 1), ("stale", 0)]);
    let mut figures = Figures { host: Some(host), ..busy() };
    figures.not_exported.insert("bcache".into());
    let text = render(&figures, Format::Prometheus);
    assert_eq!(value(&text, &format!("ubcache_set_failed{{set=\"{down}\"}}")), 1.0);
    assert_eq!(value(&text, &format!("ubcache_set_failed{{set=\"{up}\"}}")), 0.0, "its engine knows better");
    assert_eq!(value(&text, "ubcache_devices_waiting{reason=\"operator\"}"), 2.0);
    assert_eq!(value(&text, "ubcache_problems{kind=\"dead_export\"}"), 1.0);
    assert_eq!(value(&text, "ubcache_problems{kind=\"stale\"}"), 0.0);
    assert_eq!(value(&text, "ubcache_volumes_not_exported"), 1.0);
    assert_eq!(value(&text, "ubcache_state_writable"), 0.0);
    assert_eq!(value(&text, "ubcache_build_info{version=\"1.2.3\"}"), 1.0);
    assert_eq!(value(&text, "process_open_fds"), 0.0);
}
