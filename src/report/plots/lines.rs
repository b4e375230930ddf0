//! Panels of lines over time or steps, with a legend below.

use plotters::backend::DrawingBackend;
use plotters::chart::ChartBuilder;
use plotters::element::{Circle, PathElement};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, VPos};
use plotters::style::{Color as _, RGBColor};

use super::canvas::{
    Area, Drawn, LINE_HEIGHT, MARGIN, SMALL_TEXT, TEXT, TITLE_HEIGHT, WIDTH, color, defect, nice_step, text_style, text_width, tick, wrap, wrap_to,
};
use super::{LegendEntry, Line, LineStyle, Panel};

const PANEL_HEIGHT: i32 = 296;
/// Between a panel's title and its axes.
const PANEL_TITLE_HEIGHT: i32 = 28;
const LEGEND_MARK: i32 = 34;
const GRID: RGBColor = RGBColor(225, 225, 225);

fn plain_width() -> i32 {
    WIDTH as i32 - 2 * MARGIN
}

/// Height of the picture in pixels.
pub(super) fn height(columns: usize, panels: usize, legend: &[LegendEntry]) -> i32 {
    let (_, legend_height) = place_legend(legend);
    MARGIN + TITLE_HEIGHT + panels.div_ceil(columns) as i32 * PANEL_HEIGHT + legend_height + MARGIN
}

/// Draws panels and legend.
pub(super) fn draw<B: DrawingBackend>(area: &Area<B>, columns: usize, panels: &[Panel], legend: &[LegendEntry]) -> Drawn {
    let width = plain_width() / columns as i32;
    for (index, panel) in panels.iter().enumerate() {
        let left = MARGIN + (index % columns) as i32 * width;
        let top = MARGIN + TITLE_HEIGHT - 8 + (index / columns) as i32 * PANEL_HEIGHT;
        let room = area.clone().shrink((left, top), (width, PANEL_HEIGHT));
        draw_panel(&room, panel, width)?;
    }
    let top = MARGIN + TITLE_HEIGHT + panels.len().div_ceil(columns) as i32 * PANEL_HEIGHT;
    let (placed, _) = place_legend(legend);
    for (entry, lines, x, y) in placed {
        let (x, y) = (MARGIN + x, top + y);
        let mut text_left = x;
        if let Some((mark, style)) = entry.mark {
            draw_mark(area, mark, style, x, y + LINE_HEIGHT / 2)?;
            text_left += LEGEND_MARK;
        }
        for (index, line) in lines.iter().enumerate() {
            area.draw_text(line, &text_style(TEXT, HPos::Left, VPos::Center), (text_left, y + LINE_HEIGHT / 2 + index as i32 * LINE_HEIGHT))
                .map_err(defect)?;
        }
    }
    Ok(())
}

/// A panel's title, its axes and its lines.
fn draw_panel<B: DrawingBackend>(area: &Area<B>, panel: &Panel, width: i32) -> Drawn {
    for line in wrap_to(&panel.title, TEXT, width - 30, 1) {
        area.draw_text(&line, &text_style(TEXT, HPos::Left, VPos::Top), (8, 4)).map_err(defect)?;
    }
    let drawable = panel.lines.iter().any(|line| line.style != LineStyle::Level && !line.points.is_empty());
    let (x_range, x_step) = range(panel, |(x, _)| x, true, false);
    let (y_range, y_step) = range(panel, |(_, y)| y, panel.from_zero, true);
    let mut chart = ChartBuilder::on(area)
        .margin_top(PANEL_TITLE_HEIGHT)
        .margin_right(22)
        .margin_bottom(16)
        .x_label_area_size(48)
        .y_label_area_size(74)
        .build_cartesian_2d(x_range.0..x_range.1, y_range.0..y_range.1)
        .map_err(defect)?;
    let x_tick = |value: &f64| if drawable { tick(*value, x_step) } else { String::new() };
    let y_tick = |value: &f64| if drawable { tick(*value, y_step) } else { String::new() };
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(RGBColor(120, 120, 120))
        .x_labels(((x_range.1 - x_range.0) / x_step).ceil() as usize + 1)
        .y_labels(((y_range.1 - y_range.0) / y_step).ceil() as usize + 1)
        .x_label_formatter(&x_tick)
        .y_label_formatter(&y_tick)
        .label_style(text_style(SMALL_TEXT, HPos::Left, VPos::Top))
        .axis_desc_style(text_style(SMALL_TEXT, HPos::Center, VPos::Center))
        .x_desc(panel.x_axis.as_str())
        .y_desc(panel.y_axis.as_str())
        .draw()
        .map_err(defect)?;
    if !drawable {
        let lines = wrap_to(&panel.empty, TEXT, width - 140, 4);
        let middle = PANEL_TITLE_HEIGHT + (PANEL_HEIGHT - PANEL_TITLE_HEIGHT - 64) / 2 - (lines.len() as i32 - 1) * LINE_HEIGHT / 2;
        for (index, line) in lines.iter().enumerate() {
            let place = (74 + (width - 96) / 2, middle + index as i32 * LINE_HEIGHT);
            area.draw_text(line, &text_style(TEXT, HPos::Center, VPos::Center), place).map_err(defect)?;
        }
        return Ok(());
    }
    for line in &panel.lines {
        let Some(first) = line.points.first() else { continue };
        let stroke = color(line.color).stroke_width(2);
        match line.style {
            LineStyle::Solid if line.points.len() > 1 => {
                chart.draw_series(LineSeries::new(line.points.iter().copied(), stroke)).map_err(defect)?;
            }
            // A line of one point would not be seen.
            LineStyle::Solid | LineStyle::Dots => {
                chart.draw_series(LineSeries::new(line.points.iter().copied(), stroke)).map_err(defect)?;
                chart.draw_series(line.points.iter().map(|point| Circle::new(*point, 4, color(line.color).filled()))).map_err(defect)?;
            }
            LineStyle::Level => {
                // Dashes are drawn one by one: the library's dashed line has none in PNG at this width.
                let dashes = 40;
                let at = |part: usize| x_range.0 + (x_range.1 - x_range.0) * part as f64 / f64::from(dashes * 2);
                let dash = |index: u32| {
                    let index = index as usize;
                    PathElement::new(vec![(at(2 * index), first.1), (at(2 * index + 1), first.1)], stroke)
                };
                chart.draw_series((0..dashes as u32).map(dash)).map_err(defect)?;
            }
        }
    }
    Ok(())
}

