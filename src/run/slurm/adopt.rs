//! Finding the jobs of an earlier `sweep run`, so that none is submitted twice and none is forgotten.

use std::collections::BTreeSet;

use super::batch::{Batch, ExitRecord};
use super::client::{self, ClientError, Queue};
use super::watcher::array_of;
use crate::event::EventKind;
use crate::run::Work;
use crate::store::{RunFolder, StoreError};
use crate::trial::{JobState, TrialId};

/// An attempt whose job was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which trial.
    pub trial: TrialId,
    /// Which attempt.
    pub attempt: u32,
    pub(super) batch: Batch,
    /// Its place in the array.
    pub(super) task: usize,
    /// Id of the array.
    pub(super) array: String,
}

/// What an earlier `sweep run` left with SLURM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    /// Attempts that run, wait, or ended unseen.
    pub found: Vec<Found>,
    /// Jobs that run or wait.
    pub alive: Vec<String>,
    /// Those of them whose trial has a later attempt: they are in the way.
    pub superseded: Vec<String>,
}

/// Why jobs cannot be looked for.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The run folder cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The queue cannot be asked.
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl Adoption {
    /// Looks for the jobs of a run's open attempts, in the queue and in their files.
    ///
    /// # Errors
    /// The run folder cannot be read; or there are open attempts and the queue cannot be asked: to go on could start a trial twice.
    pub fn look(run: &RunFolder) -> Result<Self, AdoptError> {
        let is_open = |trial: &TrialId, attempt| !run.attempt(trial, attempt).outcome().exists();
        let batches = Batch::all(run)?;
        let open = batches.iter().any(|batch| batch.tasks().iter().any(|task| is_open(&task.trial, task.attempt)));
        if !open {
            return Ok(Self::default());
        }
        let queue = client::squeue()?;
        Ok(Self::of(run, &batches, &queue, is_open))
    }

    fn of(run: &RunFolder, batches: &[Batch], queue: &Queue, is_open: impl Fn(&TrialId, u32) -> bool) -> Self {
        let mut adoption = Self::default();
        for batch in batches {
            // A crash between submission and record leaves a job that only its name tells.
            let Some(array) = batch.job().or_else(|| array_of(queue, &batch.name)) else { continue };
            if batch.job().is_none() {
                // Found by name now, it may be gone from the queue the next time. Where it cannot be written down it is found again.
                drop(batch.submitted(&array));
            }
            for task in batch.tasks() {
                if !is_open(&task.trial, task.attempt) {
                    continue;
                }
                let id = format!("{array}_{}", task.number);
                let alive = queue.get(&id).is_some_and(|queued| !matches!(queued.state, JobState::Ended(_)));
                adoption.alive.extend(alive.then(|| id.clone()));
                if run.attempt(&task.trial, task.attempt + 1).0.exists() {
                    adoption.superseded.extend(alive.then_some(id));
                    continue;
                }
                let attempt = run.attempt(&task.trial, task.attempt);
                let ended_with_result = !alive && ExitRecord::read(&attempt).is_none() && attempt.result().exists();
                // Its folder is gone, or it tells by itself how it ended.
                if !attempt.0.exists() && !alive || ended_with_result {
                    continue;
                }
                adoption.found.push(Found {
                    trial: task.trial,
                    attempt: task.attempt,
                    batch: batch.clone(),
                    task: task.number,
                    array: array.clone(),
                });
            }
        }
        adoption
    }

    /// Ends what is in the way.
    ///
    /// # Errors
    /// `scancel` failed.
    pub fn cancel_superseded(&self) -> Result<(), ClientError> {
        if self.superseded.is_empty() { Ok(()) } else { client::scancel(&self.superseded, false) }
    }

    /// Makes the attempts that were found those of `work`: they are not over, whatever their folders say so far.
    pub fn enter(&self, work: &mut Work) {
        let trials: BTreeSet<(&TrialId, u32)> = self.found.iter().map(|found| (&found.trial, found.attempt)).collect();
        work.recovered.retain(|event| match event {
            EventKind::TrialEnded { trial, attempt, .. } => !trials.contains(&(trial, *attempt)),
            _ => true,
        });
        for (trial, attempt) in trials {
            if let Some(known) = work.known.get_mut(trial) {
                known.outcome = None;
            }
            work.adopted.insert(trial.clone(), attempt);
        }
        if !self.found.is_empty() {
            let jobs = if self.found.len() == 1 { "1 trial is".to_owned() } else { format!("{} trials are", self.found.len()) };
            work.remarks.push(format!("{jobs} with SLURM already and not submitted again."));
        }
    }
}
