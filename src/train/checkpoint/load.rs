//! Reading a checkpoint: all of it is validated before any of it is used, so nothing is ever half loaded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::Kind;
use super::index::{Index, TrainingState};
use super::tensors::TensorFile;
use crate::train::error::TrainError;
use crate::train::fsdp::{Shard, WeightSource};
use crate::train::memory;
use crate::train::model::tree::ParameterInfo;
use crate::train::optim::AdamW;
use crate::trial::TrialId;

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("checkpoint {} cannot be used: {reason}", folder.display())]
pub struct Refused {
    /// Its folder.
    pub folder: PathBuf,
    /// What is wrong with it, a sentence without a full stop.
    pub reason: String,
}

/// A complete checkpoint: every byte is what its index says, and every parameter of the model is there. Any rank of any world can read any part of it.
#[derive(Debug)]
pub struct Checkpoint {
    index: Index,
    files: Vec<TensorFile>,
    /// Where each parameter's numbers lie, by its name, in ascending order and without a gap.
    pieces: BTreeMap<(Kind, String), Vec<Piece>>,
}

/// A run of elements of a parameter in a file.
#[derive(Debug)]
struct Piece {
    elements: Range<usize>,
    file: usize,
    /// Offset of the first byte in the file's data.
    begin: u64,
}

impl Checkpoint {
    /// Opens and validates the checkpoint in `folder`: of this trial, for a model with these parameters.
    ///
    /// # Errors
    /// It is damaged, incomplete, of another trial or for another model.
    pub fn open(folder: &Path, trial: &TrialId, parameters: &[ParameterInfo]) -> Result<Self, Refused> {
        Self::validated(folder, trial, parameters).map_err(|reason| Refused { folder: folder.to_owned(), reason })
    }

    fn validated(folder: &Path, trial: &TrialId, parameters: &[ParameterInfo]) -> Result<Self, String> {
        let index = Index::read(folder)?;
        if index.trial != *trial {
            return Err(format!("it belongs to trial {}, not to {trial}", index.trial));
        }
        if folder.file_name().is_none_or(|name| name != &*super::folder_name(index.step)) {
            return Err(format!("it holds step {}, which is not what its name says", index.step));
        }
        if index.state.progress.steps.len() as u64 != index.step {
            return Err(format!("it holds step {} and tells of {} steps", index.step, index.state.progress.steps.len()));
        }
        of_this_model(&index, parameters)?;
        let files = open_files(folder, &index)?;
        let mut pieces: BTreeMap<(Kind, String), Vec<Piece>> = BTreeMap::new();
        for (file, opened) in files.iter().enumerate() {
            for (tensor, (shape, begin)) in &opened.tensors {
                let unknown = || format!("{} holds {tensor}, which is no part of a checkpoint", index.files[file].name);
                let (kind, parameter, elements) = Kind::parse(tensor).ok_or_else(unknown)?;
                let whole = index.parameters.get(parameter).ok_or_else(unknown)?;
                let numel: usize = whole.iter().product();
                let elements = elements.unwrap_or(0..numel);
                if elements.len() != shape.iter().product::<usize>() || elements.end > numel || (elements.len() == numel && shape != whole) {
                    return Err(format!("{tensor} has shape {shape:?}, which does not fit a parameter of shape {whole:?}"));
                }
                pieces.entry((kind, parameter.to_owned())).or_default().push(Piece { elements, file, begin: *begin });
            }
        }
        for pieces in pieces.values_mut() {
            pieces.sort_by_key(|piece| piece.elements.start);
        }
        for parameter in parameters {
            let found = |kind| pieces.get(&(kind, parameter.name.clone())).map_or(&[][..], Vec::as_slice);
            let has_moments = [Kind::ExpAvg, Kind::ExpAvgSq].into_iter().any(|kind| !found(kind).is_empty());
            for kind in Kind::ALL {
                if kind == Kind::Model || has_moments {
                    without_a_gap(kind, parameter, found(kind))?;
                }
            }
        }
        Ok(Self { index, files, pieces })
    }

