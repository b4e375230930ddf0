//! What `sweep plan` prints: compact text in which rows show what sets them apart, or JSON with every resolved value.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use crate::format;
use crate::spec::plan::{BlockSizeSearch, CheckpointSettings, Limits, ReportSettings};
use crate::spec::settings::Settings;
use crate::spec::slurm::SlurmSettings;
use crate::trial::{ConfigurationId, Purpose, TrialId};

/// A plan as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedSweep {
    /// Name of the sweep.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// Profiles applied, in order.
    pub profiles: Vec<String>,
    /// What the user should know, a sentence each.
    pub notices: Vec<String>,
    /// Trainings per configuration and block size.
    pub repeats: u32,
    /// Label of the row that others are compared with.
    pub control: Option<String>,
    /// The search for block sizes, if there is one.
    pub search: Option<BlockSizeSearch>,
    /// `[checkpoint]`
    pub checkpoint: CheckpointSettings,
    /// `[limits]`
    pub limits: PlannedLimits,
    /// `[slurm]`
    pub slurm: SlurmSettings,
    /// `[telemetry] interval`
    pub telemetry_interval_seconds: f64,
    /// `[report]`
    pub report: ReportSettings,
    /// Rows of the tables, in order.
    pub rows: Vec<PlannedRow>,
}

/// `[limits]`, times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedLimits {
    trial_timeout_seconds: Option<f64>,
    startup_timeout_seconds: f64,
    stall_timeout_seconds: f64,
    grace_period_seconds: f64,
    retries: u32,
    max_consecutive_infra_failures: u32,
    jobs: Option<usize>,
    sweep_timeout_seconds: Option<f64>,
}

impl From<&Limits> for PlannedLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            trial_timeout_seconds: limits.trial_timeout.as_ref().map(Duration::as_secs_f64),
            startup_timeout_seconds: limits.startup_timeout.as_secs_f64(),
            stall_timeout_seconds: limits.stall_timeout.as_secs_f64(),
            grace_period_seconds: limits.grace_period.as_secs_f64(),
            retries: limits.retries,
            max_consecutive_infra_failures: limits.max_consecutive_infra_failures,
            jobs: limits.jobs,
            sweep_timeout_seconds: limits.sweep_timeout.as_ref().map(Duration::as_secs_f64),
        }
    }
}

/// A row as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedRow {
    /// Its label.
    pub label: String,
    /// Its configuration.
    pub configuration: ConfigurationId,
    /// Whether the ids may change once model and data are at hand.
    pub provisional: bool,
    /// The fixed block size; `None` where it is searched for.
    pub block_size: Option<usize>,
    /// Label of the earlier row whose trials fill this one too.
    pub shares_trials_with: Option<String>,
    /// As the file means it.
    pub settings: Settings,
    /// As it is trained.
    pub effective: Settings,
    /// Why the two differ.
    pub collapsed: Vec<String>,
    /// Why it cannot run.
    pub refused: Vec<String>,
    /// The trials it may need.
    pub trials: Vec<PlannedTrial>,
}

/// A trial as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedTrial {
    /// Its id.
    pub id: TrialId,
    /// What it is for.
    pub purpose: Purpose,
    /// Tokens per sequence.
    pub block_size: usize,
    /// Which repeat, from 0.
    pub repeat: u32,
}

/// Prints a plan to standard output.
pub fn print(plan: &PlannedSweep, json: bool) {
    super::print(&if json { serde_json::to_string_pretty(plan).unwrap_or_default() + "\n" } else { text(plan) });
}

/// The plan as text.
fn text(plan: &PlannedSweep) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(plan, &mut out);
    out
}

