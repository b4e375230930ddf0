//! From trials to rows: which block size a row shows and why not a larger one, its means over repeats, and a note for everything that is missing,
//! failed or not what a reader would take it for.

use std::collections::HashMap;

use polars::prelude::PolarsResult;

use crate::event::LimitedBy;
use crate::format;
use crate::protocol::TrialEnding;
use crate::spec::settings::Settings;
use crate::store::{BlockSizeResult, ManifestRow};
use crate::trial::{ConfigurationId, Purpose, TrialOutcome};

use super::read::{Progress, RunContents, Trial, TrialState};
use super::statistics::{self, Mean, Means, Measured};

/// Steady steps below which a step time is marked.
const ENOUGH_STEADY_STEPS: u64 = 20;

/// One row of the tables, with all that its cells and notes say.
#[derive(Debug)]
pub(super) struct ReportRow<'run> {
    /// Short name in plots: A, B, ... Z, AA ...
    pub(super) key: String,
    pub(super) manifest: &'run ManifestRow,
    /// The largest block size that trained, or that the search found and training has not refuted.
    pub(super) block_size: Option<usize>,
    pub(super) limited_by: Option<LimitedBy>,
    pub(super) means: Means,
    pub(super) notes: Vec<Note>,
    /// Trainings at [`Self::block_size`], by repeat.
    pub(super) trainings: Vec<&'run Trial>,
}

/// A footnote and the cell it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) field: Field,
    pub(super) text: String,
}

/// Cells of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// The method: notes on the row as a whole.
    Method,
    BlockSize,
    LimitedBy,
    EpochTime,
    Perplexity,
    PerplexityCommon,
    PeakMemory,
    Throughput,
    Steps,
    TokensSeen,
    Costs,
}

impl ReportRow<'_> {
    /// As the user wrote them.
    pub(super) fn settings(&self) -> &Settings {
        &self.manifest.row.settings
    }

    pub(super) fn label(&self) -> &str {
        &self.manifest.row.label
    }

    /// The training that plots show: the first repeat that is done, or else the first.
    pub(super) fn shown_training(&self) -> Option<&Trial> {
        let done = |trial: &&&Trial| trial.state == TrialState::Ended(TrialOutcome::Done);
        self.trainings.iter().find(done).or_else(|| self.trainings.first()).copied()
    }

    /// Tokens seen, where it trained to the end.
    pub(super) fn tokens_seen(&self) -> Option<u64> {
        self.means.tokens_seen.map(|mean| mean.value.round() as u64)
    }

    fn note(&mut self, field: Field, text: impl Into<String>) {
        self.notes.push(Note { field, text: text.into() });
    }
}

/// Makes the rows, in the manifest's order.
///
/// # Errors
/// polars failed, which is a defect of ours.
pub(super) fn rows(contents: &RunContents) -> PolarsResult<Vec<ReportRow<'_>>> {
    let mut by_configuration: HashMap<&ConfigurationId, Vec<&Trial>> = HashMap::new();
    for trial in &contents.trials {
        by_configuration.entry(&trial.configuration).or_default().push(trial);
    }
    let mut rows: Vec<ReportRow<'_>> = contents
        .manifest
        .rows
        .iter()
        .enumerate()
        .map(|(index, manifest)| {
            let trials = by_configuration.get(&manifest.configuration).map_or(&[][..], Vec::as_slice);
            settle(contents, key(index), manifest, trials)
        })
        .collect();

    let measured: Vec<(usize, Measured)> =
        rows.iter().enumerate().flat_map(|(index, row)| row.trainings.iter().filter_map(move |trial| Some((index, measured(trial)?)))).collect();
    for (row, means) in rows.iter_mut().zip(statistics::over_repeats(contents.manifest.rows.len(), &measured)?) {
        row.means = means;
    }
    for row in &mut rows {
        note_training(contents, row);
        note_missing(row);
        note_spread(row);
    }
    note_unequal_tokens(&mut rows);
    Ok(rows)
}