/// The range of an axis and the distance of its ticks; it ends at a tick, or just behind the last point.
fn range(panel: &Panel, value: impl Fn((f64, f64)) -> f64 + Copy, from_zero: bool, at_tick: bool) -> ((f64, f64), f64) {
    let values = |line: &Line| line.points.iter().copied().map(value).collect::<Vec<_>>();
    // A level has a height and no place along the horizontal axis: its first coordinate is not a number.
    let all: Vec<f64> = panel.lines.iter().flat_map(values).filter(|value| value.is_finite()).collect();
    let highest = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lowest = all.iter().copied().fold(f64::INFINITY, f64::min);
    if all.is_empty() {
        return ((0.0, 1.0), 0.5);
    }
    let low = if from_zero { lowest.min(0.0) } else { lowest };
    let span = if highest > low { highest - low } else { low.abs().max(1.0) };
    let step = nice_step(span, 5.0);
    let bottom = (low / step).floor() * step;
    let top = if at_tick { (highest / step).ceil() * step } else { highest + span * 0.02 };
    ((bottom, if top > bottom { top } else { bottom + step }), step)
}

/// The mark of a series in the legend.
fn draw_mark<B: DrawingBackend>(area: &Area<B>, mark: super::Color, style: LineStyle, x: i32, y: i32) -> Drawn {
    let stroke = color(mark).stroke_width(3);
    let pieces: &[(i32, i32)] = if style == LineStyle::Level { &[(0, 6), (10, 16), (20, 26)] } else { &[(0, 26)] };
    for (from, to) in pieces {
        area.draw(&PathElement::new(vec![(x + from, y), (x + to, y)], stroke)).map_err(defect)?;
    }
    if style == LineStyle::Dots {
        area.draw(&Circle::new((x + 13, y), 4, color(mark).filled())).map_err(defect)?;
    }
    Ok(())
}

/// An entry, its wrapped lines and its place below the panels.
type PlacedEntry<'legend> = (&'legend LegendEntry, Vec<String>, i32, i32);

/// Lays the legend out: entries side by side while they fit, long ones on lines of their own. Gives its height too.
fn place_legend(legend: &[LegendEntry]) -> (Vec<PlacedEntry<'_>>, i32) {
    const GAP: i32 = 30;
    let mut placed = Vec::new();
    let (mut x, mut y) = (0, 4);
    for entry in legend {
        let mark = if entry.mark.is_some() { LEGEND_MARK } else { 0 };
        let width = mark + text_width(&entry.text, TEXT);
        if x > 0 && (entry.alone || x + width > plain_width()) {
            x = 0;
            y += LINE_HEIGHT + 2;
        }
        if width > plain_width() {
            let lines = wrap(&entry.text, TEXT, plain_width() - mark);
            let height = lines.len() as i32 * LINE_HEIGHT;
            placed.push((entry, lines, x, y));
            y += height + 2;
        } else {
            placed.push((entry, vec![entry.text.clone()], x, y));
            x += width + GAP;
        }
        if entry.alone && x > 0 {
            x = 0;
            y += LINE_HEIGHT + 2;
        }
    }
    if x > 0 {
        y += LINE_HEIGHT;
    }
    (placed, y)
}
