//! `sweep report`

use std::fmt::Write as _;

use crate::cli::ReportArguments;
use crate::error::CommandError;
use crate::report::{self, ReportError, Summary};
use crate::store::{self, RunFolder};
use crate::ui::{self, BriefRow, ReportBrief};

/// Runs the command.
///
/// # Errors
/// There is no such run, it was written by a newer `sweep`, or its folder cannot be read or written.
pub fn report(arguments: &ReportArguments) -> Result<(), CommandError> {
    let results = &arguments.run.results;
    let chosen = store::choose_run(results, arguments.run.run.as_deref())?;
    let Some(folder) = chosen else {
        let error = match &arguments.run.run {
            Some(run) => CommandError::user(format!("there is no run {} (looked in {} too)", run.display(), results.display())),
            None => CommandError::user(format!("there is no run in {}", results.display())),
        };
        return Err(error.hint("name a run folder or a sweep's folder, or give --results DIR"));
    };
    ui::print(&text(&generate(&folder)?));
    Ok(())
}

/// Writes the report of a run.
///
/// # Errors
/// The folder cannot be read or written.
pub(crate) fn generate(folder: &RunFolder) -> Result<Summary, CommandError> {
    report::generate(folder).map_err(|error| match error {
        ReportError::Store(error) => error.into(),
        other => CommandError::internal(other.to_string()),
    })
}

/// Table 1 in brief, for the terminal here and at the end of a run.
pub(crate) fn brief(summary: &Summary) -> ReportBrief {
    let row = |row: &report::SummaryRow| BriefRow {
        method: row.method.clone(),
        block_size_max: row.block_size_max,
        time_per_epoch_seconds: row.time_per_epoch_seconds,
        perplexity: row.perplexity,
    };
    ReportBrief { folder: summary.folder.clone(), rows: summary.rows.iter().map(row).collect() }
}

/// What the terminal shows: table 1 in brief, what failed, what could not be read, and where the report lies.
fn text(summary: &Summary) -> String {
    let mut text = ui::brief_table(&brief(summary));
    if !summary.complete {
        text += "\nThe run has not ended, or was stopped: the report shows what is there so far.\n";
    }
    let mut list = |heading: &str, items: &[String]| {
        if !items.is_empty() {
            let _ = writeln!(text, "\n{heading}:");
            for item in items {
                let _ = writeln!(text, "  {item}");
            }
        }
    };
    list("Failed trials", &summary.failed);
    list("Could not be read", &summary.unreadable);
    let _ = writeln!(text, "\nReport: {}", summary.folder.display());
    text
}
