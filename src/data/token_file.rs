//! Token files: safetensors with the token ids of one split, and where its documents end. Read and written here alone; also reads tokens that
//! users cut beforehand.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::error::{DataError, read_file};
use crate::store;

/// Key of the metadata of our own files. One key alone: a map of several would be written in another order every time.
const KEY: &str = "sweep";

/// Start of its value, before the digest of the contents; raised when their meaning changes.
const FORMAT: &str = "sweep-tokens-1";

/// Tokens of one split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Token ids.
    pub(crate) ids: Vec<u32>,
    /// Where each document ends, ascending; empty where the split is one run.
    pub(crate) document_ends: Vec<usize>,
}

impl Tokens {
    /// SHA-256 of the contents, hexadecimal: the same on every machine, whatever file they lie in.
    pub(crate) fn digest(&self) -> String {
        digest(&self.id_bytes(), &self.end_bytes())
    }

    fn id_bytes(&self) -> Vec<u8> {
        self.ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn end_bytes(&self) -> Vec<u8> {
        self.document_ends.iter().flat_map(|end| (*end as u64).to_le_bytes()).collect()
    }
}

fn digest(ids: &[u8], ends: &[u8]) -> String {
    let mut hasher = Sha256::new();
    hasher.update((ids.len() as u64).to_le_bytes());
    hasher.update(ids);
    hasher.update(ends);
    hexadecimal(&hasher.finalize())
}

/// Bytes as lower-case hexadecimal.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256, hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Writes a token file whole or not at all and returns the digest of its contents.
pub(crate) fn write(path: &Path, tokens: &Tokens) -> Result<String, DataError> {
    let (ids, ends) = (tokens.id_bytes(), tokens.end_bytes());
    let digest = digest(&ids, &ends);
    let metadata = HashMap::from([(KEY.to_owned(), format!("{FORMAT} {digest}"))]);
    let view = |dtype, length, bytes| TensorView::new(dtype, vec![length], bytes).map_err(|error| malformed(path, error));
    let mut tensors = vec![("tokens", view(Dtype::U32, tokens.ids.len(), &ids)?)];
    if !tokens.document_ends.is_empty() {
        tensors.push(("document_ends", view(Dtype::U64, tokens.document_ends.len(), &ends)?));
    }
    let bytes = safetensors::serialize(tensors, Some(metadata)).map_err(|error| malformed(path, error))?;
    store::write_whole(path, &bytes)?;
    Ok(digest)
}

/// Whether a file is a token file of ours; otherwise it holds tokens that a user cut beforehand. Reads its header alone.
pub(crate) fn is_ours(path: &Path) -> Result<bool, DataError> {
    let unreadable = |error| DataError::Unreadable { what: "the tokens".to_owned(), path: path.to_owned(), error };
    let mut head = Vec::new();
    File::open(path).and_then(|file| file.take(4096).read_to_end(&mut head)).map_err(unreadable)?;
    Ok(head.windows(FORMAT.len()).any(|window| window == FORMAT.as_bytes()))
}

/// Reads a token file and checks it against the digest written beside its contents.
pub(crate) fn read(path: &Path) -> Result<Tokens, DataError> {
    let bytes = read_file("the tokens", path)?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| malformed(path, error))?;
    let entry = header.metadata().as_ref().and_then(|metadata| metadata.get(KEY)).and_then(|entry| entry.split_once(' '));
    let Some((FORMAT, expected)) = entry else {
        return Err(malformed(path, "its format is another one"));
    };
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| malformed(path, error))?;
    let ids = tensors.tensor("tokens").map_err(|error| malformed(path, error))?;
    let ends = tensors.tensor("document_ends").ok();
    if ids.dtype() != Dtype::U32 || ends.as_ref().is_some_and(|ends| ends.dtype() != Dtype::U64) {
        return Err(malformed(path, "its tensors have other types"));
    }
    let end_bytes = ends.as_ref().map_or(&[][..], TensorView::data);
    if expected != digest(ids.data(), end_bytes) {
        return Err(malformed(path, "its contents are damaged"));
    }
    let ids: Vec<u32> = ids.data().chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect();
    let document_ends: Vec<usize> = end_bytes
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]]) as usize)
        .collect();
    if !document_ends.is_sorted() || document_ends.last().is_some_and(|end| *end > ids.len()) {
        return Err(malformed(path, "its document ends lie outside its tokens"));
    }
    Ok(Tokens { ids, document_ends })
}

/// Tokens that a user cut beforehand: the file's only tensor, int32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CutTokens {
    /// Token ids, row after row.
    pub(crate) ids: Vec<u32>,
    /// `[steps, global batch, block]` or `[n, block]`.
    pub(crate) shape: Vec<usize>,
}

impl CutTokens {
    /// Tokens per row.
    pub(crate) fn block_size(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }
}

