//! Horizontal bars with their labels written out.

use plotters::backend::DrawingBackend;
use plotters::element::{PathElement, Rectangle};
use plotters::style::text_anchor::{HPos, VPos};
use plotters::style::{Color as _, RGBColor};

use super::canvas::{
    Area, Drawn, LINE_HEIGHT, MARGIN, SMALL_TEXT, TEXT, TITLE_HEIGHT, WIDTH, color, defect, nice_step, text_style, text_width, tick, wrap_to,
};
use super::{Bar, PALETTE};

/// Room for the labels at the left.
const LABEL_WIDTH: i32 = 430;
const MOST_LABEL_LINES: usize = 4;
/// Space between bars.
const GAP: i32 = 16;
const THICKNESS: i32 = 26;
const AXIS_HEIGHT: i32 = 60;

fn label(bar: &Bar) -> Vec<String> {
    wrap_to(&bar.label, TEXT, LABEL_WIDTH - 20, MOST_LABEL_LINES)
}

fn bar_height(bar: &Bar) -> i32 {
    (label(bar).len() as i32 * LINE_HEIGHT).max(THICKNESS) + GAP
}

/// Height of the picture in pixels.
pub(super) fn height(bars: &[Bar]) -> i32 {
    MARGIN + TITLE_HEIGHT + bars.iter().map(bar_height).sum::<i32>() + AXIS_HEIGHT + MARGIN / 2
}

/// Draws axis, bars and labels.
pub(super) fn draw<B: DrawingBackend>(area: &Area<B>, axis: &str, bars: &[Bar]) -> Drawn {
    let left = MARGIN + LABEL_WIDTH;
    let right = WIDTH as i32 - MARGIN;
    let top = MARGIN + TITLE_HEIGHT;
    let bottom = top + bars.iter().map(bar_height).sum::<i32>();
    let highest = bars.iter().filter_map(|bar| bar.value).fold(0.0, f64::max);
    // What stands at the end of the longest bar needs its room.
    let text_room = bars.iter().filter(|bar| bar.value.is_some()).map(|bar| text_width(&bar.text, TEXT)).max().unwrap_or(0) + 20;
    let scale = if highest > 0.0 { f64::from(right - left - text_room) / highest } else { 1.0 };

    let grid = RGBColor(225, 225, 225).stroke_width(1);
    if highest > 0.0 {
        let step = nice_step(highest, 5.0);
        for index in 0..=(f64::from(right - left) / scale / step) as i32 {
            let x = left + (f64::from(index) * step * scale).round() as i32;
            area.draw(&PathElement::new(vec![(x, top), (x, bottom)], grid)).map_err(defect)?;
            area.draw_text(&tick(f64::from(index) * step, step), &text_style(SMALL_TEXT, HPos::Center, VPos::Top), (x, bottom + 8))
                .map_err(defect)?;
        }
    }
    area.draw_text(axis, &text_style(SMALL_TEXT, HPos::Center, VPos::Top), (left + (right - left) / 2, bottom + 32)).map_err(defect)?;

    let mut y = top;
    for bar in bars {
        let room = bar_height(bar);
        let middle = y + room / 2;
        let lines = label(bar);
        for (index, line) in lines.iter().enumerate() {
            let line_middle = middle - (lines.len() as i32 - 1) * LINE_HEIGHT / 2 + index as i32 * LINE_HEIGHT;
            area.draw_text(line, &text_style(TEXT, HPos::Left, VPos::Center), (MARGIN, line_middle)).map_err(defect)?;
        }
        let length = bar.value.map_or(0, |value| (value * scale).round() as i32);
        if length > 0 {
            let corners = [(left, middle - THICKNESS / 2), (left + length, middle + THICKNESS / 2)];
            area.draw(&Rectangle::new(corners, color(PALETTE[0]).filled())).map_err(defect)?;
        }
        for (index, line) in wrap_to(&bar.text, TEXT, right - left - length - 10, 2).iter().enumerate() {
            let line_middle = middle + index as i32 * LINE_HEIGHT;
            area.draw_text(line, &text_style(TEXT, HPos::Left, VPos::Center), (left + length + 10, line_middle)).map_err(defect)?;
        }
        y += room;
    }
    let line = RGBColor(120, 120, 120).stroke_width(1);
    area.draw(&PathElement::new(vec![(left, top), (left, bottom), (right, bottom)], line)).map_err(defect)
}
