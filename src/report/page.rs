//! The report's page: tables, plots, failures and where the numbers come from, as Markdown and as one self-contained HTML file.

use std::fmt::Write as _;

use crate::format;
use crate::trial::{Purpose, TrialOutcome};

use super::plots::Plot;
use super::read::{Progress, RunContents, Trial, TrialState};
use super::rows::{self, ReportRow};
use super::statistics::SteadySteps;
use super::table::{Cell, Table, escape_html, escape_markdown};
use super::tables;

/// A page apart from its format.
#[derive(Debug)]
pub(super) struct Page<'plots> {
    title: String,
    blocks: Vec<Block<'plots>>,
}

#[derive(Debug)]
enum Block<'plots> {
    Heading(&'static str),
    Text(String),
    List(Vec<String>),
    Table(Table),
    /// Lines as they stand.
    Verbatim(String),
    Plot(&'plots Plot),
}

/// What the page is made of, besides the run.
#[derive(Debug)]
pub(super) struct Parts<'parts> {
    pub(super) contents: &'parts RunContents,
    pub(super) rows: &'parts [ReportRow<'parts>],
    pub(super) table_1: Table,
    pub(super) table_2: Table,
    /// By place in [`trainings`].
    pub(super) steady: Vec<SteadySteps>,
    pub(super) plots: &'parts [Plot],
}

/// All trainings that rows show, each once, with the row that shows it first.
pub(super) fn trainings<'rows>(rows: &'rows [ReportRow<'rows>]) -> Vec<(&'rows ReportRow<'rows>, &'rows Trial)> {
    let mut found: Vec<(&ReportRow<'_>, &Trial)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for row in rows {
        for trial in &row.trainings {
            if seen.insert(&trial.id) {
                found.push((row, trial));
            }
        }
    }
    found
}

/// Trials that failed, for the page and for the terminal.
pub(super) fn failures(contents: &RunContents) -> Vec<&Trial> {
    contents.trials.iter().filter(|trial| rows::failed(trial)).collect()
}

/// One failed trial in words.
pub(super) fn failure(trial: &Trial) -> String {
    let purpose = match trial.purpose {
        Purpose::Probe => "probe",
        Purpose::Train => "training",
    };
    let repeat = if trial.repeat > 0 { format!(", repeat {}", trial.repeat + 1) } else { String::new() };
    format!("{} ({purpose} at block size {}{repeat}, trial {}): {}", trial.label, trial.block_size, trial.id, rows::describe(trial))
}

impl<'plots> Page<'plots> {
    /// Puts the page together.
    pub(super) fn new(parts: Parts<'plots>) -> Self {
        let Parts { contents, rows, table_1, table_2, steady, plots } = parts;
        let manifest = &contents.manifest;
        let mut blocks = Vec::new();
        blocks.extend(manifest.description.clone().map(Block::Text));
        let begun = humantime::format_rfc3339_seconds(manifest.created_at.0);
        let state = match contents.progress {
            Progress::Complete => "complete".to_owned(),
            Progress::Open => "in progress, or killed".to_owned(),
            Progress::Stopped => "stopped early".to_owned(),
        };
        blocks.push(Block::Text(format!("Run {}, begun {begun}; {state}.", manifest.run)));
        let found = findings(rows);
        if !found.is_empty() {
            blocks.extend([Block::Heading("What was found"), Block::List(found)]);
        }
        blocks.extend([Block::Heading("Table 1: what each method reaches"), Block::Table(table_1)]);
        blocks.extend([Block::Heading("Table 2: the switches of each method"), Block::Table(table_2)]);
        if let Some(control) = &manifest.control {
            blocks.extend([Block::Heading("Compared with the control"), against_control(rows, control)]);
        }
        let failed = failures(contents);
        if !failed.is_empty() {
            blocks.push(Block::Heading("Failed trials"));
            for trial in failed {
                blocks.push(Block::Text(failure(trial)));
                blocks.push(Block::Text(format!("Its files: trials/{}/attempt-{}", trial.id, trial.attempt)));
                if !trial.stderr_tail.trim().is_empty() {
                    blocks.push(Block::Verbatim(trial.stderr_tail.trim_end().to_owned()));
                }
            }
        }
        blocks.push(Block::Heading("Plots"));
        blocks.extend(plots.iter().map(Block::Plot));
        if !steady.is_empty() {
            blocks.extend([Block::Heading("Step times"), Block::Table(step_times(rows, &steady))]);
        }
        let warned = warnings(contents);
        if !warned.is_empty() {
            blocks.extend([Block::Heading("Warnings of trials"), Block::List(warned)]);
        }
        if !contents.problems.is_empty() {
            blocks.push(Block::Heading("Files that could not be read"));
            blocks.push(Block::List(contents.problems.iter().map(ToString::to_string).collect()));
        }
        blocks.extend([Block::Heading("Where the numbers come from"), Block::List(provenance(contents, rows))]);
        Self { title: manifest.sweep.clone(), blocks }
    }

