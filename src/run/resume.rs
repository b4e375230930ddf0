//! From a manifest and what its folder already holds to the work that is left.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::work::{Candidate, Configuration, ConfigurationTrials, KnownTrial, Selection};
use crate::event::{EventKind, LimitedBy};
use crate::protocol::ResolvedModel;
use crate::spec::ids::{ContentHashes, TrialKey, trial_id};
use crate::store::{ManifestRow, RunManifest, RunState};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// The configurations behind the rows of a manifest, in row order, each once. `models` has the model of each row.
pub fn configurations(manifest: &RunManifest, models: &[ResolvedModel]) -> Vec<Configuration> {
    let mut seen = BTreeSet::new();
    let mut configurations = Vec::new();
    for (row, model) in manifest.rows.iter().zip(models) {
        if seen.insert((row.configuration.clone(), row.row.block_size)) {
            configurations.push(configuration(row, model, manifest));
        }
    }
    configurations
}

fn configuration(row: &ManifestRow, model: &ResolvedModel, manifest: &RunManifest) -> Configuration {
    let settings = &row.row.effective;
    let contents = ContentHashes::of(model, &row.data);
    let id = |block_size, purpose, probe_steps, repeat| trial_id(settings, &contents, TrialKey { block_size, purpose, probe_steps, repeat });
    let trainings = |block_size| (0..manifest.repeats.max(1)).map(|repeat| id(block_size, Purpose::Train, None, repeat)).collect();
    let trials = match (row.row.block_size, &manifest.search) {
        (Some(block_size), _) => ConfigurationTrials::Fixed { block_size, trainings: trainings(block_size) },
        (None, Some(search)) => {
            let candidate = |block_size: &usize| Candidate {
                block_size: *block_size,
                probe: id(*block_size, Purpose::Probe, Some(search.probe_steps), 0),
                trainings: trainings(*block_size),
            };
            ConfigurationTrials::Search(search.candidates.iter().map(candidate).collect())
        }
        (None, None) => ConfigurationTrials::Search(Vec::new()),
    };
    Configuration {
        id: row.configuration.clone(),
        label: row.row.label.clone(),
        settings: settings.clone(),
        model: model.clone(),
        data: row.data.clone(),
        trials,
    }
}

/// Which settled trials are run again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rerun {
    /// None.
    Nothing,
    /// Those that failed.
    Failed,
    /// All.
    All,
    /// One.
    Trial(TrialId),
}

/// What a run folder already holds, as far as the work goes.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Trials with their attempts and, where they are settled, outcomes.
    pub known: BTreeMap<TrialId, KnownTrial>,
    /// Trials that had ended and whose folder is gone.
    pub lost: BTreeSet<TrialId>,
    /// Ends that are not in `events.jsonl`.
    pub recovered: Vec<EventKind>,
    /// What the searches announced.
    pub announced: BTreeMap<ConfigurationId, (Option<usize>, LimitedBy)>,
}

/// What is known about the trials of `configurations` from the state of their run.
pub fn progress(configurations: &[Configuration], state: &RunState, rerun: &Rerun) -> Progress {
    let mut progress = Progress {
        announced: state.block_sizes.iter().map(|(id, found)| (id.clone(), (found.block_size, found.limited_by))).collect(),
        ..Progress::default()
    };
    for configuration in configurations {
        let searched = matches!(configuration.trials, ConfigurationTrials::Search(_));
        for trial in configuration.possible_trials() {
            let is_rerun = |outcome: &TrialOutcome| match rerun {
                Rerun::Nothing => false,
                Rerun::Failed => !super::dispatcher::is_expected(trial.purpose, searched, outcome),
                Rerun::All => true,
                Rerun::Trial(id) => *id == trial.id,
            };
            let on_record = state.ended_events.get(&trial.id);
            let Some(found) = state.trials.get(&trial.id) else {
                // What is left of a damaged folder keeps its attempts, so that the next one has a folder of its own.
                if let Some(attempts) = state.unreadable_attempts.get(&trial.id) {
                    progress.known.insert(trial.id.clone(), KnownTrial { attempts: *attempts, ..KnownTrial::default() });
                }
                if on_record.is_some_and(|(_, outcome)| outcome.settles_the_trial()) {
                    progress.lost.insert(trial.id);
                }
                continue;
            };
            let settled = found.settled();
            match settled {
                None if on_record.is_some_and(|(_, outcome)| outcome.settles_the_trial()) => drop(progress.lost.insert(trial.id.clone())),
                // A search that is settled without it would not ask for it again.
                Some(outcome) if is_rerun(outcome) => drop(progress.lost.insert(trial.id.clone())),
                _ => {}
            }
            if let Some(ended) = &found.ended
                && on_record.is_none_or(|(attempt, _)| *attempt < ended.attempt)
            {
                progress.recovered.push(EventKind::TrialEnded {
                    trial: trial.id.clone(),
                    label: configuration.label.clone(),
                    purpose: trial.purpose,
                    block_size: trial.block_size,
                    attempt: ended.attempt,
                    outcome: ended.outcome.clone(),
                    seconds: ended.seconds,
                    stderr_tail: ended.stderr_tail.clone(),
                });
            }
            let outcome = settled.filter(|outcome| !is_rerun(outcome)).cloned();
            // What the machine or somebody ended goes on where it was; what the training itself came to would come to the same again.
            let afresh = settled.is_some_and(|outcome| is_rerun(outcome) && !outcome.leaves_training_intact());
            progress.known.insert(trial.id, KnownTrial { attempts: found.attempts, outcome, afresh });
        }
    }
    progress
}

