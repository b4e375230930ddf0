//! Everything that names Burn. Run by `sweep trial` in the child.

pub mod checkpoint;
pub mod config;
pub mod dataset;
pub mod error;
pub mod eval;
pub mod export;
#[cfg(feature = "test-fakes")]
mod fault;
pub mod fsdp;
pub mod memory;
pub mod model;
pub mod optim;
pub mod preemption;
pub mod reporter;
pub mod scaler;
pub mod schedule;
pub mod timing;
pub mod trainer;
pub mod weights;

use std::path::Path;
use std::time::Instant;

use self::checkpoint::Checkpoints;
use self::config::TrialConfig;
use self::error::TrainError;
use self::preemption::Preemption;
use self::reporter::Reporter;
use crate::protocol::{DataCounts, PROTOCOL, Timing, TrialEnding, TrialRequest, TrialResult};
use crate::store::{self, AttemptFolder, StoreError};
use crate::trial::child_exit;

/// Exit code of a defect of our own: a crash to whoever started us.
const CRASHED: i32 = 70;

/// Why a trial did not end with a complete result.
#[derive(Debug, thiserror::Error)]
pub enum TrialFailure {
    /// The training room could not do it.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The loss became NaN or infinite.
    #[error("training diverged: {0}")]
    Diverged(String),
}

impl TrialFailure {
    /// The child's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Train(TrainError::Request(_) | TrainError::Input(_)) => child_exit::BAD_REQUEST,
            Self::Train(error) if error.is_panic() => CRASHED,
            Self::Train(_) | Self::Diverged(_) => child_exit::FAILED,
        }
    }
}

/// How a trial ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialEnd {
    /// It is done.
    Done,
    /// It was asked to end and has saved its state.
    Checkpointed,
}

impl TrialEnd {
    /// The child's exit code.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Done => child_exit::DONE,
            Self::Checkpointed => child_exit::CHECKPOINTED,
        }
    }
}

/// Runs the trial that the request file asks for and writes its answers beside it. TERM and USR2 end the process early, see [`preemption`]. `give_up` must end
/// it at once: it is called where a rank has failed and another is blocked, so that its thread cannot be ended.
///
/// # Errors
/// Everything but a complete result or a checkpoint. What went wrong in training stands in `result.json` too.
pub fn run(request: &Path, give_up: &(dyn Fn(&TrialFailure) + Sync)) -> Result<TrialEnd, TrialFailure> {
    let began = Instant::now();
    let preemption = Preemption::watch().map_err(|error| TrainError::Failed(format!("cannot watch for signals: {error}")))?;
    let folder = AttemptFolder(request.parent().map(Path::to_owned).unwrap_or_default());
    let config = TrialConfig::read(request)?;
    let checkpoints = Checkpoints::of(&config.request, &folder.0);
    let reporter = Reporter::open(&folder.messages())?;
    let abandon = |error: &TrainError| {
        // The process ends with this error; one of writing it down would only hide it.
        drop(store::write_json(&folder.result(), &failed(&config.request, &reporter, error)));
        give_up(&error.clone().into());
    };
    let (result, failure) = match trainer::train(&config, &reporter, checkpoints.as_ref(), &preemption, began, &abandon) {
        Ok(result) => {
            let failure = match &result.ending {
                TrialEnding::Diverged { reason } => Some(TrialFailure::Diverged(reason.clone())),
                _ => None,
            };
            (result, failure)
        }
        Err(error @ (TrainError::Request(_) | TrainError::Input(_))) => return Err(error.into()),
        Err(error) => (failed(&config.request, &reporter, &error), Some(error.into())),
    };
    let failed = |error: StoreError| TrainError::Failed(error.to_string());
    store::write_json(&folder.result(), &result).map_err(failed)?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    if matches!(result.ending, TrialEnding::Checkpointed { .. }) {
        return Ok(TrialEnd::Checkpointed);
    }
    checkpoints.map_or(Ok(()), |checkpoints| checkpoints.remove_unasked()).map_err(failed)?;
    Ok(TrialEnd::Done)
}

/// The result of a training that failed: it says why, and nothing that was not measured.
fn failed(request: &TrialRequest, reporter: &Reporter, error: &TrainError) -> TrialResult {
    TrialResult {
        protocol: PROTOCOL,
        trial: request.trial.clone(),
        ending: TrialEnding::Failed { reason: error.to_string() },
        optimizer_steps: 0,
        skipped_steps: 0,
        tokens_seen: 0,
        evaluation: None,
        evaluation_common: None,
        timing: Timing::default(),
        peak_bytes: Vec::new(),
        host_bytes: Vec::new(),
        parameters: 0,
        data: DataCounts::default(),
        warnings: reporter.warnings(),
    }
}