/// The key of a row in plots: A to Z, then AA, AB ...
fn key(index: usize) -> String {
    let letter = char::from(b'A' + (index % 26) as u8);
    if index < 26 { letter.to_string() } else { key(index / 26 - 1) + &letter.to_string() }
}

/// Block size, what limits it, and the trainings shown.
fn settle<'run>(contents: &RunContents, key: String, manifest: &'run ManifestRow, trials: &[&'run Trial]) -> ReportRow<'run> {
    let mut row = ReportRow { key, manifest, block_size: None, limited_by: None, means: Means::default(), notes: Vec::new(), trainings: Vec::new() };
    for text in &manifest.row.collapsed {
        row.note(Field::Method, text.clone());
    }
    let fixed = manifest.row.block_size;
    let search = match fixed {
        Some(_) => None,
        None => contents.searches.get(&manifest.configuration).copied().or_else(|| search_in_folders(contents, manifest, trials)),
    };
    let found = fixed.or(search.and_then(|search| search.block_size));

    let trainings: Vec<&Trial> = trials.iter().copied().filter(|trial| trial.purpose == Purpose::Train).collect();
    let out_of_memory = |trial: &&&Trial| matches!(trial.state, TrialState::Ended(TrialOutcome::OutOfDeviceMemory { .. }));
    let done = |trial: &&&Trial| trial.state == TrialState::Ended(TrialOutcome::Done);
    let largest_done = trainings.iter().filter(done).map(|trial| trial.block_size).max();
    let refuted =
        trainings.iter().filter(out_of_memory).map(|trial| trial.block_size).filter(|size| largest_done.is_none_or(|done| *size > done)).min();
    row.block_size = largest_done
        .or_else(|| trainings.iter().filter(|trial| !out_of_memory(trial)).map(|trial| trial.block_size).min())
        .or(found)
        .filter(|size| refuted.is_none_or(|refuted| *size < refuted));
    row.trainings = trainings.iter().copied().filter(|trial| Some(trial.block_size) == row.block_size).collect();
    row.trainings.sort_by_key(|trial| trial.repeat);

    row.limited_by = if refuted.is_some() { Some(LimitedBy::Memory) } else { search.map(|search| search.limited_by) };
    if let Some(size) = refuted {
        let ending = trainings.iter().filter(out_of_memory).find(|trial| trial.block_size == size).map_or_else(String::new, |trial| describe(trial));
        let consequence = match row.block_size {
            Some(smaller) => format!("the next smaller candidate, {smaller}, was taken"),
            None if fixed.is_some() => "the sweep file fixes the block size, so there is no smaller one to take".to_owned(),
            None => "no smaller block size has trained".to_owned(),
        };
        row.note(Field::BlockSize, format!("training at block size {size} ended {ending}; {consequence}"));
    } else if row.block_size.is_none() {
        let reason = match search {
            Some(BlockSizeResult { limited_by: LimitedBy::Memory, .. }) => nothing_fits(contents, trials),
            Some(BlockSizeResult { limited_by: LimitedBy::Model, .. }) => {
                "not even the smallest candidate is within the model's positions".to_owned()
            }
            Some(BlockSizeResult { limited_by: LimitedBy::Data, .. }) => "not even the smallest candidate leaves one global batch of data".to_owned(),
            Some(BlockSizeResult { limited_by: LimitedBy::Candidates, .. }) => "no candidate fits".to_owned(),
            None => search_so_far(contents, trials),
        };
        row.note(Field::BlockSize, reason);
    }
    if row.limited_by.is_none() {
        let reason = if fixed.is_some() { "the block size is fixed by the sweep file, not searched" } else { "the search has not ended" };
        row.note(Field::LimitedBy, reason);
    }
    row
}

fn nothing_fits(contents: &RunContents, trials: &[&Trial]) -> String {
    let smallest = contents.manifest.search.as_ref().and_then(|search| search.candidates.first().copied());
    let ending = trials.iter().filter(|trial| Some(trial.block_size) == smallest).find_map(|trial| match &trial.state {
        TrialState::Ended(outcome @ TrialOutcome::OutOfDeviceMemory { .. }) => Some(outcome.to_string()),
        _ => None,
    });
    match (smallest, ending) {
        (Some(smallest), Some(ending)) => format!("not even the smallest candidate, {smallest}, fits: {ending}"),
        (Some(smallest), None) => format!("not even the smallest candidate, {smallest}, fits"),
        (None, _) => "no block size fits".to_owned(),
    }
}

/// Why there is no size where the search is not known to have ended.
fn search_so_far(contents: &RunContents, trials: &[&Trial]) -> String {
    if trials.is_empty() {
        return format!("not started{}", still(contents));
    }
    if let Some(trial) = trials.iter().find(|trial| failed(trial)) {
        return format!("the search could not end: block size {} {}", trial.block_size, describe(trial));
    }
    match trials.iter().filter(|trial| trial.state == TrialState::Ended(TrialOutcome::Done)).map(|trial| trial.block_size).max() {
        Some(size) => format!("the search has not ended; {size} fits so far{}", still(contents)),
        None => format!("the search has not ended{}", still(contents)),
    }
}

/// What the folders tell of a search whose end is not among the events.
fn search_in_folders(contents: &RunContents, manifest: &ManifestRow, trials: &[&Trial]) -> Option<BlockSizeResult> {
    let candidates = &contents.manifest.search.as_ref()?.candidates;
    let ended = |size: usize, fits: bool| {
        trials.iter().any(|trial| {
            trial.block_size == size
                && match &trial.state {
                    TrialState::Ended(TrialOutcome::Done) => fits,
                    TrialState::Ended(TrialOutcome::OutOfDeviceMemory { .. }) => !fits,
                    _ => false,
                }
        })
    };
    let block_size = candidates.iter().copied().filter(|size| ended(*size, true) && !ended(*size, false)).max();
    let next = candidates.iter().copied().find(|size| block_size.is_none_or(|found| *size > found));
    let positions = trials.iter().find_map(|trial| trial.positions);
    let train = &manifest.row.effective.train;
    let global_batch = manifest.row.effective.device.world_size * train.per_device_train_batch_size * train.gradient_accumulation_steps;
    let limited_by = match next {
        None => LimitedBy::Candidates,
        Some(next) if ended(next, false) => LimitedBy::Memory,
        Some(next) if positions.is_some_and(|positions| next > positions) => LimitedBy::Model,
        Some(next) if manifest.data.train_tokens / (next as u64) < global_batch as u64 => LimitedBy::Data,
        Some(_) => return None,
    };
    Some(BlockSizeResult { block_size, limited_by })
}

/// Whether a trial ended in a way that is no result.
pub(super) fn failed(trial: &Trial) -> bool {
    matches!(&trial.state, TrialState::Ended(outcome) if outcome.is_failure())
}

/// How far a trial is, as a clause.
pub(super) fn describe(trial: &Trial) -> String {
    match &trial.state {
        TrialState::Ended(outcome) => outcome.to_string(),
        TrialState::NotStarted => "not started".to_owned(),
        TrialState::Open => match trial.series.steps.last() {
            Some((_, step)) => format!("not ended: step {} of {} so far", format::count(step.step), format::count(step.steps)),
            None => "not ended: no step so far".to_owned(),
        },
    }
}

/// What to add to a row that is not ready, so that nobody waits for a run that is over.
fn still(contents: &RunContents) -> &'static str {
    match contents.progress {
        Progress::Open => " (the run is in progress, or was killed)",
        Progress::Stopped => " (the run was stopped early)",
        Progress::Complete => "",
    }
}

