//! State dicts: saving the whole state of a training between two optimiser steps, and going on from it.
//!
//! A checkpoint is a folder `step-<n>` with `index.json` and tensors in safetensors files: one per rank (`SHARDED_STATE_DICT`) or one that rank 0 writes
//! (`FULL_STATE_DICT`). Tensors are f32 masters and AdamW's moments, each named by its parameter and the elements it holds, never by unit, rank or
//! strategy: whatever wrote a checkpoint, any world size, wrap policy and strategy can read it. The folder gets its name when everything in it is on disk,
//! the index last; a checkpoint that is not whole is refused by name.

mod index;
mod load;
mod save;
mod tensors;

#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use self::index::{DataPosition, Index, Progress, SchedulerState, TrainingState};
pub use self::load::{Checkpoint, Refused};
pub use self::tensors::FileEntry;

use super::error::TrainError;
use super::fsdp::FullyShardedDataParallel;
use super::model::tree::ParameterInfo;
use super::optim::AdamW;
use crate::protocol::{CheckpointRequest, TrialRequest};
use crate::spec::settings::StateDictType;
use crate::store::{StoreError, io_error};
use crate::trial::TrialId;

/// Folders that are being written, or deleted, begin with it; nobody reads them.
const PARTIAL: &str = ".partial-";

/// What a tensor of a checkpoint is of its parameter; PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// The f32 master.
    Model,
    /// AdamW's average of the gradient.
    ExpAvg,
    /// AdamW's average of its square.
    ExpAvgSq,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Model, Self::ExpAvg, Self::ExpAvgSq];

    const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
        }
    }

    /// `model/transformer.wte.weight`, or `model/transformer.wte.weight[0..4096]` where it is a part.
    fn tensor_name(self, parameter: &str, elements: Option<&Range<usize>>) -> String {
        match elements {
            None => format!("{}/{parameter}", self.name()),
            Some(Range { start, end }) => format!("{}/{parameter}[{start}..{end}]", self.name()),
        }
    }

    /// Kind, parameter and, where it is a part, elements of the tensor of this name.
    fn parse(tensor: &str) -> Option<(Self, &str, Option<Range<usize>>)> {
        let (kind, rest) = tensor.split_once('/')?;
        let kind = Self::ALL.into_iter().find(|known| known.name() == kind)?;
        let Some((parameter, elements)) = rest.strip_suffix(']').and_then(|rest| rest.rsplit_once('[')) else { return Some((kind, rest, None)) };
        let (start, end) = elements.split_once("..")?;
        let (start, end) = (start.parse().ok()?, end.parse().ok()?);
        (start < end).then_some((kind, parameter, Some(start..end)))
    }
}

/// Name of the folder of a checkpoint after `step` optimiser steps.
fn folder_name(step: u64) -> String {
    format!("step-{step}")
}

/// The checkpoints of a trial.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    trial: TrialId,
    folder: PathBuf,
    save_steps: Option<u64>,
    save_total_limit: Option<usize>,
    state_dict_type: StateDictType,
}

impl Checkpoints {
    /// The checkpoints that a request in the folder `of_request` asks for.
    pub fn of(request: &TrialRequest, of_request: &Path) -> Option<Self> {
        let CheckpointRequest { folder, save_steps, save_total_limit } = request.checkpoint.as_ref()?;
        Some(Self {
            trial: request.trial.clone(),
            folder: resolve(of_request, folder),
            save_steps: *save_steps,
            save_total_limit: *save_total_limit,
            state_dict_type: request.settings.fsdp.state_dict_type,
        })
    }

    /// Whether a checkpoint is due after `step` optimiser steps.
    pub fn is_due(&self, step: u64) -> bool {
        self.save_steps.is_some_and(|every| step.is_multiple_of(every))
    }

    /// The newest checkpoint that can be used, and a sentence for each newer one that cannot; `None` where there is none at all.
    ///
    /// # Errors
    /// There are checkpoints and none of them can be used, or the folder cannot be read.
    pub fn newest(&self, parameters: &[ParameterInfo]) -> Result<Option<(Checkpoint, Vec<String>)>, TrainError> {
        let steps = self.steps().map_err(|error| TrainError::Input(error.to_string()))?;
        let mut refused = Vec::new();
        for step in steps.into_iter().rev() {
            match Checkpoint::open(&self.folder.join(folder_name(step)), &self.trial, parameters) {
                Ok(checkpoint) => {
                    let warnings = refused.iter().map(|refused: &Refused| format!("{refused}; training goes on from step {step}")).collect();
                    return Ok(Some((checkpoint, warnings)));
                }
                Err(error) => refused.push(error),
            }
        }
        match refused.first() {
            None => Ok(None),
            Some(newest) => {
                let older = if refused.len() > 1 { format!(", and none of the {} older ones can", refused.len() - 1) } else { String::new() };
                Err(TrainError::Input(format!(
                    "{newest}{older}; remove {}, or give `sweep run` --rerun failed, to start afresh",
                    self.folder.display()
                )))
            }
        }
    }

