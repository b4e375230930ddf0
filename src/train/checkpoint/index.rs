//! `index.json`: what a checkpoint holds, and the state of a training that is not a tensor. Written last; it vouches for every other file and for itself.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::tensors::FileEntry;
use crate::spec::settings::StateDictType;
use crate::store::{StoreError, write_whole};
use crate::train::fsdp::RngState;
use crate::train::optim::AdamWState;
use crate::train::scaler::GradScalerState;
use crate::trial::TrialId;

/// Version of the format. Readers refuse any other.
pub(super) const FORMAT_VERSION: u32 = 1;
/// Name of the index in a checkpoint's folder.
pub(super) const INDEX: &str = "index.json";

/// The index of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Version of the format.
    pub format_version: u32,
    /// The trial it belongs to; its id stands for every parameter that decides a measurement, and for the contents of model and data.
    pub trial: TrialId,
    /// Optimiser steps taken, skipped ones included.
    pub step: u64,
    /// Ranks that wrote it. It can be read by any number.
    pub world_size: usize,
    /// How its tensors are spread over files.
    pub state_dict_type: StateDictType,
    /// Everything that is not a tensor.
    pub state: TrainingState,
    /// Shape of every parameter.
    pub parameters: BTreeMap<String, Vec<usize>>,
    /// The files that hold the tensors.
    pub files: Vec<FileEntry>,
}

/// The state of a training between two optimiser steps, but for parameters and moments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// The optimiser's.
    pub optimizer: AdamWState,
    /// The learning-rate schedule's.
    pub lr_scheduler: SchedulerState,
    /// The loss scaler's; `None` without fp16.
    pub scaler: Option<GradScalerState>,
    /// Dropout's.
    pub rng: RngState,
    /// Which data comes next.
    pub data: DataPosition,
    /// What the result tells of the steps so far.
    pub progress: Progress,
}

/// Position of a learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerState {
    /// Applied optimiser steps; PyTorch's name for it.
    pub last_epoch: u64,
}

/// A place in the training data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Blocks of it that were taken, over all ranks.
    pub blocks: usize,
}

/// What a result tells of the steps so far, whichever attempt took them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Seconds and tokens of every optimiser step.
    pub steps: Vec<(f64, u64)>,
    /// Steps before which an attempt began to go on from a checkpoint.
    pub resumed_at: Vec<usize>,
    /// Steps skipped for overflow.
    pub skipped_steps: u64,
    /// Spent evaluating.
    pub evaluation_seconds: f64,
    /// Spent saving state, without this checkpoint.
    pub checkpoint_seconds: f64,
    /// Spent before first steps.
    pub startup_seconds: f64,
    /// Most device bytes ever in use on each rank.
    pub peak_bytes: Vec<u64>,
    /// Most host bytes ever in use on each rank.
    pub host_bytes: Vec<u64>,
}

impl Index {
    /// Writes the index, whole or not at all, and waits until it is on disk.
    pub(super) fn write(&self, folder: &Path) -> Result<(), StoreError> {
        let path = folder.join(INDEX);
        let contents = serde_json::to_vec(self).map_err(|error| StoreError::Malformed { path: path.clone(), reason: error.to_string() })?;
        let mut text = seal(&contents[1..]).into_bytes();
        text.extend(&contents[1..]);
        write_whole(&path, &text)
    }

    /// Reads the index of the checkpoint in `folder`.
    ///
    /// # Errors
    /// Why it cannot be relied on, a sentence.
    pub(super) fn read(folder: &Path) -> Result<Self, String> {
        let text = std::fs::read(folder.join(INDEX)).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => format!("{INDEX} is missing, so it is incomplete"),
            _ => format!("{INDEX} cannot be read: {error}"),
        })?;
        let length = seal(&[]).len();
        if text.len() <= length || text[..length] != *seal(&text[length..]).as_bytes() {
            return Err(format!("{INDEX} is damaged: its checksum is not its own"));
        }
        /// What every version of the format has.
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let contents = [b"{", &text[length..]].concat();
        let unreadable = |error: serde_json::Error| format!("{INDEX} cannot be read: {error}");
        let Version { format_version } = serde_json::from_slice(&contents).map_err(unreadable)?;
        if format_version != FORMAT_VERSION {
            return Err(format!("it has format {format_version}, this sweep reads format {FORMAT_VERSION}"));
        }
        serde_json::from_slice(&contents).map_err(unreadable)
    }
}

/// The beginning of the file: the checksum of everything after it.
fn seal(rest: &[u8]) -> String {
    format!("{{\"sha256\":\"{}\",\n", hexadecimal(&Sha256::digest(rest)))
}

/// Bytes as hexadecimal digits.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