/// Numbers of a training that left a result, whatever its ending; a training that took no step has none.
fn measured(trial: &Trial) -> Option<Measured> {
    let result = trial.result.as_ref().filter(|_| matches!(trial.state, TrialState::Ended(_)))?;
    // A checkpoint on the way is not an end: its numbers are of half a training.
    if matches!(result.ending, TrialEnding::Checkpointed { .. }) {
        return None;
    }
    let done = result.ending == TrialEnding::Done;
    Some(Measured {
        epoch_seconds: result.timing.epoch_seconds,
        perplexity: result.evaluation.as_ref().map(|evaluation| evaluation.perplexity.0),
        perplexity_common: result.evaluation_common.as_ref().map(|evaluation| evaluation.perplexity.0),
        peak_bytes: result.peak_bytes.iter().max().map(|bytes| *bytes as f64),
        tokens_per_second: result.timing.tokens_per_second,
        optimizer_steps: (done || result.optimizer_steps > 0).then_some(result.optimizer_steps as f64),
        tokens_seen: (done || result.tokens_seen > 0).then_some(result.tokens_seen as f64),
        costs_seconds: done.then_some(result.timing.evaluation_seconds + result.timing.checkpoint_seconds),
    })
}

/// Notes on how the trainings ended.
fn note_training(contents: &RunContents, row: &mut ReportRow<'_>) {
    let repeats = contents.manifest.repeats.max(1) as usize;
    let mut texts = Vec::new();
    for trial in &row.trainings {
        if trial.state == TrialState::Ended(TrialOutcome::Done) {
            if trial.result.is_none() {
                texts.push(format!("training ended well, but its result.json is missing or cannot be read (trial {})", trial.id));
            }
            continue;
        }
        let which = if repeats > 1 { format!("repeat {} of {repeats}", trial.repeat + 1) } else { "training".to_owned() };
        let still = if matches!(trial.state, TrialState::Ended(_)) { "" } else { still(contents) };
        texts.push(format!("{which} {}{still}", describe(trial)));
    }
    if row.block_size.is_some() && row.trainings.len() < repeats {
        let missing = match (contents.progress, row.trainings.len()) {
            (Progress::Complete, 0) => "the run is over and has no training of this row".to_owned(),
            (_, 0) => "training has not started".to_owned(),
            (_, some) => format!("{} of {repeats} repeats have not run", repeats - some),
        };
        texts.push(missing + still(contents));
    }
    for text in texts {
        row.note(Field::Method, text);
    }
    let shortest = row.trainings.iter().filter_map(|trial| trial.result.as_ref()).map(|result| result.timing.steady_steps).min();
    if let (Some(_), Some(steps)) = (row.means.epoch_seconds, shortest.filter(|steps| *steps < ENOUGH_STEADY_STEPS)) {
        let text = format!("mean over {steps} steady steps only, fewer than {ENOUGH_STEADY_STEPS}");
        row.note(Field::EpochTime, text.clone());
        row.note(Field::Throughput, text);
    }
    let skipped: u64 = row.trainings.iter().filter_map(|trial| trial.result.as_ref()).map(|result| result.skipped_steps).sum();
    if skipped > 0 {
        row.note(Field::Steps, format!("{} skipped for fp16 overflow are among them", format::count(skipped)));
    }
    for (field, mean) in [(Field::Perplexity, row.means.perplexity), (Field::PerplexityCommon, row.means.perplexity_common)] {
        if mean.is_some_and(|mean| !mean.value.is_finite()) {
            row.note(field, "not a finite number: the evaluation loss overflowed");
        }
    }
}

