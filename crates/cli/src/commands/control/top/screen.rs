//! The screen of `top` on a terminal.
//!
//! Owns the columns, the keys and the order of the volumes. The terminal is restored when the screen ends, also after an error
//! or a panic. Must not know the counters.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::{Activity, Update, dash, jobs, milliseconds, title};
use crate::failure::Failure;
use crate::size;

/// Width from which the screen has a column for the name, the state and the writeback of a volume.
const WIDE: u16 = 120;

/// A column by which the volumes are sorted. Labels ascend; numbers descend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SortKey {
    Label,
    Reads,
    ReadBytes,
    ReadP50,
    ReadP99,
    Writes,
    WrittenBytes,
    WriteP50,
    WriteP99,
    Hits,
    Dirty,
}

/// The columns that keys choose: the name in the last line, and each key with its column.
const KEYS: [(&str, &[(char, SortKey)]); 7] = [
    ("label", &[('l', SortKey::Label)]),
    ("IOPS", &[('r', SortKey::Reads), ('w', SortKey::Writes)]),
    ("MiB/s", &[('R', SortKey::ReadBytes), ('W', SortKey::WrittenBytes)]),
    ("p50", &[('p', SortKey::ReadP50), ('P', SortKey::WriteP50)]),
    ("p99", &[('t', SortKey::ReadP99), ('T', SortKey::WriteP99)]),
    ("hits", &[('h', SortKey::Hits)]),
    ("dirty", &[('d', SortKey::Dirty)]),
];

impl SortKey {
    fn sort(self, volumes: &mut [Activity]) {
        let us = |ms: Option<f64>| ms.map(|ms| (ms * 1000.0) as u64);
        let number = |v: &Activity| match self {
            SortKey::Label => None,
            SortKey::Reads => Some(v.ops[0].per_s),
            SortKey::ReadBytes => Some(v.ops[0].bytes_per_s),
            SortKey::ReadP50 => us(v.ops[0].p50_ms),
            SortKey::ReadP99 => us(v.ops[0].p99_ms),
            SortKey::Writes => Some(v.ops[1].per_s),
            SortKey::WrittenBytes => Some(v.ops[1].bytes_per_s),
            SortKey::WriteP50 => us(v.ops[1].p50_ms),
            SortKey::WriteP99 => us(v.ops[1].p99_ms),
            SortKey::Hits => v.hit_percent(),
            SortKey::Dirty => Some(v.dirty_bytes),
        };
        let unlabelled = |v: &Activity| (v.label.is_empty(), v.label.clone(), v.name.clone());
        volumes.sort_by_key(|v| (Reverse(number(v)), unlabelled(v)));
    }
}

/// What a key does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Quit,
    Sort(SortKey),
    Nothing,
}

fn action(key: KeyEvent) -> Action {
    if key.kind == KeyEventKind::Release {
        return Action::Nothing;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => Action::Quit,
        KeyCode::Char('q') | KeyCode::Esc => Action::Quit,
        KeyCode::Char(c) if !control => KEYS
            .iter()
            .flat_map(|(_, keys)| *keys)
            .find(|(key, _)| *key == c)
            .map_or(Action::Nothing, |(_, sort)| Action::Sort(*sort)),
        _ => Action::Nothing,
    }
}

/// Shows updates until a key ends the screen, or `count` of them were shown.
pub(super) fn run(
    interval: Duration,
    count: Option<u64>,
    mut update: impl FnMut() -> Result<Update, Failure>,
) -> Result<(), Failure> {
    // The first update fails before the terminal is changed if there is no daemon.
    let first = update()?;
    let mut terminal = ratatui::try_init().map_err(|e| Failure::because("terminal", e))?;
    let shown = show(&mut terminal, interval, count, first, update);
    let restored = ratatui::try_restore().map_err(|e| Failure::because("terminal", e));
    shown.and(restored)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    interval: Duration,
    count: Option<u64>,
    first: Update,
    mut update: impl FnMut() -> Result<Update, Failure>,
) -> Result<(), Failure> {
    let broken = |e: std::io::Error| Failure::because("terminal", e);
    let (mut now, mut sort, mut shown) = (first, SortKey::Label, 1);
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| draw(frame, &now, sort)).map_err(broken)?;
        let left = next.saturating_duration_since(Instant::now());
        if event::poll(left).map_err(broken)? {
            // A change of the size is drawn in the next round.
            if let Event::Key(key) = event::read().map_err(broken)? {
                match action(key) {
                    Action::Quit => return Ok(()),
                    Action::Sort(by) => sort = by,
                    Action::Nothing => {}
                }
            }
        }
        if Instant::now() >= next {
            if count.is_some_and(|count| shown >= count) {
                return Ok(());
            }
            now = update()?;
            shown += 1;
            next = Instant::now() + interval;
        }
    }
}

