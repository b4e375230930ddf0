//! Weights from safetensors: one file, a folder with one, or a folder with an index over several. Slices are read where they lie; no file is held whole.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use half::{bf16, f16};
use serde::Deserialize;

use super::bare;
use crate::train::error::TrainError;
use crate::train::fsdp::WeightSource;
use crate::train::memory;

/// The file that says which of several files holds which tensor.
const INDEX: &str = "model.safetensors.index.json";
/// The file of a model that is not cut.
const SINGLE: &str = "model.safetensors";
/// Larger headers are not headers. The same limit as the safetensors library's.
const LARGEST_HEADER: u64 = 100_000_000;
/// Elements converted at a time.
const CHUNK: usize = 256 * 1024;

/// Weights that lie in files.
#[derive(Debug)]
pub struct SafetensorsWeights {
    /// What was asked for, for messages.
    source: PathBuf,
    files: Vec<OpenFile>,
    /// File of each tensor, by its name without prefix.
    tensors: HashMap<String, Place>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    /// Where tensor data begins.
    data: u64,
}

#[derive(Clone, Debug)]
struct Place {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offset of the first byte in the file's data.
    begin: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl SafetensorsWeights {
    /// Opens the weights at `source`: a safetensors file, or a folder with `model.safetensors` or an index over several files. Reads headers only.
    ///
    /// # Errors
    /// Nothing of the kind is there, or a file is damaged or incomplete; the message names it.
    pub fn open(source: &Path) -> Result<Self, TrainError> {
        let mut weights = Self { source: source.to_owned(), files: Vec::new(), tensors: HashMap::new() };
        if !source.is_dir() {
            weights.add_file(source, |_| true)?;
        } else if source.join(SINGLE).exists() {
            weights.add_file(&source.join(SINGLE), |_| true)?;
        } else if source.join(INDEX).exists() {
            weights.add_indexed(&source.join(INDEX))?;
        } else {
            return Err(TrainError::Input(format!("{} holds neither {SINGLE} nor {INDEX}", source.display())));
        }
        Ok(weights)
    }

    fn add_indexed(&mut self, index: &Path) -> Result<(), TrainError> {
        let text = std::fs::read(index).map_err(|error| cannot_read(index, error))?;
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| damaged(index, error))?;
        let files: std::collections::BTreeSet<&String> = weight_map.values().collect();
        for name in files {
            // Only names of files beside the index: an index is data from elsewhere.
            if Path::new(name).components().count() != 1 || name == ".." {
                return Err(damaged(index, format!("it names the file \"{name}\", which is not beside it")));
            }
            self.add_file(&self.source.join(name), |tensor| weight_map.get(tensor) == Some(name))?;
        }
        for (tensor, file) in &weight_map {
            if !self.tensors.contains_key(bare(tensor)) {
                return Err(damaged(index, format!("it promises the tensor {tensor} in {file}, which does not hold it")));
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), TrainError> {
        let file = File::open(path).map_err(|error| cannot_read(path, error))?;
        let length = file.metadata().map_err(|error| cannot_read(path, error))?.len();
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0).map_err(|_| damaged(path, "it is too short for a safetensors file"))?;
        let size = u64::from_le_bytes(size);
        if size > LARGEST_HEADER || size + 8 > length {
            return Err(damaged(path, "it is not a safetensors file, or it is cut off in its header"));
        }
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, 8).map_err(|error| cannot_read(path, error))?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(path, error))?;
        let expected = 8 + size + metadata.data_len() as u64;
        if length != expected {
            return Err(damaged(path, format!("it is {length} bytes long where its header says {expected}")));
        }
        let index = self.files.len();
        for (name, info) in metadata.tensors() {
            if wanted(&name) {
                let place = Place { file: index, dtype: info.dtype, shape: info.shape.clone(), begin: info.data_offsets.0 as u64 };
                self.tensors.insert(bare(&name).to_owned(), place);
            }
        }
        self.files.push(OpenFile { path: path.to_owned(), file, data: 8 + size });
        Ok(())
    }
}

impl WeightSource for SafetensorsWeights {
    fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
        let Some(place) = self.tensors.get(bare(name)) else {
            return Err(TrainError::Input(format!("{} has no tensor {name}, which the model needs", self.source.display())));
        };
        let OpenFile { path, file, data } = &self.files[place.file];
        let named = |reason: String| TrainError::Input(format!("{}: tensor {name} {reason}", path.display()));
        if place.shape != shape {
            return Err(named(format!("has shape {:?}, the model needs {shape:?}", place.shape)));
        }
        let size = match place.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => return Err(named(format!("has data type {other:?}; F32, F16 and BF16 can be read"))),
        };
        let mut values = Vec::with_capacity(elements.len());
        // The bytes of the file are not what the device holds.
        let mut bytes = memory::host(|| vec![0_u8; elements.len().min(CHUNK) * size]);
        let mut next = elements.start;
        while next < elements.end {
            let count = (elements.end - next).min(CHUNK);
            let bytes = &mut bytes[..count * size];
            file.read_exact_at(bytes, data + place.begin + (next * size) as u64).map_err(|error| cannot_read(path, error))?;
            match place.dtype {
                Dtype::F32 => values.extend(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
                Dtype::F16 => values.extend(bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32())),
                _ => values.extend(bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32())),
            }
            next += count;
        }
        Ok(values)
    }
}

fn cannot_read(path: &Path, error: io::Error) -> TrainError {
    TrainError::Input(format!("cannot read {}: {error}", path.display()))
}

fn damaged(path: &Path, reason: impl std::fmt::Display) -> TrainError {
    TrainError::Input(format!("{} cannot be used: {reason}", path.display()))
}

#[cfg(test)]
mod tests;
