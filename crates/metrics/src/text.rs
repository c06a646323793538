//! The text formats of Prometheus and OpenMetrics.
//!
//! Owns the syntax of both text formats: names, labels and their escapes, numbers, histograms. It does not use a metrics library,
//! because such a library has its own registry of live metrics, and the engine counts these figures. Must not know the families.

use std::fmt::Write;

use io::Histogram;

/// A text format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Prometheus' text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The format that the client's `Accept` header requests.
    pub fn accepted(accept: &str) -> Format {
        if accept.contains("application/openmetrics-text") { Format::OpenMetrics } else { Format::Prometheus }
    }

    /// The `Content-Type` of the format.
    pub const fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The type of a family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A number that only grows until the process ends.
    Counter,
    /// A number that grows and shrinks.
    Gauge,
    /// A distribution of times in seconds.
    Histogram,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// Upper bounds of the buckets of requests, as powers of two of a nanosecond: from 65 us to 268 ms.
///
/// Histograms count exactly at these bounds. The bounds are few, because a volume has a histogram for each operation and outcome,
/// and each bound is a series of each histogram. The ranges distinguish memory (to 65 us), an SSD (to 524 us), an SSD under load (to
/// 4.2 ms), a disk (to 34 ms), a disk under load (to 268 ms), and a device that hangs. The bound 34 ms is just below
/// the 50 ms of the alert UbcacheSlowCache, so that the alert does not depend on interpolation over a whole range.
pub(crate) const REQUEST_BOUNDS: &[u32] = &[16, 19, 22, 25, 28];

/// Upper bounds of the buckets of background work, in the same unit: 4.2 ms and 134 ms.
///
/// Shorter work delays no client, and the longest slice has a metric of its own.
pub(crate) const WORK_BOUNDS: &[u32] = &[22, 27];

/// The rendered text so far.
pub(crate) struct Text {
    out: String,
    format: Format,
    name: &'static str,
}

impl Text {
    pub(crate) fn new(format: Format) -> Text {
        Text { out: String::new(), format, name: "" }
    }

    /// Begins a family; its samples follow.
    pub(crate) fn family(&mut self, name: &'static str, kind: Kind, help: &str) {
        self.name = name;
        // OpenMetrics omits `_total` in the name of a counter's family; the samples have it.
        let title = match (self.format, kind) {
            (Format::OpenMetrics, Kind::Counter) => name.strip_suffix("_total").unwrap_or(name),
            _ => name,
        };
        let _ = writeln!(self.out, "# HELP {title} {help}");
        let _ = writeln!(self.out, "# TYPE {title} {}", kind.name());
    }

    pub(crate) fn count(&mut self, labels: Labels<'_>, value: u64) {
        self.begin("", labels, None);
        let _ = writeln!(self.out, " {value}");
    }

    pub(crate) fn value(&mut self, labels: Labels<'_>, value: f64) {
        self.begin("", labels, None);
        let _ = writeln!(self.out, " {value}");
    }

    /// Writes the series of a histogram with these upper bounds. A histogram without a time has no series.
    ///
    /// Of the bounds below the shortest time, only the last one is written: it is the lower end of the first bucket with a
    /// count. The others have the count 0, so a sum over several histograms does not need them.
    pub(crate) fn histogram(&mut self, labels: Labels<'_>, times: &Histogram, bounds: &[u32]) {
        let count = times.count();
        if count == 0 {
            return;
        }
        let empty = bounds.iter().take_while(|shift| times.below(**shift) == 0).count();
        for shift in bounds.iter().skip(empty.saturating_sub(1)) {
            let end = format!("{}", (1u64 << *shift) as f64 / 1e9);
            self.begin("_bucket", labels, Some(&end));
            let _ = writeln!(self.out, " {}", times.below(*shift));
        }
        self.begin("_bucket", labels, Some("+Inf"));
        let _ = writeln!(self.out, " {count}");
        self.begin("_sum", labels, None);
        let _ = writeln!(self.out, " {}", times.sum().as_seconds());
        self.begin("_count", labels, None);
        let _ = writeln!(self.out, " {count}");
    }

