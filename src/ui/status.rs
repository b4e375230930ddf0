//! The text of `sweep status`. Pure.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::columns::{Align, columns};
use super::printable;
use crate::format;

/// Everything `sweep status` shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StatusView {
    /// Name of the sweep.
    pub sweep: String,
    /// Its run folder.
    pub folder: PathBuf,
    /// How the run stands.
    pub standing: Standing,
    /// Seconds from the run's first event to its last, or to now while it runs.
    pub seconds: Option<f64>,
    /// Rows of the tables, in order.
    pub rows: Vec<RowStatus>,
    /// Trials that are done.
    pub done: usize,
    /// Trials that run.
    pub running: usize,
    /// Trials that failed.
    pub failures: Vec<FailureStatus>,
    /// What in the folder cannot be read, a sentence each.
    pub unreadable: Vec<String>,
    /// Where the report lies, if it was written.
    pub report: Option<PathBuf>,
}

/// How a run stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// A process works in its folder.
    Running,
    /// It ended with this exit code.
    Ended(u8),
    /// It was cut off: no process works in its folder, and it never said that it ended.
    #[default]
    CutOff,
}

/// How a row of the tables stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowStatus {
    /// Its label.
    pub label: String,
    /// `done`, `training`, `probing`, `failed` ...
    pub state: &'static str,
    /// The block size it trains or trained at, or that the search found.
    pub block_size: Option<usize>,
    /// Optimiser steps taken, and to take.
    pub steps: Option<(u64, u64)>,
    /// Training loss of the last step.
    pub loss: Option<f64>,
    /// Perplexity at its own block size.
    pub perplexity: Option<f64>,
}

/// A trial that failed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FailureStatus {
    /// Purpose, block size and label.
    pub what: String,
    /// How it ended.
    pub reason: String,
    /// Its attempt's folder.
    pub folder: PathBuf,
    /// Last lines of stderr.
    pub stderr_tail: String,
}

/// The text: how the run stands, a line per row, failures with their reasons.
pub fn status_text(view: &StatusView) -> String {
    let mut text = format!("{}  {}\n", view.sweep, view.folder.display());
    let took = view.seconds.map_or(String::new(), |seconds| format!(" {}", format::minutes(seconds)));
    let standing = match view.standing {
        Standing::Running => format!("running for{took}"),
        Standing::Ended(code) => format!("ended after{took} with exit code {code}: {}", exit_code_words(code)),
        Standing::CutOff => format!("cut off after{took}: no process works in it any more; `sweep run` with its sweep file goes on"),
    };
    let _ = writeln!(text, "{standing}");
    let failed = view.failures.len();
    let _ = writeln!(text, "{} {} done, {failed} failed, {} running\n", view.done, if view.done == 1 { "trial" } else { "trials" }, view.running);
    let mut cells = vec![["State", "Block size max", "Steps", "Loss", "Perplexity", "Method"].map(str::to_owned)];
    cells.extend(view.rows.iter().map(|row| {
        [
            row.state.to_owned(),
            row.block_size.map(|size| size.to_string()).unwrap_or_default(),
            row.steps.map(|(taken, all)| format!("{taken}/{all}")).unwrap_or_default(),
            row.loss.map(|loss| format!("{loss:.4}")).unwrap_or_default(),
            row.perplexity.map(|perplexity| format!("{perplexity:.2}")).unwrap_or_default(),
            printable(&row.label).replace('\n', " "),
        ]
    }));
    text.push_str(&columns([Align::Left, Align::Right, Align::Right, Align::Right, Align::Right, Align::Left], &cells));
    if failed > 0 {
        text.push_str("\nFailed trials:\n");
    }
    for failure in &view.failures {
        let _ = writeln!(text, "  {}: {}\n    {}", failure.what, failure.reason, failure.folder.display());
        for line in printable(&failure.stderr_tail).lines().filter(|line| !line.trim().is_empty()) {
            let _ = writeln!(text, "    | {line}");
        }
    }
    if !view.unreadable.is_empty() {
        text.push_str("\nCannot be read:\n");
    }
    for sentence in &view.unreadable {
        let _ = writeln!(text, "  {sentence}");
    }
    if let Some(report) = &view.report {
        let _ = writeln!(text, "\nReport: {}", report.display());
    }
    printable(&text)
}

/// What an exit code of `sweep run` means.
fn exit_code_words(code: u8) -> &'static str {
    match code {
        0 => "all trials ended well",
        4 => "there was nothing to do",
        5 => "interrupted with trials outstanding",
        70 => "a defect of sweep itself",
        75 => "the machine failed; try again",
        100 => "at least one trial failed",
        _ => "an exit code that this sweep does not know",
    }
}

#[cfg(test)]
mod tests {
    use super::{FailureStatus, RowStatus, Standing, StatusView, status_text};

    fn view() -> StatusView {
        StatusView {
            sweep: "gpt2_blocksize".into(),
            folder: "results/gpt2_blocksize/20261130T120000Z-abc".into(),
            standing: Standing::Running,
            seconds: Some(112.0),
            rows: vec![
                RowStatus {
                    label: "FSDP + full_shard".into(),
                    state: "done",
                    block_size: Some(64),
                    steps: Some((96, 96)),
                    loss: Some(5.25),
                    perplexity: Some(85.128),
                },
                RowStatus {
                    label: "bf16".into(),
                    state: "training",
                    block_size: Some(1024),
                    steps: Some((3, 96)),
                    loss: Some(f64::NAN),
                    perplexity: None,
                },
                RowStatus { label: "a\u{1b}[31mlabel".into(), state: "waiting", ..RowStatus::default() },
            ],
            done: 1,
            running: 1,
            failures: vec![FailureStatus {
                what: "probe  block 512  bf16".into(),
                reason: "crashed: ended by SIGSEGV".into(),
                folder: "trials/x/attempt-2".into(),
                stderr_tail: "one\n\n\u{7}two\n".into(),
            }],
            unreadable: vec!["events.jsonl: line 3: EOF".into()],
            report: Some("results/gpt2_blocksize/20261130T120000Z-abc/report".into()),
        }
    }

    #[test]
    fn a_run_that_is_under_way_is_shown_row_by_row() {
        assert_eq!(
            status_text(&view()),
            "gpt2_blocksize  results/gpt2_blocksize/20261130T120000Z-abc
running for 1:52
1 trial done, 1 failed, 1 running

State     Block size max  Steps    Loss  Perplexity  Method
done                  64  96/96  5.2500       85.13  FSDP + full_shard
training            1024   3/96     NaN              bf16
waiting                                              alabel

Failed trials:
  probe  block 512  bf16: crashed: ended by SIGSEGV
    trials/x/attempt-2
    | one
    |  two

Cannot be read:
  events.jsonl: line 3: EOF

Report: results/gpt2_blocksize/20261130T120000Z-abc/report
"
        );
    }

    #[test]
    fn an_ended_run_says_how() {
        let line = |standing, seconds| {
            let view = StatusView { standing, seconds, ..StatusView::default() };
            status_text(&view).lines().nth(1).unwrap_or_default().to_owned()
        };
        assert_eq!(line(Standing::Ended(0), Some(60.0)), "ended after 1:00 with exit code 0: all trials ended well");
        assert_eq!(line(Standing::Ended(5), Some(60.0)), "ended after 1:00 with exit code 5: interrupted with trials outstanding");
        assert_eq!(line(Standing::CutOff, Some(1.0)), "cut off after 0:01: no process works in it any more; `sweep run` with its sweep file goes on");
    }
}