    /// Steps of which there is a folder, ascending.
    fn steps(&self) -> Result<Vec<u64>, StoreError> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error("read", &self.folder)(error)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(io_error("read", &self.folder))?.file_name();
            // Only names that `folder_name` makes: `step-007` would be opened as `step-7`.
            let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok()).filter(|step| *folder_name(*step) == *name);
            steps.extend(step);
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Saves the state after `step` optimiser steps; every rank must call it, and none goes on before the checkpoint is on disk. `state` is rank 0's. Gives
    /// the checkpoint's folder.
    ///
    /// # Errors
    /// It cannot be written; what there was before is untouched then. Or another rank failed.
    pub fn save(
        &self,
        engine: &mut FullyShardedDataParallel,
        optimizer: &AdamW,
        parameters: &[ParameterInfo],
        step: u64,
        state: TrainingState,
    ) -> Result<PathBuf, TrainError> {
        let (partial, complete) = (self.folder.join(format!("{PARTIAL}{}", folder_name(step))), self.folder.join(folder_name(step)));
        let writes_index = engine.group().rank() == 0;
        let saved = self.save_in(&partial, &complete, engine, optimizer, parameters, step, state);
        if saved.is_err() && writes_index {
            // On a full disk it would only be in the way. The error that is told is the first.
            drop(fs::remove_dir_all(&partial));
        }
        saved.map(|()| complete)
    }

    /// Saves the state in the folder `partial` and calls it `complete` in the end.
    #[expect(clippy::too_many_arguments, reason = "two folders, and what `save` is given")]
    fn save_in(
        &self,
        partial: &Path,
        complete: &Path,
        engine: &mut FullyShardedDataParallel,
        optimizer: &AdamW,
        parameters: &[ParameterInfo],
        step: u64,
        state: TrainingState,
    ) -> Result<(), TrainError> {
        let failed = |error: StoreError| TrainError::Failed(error.to_string());
        let group = engine.group().clone();
        if group.rank() == 0 {
            self.prepare(partial).map_err(failed)?;
        }
        group.barrier()?;
        let files = save::write_tensors(partial, self.state_dict_type, &*group, parameters, engine.shards(), optimizer)?;
        if group.rank() == 0 {
            let index = Index {
                format_version: index::FORMAT_VERSION,
                trial: self.trial.clone(),
                step,
                world_size: group.world_size(),
                state_dict_type: self.state_dict_type,
                state,
                parameters: parameters.iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect(),
                files,
            };
            index.write(partial).and_then(|()| self.publish(partial, complete)).and_then(|()| self.remove_superseded(step)).map_err(failed)?;
        }
        group.barrier()
    }

    /// Makes the folder to write in, and clears away what a killed attempt left unfinished.
    fn prepare(&self, partial: &Path) -> Result<(), StoreError> {
        fs::create_dir_all(&self.folder).map_err(io_error("create", &self.folder))?;
        for entry in fs::read_dir(&self.folder).map_err(io_error("read", &self.folder))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
                fs::remove_dir_all(entry.path()).map_err(io_error("remove", &entry.path()))?;
            }
        }
        fs::create_dir(partial).map_err(io_error("create", partial))
    }

    /// Gives a folder whose contents are on disk its name.
    fn publish(&self, partial: &Path, complete: &Path) -> Result<(), StoreError> {
        // Only a checkpoint that was refused can be in the way: training would otherwise have gone on from it.
        self.remove(complete)?;
        fs::rename(partial, complete).map_err(io_error("rename", partial))?;
        let synced = |folder: &Path| File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("write", folder));
        synced(&self.folder)?;
        // The folder itself may be new.
        self.folder.parent().filter(|parent| !parent.as_os_str().is_empty()).map_or(Ok(()), synced)
    }

    /// Deletes what the complete checkpoint of `step` makes superfluous: older ones beyond the limit, and newer ones, which were refused.
    fn remove_superseded(&self, step: u64) -> Result<(), StoreError> {
        let limit = match (self.save_total_limit, self.save_steps) {
            (Some(limit), _) => limit.max(1),
            (None, Some(_)) => usize::MAX,
            // Saved only to go on later: the newest will do.
            (None, None) => 1,
        };
        let (older, newer): (Vec<u64>, Vec<u64>) = self.steps()?.into_iter().partition(|saved| *saved <= step);
        let superfluous = &older[..older.len().saturating_sub(limit)];
        superfluous.iter().chain(&newer).try_for_each(|step| self.remove(&self.folder.join(folder_name(*step))))
    }

    /// Deletes a checkpoint, if it is there: first its name, so that nobody ever sees half of it.
    fn remove(&self, checkpoint: &Path) -> Result<(), StoreError> {
        let removed = self.folder.join(format!("{PARTIAL}removed"));
        match fs::rename(checkpoint, &removed) {
            Ok(()) => fs::remove_dir_all(&removed).map_err(io_error("remove", &removed)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error("remove", checkpoint)(error)),
        }
    }

    /// At the end of a trial: nobody asked for checkpoints that were saved only to go on later.
    ///
    /// # Errors
    /// They cannot be deleted.
    pub fn remove_unasked(&self) -> Result<(), StoreError> {
        if self.save_steps.is_some() || !self.folder.exists() {
            return Ok(());
        }
        fs::remove_dir_all(&self.folder).map_err(io_error("remove", &self.folder))
    }
}

/// `folder` as seen from the folder `of_request`; `..` is taken back where it leads to a known parent, so that paths in messages are readable.
fn resolve(of_request: &Path, folder: &Path) -> PathBuf {
    match (folder.strip_prefix(".."), of_request.parent()) {
        (Ok(rest), Some(parent)) if of_request.file_name().is_some() => parent.join(rest),
        _ => of_request.join(folder),
    }
}
