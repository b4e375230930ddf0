//! The tensor files of a checkpoint: safetensors. Written in one stream that is hashed on its way and synced at its end; read by ranges.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use sha2::{Digest, Sha256};

use super::index::hexadecimal;
use crate::store::{StoreError, io_error};

/// Elements converted, and bytes hashed, at a time.
pub(super) const CHUNK: usize = 256 * 1024;
/// Larger headers are not headers. The same limit as the safetensors library's.
const LARGEST_HEADER: u64 = 100_000_000;

/// What the index says of a tensor file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its contents, hexadecimal.
    pub sha256: String,
}

/// Writes f32 tensors one after another.
pub(super) struct TensorWriter {
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
    expected: u64,
    buffer: Vec<u8>,
}

impl TensorWriter {
    /// Creates the file for these tensors, name and shape; their values must follow in the same order.
    pub(super) fn create(path: &Path, tensors: &[(String, Vec<usize>)]) -> Result<Self, StoreError> {
        let mut header = Map::new();
        let mut end = 0;
        for (name, shape) in tensors {
            let begin = end;
            end += 4 * shape.iter().product::<usize>();
            header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}));
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        // Tensor data begins at a multiple of eight bytes.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = File::create(path).map_err(io_error("create", path))?;
        let expected = 8 + header.len() as u64 + end as u64;
        let mut writer = Self { path: path.to_owned(), file, hash: Sha256::new(), bytes: 0, expected, buffer: Vec::new() };
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// Appends values.
    pub(super) fn write(&mut self, values: &[f32]) -> Result<(), StoreError> {
        for values in values.chunks(CHUNK) {
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.clear();
            buffer.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            self.put(&buffer)?;
            self.buffer = buffer;
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file.write_all(bytes).map_err(io_error("write", &self.path))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Waits until the file is on disk.
    pub(super) fn finish(self) -> Result<FileEntry, StoreError> {
        if self.bytes != self.expected {
            let reason = format!("{} bytes were written where its header promises {}", self.bytes, self.expected);
            return Err(StoreError::Malformed { path: self.path, reason });
        }
        self.file.sync_all().map_err(io_error("write", &self.path))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(FileEntry { name, bytes: self.bytes, sha256: hexadecimal(&self.hash.finalize()) })
    }
}

/// A tensor file whose contents are what its index says.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: File,
    /// Where tensor data begins.
    data: u64,
    /// Shape of each tensor, and the offset of its first byte in the file's data.
    pub(super) tensors: BTreeMap<String, (Vec<usize>, u64)>,
}

impl TensorFile {
    /// Opens the file of `entry` in `folder` and reads all of it once, to see that not a byte has changed.
    ///
    /// # Errors
    /// What is wrong with it, a sentence that names it.
    pub(super) fn open(folder: &Path, entry: &FileEntry) -> Result<Self, String> {
        let FileEntry { name, bytes, sha256 } = entry;
        if Path::new(name).components().count() != 1 || name == ".." {
            return Err(format!("its index names the file \"{name}\", which is not in the folder"));
        }
        let path = folder.join(name);
        let unreadable = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => format!("{name} is missing"),
            _ => format!("{name} cannot be read: {error}"),
        };
        let mut file = File::open(&path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        if length != *bytes {
            return Err(format!("{name} is {length} bytes long and should be {bytes}"));
        }
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
        loop {
            match file.read(&mut buffer).map_err(unreadable)? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
        if hexadecimal(&hash.finalize()) != *sha256 {
            return Err(format!("{name} is damaged: its checksum is not the one in the index"));
        }
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0).map_err(unreadable)?;
        let size = u64::from_le_bytes(size);
        if size > LARGEST_HEADER || size + 8 > length {
            return Err(format!("{name} is not a safetensors file"));
        }
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, 8).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| format!("{name} has a header that cannot be read: {error}"))?;
        if 8 + size + metadata.data_len() as u64 != length {
            return Err(format!("{name} is {length} bytes long where its header says {}", 8 + size + metadata.data_len() as u64));
        }
        let mut tensors = BTreeMap::new();
        for (tensor, info) in metadata.tensors() {
            if info.dtype != Dtype::F32 {
                return Err(format!("{name}: {tensor} has data type {:?} and should have F32", info.dtype));
            }
            tensors.insert(tensor, (info.shape.clone(), info.data_offsets.0 as u64));
        }
        Ok(Self { path, file, data: 8 + size, tensors })
    }

    /// Reads the elements `elements` of the tensor whose first byte lies at `begin`.
    pub(super) fn read(&self, begin: u64, elements: Range<usize>, into: &mut [f32]) -> Result<(), StoreError> {
        let mut bytes = vec![0_u8; 4 * into.len().min(CHUNK)];
        let mut next = self.data + begin + 4 * elements.start as u64;
        for values in into.chunks_mut(CHUNK) {
            let bytes = &mut bytes[..4 * values.len()];
            self.file.read_exact_at(bytes, next).map_err(io_error("read", &self.path))?;
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes);
            }
            next += bytes.len() as u64;
        }
        Ok(())
    }
}