    /// As Markdown; plots are linked.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {}\n", escape_markdown(&self.title));
        for block in &self.blocks {
            text.push('\n');
            match block {
                Block::Heading(heading) => {
                    let _ = writeln!(text, "## {heading}");
                }
                Block::Text(words) => {
                    let _ = writeln!(text, "{}", escape_markdown(words));
                }
                Block::List(items) => {
                    for item in items {
                        let _ = writeln!(text, "- {}", escape_markdown(item));
                    }
                }
                Block::Table(table) => text += &table.markdown(),
                Block::Verbatim(lines) => {
                    for line in lines.lines() {
                        let _ = writeln!(text, "    {line}");
                    }
                }
                Block::Plot(plot) => {
                    let _ = writeln!(text, "![{}](plots/{}.svg)", plot.title, plot.name);
                }
            }
        }
        text
    }

    /// As HTML with everything inside.
    pub(super) fn html(&self) -> String {
        let mut text = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
            title = escape_html(&self.title)
        );
        for block in &self.blocks {
            match block {
                Block::Heading(heading) => {
                    let _ = writeln!(text, "<h2>{heading}</h2>");
                }
                Block::Text(words) => {
                    let _ = writeln!(text, "<p>{}</p>", escape_html(words));
                }
                Block::List(items) => {
                    text += "<ul>\n";
                    for item in items {
                        let _ = writeln!(text, "<li>{}</li>", escape_html(item));
                    }
                    text += "</ul>\n";
                }
                Block::Table(table) => text += &table.html(),
                Block::Verbatim(lines) => {
                    let _ = writeln!(text, "<pre>{}</pre>", escape_html(lines));
                }
                Block::Plot(plot) => {
                    let _ = writeln!(text, "<figure role=\"img\" aria-label=\"{}\">\n{}</figure>", escape_html(&plot.title), plot.svg);
                }
            }
        }
        text += "</body>\n</html>\n";
        text
    }
}

