//! Plots of values over time, one file for each thing that was drawn.

use std::io;
use std::path::Path;

use plotters::prelude::*;

use crate::result::{Results, Series};
use crate::subject::Subject;

const SIZE: (u32, u32) = (900, 480);

/// Writes `B3-<what>.svg` for every kind of series.
///
/// # Errors
/// If a file cannot be written.
pub fn write(results: &Results, dir: &Path) -> io::Result<()> {
    let job = &results.job;
    let mut done: Vec<&str> = Vec::new();
    for s in &results.series {
        if done.contains(&s.what.as_str()) {
            continue;
        }
        done.push(&s.what);
        let same: Vec<&Series> = results.series.iter().filter(|x| x.what == s.what).collect();
        let name = format!("{job}-{}.svg", s.what.replace([' ', '/'], "-").replace(['(', ')'], ""));
        draw(&dir.join(name), &format!("{job}: {}", s.what), &same).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Values span decades (a collapse from thousands to two), so the axis is logarithmic.
fn draw(
    path: &Path,
    title: &str,
    series: &[&Series],
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let points = || series.iter().flat_map(|s| s.points.iter().copied());
    let last = points().map(|p| p.0).fold(1.0, f64::max);
    let top = points().map(|p| p.1).fold(10.0, f64::max);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|e| e.to_string())?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..last, (1.0..top * 1.3).log_scale())
        .map_err(|e| e.to_string())?;
    chart.configure_mesh().x_desc("seconds").light_line_style(WHITE).draw().map_err(|e| e.to_string())?;
    for s in series {
        let nr = Subject::ALL.iter().position(|x| x.name() == s.subject).unwrap_or(0);
        let colour = Palette99::pick(nr).stroke_width(2);
        let line = s.points.iter().map(|(t, v)| (*t, v.max(1.0)));
        chart
            .draw_series(LineSeries::new(line, colour))
            .map_err(|e| e.to_string())?
            .label(s.subject.clone())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK)
        .draw()
        .map_err(|e| e.to_string())?;
    root.present().map_err(|e| e.to_string())?;
    Ok(())
}