fn draw(frame: &mut Frame<'_>, update: &Update, sort: SortKey) {
    let jobs = jobs(&update.status);
    let lines = u16::try_from(jobs.len()).unwrap_or(u16::MAX).min(frame.area().height / 4);
    let parts = [Constraint::Length(1), Constraint::Min(3), Constraint::Length(lines), Constraint::Length(1)];
    let [head, middle, below, foot] = Layout::vertical(parts).areas(frame.area());
    let title = match update.seconds {
        None => format!("{}; rates follow with the next update", title(&update.status)),
        Some(seconds) => format!("{}; means of the last {seconds:.1} s", title(&update.status)),
    };
    frame.render_widget(Paragraph::new(title).bold(), head);
    let mut volumes = update.volumes.clone();
    sort.sort(&mut volumes);
    frame.render_widget(table(&volumes, frame.area().width >= WIDE), middle);
    frame.render_widget(Paragraph::new(jobs.into_iter().map(Line::from).collect::<Vec<_>>()), below);
    frame.render_widget(Paragraph::new(keys(sort)), foot);
}

/// The last line: the keys, with the one in use reversed.
fn keys(sort: SortKey) -> Line<'static> {
    let mut spans = vec!["sort ".into()];
    for (name, keys) in KEYS {
        for (n, (key, by)) in keys.iter().enumerate() {
            spans.extend((n > 0).then(|| ",".into()));
            spans.push(if *by == sort { key.to_string().reversed() } else { key.to_string().into() });
        }
        spans.push(format!(":{name} ").into());
    }
    spans.push("q:quit".into());
    Line::from(spans)
}

fn right(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Text::from(text.into()).alignment(Alignment::Right))
}

fn mebibytes(bytes: u64) -> String {
    let value = bytes as f64 / f64::from(1 << 20);
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn table(volumes: &[Activity], wide: bool) -> Table<'static> {
    let mut head = vec![Cell::from("\nLabel")];
    let mut widths = vec![Constraint::Min(8)];
    if wide {
        head.push(Cell::from("\nVolume"));
        widths.push(Constraint::Length(9));
    }
    let columns: [(&str, u16); 10] = [
        ("Read\nIOPS", 6),
        ("Read\nMiB/s", 5),
        ("Read\np50 ms", 6),
        ("Read\np99 ms", 6),
        ("Write\nIOPS", 6),
        ("Write\nMiB/s", 5),
        ("Write\np50 ms", 6),
        ("Write\np99 ms", 6),
        ("Hits\n%", 4),
        ("\nDirty", 10),
    ];
    for (name, width) in columns {
        head.push(right(name));
        widths.push(Constraint::Length(width));
    }
    if wide {
        head.extend([right("Writeback\nlimit"), Cell::from("\nState")]);
        widths.extend([Constraint::Length(14), Constraint::Length(13)]);
    }
    let rows = volumes.iter().map(|v| row(v, wide));
    Table::new(rows, widths).header(Row::new(head).height(2).bold()).column_spacing(1)
}

