//! What a sweep file means once it is read, merged and expanded: rows to fill, and the rules of the run.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::expand::Expansion;
use super::settings::Settings;
use super::slurm::SlurmSettings;

/// A sweep file, resolved: every row of its tables and everything the run needs to know. Nothing has been fetched or looked up yet.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepPlan {
    /// Name of the sweep: a folder name.
    pub name: String,
    /// What the sweep is for, in the author's words.
    pub description: Option<String>,
    /// Trainings per configuration and block size, each with its own seed.
    pub repeats: u32,
    /// Label of the row that others are compared with.
    pub control: Option<String>,
    /// Rows in file order: `[grid]` first, then the cases.
    pub rows: Rows,
    /// The search for the largest block size; `None` where block sizes are fixed.
    pub search: Option<BlockSizeSearch>,
    /// `[checkpoint]`
    pub checkpoint: CheckpointSettings,
    /// `[limits]`
    pub limits: Limits,
    /// `[slurm]`
    pub slurm: SlurmSettings,
    /// `[telemetry] interval`
    pub telemetry_interval: Duration,
    /// `[report]`
    pub report: ReportSettings,
    /// Profiles that were applied, in order.
    pub profiles: Vec<String>,
    /// What the user should know before anything starts, a sentence each: points excluded, profile applied by itself.
    pub notices: Vec<String>,
}

/// The rows of a plan, in order. A grid of a million points is held as its axes, so each row is built when it is asked for; `Rows::from(vec)` holds a
/// list as it stands.
#[derive(Clone, Debug)]
pub struct Rows(Source);

#[derive(Clone, Debug)]
enum Source {
    Listed(Arc<[Row]>),
    Expanded(Arc<Expansion>),
}

impl Rows {
    pub(super) fn expanded(expansion: Arc<Expansion>) -> Self {
        Self(Source::Expanded(expansion))
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Source::Listed(rows) => rows.len(),
            Source::Expanded(expansion) => expansion.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Builds the row at `index`, from 0.
    pub fn get(&self, index: usize) -> Option<Row> {
        match &self.0 {
            Source::Listed(rows) => rows.get(index).cloned(),
            Source::Expanded(expansion) => expansion.row(index),
        }
    }

    /// Builds the rows one after another.
    pub fn iter(&self) -> Box<dyn Iterator<Item = Row> + '_> {
        match &self.0 {
            Source::Listed(rows) => Box::new(rows.iter().cloned()),
            Source::Expanded(expansion) => Box::new(expansion.rows()),
        }
    }
}

impl From<Vec<Row>> for Rows {
    fn from(listed: Vec<Row>) -> Self {
        Self(Source::Listed(listed.into()))
    }
}

impl<'a> IntoIterator for &'a Rows {
    type Item = Row;
    type IntoIter = Box<dyn Iterator<Item = Row> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for Rows {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// One row of the tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The case's label, or one made of the axes' values; unique in the sweep.
    pub label: String,
    /// All parameters as the file means them; what Table 2 shows.
    pub settings: Settings,
    /// The same with switches that cannot matter set to one canonical value; what trials are identified by and trained with.
    pub effective: Settings,
    /// The fixed block size; `None` where the search finds it.
    pub block_size: Option<usize>,
    /// Why `effective` differs from `settings`, a sentence each; footnotes of the row.
    pub collapsed: Vec<String>,
}

/// `[search.block_size]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSizeSearch {
    /// Ascending, without duplicates.
    pub candidates: Vec<usize>,
    /// Applied optimiser steps of a probe.
    pub probe_steps: u64,
}

/// `[checkpoint]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSettings {
    /// Optimiser steps between checkpoints; `None` saves none.
    pub save_steps: Option<u64>,
    /// How many checkpoints are kept; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// Whether the trained model is saved at the end.
    pub save_model: bool,
}

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Longest time of one attempt.
    pub trial_timeout: Option<Duration>,
    /// Longest time before the first step.
    pub startup_timeout: Duration,
    /// Longest time without progress after it.
    pub stall_timeout: Duration,
    /// Time between TERM and KILL.
    pub grace_period: Duration,
    /// Attempts after the first, for infrastructure failures only.
    pub retries: u32,
    /// Infrastructure failures in a row that stop the run.
    pub max_consecutive_infra_failures: u32,
    /// Trials at a time; `None` is as many as the devices hold.
    pub jobs: Option<usize>,
    /// Longest time of the whole run.
    pub sweep_timeout: Option<Duration>,
}

/// `[report]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReportSettings {
    /// Price of one device for one hour, in the user's currency; adds a cost column.
    pub price_per_device_hour: Option<f64>,
}