    fn begin(&mut self, end: &str, labels: Labels<'_>, le: Option<&str>) {
        self.out.push_str(self.name);
        self.out.push_str(end);
        let mut mark = '{';
        // Both formats treat a label with an empty value as an absent label.
        for (name, value) in labels.iter().copied().filter(|l| !l.1.is_empty()).chain(le.map(|le| ("le", le)))
        {
            self.out.push(mark);
            mark = ',';
            self.out.push_str(name);
            self.out.push_str("=\"");
            for c in value.chars() {
                match c {
                    '\\' => self.out.push_str("\\\\"),
                    '"' => self.out.push_str("\\\""),
                    '\n' => self.out.push_str("\\n"),
                    // A label of a disk may have been written by another host, and must not act upon a terminal.
                    c if c.is_control() => c.escape_unicode().for_each(|e| match e {
                        '\\' => self.out.push_str("\\\\"),
                        e => self.out.push(e),
                    }),
                    c => self.out.push(c),
                }
            }
            self.out.push('"');
        }
        if mark == ',' {
            self.out.push('}');
        }
    }

    pub(crate) fn end(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.out.push_str("# EOF\n");
        }
        self.out
    }
}

#[cfg(test)]
mod tests {
    use io::Nanos;

    use super::*;

    #[test]
    fn a_family_of_each_kind() {
        let mut times = Histogram::default();
        times.record(Nanos::from_us(100));
        times.record(Nanos::from_secs(60));
        let mut text = Text::new(Format::OpenMetrics);
        text.family("a_total", Kind::Counter, "Things.");
        text.count(&[("x", "1"), ("none", ""), ("y", "a\"b\\c\nd\u{1b}")], u64::MAX);
        text.family("b", Kind::Gauge, "A level.");
        text.value(&[], -1.5);
        text.family("c_seconds", Kind::Histogram, "Times.");
        text.histogram(&[("op", "read")], &times, REQUEST_BOUNDS);
        text.histogram(&[("op", "write")], &Histogram::default(), REQUEST_BOUNDS);
        let text = text.end();
        let begin = "# HELP a Things.\n# TYPE a counter\na_total{x=\"1\",y=\"a\\\"b\\\\c\\nd\\\\u{1b}\"} 18446744073709551615\n\
                     # HELP b A level.\n# TYPE b gauge\nb -1.5\n# HELP c_seconds Times.\n# TYPE c_seconds histogram\n\
                     c_seconds_bucket{op=\"read\",le=\"0.000065536\"} 0\n\
                     c_seconds_bucket{op=\"read\",le=\"0.000524288\"} 1\n";
        assert!(text.starts_with(begin), "{text}");
        let end = "c_seconds_bucket{op=\"read\",le=\"0.268435456\"} 1\nc_seconds_bucket{op=\"read\",le=\"+Inf\"} 2\n\
                   c_seconds_sum{op=\"read\"} 60.0001\nc_seconds_count{op=\"read\"} 2\n# EOF\n";
        assert!(text.ends_with(end), "{text}");
        let mut text = Text::new(Format::Prometheus);
        text.histogram(&[], &times.since(&Histogram::of_buckets([(Nanos::from_us(100), 1)])), REQUEST_BOUNDS);
        assert_eq!(
            text.end().lines().next(),
            Some("_bucket{le=\"0.268435456\"} 0"),
            "the bounds before tell nothing"
        );
        let mut text = Text::new(Format::Prometheus);
        text.family("a_total", Kind::Counter, "Things.");
        assert_eq!(text.end(), "# HELP a_total Things.\n# TYPE a_total counter\n");
    }

    #[test]
    fn clients_say_what_they_want() {
        assert_eq!(
            Format::accepted("text/plain;q=0.5, application/openmetrics-text;version=1.0.0"),
            Format::OpenMetrics
        );
        assert_eq!(Format::accepted("*/*"), Format::Prometheus);
    }
}