fn write(plan: &PlannedSweep, out: &mut String) -> std::fmt::Result {
    let configurations: BTreeSet<_> = plan.rows.iter().map(|row| &row.configuration).collect();
    let count = |purpose| plan.rows.iter().flat_map(|row| &row.trials).filter(|trial| trial.purpose == purpose).count() as u64;
    let trainings = if plan.search.is_some() { configurations.len() as u64 * u64::from(plan.repeats) } else { count(Purpose::Train) };
    write!(out, "{}: {}, {}", plan.name, plural(plan.rows.len() as u64, "row"), plural(configurations.len() as u64, "configuration"))?;
    if plan.search.is_some() {
        write!(out, ", at most {}", plural(count(Purpose::Probe), "probe"))?;
    }
    writeln!(out, ", {}", plural(trainings, "training"))?;
    if let Some(description) = &plan.description {
        writeln!(out, "{description}")?;
    }
    if !plan.profiles.is_empty() {
        writeln!(out, "profiles: {}", plan.profiles.join(", "))?;
    }
    for notice in &plan.notices {
        writeln!(out, "note: {notice}")?;
    }
    if let Some(search) = &plan.search {
        let candidates: Vec<String> = search.candidates.iter().map(usize::to_string).collect();
        writeln!(out, "block size: the largest that fits of {}, {} steps a probe", candidates.join(", "), search.probe_steps)?;
    }
    let mut shared = plan.rows.first().map(flatten).unwrap_or_default();
    for row in plan.rows.iter().skip(1) {
        let settings = flatten(row);
        shared.retain(|pair| settings.contains(pair));
    }
    writeln!(out, "\n{}", if plan.rows.len() == 1 { "settings" } else { "the same for all rows" })?;
    write_settings(out, "  ", shared.iter())?;
    for (number, row) in plan.rows.iter().enumerate() {
        writeln!(out, "\n{}. {}", number + 1, row.label)?;
        writeln!(out, "   configuration {}{}", row.configuration, if row.provisional { " (provisional)" } else { "" })?;
        write_settings(out, "   ", flatten(row).iter().filter(|pair| !shared.contains(pair)))?;
        for sentence in &row.collapsed {
            writeln!(out, "   collapsed: {sentence}")?;
        }
        for sentence in &row.refused {
            writeln!(out, "   refused: {sentence}")?;
        }
        if let Some(label) = &row.shares_trials_with {
            writeln!(out, "   the same trials as \"{label}\"")?;
        }
        for purpose in [Purpose::Probe, Purpose::Train] {
            let trials: Vec<String> =
                row.trials.iter().filter(|trial| trial.purpose == purpose).map(|trial| trial_text(trial, plan.repeats)).collect();
            for (number, line) in trials.chunks(4).enumerate() {
                let name = match purpose {
                    Purpose::Probe => "probes",
                    Purpose::Train if plan.search.is_some() => "trains one of",
                    Purpose::Train => "trains",
                };
                writeln!(out, "   {:<14}{}", if number == 0 { name } else { "" }, line.join("  "))?;
            }
        }
    }
    if plan.rows.iter().any(|row| row.provisional) {
        writeln!(out, "\nIds are provisional: they change once model and data are at hand, to the same on every machine.")?;
    }
    Ok(())
}

fn plural(count: u64, name: &str) -> String {
    format!("{} {name}{}", format::count(count), if count == 1 { "" } else { "s" })
}

fn trial_text(trial: &PlannedTrial, repeats: u32) -> String {
    let repeat = if repeats > 1 && trial.purpose == Purpose::Train { format!(".{}", trial.repeat) } else { String::new() };
    format!("{:>5}{repeat} {}", trial.block_size, trial.id)
}

fn write_settings<'a>(out: &mut String, indent: &str, settings: impl Iterator<Item = &'a (String, String)>) -> std::fmt::Result {
    for (path, value) in settings {
        writeln!(out, "{indent}{path:<37}{value}")?;
    }
    Ok(())
}

/// Settings as pairs of path and value, written as in the sweep file.
fn flatten(row: &PlannedRow) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    if let Some(block_size) = row.block_size {
        pairs.push(("train.block_size".to_owned(), block_size.to_string()));
    }
    let Ok(Value::Object(tables)) = serde_json::to_value(&row.settings) else { return pairs };
    for (table, keys) in tables {
        let Value::Object(keys) = keys else { continue };
        for (key, value) in keys {
            match (key.as_str(), value) {
                (_, Value::Null) => {}
                // Either way of saying how long is a key of [train] in the file.
                ("duration", Value::Object(duration)) => {
                    pairs.extend(duration.into_iter().map(|(key, value)| (format!("{table}.{key}"), value.to_string())))
                }
                ("config", Value::Object(config)) => {
                    let given = config.into_iter().filter(|(_, value)| !value.is_null());
                    pairs.extend(given.map(|(key, value)| (format!("{table}.config.{key}"), value.to_string())));
                }
                ("memory", Value::Number(bytes)) => pairs.push((format!("{table}.memory"), bytes.as_u64().map(format::bytes).unwrap_or_default())),
                ("mixed_precision", Value::Object(dtypes)) => pairs.push((format!("{table}.mixed_precision"), precision(&dtypes))),
                ("dataset", Value::Object(dataset)) => {
                    let hub = dataset.get("hub").and_then(Value::as_str).map(str::to_owned);
                    pairs.push((format!("{table}.dataset"), hub.unwrap_or_else(|| Value::Object(dataset).to_string())));
                }
                (_, Value::String(value)) => pairs.push((format!("{table}.{key}"), value)),
                (_, Value::Number(number)) if number.is_f64() => pairs.push((format!("{table}.{key}"), float(number.as_f64().unwrap_or(f64::NAN)))),
                (_, value) => pairs.push((format!("{table}.{key}"), value.to_string())),
            }
        }
    }
    pairs
}

/// As people write it in a sweep file: small numbers with an exponent.
fn float(number: f64) -> String {
    if number != 0.0 && number.abs() < 1e-3 { format!("{number:e}") } else { format!("{number:?}") }
}

fn precision(dtypes: &serde_json::Map<String, Value>) -> String {
    let names: Vec<&str> = dtypes.values().filter_map(Value::as_str).collect();
    match names.as_slice() {
        ["fp32", "fp32", "fp32"] => "no".to_owned(),
        [first, rest @ ..] if rest.iter().all(|name| name == first) => (*first).to_owned(),
        _ => Value::Object(dtypes.clone()).to_string(),
    }
}