    /// Optimiser steps it holds.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Everything that is not a tensor.
    pub fn state(&self) -> &TrainingState {
        &self.index.state
    }

    /// Fills the optimiser's moments of these shards, as far as the checkpoint has any.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn load_moments(&self, shards: &[Shard], optimizer: &mut AdamW) -> Result<(), TrainError> {
        for (number, shard) in shards.iter().enumerate() {
            for segment in &shard.segments {
                if !self.pieces.contains_key(&(Kind::ExpAvg, segment.name.clone())) {
                    continue;
                }
                let Some([average, square]) = optimizer.moments_mut(number, &segment.range) else { continue };
                self.read(Kind::ExpAvg, &segment.name, segment.parameter_range.clone(), average)?;
                self.read(Kind::ExpAvgSq, &segment.name, segment.parameter_range.clone(), square)?;
            }
        }
        Ok(())
    }

    fn read(&self, kind: Kind, name: &str, elements: Range<usize>, into: &mut [f32]) -> Result<(), TrainError> {
        // The bytes of files are not what the device holds.
        memory::host(|| {
            let pieces = self.pieces.get(&(kind, name.to_owned())).map_or(&[][..], Vec::as_slice);
            let mut next = elements.start;
            for piece in pieces {
                if piece.elements.end <= next || next == elements.end {
                    continue;
                }
                let end = piece.elements.end.min(elements.end);
                let target = &mut into[next - elements.start..end - elements.start];
                let within = next - piece.elements.start..end - piece.elements.start;
                self.files[piece.file].read(piece.begin, within, target).map_err(|error| TrainError::Failed(error.to_string()))?;
                next = end;
            }
            if next == elements.end {
                Ok(())
            } else {
                Err(TrainError::Input(format!("the checkpoint has no elements {next} to {} of {name}", elements.end)))
            }
        })
    }
}

/// The masters, so that an engine is built from a checkpoint as from a model's own files.
impl WeightSource for Checkpoint {
    fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
        if self.index.parameters.get(name).is_none_or(|found| found != shape) {
            return Err(TrainError::Input(format!("the checkpoint has no parameter {name} of shape {shape:?}")));
        }
        let mut values = vec![0.0; elements.len()];
        self.read(Kind::Model, name, elements, &mut values)?;
        Ok(values)
    }

    /// Every byte was checked, so each rank reads its own part, whichever files hold it.
    fn same_on_every_rank(&self) -> bool {
        true
    }
}

fn of_this_model(index: &Index, parameters: &[ParameterInfo]) -> Result<(), String> {
    for parameter in parameters {
        match index.parameters.get(&parameter.name) {
            None => return Err(format!("the parameter {} is missing", parameter.name)),
            Some(shape) if *shape != parameter.shape => {
                return Err(format!("the parameter {} has shape {shape:?}, the model needs {:?}", parameter.name, parameter.shape));
            }
            Some(_) => {}
        }
    }
    match index.parameters.keys().find(|name| parameters.iter().all(|parameter| parameter.name != **name)) {
        Some(name) => Err(format!("it holds the parameter {name}, which the model lacks")),
        None => Ok(()),
    }
}

/// Opens all files, each on a thread of its own: their checksums take longer than anything else.
fn open_files(folder: &Path, index: &Index) -> Result<Vec<TensorFile>, String> {
    std::thread::scope(|scope| {
        let opening: Vec<_> = index.files.iter().map(|entry| scope.spawn(move || TensorFile::open(folder, entry))).collect();
        opening.into_iter().map(|file| file.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn without_a_gap(kind: Kind, parameter: &ParameterInfo, pieces: &[Piece]) -> Result<(), String> {
    let mut next = 0;
    for piece in pieces {
        if piece.elements.start != next {
            break;
        }
        next = piece.elements.end;
    }
    let whole = next == parameter.numel() && pieces.iter().map(|piece| piece.elements.len()).sum::<usize>() == next;
    if whole { Ok(()) } else { Err(format!("elements of {} are missing or there twice, from {next} on", kind.tensor_name(&parameter.name, None))) }
}