/// Reads tokens that were cut beforehand: exactly one int32 tensor of `rank` dimensions, none of them 0, no id negative.
pub(crate) fn read_cut(path: &Path, rank: usize) -> Result<CutTokens, DataError> {
    let shape_wanted = if rank == 3 { "[steps, global batch, block]" } else { "[n, block]" };
    let bytes = read_file("the token blocks", path)?;
    let wrong = |reason: String| DataError::Malformed { path: path.to_owned(), expected: "a safetensors file of token blocks", reason };
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
    let mut all = tensors.tensors();
    let (Some((name, tensor)), true) = (all.pop(), all.is_empty()) else {
        return Err(wrong(format!("it holds {} tensors where one int32 tensor {shape_wanted} belongs", tensors.len())));
    };
    if tensor.dtype() != Dtype::I32 {
        return Err(wrong(format!("tensor `{name}` is {:?} where int32 belongs", tensor.dtype())));
    }
    let shape = tensor.shape().to_vec();
    if shape.len() != rank {
        return Err(wrong(format!("tensor `{name}` has shape {shape:?} where {shape_wanted} belongs")));
    }
    if shape.contains(&0) {
        return Err(DataError::Empty { what: "the tensor of token blocks".to_owned(), place: path.display().to_string() });
    }
    let mut ids = Vec::with_capacity(tensor.data().len() / 4);
    for bytes in tensor.data().chunks_exact(4) {
        let id = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        ids.push(u32::try_from(id).map_err(|_| wrong(format!("token {} of tensor `{name}` is {id}, token ids are not negative", ids.len())))?);
    }
    Ok(CutTokens { ids, shape })
}

fn malformed(path: &Path, reason: impl ToString) -> DataError {
    DataError::Malformed { path: path.to_owned(), expected: "a token file of this version", reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.safetensors");
        for tokens in
            [Tokens { ids: vec![0, 1, u32::MAX], document_ends: vec![1, 1, 3] }, Tokens { ids: vec![7], document_ends: vec![] }, Tokens::default()]
        {
            let digest = write(&path, &tokens).unwrap();
            assert_eq!(read(&path).unwrap(), tokens);
            assert_eq!(digest, tokens.digest());
        }
    }

    /// A bit flipped anywhere, or a file cut short, is noticed.
    #[test]
    fn damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.safetensors");
        write(&path, &Tokens { ids: (0..20).collect(), document_ends: vec![10, 20] }).unwrap();
        let good = std::fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        for index in header..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert!(read(&path).is_err(), "byte {index}");
        }
        for length in 0..good.len() {
            std::fs::write(&path, &good[..length]).unwrap();
            assert!(read(&path).is_err(), "length {length}");
        }
    }

    #[test]
    fn cut_tokens_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.safetensors");
        let file = |tensors: &[(&str, Dtype, Vec<usize>, Vec<i32>)]| {
            let bytes: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.3.iter().flat_map(|id| id.to_le_bytes()).collect()).collect();
            let views: Vec<_> =
                tensors.iter().zip(&bytes).map(|(tensor, bytes)| (tensor.0, TensorView::new(tensor.1, tensor.2.clone(), bytes).unwrap())).collect();
            std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        };
        file(&[("anything", Dtype::I32, vec![1, 2, 2], vec![0, 1, 2, 3])]);
        assert_eq!(read_cut(&path, 3).unwrap(), CutTokens { ids: vec![0, 1, 2, 3], shape: vec![1, 2, 2] });
        let name = path.display();
        let message = |rank| read_cut(&path, rank).unwrap_err().to_string().replace(&name.to_string(), "blocks.safetensors");
        assert_eq!(
            message(2),
            "blocks.safetensors is not a safetensors file of token blocks: tensor `anything` has shape [1, 2, 2] where [n, block] belongs"
        );
        file(&[("anything", Dtype::F32, vec![2, 2], vec![0, 1, 2, 3])]);
        assert_eq!(message(2), "blocks.safetensors is not a safetensors file of token blocks: tensor `anything` is F32 where int32 belongs");
        file(&[("anything", Dtype::I32, vec![2, 2], vec![0, 1, -2, 3])]);
        assert_eq!(
            message(2),
            "blocks.safetensors is not a safetensors file of token blocks: token 2 of tensor `anything` is -2, token ids are not negative"
        );
        file(&[("a", Dtype::I32, vec![1, 1], vec![0]), ("b", Dtype::I32, vec![1, 1], vec![0])]);
        assert_eq!(
            message(2),
            "blocks.safetensors is not a safetensors file of token blocks: it holds 2 tensors where one int32 tensor [n, block] belongs"
        );
        file(&[("a", Dtype::I32, vec![0, 4], vec![])]);
        assert_eq!(message(2), "the tensor of token blocks blocks.safetensors is empty");
        std::fs::write(&path, b"hello").unwrap();
        assert!(message(2).starts_with("blocks.safetensors is not a safetensors file of token blocks: "));
    }
}