fn row(v: &Activity, wide: bool) -> Row<'static> {
    let mut cells = match wide {
        true => vec![Cell::from(dash(&v.label)), Cell::from(v.name.clone())],
        false if v.label.is_empty() => vec![Cell::from(v.name.clone())],
        false => vec![Cell::from(v.label.clone())],
    };
    for op in v.ops {
        cells.push(right(op.per_s.to_string()));
        cells.push(right(mebibytes(op.bytes_per_s)));
        cells.push(right(milliseconds(op.p50_ms)));
        cells.push(right(milliseconds(op.p99_ms)));
    }
    cells.push(right(v.hit_percent().map_or_else(|| "-".to_owned(), |p| p.to_string())));
    cells.push(right(size::human(v.dirty_bytes)));
    if wide {
        cells.extend([right(v.writeback.clone()), Cell::from(v.state.clone())]);
    }
    Row::new(cells)
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::super::OpActivity;
    use super::*;

    fn volume(label: &str, name: &str, reads: u64, dirty_bytes: u64) -> Activity {
        let ms = |ms| (reads > 0).then_some(ms);
        let op = OpActivity {
            per_s: reads,
            bytes_per_s: reads * 4096,
            mean_ms: ms(0.5),
            p50_ms: ms(0.25),
            p99_ms: ms(reads as f64 / 10.0),
        };
        Activity {
            label: label.into(),
            name: name.into(),
            state: "dirty".into(),
            ops: [op, OpActivity::default()],
            hits: reads,
            misses: reads,
            dirty_bytes,
            writeback: "not limited".into(),
        }
    }

    fn lines(size: (u16, u16), sort: SortKey) -> Vec<String> {
        let update = Update {
            status: json!({"version": "1", "uptime_seconds": 5, "problems": [],
                "jobs": [{"id": 3, "kind": "drain", "target": "bcache0", "percent": 9}]}),
            seconds: Some(1.0),
            volumes: vec![volume("", "bcache2", 512, 0), volume("one", "bcache0", 256, 5 << 30)],
        };
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("memory");
        terminal.draw(|frame| draw(frame, &update, sort)).expect("memory");
        let cells = terminal.backend().buffer().content().chunks(size.0.into());
        cells.map(|line| line.iter().map(ratatui::buffer::Cell::symbol).collect::<String>()).collect()
    }

    /// 80 columns have everything that the wide screen has of a volume's requests.
    #[test]
    fn the_screen_fits_into_80_columns() {
        let lines = lines((80, 24), SortKey::Label);
        assert_eq!(lines[0].trim_end(), "ubcache 1, up 5 s; means of the last 1.0 s");
        assert_eq!(
            lines[2].split_whitespace().collect::<Vec<_>>().join(" "),
            "Label IOPS MiB/s p50 ms p99 ms IOPS MiB/s p50 ms p99 ms % Dirty"
        );
        assert_eq!(
            lines[3].split_whitespace().collect::<Vec<_>>().join(" "),
            "one 256 1.0 0.25 26 0 0.0 - - 50 5.0 GiB"
        );
        assert!(lines[4].starts_with("bcache2"), "without a label: {}", lines[4]);
        assert_eq!(lines[22].trim_end(), "job 3: drain bcache0: 9 %");
        assert!(lines[23].contains("d:dirty q:quit"), "{}", lines[23]);
        let small = super::tests::lines((20, 4), SortKey::Dirty);
        assert_eq!(small.len(), 4, "a small terminal is no error");
    }

    #[test]
    fn a_wide_screen_has_names_and_writeback() {
        let lines = lines((150, 50), SortKey::Label);
        for words in ["one ", "bcache0", "5.0 GiB", "not limited", "dirty"] {
            assert!(lines[3].contains(words), "{words}: {}", lines[3]);
        }
    }

    #[test]
    fn keys_sort() {
        let first = |sort| lines((80, 24), sort)[3].split_whitespace().next().unwrap_or("").to_owned();
        assert_eq!([SortKey::Label, SortKey::Dirty, SortKey::Reads].map(first), ["one", "one", "bcache2"]);
        // The first volume by its label has the shorter latency.
        assert_eq!([SortKey::ReadP99, SortKey::WriteP99].map(first), ["bcache2", "one"]);
        let key = |c, modifiers| action(KeyEvent::new(KeyCode::Char(c), modifiers));
        assert_eq!(key('d', KeyModifiers::NONE), Action::Sort(SortKey::Dirty));
        assert_eq!(key('R', KeyModifiers::SHIFT), Action::Sort(SortKey::ReadBytes));
        assert_eq!(key('p', KeyModifiers::NONE), Action::Sort(SortKey::ReadP50));
        assert_eq!(key('T', KeyModifiers::SHIFT), Action::Sort(SortKey::WriteP99));
        assert_eq!(key('q', KeyModifiers::NONE), Action::Quit);
        assert_eq!(key('c', KeyModifiers::CONTROL), Action::Quit);
        assert_eq!(key('x', KeyModifiers::NONE), Action::Nothing);
    }
}
