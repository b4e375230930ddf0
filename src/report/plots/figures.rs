//! Which figures a run has and what each shows. Many rows are spread over pages, so that no picture is crowded.

use std::collections::BTreeSet;

use crate::report::read::Trial;
use crate::report::rows::{Field, ReportRow};
use crate::report::tables;

use super::{Bar, Body, Color, Figure, INK, LegendEntry, Line, LineStyle, PALETTE, Panel};

/// Rows on one picture of lines: as many as the palette has colours.
const ROWS_PER_PAGE: usize = PALETTE.len();
/// Bars on one picture.
const BARS_PER_PAGE: usize = 24;
/// Points of one line; more would fall on the same pixels.
const MOST_POINTS: usize = 400;

const MIB: f64 = 1024.0 * 1024.0;
const GIB: f64 = 1024.0 * MIB;

/// All figures, in the order of the page.
pub(super) fn figures(rows: &[ReportRow<'_>]) -> Vec<Figure> {
    let mut figures = Vec::new();
    figures.extend(pages(rows, BARS_PER_PAGE, "max_block_size", "Largest block size per case", block_sizes));
    figures.extend(pages(rows, ROWS_PER_PAGE, "loss", "Training and validation loss per case", losses));
    figures.extend(pages(rows, ROWS_PER_PAGE, "memory", "Memory over time per case", memory));
    figures.extend(pages(rows, ROWS_PER_PAGE, "utilisation", "Utilisation over time per case", utilisation));
    figures
}

/// One figure for each `per_page` rows; even without rows there is one, which says so.
fn pages(rows: &[ReportRow<'_>], per_page: usize, name: &str, title: &str, body: impl Fn(&[ReportRow<'_>]) -> Body) -> Vec<Figure> {
    let count = rows.len().div_ceil(per_page).max(1);
    (0..count)
        .map(|page| {
            let rows = &rows[page * per_page..rows.len().min((page + 1) * per_page)];
            let name = if page == 0 { name.to_owned() } else { format!("{name}-{}", page + 1) };
            let title = if count == 1 { title.to_owned() } else { format!("{title} ({} of {count})", page + 1) };
            Figure { name, title, body: body(rows) }
        })
        .collect()
}

