//! Plots: what is drawn (figures made from rows) apart from how it is drawn. Each figure is rendered twice, as SVG and as PNG, with an embedded font.

mod bars;
mod canvas;
mod figures;
mod lines;

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::rows::ReportRow;

/// A picture in both formats.
#[derive(Debug)]
pub(super) struct Plot {
    /// File name without extension.
    pub(super) name: String,
    /// What it shows, in words.
    pub(super) title: String,
    pub(super) svg: String,
    pub(super) png: Vec<u8>,
}

/// What a picture shows, apart from how it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) body: Body,
}

/// Kinds of pictures.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Body {
    /// Panels in a grid, with a legend below.
    Lines { columns: usize, panels: Vec<Panel>, legend: Vec<LegendEntry> },
    /// Horizontal bars.
    Bars { axis: String, bars: Vec<Bar> },
}

/// One pair of axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) x_axis: String,
    pub(super) y_axis: String,
    pub(super) lines: Vec<Line>,
    /// Whether the vertical axis begins at zero.
    pub(super) from_zero: bool,
    /// What it says where there is nothing to draw.
    pub(super) empty: String,
}

/// One series; all points are finite.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) points: Vec<(f64, f64)>,
    pub(super) color: Color,
    pub(super) style: LineStyle,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineStyle {
    Solid,
    /// A level that holds from edge to edge; only the height of its first point counts.
    Level,
    /// A line with a dot at every point.
    Dots,
}

/// One entry of the legend.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LegendEntry {
    /// The series it explains; `None` explains a key.
    pub(super) mark: Option<(Color, LineStyle)>,
    pub(super) text: String,
    /// Whether it has a line of its own.
    pub(super) alone: bool,
}

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bar {
    pub(super) label: String,
    /// `None` where there is nothing to show; [`Self::text`] says why.
    pub(super) value: Option<f64>,
    pub(super) text: String,
}

/// A colour as red, green, blue.
pub(super) type Color = (u8, u8, u8);

/// The palette of Okabe and Ito (2008), which people with any colour vision tell apart, without its yellow, which is too light on white.
pub(super) const PALETTE: [Color; 6] = [(0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233)];
/// Text, axes and budgets.
pub(super) const INK: Color = (40, 40, 40);

/// Draws all plots of a run, spread over the machine's cores.
///
/// # Errors
/// A sentence; drawing fails only by a defect of ours.
pub(super) fn draw(rows: &[ReportRow<'_>]) -> Result<Vec<Plot>, String> {
    let figures = figures::figures(rows);
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get).min(figures.len().max(1));
    let work = || {
        let mut done = Vec::new();
        while let Some((index, figure)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            figures.get(index).map(|figure| (index, figure))
        } {
            done.push((index, canvas::render(figure)));
        }
        done
    };
    let mut drawn: Vec<(usize, Result<Plot, String>)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    drawn.sort_by_key(|(index, _)| *index);
    drawn.into_iter().map(|(_, plot)| plot).collect()
}
