//! What a run is given to do: plain data, complete before the first trial starts.

use std::collections::{BTreeMap, BTreeSet};

use super::leases::{Demand, Machine};
use crate::event::{EventKind, LimitedBy};
use crate::protocol::{PreparedData, ResolvedModel};
use crate::spec::plan::{CheckpointSettings, Limits};
use crate::spec::settings::{DeviceKind, Settings};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// A configuration with everything its trials need. Rows that share it are served by one.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// Its id.
    pub id: ConfigurationId,
    /// Label of the first row it serves.
    pub label: String,
    /// All parameters, switches that cannot matter set to their canonical value.
    pub settings: Settings,
    /// The model, found and described.
    pub model: ResolvedModel,
    /// The data, tokenised.
    pub data: PreparedData,
    /// Its trials.
    pub trials: ConfigurationTrials,
}

/// The trials a configuration may need.
#[derive(Clone, Debug)]
pub enum ConfigurationTrials {
    /// A fixed block size: the trainings, one per repeat.
    Fixed {
        /// Tokens per sequence.
        block_size: usize,
        /// Ids of the trainings by repeat.
        trainings: Vec<TrialId>,
    },
    /// A search over candidates, ascending.
    Search(Vec<Candidate>),
}

/// A candidate of the search.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Tokens per sequence.
    pub block_size: usize,
    /// Id of its probe.
    pub probe: TrialId,
    /// Ids of its trainings by repeat.
    pub trainings: Vec<TrialId>,
}

impl Configuration {
    /// Every trial that this configuration may ever need.
    pub fn possible_trials(&self) -> Vec<PlannedTrial> {
        let plan = |id: &TrialId, purpose, block_size, repeat: usize| PlannedTrial {
            id: id.clone(),
            purpose,
            block_size,
            repeat: u32::try_from(repeat).unwrap_or(u32::MAX),
        };
        let trainings =
            |ids: &[TrialId], block_size| ids.iter().enumerate().map(|(repeat, id)| plan(id, Purpose::Train, block_size, repeat)).collect::<Vec<_>>();
        match &self.trials {
            ConfigurationTrials::Fixed { block_size, trainings: ids } => trainings(ids, *block_size),
            ConfigurationTrials::Search(candidates) => candidates
                .iter()
                .flat_map(|candidate| {
                    let mut trials = vec![plan(&candidate.probe, Purpose::Probe, candidate.block_size, 0)];
                    trials.extend(trainings(&candidate.trainings, candidate.block_size));
                    trials
                })
                .collect(),
        }
    }

    /// What each of its trials needs: on a CPU the budgets of its ranks together, 0 where there are none; otherwise a GPU for each rank.
    pub(super) fn demand(&self) -> Demand {
        let device = &self.settings.device;
        match device.kind {
            DeviceKind::Cpu => Demand { memory_bytes: device.memory.unwrap_or(0).saturating_mul(device.world_size as u64), gpus: 0 },
            DeviceKind::Cuda => Demand { memory_bytes: 0, gpus: device.world_size },
        }
    }
}

/// A trial, as far as the configuration does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Which trials may run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// All but what is named below is left alone; `false` is no restriction.
    pub restricted: bool,
    /// Configurations, by their place in [`Work::configurations`].
    pub configurations: BTreeSet<usize>,
    /// Single trials.
    pub trials: BTreeSet<TrialId>,
}

/// What is known about a trial before the run starts.
#[derive(Clone, Debug, Default)]
pub struct KnownTrial {
    /// Attempts begun so far.
    pub attempts: u32,
    /// The outcome, where it settles the trial.
    pub outcome: Option<TrialOutcome>,
    /// Whether the next attempt starts afresh, whatever checkpoints earlier ones left.
    pub afresh: bool,
}

/// Machines that another shares out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Nodes of one trial.
    pub nodes: usize,
}

/// Everything a run is given.
#[derive(Clone, Debug)]
pub struct Work {
    /// Name of the sweep.
    pub sweep: String,
    /// Name of the run.
    pub run: String,
    /// Whether an earlier `sweep run` began it.
    pub resumed: bool,
    /// In row order.
    pub configurations: Vec<Configuration>,
    /// Applied optimiser steps of a probe.
    pub probe_steps: u64,
    /// Which trials may run.
    pub selection: Selection,
    /// `[checkpoint]`
    pub checkpoint: CheckpointSettings,
    /// `[limits]`, `--jobs` laid over it.
    pub limits: Limits,
    /// Whether the first failed trial ends the run.
    pub fail_fast: bool,
    /// What the machine has to give.
    pub machine: Machine,
    /// The cluster that trials run on; `None` where they run on this machine.
    pub cluster: Option<Cluster>,
    /// Attempts that an earlier `sweep run` started and that still run, or ended unseen. They end as if this one had started them.
    pub adopted: BTreeMap<TrialId, u32>,
    /// What is known already, from an earlier `sweep run`.
    pub known: BTreeMap<TrialId, KnownTrial>,
    /// Trials that had ended and whose folder is gone; they run again.
    pub lost: BTreeSet<TrialId>,
    /// Ends of trials that stand in the trials' folders and not in `events.jsonl`; they are put on record first.
    pub recovered: Vec<EventKind>,
    /// What the searches announced already.
    pub announced: BTreeMap<ConfigurationId, (Option<usize>, LimitedBy)>,
    /// What the user should know about the results before the first trial, a sentence each.
    pub notices: Vec<String>,
    /// What the user should know about the course of the run, a sentence each.
    pub remarks: Vec<String>,
}