fn block_sizes(rows: &[ReportRow<'_>]) -> Body {
    let bars = rows
        .iter()
        .map(|row| Bar {
            label: format!("{}: {}", row.key, row.label()),
            value: row.block_size.map(|size| size as f64),
            text: match (row.block_size, row.limited_by) {
                (Some(size), Some(limit)) => format!("{size}, limited by {}", tables::limited_by(limit)),
                (Some(size), None) => size.to_string(),
                (None, _) => row.notes.iter().find(|note| note.field == Field::BlockSize).map_or_else(|| "none".to_owned(), |note| note.text.clone()),
            },
        })
        .collect();
    Body::Bars { axis: "largest block size that fits, in tokens per sequence".to_owned(), bars }
}

fn losses(rows: &[ReportRow<'_>]) -> Body {
    let panel = |title: &str, empty: &str| Panel {
        title: title.to_owned(),
        x_axis: "optimizer step".to_owned(),
        y_axis: "loss (nats per token)".to_owned(),
        empty: empty.to_owned(),
        ..Panel::default()
    };
    let mut training = panel("Training loss", "no samples: no training step was recorded");
    let mut validation = panel("Validation loss, at each row's own block size", "no samples: no evaluation was recorded");
    let mut legend = Vec::new();
    for (row, color) in rows.iter().zip(PALETTE) {
        let mut text = format!("{}: {}", row.key, row.label());
        if let Some(trial) = row.shown_training() {
            let all: Vec<(f64, f64)> = trial.series.steps.iter().map(|(_, step)| (step.step as f64, step.loss.0)).collect();
            if let Some((step, _)) = all.iter().find(|(_, loss)| !loss.is_finite()) {
                text += &format!(" (loss is not finite from step {step:.0})");
            }
            training.lines.push(Line { points: thinned(all), color, style: LineStyle::Solid });
            validation.lines.push(Line { points: thinned(evaluations(trial)), color, style: LineStyle::Dots });
        }
        if training.lines.last().is_none_or(|line| line.color != color || line.points.is_empty()) {
            text += " (no samples)";
        }
        legend.push(LegendEntry { mark: Some((color, LineStyle::Solid)), text, alone: true });
    }
    Body::Lines { columns: 2, panels: vec![training, validation], legend }
}

/// Evaluations at the trial's own block size, by step; the last is the one of the result, where the messages lack it.
fn evaluations(trial: &Trial) -> Vec<(f64, f64)> {
    let own = trial.series.evaluations.iter().filter(|(_, evaluation)| evaluation.block_size == trial.block_size);
    let mut points: Vec<(f64, f64)> = own.map(|(step, evaluation)| (*step as f64, evaluation.loss.0)).collect();
    if let Some(result) = &trial.result
        && let Some(evaluation) = &result.evaluation
        && points.last().is_none_or(|(step, _)| *step < result.optimizer_steps as f64)
    {
        points.push((result.optimizer_steps as f64, evaluation.loss.0));
    }
    points
}

/// Two panels a row: what the ranks' allocators count against their budget, and what the machine sees.
fn memory(rows: &[ReportRow<'_>]) -> Body {
    let mut panels = Vec::new();
    let mut any_gpu = BTreeSet::new();
    for row in rows {
        let trial = row.shown_training();
        let steps = trial.map_or(&[][..], |trial| &trial.series.steps);
        let fullest = |bytes: &[u64]| bytes.iter().max().map(|bytes| *bytes as f64);
        let allocated: Vec<_> = steps.iter().filter_map(|(at, step)| Some((*at, fullest(&step.allocated_bytes)?))).collect();
        let peak: Vec<_> = steps.iter().filter_map(|(at, step)| Some((*at, fullest(&step.peak_bytes)?))).collect();
        let mut lines = vec![
            Line { points: thinned(peak), color: PALETTE[1], style: LineStyle::Solid },
            Line { points: thinned(allocated), color: PALETTE[0], style: LineStyle::Solid },
        ];
        if let Some(budget) = row.settings().device.memory {
            lines.push(Line { points: vec![(f64::NAN, budget as f64)], color: INK, style: LineStyle::Level });
        }
        panels.push(over_time(format!("{}: device memory, fullest rank", row.key), "memory", lines));

        let mut lines = Vec::new();
        if let Some(trial) = trial {
            lines.push(Line { points: source(trial, "host", |sample| sample.memory_bytes), color: PALETTE[2], style: LineStyle::Solid });
            for (index, gpu) in gpus(trial).iter().enumerate() {
                any_gpu.insert(index % 3);
                lines.push(Line { points: source(trial, gpu, |sample| sample.memory_bytes), color: PALETTE[3 + index % 3], style: LineStyle::Solid });
            }
        }
        panels.push(over_time(format!("{}: whole trial, as the machine sees it", row.key), "memory", lines));
    }
    let mut legend = vec![
        series("allocated, fullest rank", PALETTE[0], LineStyle::Solid),
        series("peak so far, fullest rank", PALETTE[1], LineStyle::Solid),
        series("budget per rank", INK, LineStyle::Level),
        series("resident host memory, all ranks", PALETTE[2], LineStyle::Solid),
    ];
    legend.extend(gpu_legend(&any_gpu));
    legend.extend(keys(rows));
    Body::Lines { columns: 2, panels: or_none(panels), legend }
}

fn utilisation(rows: &[ReportRow<'_>]) -> Body {
    let mut any_gpu = BTreeSet::new();
    let panels = rows
        .iter()
        .map(|row| {
            let mut lines = Vec::new();
            if let Some(trial) = row.shown_training() {
                lines.push(Line { points: source(trial, "host", |sample| sample.utilization), color: PALETTE[2], style: LineStyle::Solid });
                for (index, gpu) in gpus(trial).iter().enumerate() {
                    any_gpu.insert(index % 3);
                    lines.push(Line {
                        points: source(trial, gpu, |sample| sample.utilization),
                        color: PALETTE[3 + index % 3],
                        style: LineStyle::Solid,
                    });
                }
            }
            over_time(row.key.clone(), "utilisation (%)", lines)
        })
        .collect();
    let mut legend = vec![series("CPU use of the trial, 100 % is one core", PALETTE[2], LineStyle::Solid)];
    legend.extend(gpu_legend(&any_gpu));
    legend.extend(keys(rows));
    Body::Lines { columns: 2, panels: or_none(panels), legend }
}

/// A picture without rows still says so.
fn or_none(panels: Vec<Panel>) -> Vec<Panel> {
    if panels.is_empty() { vec![Panel { empty: "no samples: the run has no rows".to_owned(), ..Panel::default() }] } else { panels }
}

fn series(text: &str, color: Color, style: LineStyle) -> LegendEntry {
    LegendEntry { mark: Some((color, style)), text: text.to_owned(), alone: false }
}

fn gpu_legend(found: &BTreeSet<usize>) -> Vec<LegendEntry> {
    found.iter().map(|index| series(&format!("GPU {index}"), PALETTE[3 + index], LineStyle::Solid)).collect()
}

/// What the keys of the panels stand for.
fn keys(rows: &[ReportRow<'_>]) -> Vec<LegendEntry> {
    rows.iter().map(|row| LegendEntry { mark: None, text: format!("{}: {}", row.key, row.label()), alone: true }).collect()
}

/// UUIDs of the GPUs that a trial has samples of, in order.
fn gpus(trial: &Trial) -> Vec<&str> {
    let found: BTreeSet<&str> = trial.series.telemetry.iter().filter(|sample| !sample.is_host()).map(|sample| sample.source.as_str()).collect();
    found.into_iter().collect()
}

/// What one source said over time.
fn source(trial: &Trial, source: &str, value: impl Fn(&crate::report::telemetry::Sample) -> Option<f64>) -> Vec<(f64, f64)> {
    let samples = trial.series.telemetry.iter().filter(|sample| sample.source == source);
    thinned(samples.filter_map(|sample| Some((sample.elapsed, value(sample)?))).collect())
}

/// A panel over time, in the units that suit its numbers.
fn over_time(title: String, quantity: &str, mut lines: Vec<Line>) -> Panel {
    let largest = |value: fn(&(f64, f64)) -> f64| {
        lines.iter().flat_map(|line| line.points.iter().map(value)).filter(|value| value.is_finite()).fold(0.0, f64::max)
    };
    let longest = largest(|(x, _)| *x);
    let (time, time_unit) = if longest > 7200.0 {
        (3600.0, "h")
    } else if longest > 300.0 {
        (60.0, "min")
    } else {
        (1.0, "s")
    };
    let mut y_axis = quantity.to_owned();
    let mut scale = 1.0;
    if quantity == "memory" {
        let (unit, name) = if largest(|(_, y)| *y) >= GIB { (GIB, "GiB") } else { (MIB, "MiB") };
        scale = unit;
        y_axis = format!("memory ({name})");
    }
    for line in &mut lines {
        for (x, y) in &mut line.points {
            *x /= time;
            *y /= scale;
        }
    }
    Panel {
        title,
        x_axis: format!("time since the start of the training ({time_unit})"),
        y_axis,
        lines,
        from_zero: true,
        empty: "no samples".to_owned(),
    }
}

/// Drops what is not finite, and all but the lowest and highest point of each stretch where there are more points than pixels.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = points.into_iter().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    if points.len() <= MOST_POINTS {
        return points;
    }
    let stretch = points.len().div_ceil(MOST_POINTS / 2);
    let mut kept = Vec::with_capacity(MOST_POINTS);
    for chunk in points.chunks(stretch) {
        let lowest = (0..chunk.len()).min_by(|a, b| chunk[*a].1.total_cmp(&chunk[*b].1)).unwrap_or(0);
        let highest = (0..chunk.len()).max_by(|a, b| chunk[*a].1.total_cmp(&chunk[*b].1)).unwrap_or(0);
        kept.push(chunk[lowest.min(highest)]);
        if lowest != highest {
            kept.push(chunk[lowest.max(highest)]);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::{MOST_POINTS, thinned};

    #[test]
    fn thinning_keeps_extremes_and_order_and_drops_what_is_not_finite() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|x| (f64::from(x), (f64::from(x) / 100.0).sin())).collect();
        points[5_000].1 = 99.0;
        points[7_000].1 = f64::NAN;
        points[7_001].1 = -7.0;
        let kept = thinned(points);
        assert!(kept.len() <= MOST_POINTS, "{}", kept.len());
        assert!(kept.contains(&(5_000.0, 99.0)) && kept.contains(&(7_001.0, -7.0)));
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(thinned(vec![(0.0, f64::INFINITY), (1.0, 2.0)]), [(1.0, 2.0)]);
    }
}