/// A note for every cell that is empty.
fn note_missing(row: &mut ReportRow<'_>) {
    let whole = row
        .notes
        .iter()
        .find(|note| match note.field {
            Field::BlockSize => row.block_size.is_none(),
            Field::Method => !row.manifest.row.collapsed.contains(&note.text),
            _ => false,
        })
        .map(|note| note.text.clone());
    let no_result = !row.trainings.iter().any(|trial| trial.result.is_some() && trial.state == TrialState::Ended(TrialOutcome::Done));
    let means = row.means.clone();
    let fields = [
        (Field::EpochTime, means.epoch_seconds.is_none()),
        (Field::Perplexity, means.perplexity.is_none()),
        (Field::PerplexityCommon, means.perplexity_common.is_none()),
        (Field::PeakMemory, means.peak_bytes.is_none()),
        (Field::Throughput, means.tokens_per_second.is_none()),
        (Field::Steps, means.optimizer_steps.is_none()),
        (Field::TokensSeen, means.tokens_seen.is_none()),
        (Field::Costs, means.costs_seconds.is_none()),
    ];
    for (field, missing) in fields {
        if !missing {
            continue;
        }
        let reason = match &whole {
            Some(whole) if no_result => whole.clone(),
            _ => reason_missing(row, field),
        };
        row.note(field, reason);
    }
}

