//! The end of a run in words: what was done, table 1 in brief, and where the report lies. Failed trials are named again by the error that `sweep run`
//! ends with, since those of an earlier run of the same folder count too. Pure.

use std::fmt::Write as _;

use super::columns::{Align, columns};
use super::progress::Progress;
use super::{BriefRow, ReportBrief};
use crate::format;

/// The summary, with a blank line before it.
pub(super) fn summary(progress: &Progress, report: Option<&ReportBrief>) -> String {
    let mut text = String::new();
    if let Some(totals) = progress.ended {
        let took = progress.last.map_or(0.0, |last| progress.seconds_until(last));
        let _ = write!(
            text,
            "\n{} done, {} failed, {} outstanding, in {}\n",
            trials(totals.done),
            totals.failed,
            totals.outstanding,
            format::minutes(took)
        );
    }
    if let Some(report) = report {
        if !report.rows.is_empty() {
            let _ = write!(text, "\n{}", table(&report.rows));
        }
        let _ = writeln!(text, "\nReport: {}", report.folder.display());
    }
    text
}

fn trials(count: usize) -> String {
    format!("{count} {}", if count == 1 { "trial" } else { "trials" })
}

/// Table 1 in brief. Labels come last: they may be longer than a terminal is wide.
pub(super) fn table(rows: &[BriefRow]) -> String {
    let mut cells = vec![["Block size max", "Time per epoch (min)", "Perplexity", "Method"].map(str::to_owned)];
    cells.extend(rows.iter().map(|row| {
        [
            row.block_size_max.map(|size| size.to_string()).unwrap_or_default(),
            row.time_per_epoch_seconds.map(format::minutes).unwrap_or_default(),
            row.perplexity.map(|perplexity| format!("{perplexity:.2}")).unwrap_or_default(),
            row.method.clone(),
        ]
    }));
    columns([Align::Right, Align::Right, Align::Right, Align::Left], &cells)
}
