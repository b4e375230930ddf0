//! In the child: token files become blocks. Also the counts that decide beforehand whether a block size is limited by the data.

use super::blocks::Blocks;
use super::error::DataError;
use super::token_file;
use crate::protocol::{DataCounts, PreparedData};
use crate::spec::settings::Packing;

/// Part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Trained on.
    Train,
    /// Evaluated on.
    Eval,
}

/// Blocks of a split; none where there is no such split, or where it is shorter than a block.
///
/// # Errors
/// The token file cannot be read, is damaged, holds ids outside the vocabulary, or was cut beforehand for another block size.
pub fn load(data: &PreparedData, split: Split, block_size: usize, packing: Packing) -> Result<Blocks, DataError> {
    let (path, expected) = match (split, &data.eval) {
        (Split::Train, _) => (&data.train, data.train_tokens),
        (Split::Eval, Some(eval)) => (eval, data.eval_tokens),
        (Split::Eval, None) => return Ok(Blocks::cut(Vec::new(), block_size)),
    };
    let changed = |reason: String| DataError::Malformed { path: path.clone(), expected: "the data that was prepared", reason };
    let check = |ids: &[u32]| {
        if ids.len() as u64 != expected {
            return Err(changed(format!("it holds {} tokens, {expected} were prepared", ids.len())));
        }
        match ids.iter().position(|id| *id as usize >= data.vocab_size) {
            Some(place) => Err(changed(format!("token {place} is {}, the vocabulary has {} entries", ids[place], data.vocab_size))),
            None => Ok(()),
        }
    };
    if token_file::is_ours(path)? {
        let tokens = token_file::read(path)?;
        check(&tokens.ids)?;
        return Ok(match packing {
            Packing::Concatenate => Blocks::cut(tokens.ids, block_size),
            Packing::PerDocument => Blocks::per_document(&tokens.ids, &tokens.document_ends, block_size),
        });
    }
    let cut = token_file::read_cut(path, if split == Split::Train { 3 } else { 2 })?;
    check(&cut.ids)?;
    if cut.block_size() != block_size {
        return Err(DataError::BlockSize { path: path.clone(), found: cut.block_size(), asked: block_size });
    }
    Ok(match cut.shape[..] {
        [_, global_batch_size, _] => Blocks::cut_beforehand(cut.ids, block_size, global_batch_size),
        _ => Blocks::cut(cut.ids, block_size),
    })
}

/// What becomes of the data at a block size.
///
/// # Errors
/// As [`load`].
pub fn counts(data: &PreparedData, block_size: usize, packing: Packing) -> Result<DataCounts, DataError> {
    let train = load(data, Split::Train, block_size, packing)?;
    let eval = load(data, Split::Eval, block_size, packing)?;
    Ok(DataCounts {
        train_blocks: train.count() as u64,
        train_dropped_tokens: train.dropped_tokens(),
        eval_blocks: eval.count() as u64,
        eval_dropped_tokens: eval.dropped_tokens(),
    })
}

/// Checks that the training split gives one global batch at least.
///
/// # Errors
/// It does not, or [`load`] fails.
pub fn check_enough(data: &PreparedData, block_size: usize, packing: Packing, global_batch_size: usize) -> Result<DataCounts, DataError> {
    let counts = counts(data, block_size, packing)?;
    if counts.train_blocks < global_batch_size as u64 {
        let (tokens, blocks, global_batch) = (data.train_tokens, counts.train_blocks, global_batch_size as u64);
        return Err(DataError::TooShort { tokens, blocks, block_size, global_batch });
    }
    Ok(counts)
}