/// Why a training that ended well has no such number.
fn reason_missing(row: &ReportRow<'_>, field: Field) -> String {
    let evaluation = |block_size: Option<usize>| match block_size {
        _ if row.manifest.data.eval.is_none() => "there is no evaluation split".to_owned(),
        Some(size) if row.manifest.data.eval_tokens < size as u64 => {
            format!("the evaluation split of {} tokens is shorter than one block of {size}", format::count(row.manifest.data.eval_tokens))
        }
        _ => "the evaluation left no perplexity".to_owned(),
    };
    match field {
        Field::Perplexity => evaluation(row.block_size),
        Field::PerplexityCommon => evaluation(Some(row.settings().train.eval_block_size)),
        Field::EpochTime | Field::Throughput => "the training has no steady step to take a mean over".to_owned(),
        Field::PeakMemory => "the device's memory could not be read".to_owned(),
        _ => "not measured".to_owned(),
    }
}

/// The spread of every mean over more than one repeat.
fn note_spread(row: &mut ReportRow<'_>) {
    let means = row.means.clone();
    let spread = |mean: Option<Mean>, write: &dyn Fn(f64) -> String| {
        let mean = mean.filter(|mean| mean.count > 1)?;
        Some(format!("mean of {} repeats, standard deviation {}", mean.count, write(mean.deviation?)))
    };
    let two_decimals = |value: f64| format!("{value:.2}");
    let seconds = |value: f64| format!("{value:.2} s");
    let notes = [
        (Field::EpochTime, spread(means.epoch_seconds, &seconds)),
        (Field::Perplexity, spread(means.perplexity, &two_decimals)),
        (Field::PerplexityCommon, spread(means.perplexity_common, &two_decimals)),
        (Field::Throughput, spread(means.tokens_per_second, &two_decimals)),
        (Field::PeakMemory, means.peak_bytes.filter(|mean| mean.count > 1).map(|mean| format!("largest of {} repeats", mean.count))),
    ];
    for (field, text) in notes {
        if let Some(text) = text {
            row.note(field, text);
        }
    }
}

/// Rows that saw different numbers of tokens say so, so that nobody ranks them.
fn note_unequal_tokens(rows: &mut [ReportRow<'_>]) {
    let mut seen = rows.iter().filter_map(ReportRow::tokens_seen);
    let Some(first) = seen.next() else { return };
    if seen.all(|tokens| tokens == first) {
        return;
    }
    for row in rows {
        if row.tokens_seen().is_some() {
            row.note(
                Field::TokensSeen,
                "rows differ in tokens seen: where they are unequal, no row is better or worse than another by its perplexity",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::key;

    #[test]
    fn keys_are_letters() {
        let keys: Vec<String> = [0, 1, 25, 26, 27, 51, 52, 701, 702].into_iter().map(key).collect();
        assert_eq!(keys, ["A", "B", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]);
    }
}
