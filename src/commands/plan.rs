//! `sweep plan`: what a sweep file means, without running anything of it.

use std::collections::HashMap;
use std::fs;

use crate::cli::{PlanArguments, SweepFileArguments};
use crate::error::CommandError;
use crate::spec::check::{self, Facts, Problem};
use crate::spec::ids::{ContentHashes, TrialKey, configuration_id, trial_id};
use crate::spec::plan::{Row, SweepPlan};
use crate::spec::{self, Overlays, Surroundings};
use crate::telemetry::{self, Gpus};
use crate::trial::{ConfigurationId, Purpose};
use crate::ui;
use crate::ui::plan::{PlannedRow, PlannedSweep, PlannedTrial};

/// Runs the command.
///
/// # Errors
/// The sweep file cannot be read or is wrong, or some of its rows cannot run.
pub fn plan(arguments: &PlanArguments) -> Result<(), CommandError> {
    let gpus = Gpus::of_this_machine();
    let (_, plan) = load(&arguments.sweep, &gpus)?;
    let facts = Facts { host_memory_bytes: Some(telemetry::host(&gpus).memory_bytes).filter(|bytes| *bytes > 0), ..Facts::default() };
    let problems = check::check(&plan, &facts);
    let planned = planned(&plan, &problems);
    ui::plan::print(&planned, arguments.json);
    refused(&plan, &problems)
}

/// Reads a sweep file as the command line names it: its text and what it means on this machine.
///
/// # Errors
/// The file cannot be read or is wrong.
pub(crate) fn load(arguments: &SweepFileArguments, gpus: &Gpus) -> Result<(String, SweepPlan), CommandError> {
    let name = arguments.file.display().to_string();
    let bytes = fs::read(&arguments.file).map_err(|error| CommandError::user(format!("cannot read the sweep file {name}: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|byte| *byte == b'\n').count();
        CommandError::user(format!("{name}:{line}: the sweep file is not UTF-8 text"))
    })?;
    let overlays = Overlays { profile: arguments.profile.clone(), sets: arguments.set.clone() };
    let surroundings = Surroundings { cuda_device_visible: !gpus.devices.is_empty(), built_with_cuda: TRAINS_ON_CUDA };
    let plan = spec::load(&name, &text, &overlays, &surroundings).map_err(|errors| CommandError::user(errors.to_string()))?;
    Ok((text, plan))
}

/// Whether this build trains on NVIDIA GPUs. The feature `cuda` is declared, its training is not there yet.
const TRAINS_ON_CUDA: bool = false;

/// Says which rows cannot run and why, where there are any.
///
/// # Errors
/// Some rows cannot run.
pub(crate) fn refused(plan: &SweepPlan, problems: &[Problem]) -> Result<(), CommandError> {
    const NAMED: usize = 3;
    if problems.is_empty() {
        return Ok(());
    }
    let mut message = "some rows cannot run; nothing was started".to_owned();
    for problem in problems {
        let labels: Vec<String> =
            problem.rows.iter().take(NAMED).filter_map(|row| plan.rows.get(*row)).map(|row| format!("\"{}\"", row.label)).collect();
        let more = problem.rows.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        message.push_str(&format!("\n\n{}\n  in {}{more}\n  = {}", problem.message, labels.join(", "), problem.help));
    }
    Err(CommandError::user(message).hint("change the sweep file, or drop these points with [[exclude]]"))
}

/// Everything there is to show of a plan.
fn planned(plan: &SweepPlan, problems: &[Problem]) -> PlannedSweep {
    let mut refusals: HashMap<usize, Vec<String>> = HashMap::new();
    for problem in problems {
        for row in &problem.rows {
            refusals.entry(*row).or_default().push(format!("{}: {}", problem.message, problem.help));
        }
    }
    let contents = ContentHashes::default();
    let mut first: HashMap<(ConfigurationId, Option<usize>), String> = HashMap::new();
    let mut rows = Vec::with_capacity(plan.rows.len());
    for (index, row) in plan.rows.iter().enumerate() {
        let configuration = configuration_id(&row.effective, &contents);
        let earlier = first.get(&(configuration.clone(), row.block_size)).cloned();
        let refused = refusals.remove(&index).unwrap_or_default();
        let trials = if earlier.is_none() && refused.is_empty() { trials(plan, &row, &contents) } else { Vec::new() };
        if earlier.is_none() {
            first.insert((configuration.clone(), row.block_size), row.label.clone());
        }
        rows.push(PlannedRow {
            label: row.label,
            configuration,
            provisional: contents.provisional(),
            block_size: row.block_size,
            shares_trials_with: earlier,
            settings: row.settings,
            effective: row.effective,
            collapsed: row.collapsed,
            refused,
            trials,
        });
    }
    PlannedSweep {
        name: plan.name.clone(),
        description: plan.description.clone(),
        profiles: plan.profiles.clone(),
        notices: plan.notices.clone(),
        repeats: plan.repeats,
        control: plan.control.clone(),
        search: plan.search.clone(),
        checkpoint: plan.checkpoint.clone(),
        limits: (&plan.limits).into(),
        slurm: plan.slurm.clone(),
        telemetry_interval_seconds: plan.telemetry_interval.as_secs_f64(),
        report: plan.report.clone(),
        rows,
    }
}

/// The trials that a row may need. Which of a search's probes run, and at which size the training, only the search finds out.
fn trials(plan: &SweepPlan, row: &Row, contents: &ContentHashes) -> Vec<PlannedTrial> {
    let mut trials = Vec::new();
    let mut push = |purpose, block_size, probe_steps, repeat| {
        let id = trial_id(&row.effective, contents, TrialKey { block_size, purpose, probe_steps, repeat });
        trials.push(PlannedTrial { id, purpose, block_size, repeat });
    };
    let sizes = match (&plan.search, row.block_size) {
        (Some(search), None) => {
            for block_size in &search.candidates {
                push(Purpose::Probe, *block_size, Some(search.probe_steps), 0);
            }
            search.candidates.clone()
        }
        (_, block_size) => block_size.into_iter().collect(),
    };
    for block_size in sizes {
        for repeat in 0..plan.repeats {
            push(Purpose::Train, block_size, None, repeat);
        }
    }
    trials
}
