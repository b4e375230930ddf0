//! Reports: rows, statistics, tables, plots and page, from the results folder alone. Pure: no clock, no network, no device; the same folder gives the
//! same bytes.

mod page;
mod plots;
mod read;
mod rows;
mod statistics;
mod table;
mod tables;
mod telemetry;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use polars::prelude::PolarsError;

use crate::store::{self, RunFolder, StoreError};

/// What was written, and what a reader should hear of it at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// The folder of the report.
    pub folder: PathBuf,
    /// Files written, in order.
    pub files: Vec<PathBuf>,
    /// Rows of Table 1, in order.
    pub rows: Vec<SummaryRow>,
    /// Failed trials, in words.
    pub failed: Vec<String>,
    /// Files and lines that could not be read, with their reasons; paths are relative to the run folder.
    pub unreadable: Vec<String>,
    /// Whether the run ended with nothing outstanding.
    pub complete: bool,
}

/// What a row of Table 1 shows, missing where it is missing.
#[derive(Clone, Debug, PartialEq)]
pub struct SummaryRow {
    /// The row's label.
    pub method: String,
    /// The largest block size.
    pub block_size_max: Option<usize>,
    /// Mean time per epoch in seconds.
    pub time_per_epoch_seconds: Option<f64>,
    /// Perplexity at the row's own block size.
    pub perplexity: Option<f64>,
}

/// A report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The results folder cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The arithmetic failed: a defect.
    #[error("the statistics of the tables failed: {0}")]
    Statistics(#[from] PolarsError),
    /// Drawing failed: a defect.
    #[error("{0}")]
    Plot(String),
}

/// Writes tables, page and plots of a run into its `report` folder, from the folder alone.
///
/// # Errors
/// `run.json` is missing, damaged or of a newer format; the report cannot be written. Anything else that is damaged is named in the report.
pub fn generate(folder: &RunFolder) -> Result<Summary, ReportError> {
    let contents = read::read(folder)?;
    let rows = rows::rows(&contents)?;
    let steps: Vec<statistics::StepTime> = page::trainings(&rows)
        .iter()
        .enumerate()
        .flat_map(|(training, (_, trial))| {
            trial.series.steps.iter().map(move |(_, step)| statistics::StepTime {
                training: training as u32,
                step: step.step,
                steps: step.steps,
                seconds: step.step_seconds,
                tokens: step.tokens,
                skipped: step.skipped,
            })
        })
        .collect();
    let steady = statistics::over_steps(&steps)?;
    let plots = plots::draw(&rows).map_err(ReportError::Plot)?;
    let table_1 = tables::table_1(&contents, &rows);
    let table_2 = tables::table_2(&rows);

    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let mut add = |name: &str, text: String| files.push((name.to_owned(), text.into_bytes()));
    add("table1.md", table_1.markdown());
    add("table1.csv", tables::table_1_csv(&contents, &rows));
    add("table1.tex", table_1.latex());
    add("table2.md", table_2.markdown());
    add("table2.csv", tables::table_2_csv(&rows));
    add("table2.tex", table_2.latex());
    let page = page::Page::new(page::Parts { contents: &contents, rows: &rows, table_1, table_2, steady, plots: &plots });
    add("report.md", page.markdown());
    add("report.html", page.html());
    for plot in &plots {
        files.push((format!("plots/{}.svg", plot.name), plot.svg.clone().into_bytes()));
        files.push((format!("plots/{}.png", plot.name), plot.png.clone()));
    }
    let written = write(&folder.report(), &files)?;

    Ok(Summary {
        folder: folder.report(),
        files: written,
        rows: rows
            .iter()
            .map(|row| SummaryRow {
                method: row.label().to_owned(),
                block_size_max: row.block_size,
                time_per_epoch_seconds: row.means.epoch_seconds.map(|mean| mean.value),
                perplexity: row.means.perplexity.map(|mean| mean.value),
            })
            .collect(),
        failed: page::failures(&contents).into_iter().map(page::failure).collect(),
        unreadable: contents.problems.iter().map(ToString::to_string).collect(),
        complete: contents.progress == read::Progress::Complete,
    })
}

/// Writes each file whole or not at all, and removes plots of an earlier report that this one does not have.
fn write(folder: &Path, files: &[(String, Vec<u8>)]) -> Result<Vec<PathBuf>, StoreError> {
    let plots = folder.join("plots");
    fs::create_dir_all(&plots).map_err(store::io_error("create", &plots))?;
    let mut written = Vec::with_capacity(files.len());
    for (name, contents) in files {
        let path = folder.join(name);
        write_by_rename(&path, contents).map_err(store::io_error("write", &path))?;
        written.push(path);
    }
    let kept: BTreeSet<&PathBuf> = written.iter().collect();
    for entry in fs::read_dir(&plots).map_err(store::io_error("read", &plots))? {
        let path = entry.map_err(store::io_error("read", &plots))?.path();
        let is_plot = path.extension().is_some_and(|extension| extension == "svg" || extension == "png");
        if is_plot && !kept.contains(&path) {
            fs::remove_file(&path).map_err(store::io_error("remove", &path))?;
        }
    }
    Ok(written)
}

/// A report can always be made again, so nothing waits for the disk; a reader never sees half a file all the same.
fn write_by_rename(path: &Path, contents: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".partial-").permissions(readable()).tempfile_in(folder)?;
    fs::write(file.path(), contents)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// As readable as any other file; the umask still applies.
fn readable() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}