const STYLE: &str = "\
body { font-family: \"DejaVu Sans\", system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: #222; background: #fff; line-height: 1.45 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.9em }
th, td { border-bottom: 1px solid #ccc; padding: 0.4em 0.7em; text-align: left; vertical-align: top }
thead th { border-bottom: 2px solid #555; vertical-align: bottom }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td:first-child { min-width: 9em }
.notes { font-size: 0.85em; color: #444 }
pre { background: #f4f4f4; padding: 0.7em; overflow-x: auto }
figure { margin: 1.5em 0 }
figure svg { max-width: 100%; height: auto }
";

/// Whether all of a row trained to its end: no other wins anything.
fn is_complete(row: &ReportRow<'_>) -> bool {
    !row.trainings.is_empty() && row.trainings.iter().all(|trial| trial.state == TrialState::Ended(TrialOutcome::Done))
}

/// The answers that the sweep was made for.
fn findings(rows: &[ReportRow<'_>]) -> Vec<String> {
    let complete: Vec<&ReportRow<'_>> = rows.iter().filter(|row| is_complete(row)).collect();
    let best = |value: &dyn Fn(&ReportRow<'_>) -> Option<f64>| -> Option<(f64, String)> {
        let values: Vec<(f64, &str)> =
            complete.iter().filter_map(|row| Some((value(row)?, row.label()))).filter(|(value, _)| value.is_finite()).collect();
        let lowest = values.iter().map(|(value, _)| *value).min_by(f64::total_cmp)?;
        let holders: Vec<&str> = values.iter().filter(|(value, _)| *value == lowest).map(|(_, label)| *label).collect();
        Some((lowest, holders.join("; and ")))
    };
    let mut found = Vec::new();
    if let Some((size, who)) = best(&|row| row.block_size.map(|size| -(size as f64))) {
        found.push(format!("Largest block size: {}, by {who}.", -size));
    }
    if complete.len() < 2 {
        return found;
    }
    if let Some((seconds, who)) = best(&|row| row.means.epoch_seconds.map(|mean| mean.value)) {
        found.push(format!("Shortest epoch: {}, by {who}.", format::minutes(seconds)));
    }
    let mut seen: Vec<u64> = complete.iter().filter_map(|row| row.tokens_seen()).collect();
    seen.sort_unstable();
    seen.dedup();
    if seen.len() > 1 {
        found.push("Perplexities are not ranked, because the rows saw unequal numbers of tokens.".to_owned());
    } else if let Some((perplexity, who)) = best(&|row| row.means.perplexity_common.map(|mean| mean.value)) {
        found.push(format!("Lowest perplexity at the common block size: {}, by {who}.", tables::perplexity(perplexity)));
    }
    found
}

/// Differences to the control row, only where tokens seen are equal.
fn against_control<'plots>(rows: &[ReportRow<'_>], label: &str) -> Block<'plots> {
    let Some(control) = rows.iter().find(|row| row.label() == label) else {
        return Block::Text(format!("The run has no row {label}."));
    };
    let headings = ["Method", "Time per epoch", "Perplexity at common block size", "Peak memory", "Tokens/s"];
    let mut table = Table { headings: headings.map(str::to_owned).to_vec(), numeric: vec![false, true, true, true, true], ..Table::default() };
    for row in rows {
        let mut cells = vec![Cell::plain(row.label())];
        if row.label() == label {
            cells.extend(vec![Cell::plain("control"); 4]);
            table.rows.push(cells);
            continue;
        }
        let reason = if !is_complete(row) || !is_complete(control) {
            Some("one of the two did not train to its end".to_owned())
        } else {
            match (row.tokens_seen(), control.tokens_seen()) {
                (Some(seen), Some(control)) if seen != control => {
                    Some(format!("not comparable: it saw {} tokens, the control {}", format::count(seen), format::count(control)))
                }
                _ => None,
            }
        };
        let pairs = [
            (row.means.epoch_seconds, control.means.epoch_seconds),
            (row.means.perplexity_common, control.means.perplexity_common),
            (row.means.peak_bytes, control.means.peak_bytes),
            (row.means.tokens_per_second, control.means.tokens_per_second),
        ];
        for (own, control) in pairs {
            cells.push(match (&reason, own, control) {
                (Some(reason), ..) => Cell { text: String::new(), notes: vec![table.footnote(reason)] },
                (None, Some(own), Some(control)) if own.value.is_finite() && control.value.is_finite() && control.value != 0.0 => {
                    Cell::plain(format!("{:+.1} %", (own.value / control.value - 1.0) * 100.0))
                }
                _ => Cell { text: String::new(), notes: vec![table.footnote("missing in one of the two")] },
            });
        }
        table.rows.push(cells);
    }
    Block::Table(table)
}

/// Step times over the steady steps, from the messages of each training.
fn step_times(rows: &[ReportRow<'_>], steady: &[SteadySteps]) -> Table {
    let trainings = trainings(rows);
    let headings = ["Method", "Block size", "Steady steps", "Mean (s)", "Median (s)", "95th percentile (s)", "Tokens/s", "Steps skipped"];
    let mut numeric = vec![true; headings.len()];
    numeric[0] = false;
    let mut table = Table { headings: headings.map(str::to_owned).to_vec(), numeric, ..Table::default() };
    for steps in steady {
        let Some((row, trial)) = trainings.get(steps.training as usize) else { continue };
        let label = if trial.repeat > 0 { format!("{} (repeat {})", row.label(), trial.repeat + 1) } else { row.label().to_owned() };
        table.rows.push(
            [
                label,
                trial.block_size.to_string(),
                format::count(u64::from(steps.steps)),
                format!("{:.3}", steps.mean),
                format!("{:.3}", steps.median),
                format!("{:.3}", steps.percentile_95),
                format!("{:.0}", steps.tokens_per_second),
                steps.skipped.to_string(),
            ]
            .map(Cell::plain)
            .to_vec(),
        );
    }
    table.remarks = vec!["From the step messages, all but the first max(3, 5 %) steps.".to_owned()];
    table
}

/// What trials warned of: each sentence once, with the rows it is about.
fn warnings(contents: &RunContents) -> Vec<String> {
    let mut found: Vec<(&str, Vec<&str>)> = Vec::new();
    for trial in &contents.trials {
        let result = trial.result.iter().flat_map(|result| &result.warnings);
        for warning in trial.series.warnings.iter().chain(result) {
            match found.iter_mut().find(|(text, _)| text == warning) {
                Some((_, labels)) if labels.contains(&trial.label.as_str()) => {}
                Some((_, labels)) => labels.push(&trial.label),
                None => found.push((warning, vec![&trial.label])),
            }
        }
    }
    found.into_iter().map(|(text, labels)| format!("{text} ({})", labels.join("; "))).collect()
}

/// Machine, versions and inputs.
fn provenance(contents: &RunContents, rows: &[ReportRow<'_>]) -> Vec<String> {
    let manifest = &contents.manifest;
    let host = &manifest.host;
    let gpus = if host.gpus.is_empty() { "no GPU".to_owned() } else { host.gpus.join(", ") };
    let mut list = vec![
        format!("Host {}: {} cores, {} of memory, {gpus}.", host.name, host.cores, format::bytes(host.memory_bytes)),
        format!("sweep {}, results format {}.", manifest.sweep_version, manifest.format_version),
        format!("Sweep file: sweep.toml, SHA-256 {}.", manifest.sweep_file_sha256),
        match manifest.profiles.as_slice() {
            [] => "No profile.".to_owned(),
            profiles => format!("Profiles: {}.", profiles.join(", ")),
        },
    ];
    if !manifest.overrides.is_empty() {
        list.push(format!("Set on the command line: {}.", manifest.overrides.join("; ")));
    }
    if let Some(search) = &manifest.search {
        let candidates: Vec<String> = search.candidates.iter().map(usize::to_string).collect();
        list.push(format!("Block sizes searched: {}; {} applied optimizer steps a probe.", candidates.join(", "), search.probe_steps));
    }
    if manifest.repeats > 1 {
        list.push(format!("{} repeats of each training, each with its own seed.", manifest.repeats));
    }
    let mut fingerprints = Vec::new();
    for row in rows {
        let data = &row.manifest.data;
        let settings = row.settings();
        let model = format!("Model {}, {} ranks", settings.model.id, settings.device.world_size);
        let memory = settings.device.memory.map_or_else(|| "no budget".to_owned(), |bytes| format!("{} of memory each", format::bytes(bytes)));
        let parameters =
            row.trainings.iter().find_map(|trial| trial.result.as_ref()).map(|result| format!(", {} parameters", format::count(result.parameters)));
        let model = format!("{model}, {memory}{}.", parameters.unwrap_or_default());
        for text in [model, format!("Data fingerprint {}: {}.", data.fingerprint, data.description)] {
            if !fingerprints.contains(&text) {
                fingerprints.push(text);
            }
        }
        for counts in row.trainings.iter().filter_map(|trial| trial.result.as_ref()).map(|result| &result.data).take(1) {
            let dropped = counts.train_dropped_tokens + counts.eval_dropped_tokens;
            if let (Some(size), true) = (row.block_size, dropped > 0) {
                let text = format!(
                    "At block size {size}: {} training blocks and {} evaluation blocks; {} and {} tokens of incomplete tails dropped.",
                    format::count(counts.train_blocks),
                    format::count(counts.eval_blocks),
                    format::count(counts.train_dropped_tokens),
                    format::count(counts.eval_dropped_tokens)
                );
                if !fingerprints.contains(&text) {
                    fingerprints.push(text);
                }
            }
        }
    }
    list.extend(fingerprints);
    list
}