/// What `--only` names: labels of rows, ids of configurations or trials.
///
/// # Errors
/// The first name that is none of them.
pub fn select(names: &[String], manifest: &RunManifest, configurations: &[Configuration]) -> Result<Selection, String> {
    let mut selection = Selection { restricted: !names.is_empty(), ..Selection::default() };
    for name in names {
        let rows = manifest.rows.iter().filter(|row| row.row.label == *name || row.configuration.0 == *name);
        let chosen: BTreeSet<_> = rows.map(|row| (&row.configuration, row.row.block_size)).collect();
        let of_row = |configuration: &Configuration| {
            let block_size = match configuration.trials {
                ConfigurationTrials::Fixed { block_size, .. } => Some(block_size),
                ConfigurationTrials::Search(_) => None,
            };
            chosen.contains(&(&configuration.id, block_size))
        };
        let places = configurations.iter().enumerate().filter(|(_, configuration)| of_row(configuration)).map(|(index, _)| index);
        let before = selection.configurations.len() + selection.trials.len();
        selection.configurations.extend(places);
        let is_trial = configurations.iter().flat_map(Configuration::possible_trials).any(|trial| trial.id.0 == *name);
        if is_trial {
            selection.trials.insert(TrialId(name.clone()));
        }
        if chosen.is_empty() && !is_trial && before == selection.configurations.len() + selection.trials.len() {
            return Err(name.clone());
        }
    }
    Ok(selection)
}

/// How `new` differs from `old`, a sentence each; empty where the same run can go on.
pub fn differences(old: &RunManifest, new: &RunManifest) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |what: &str, old: String, new: String| {
        if old != new {
            found.push(format!("{what} was {old} and is {new}"));
        }
    };
    compare("--profile", words(&old.profiles), words(&new.profiles));
    compare("--set", words(&old.overrides), words(&new.overrides));
    compare("sweep.repeats", old.repeats.to_string(), new.repeats.to_string());
    let search = |manifest: &RunManifest| match &manifest.search {
        Some(search) => format!("{:?} with {} steps", search.candidates, search.probe_steps),
        None => "none".to_owned(),
    };
    compare("search.block_size", search(old), search(new));
    let labels = |manifest: &RunManifest| manifest.rows.iter().map(|row| row.row.label.clone()).collect::<Vec<_>>();
    let (old_labels, new_labels) = (labels(old), labels(new));
    for label in old_labels.iter().filter(|label| !new_labels.contains(label)) {
        found.push(format!("row \"{label}\" is gone"));
    }
    for row in &new.rows {
        match old.rows.iter().find(|earlier| earlier.row.label == row.row.label) {
            None => found.push(format!("row \"{}\" is new", row.row.label)),
            Some(earlier) => found.extend(row_differences(earlier, row)),
        }
    }
    if old.sweep_file_sha256 != new.sweep_file_sha256 && found.is_empty() {
        found.push("the text of the sweep file has changed, though every trial means the same".to_owned());
    }
    found
}

fn row_differences(old: &ManifestRow, new: &ManifestRow) -> Vec<String> {
    let label = &new.row.label;
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    flatten("", &serde_json::to_value(&old.row.effective).unwrap_or_default(), &mut before);
    flatten("", &serde_json::to_value(&new.row.effective).unwrap_or_default(), &mut after);
    before.insert("train.block_size".to_owned(), serde_json::json!(old.row.block_size));
    after.insert("train.block_size".to_owned(), serde_json::json!(new.row.block_size));
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let value =
        |values: &BTreeMap<String, Value>, key: &str| values.get(key).filter(|value| !value.is_null()).map_or("not set".to_owned(), Value::to_string);
    let mut found: Vec<String> = keys
        .into_iter()
        .filter(|key| before.get(*key) != after.get(*key))
        .map(|key| format!("row \"{label}\": {key} was {} and is {}", value(&before, key), value(&after, key)))
        .collect();
    if found.is_empty() && old.data.fingerprint != new.data.fingerprint {
        found.push(format!("row \"{label}\": the contents of its data have changed"));
    } else if found.is_empty() && old.configuration != new.configuration {
        found.push(format!("row \"{label}\": the contents of its model have changed"));
    }
    found
}

/// Leaves of a JSON value by their dotted path.
fn flatten(path: &str, value: &Value, leaves: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, field, leaves);
            }
        }
        leaf => {
            leaves.insert(path.to_owned(), leaf.clone());
        }
    }
}

fn words(values: &[String]) -> String {
    if values.is_empty() { "not given".to_owned() } else { values.join(" ") }
}
