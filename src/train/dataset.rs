//! The blocks of a trial, and the batches that ranks make of them. All of it is host memory.

use super::config::TrialConfig;
use super::error::TrainError;
use super::fsdp::Batch;
use super::memory;
use super::reporter::Reporter;
use crate::data::{Blocks, DataError, Dealing, Split, load};
use crate::protocol::DataCounts;

/// Everything a trial reads.
#[derive(Debug)]
pub struct TrialData {
    /// The training split.
    pub train: Blocks,
    /// The evaluation split at the trial's own block size; no blocks where there is none.
    pub eval: Blocks,
    /// The evaluation split at the block size that rows are compared at, where it is another.
    pub eval_common: Option<Blocks>,
    /// How training blocks are dealt.
    pub dealing: Dealing,
}

impl TrialData {
    /// Loads all splits.
    ///
    /// # Errors
    /// A token file cannot be read or does not fit the request, or there is less than one global batch.
    pub fn load(config: &TrialConfig, reporter: &Reporter) -> Result<Self, TrainError> {
        let request = &config.request;
        let (train, packing) = (&request.settings.train, request.settings.data.packing);
        let bad = |error: DataError| TrainError::Input(error.to_string());
        let dealing = Dealing {
            world_size: config.world_size(),
            per_device_batch_size: train.per_device_train_batch_size,
            gradient_accumulation_steps: train.gradient_accumulation_steps,
            shuffle: request.settings.data.shuffle.then_some(request.seed),
        };
        let blocks = load(&request.data, Split::Train, request.block_size, packing).map_err(bad)?;
        if blocks.count() < dealing.global_batch_size() {
            return Err(bad(DataError::TooShort {
                tokens: request.data.train_tokens,
                blocks: blocks.count() as u64,
                block_size: request.block_size,
                global_batch: dealing.global_batch_size() as u64,
            }));
        }
        let eval = load(&request.data, Split::Eval, request.block_size, packing).map_err(bad)?;
        let eval_common = match train.eval_block_size {
            size if size == request.block_size => None,
            size if size > request.model.architecture.positions() => {
                reporter
                    .warn(format!("no perplexity at eval_block_size = {size}: the model takes {} tokens", request.model.architecture.positions()))?;
                None
            }
            size => match load(&request.data, Split::Eval, size, packing) {
                Ok(blocks) => Some(blocks),
                // Tokens that were cut beforehand have one block size.
                Err(error @ DataError::BlockSize { .. }) => {
                    reporter.warn(format!("no perplexity at eval_block_size = {size}: {error}"))?;
                    None
                }
                Err(error) => return Err(bad(error)),
            },
        };
        if request.data.eval.is_none() {
            reporter.warn("no perplexity: there is no evaluation split")?;
        } else if eval.count() == 0 {
            reporter.warn(format!(
                "no perplexity: the evaluation split has {} tokens, less than one block of {}",
                request.data.eval_tokens, request.block_size
            ))?;
        }
        Ok(Self { train: blocks, eval, eval_common, dealing })
    }

    /// What became of the data.
    pub fn counts(&self) -> DataCounts {
        DataCounts {
            train_blocks: self.train.count() as u64,
            train_dropped_tokens: self.train.dropped_tokens(),
            eval_blocks: self.eval.count() as u64,
            eval_dropped_tokens: self.eval.dropped_tokens(),
        }
    }
}

/// The batch of these rows. A rank without rows, where fewer are left than ranks, still takes part in every collective: it gets a row in which nothing
/// is scored.
pub fn batch(blocks: &Blocks, rows: &[usize]) -> Batch {
    memory::host(|| {
        let block_size = blocks.block_size();
        if rows.is_empty() {
            return Batch { ids: blocks.row(0).to_vec(), scored: Some(vec![false; block_size]), rows: 1, block_size };
        }
        let ids = rows.iter().flat_map(|row| blocks.row(*row)).copied().collect();
        let scored = blocks.is_padded().then(|| {
            let of_row = |row: &usize| {
                (0..block_size).map({
                    let length = blocks.length(*row);
                    move |place| place < length
                })
            };
            rows.iter().flat_map(of_row).collect()
        });
        Batch { ids, scored, rows: rows.len(), block_size }
    })
}

/// Targets of these rows: tokens that a loss is computed for.
pub fn targets(blocks: &Blocks, rows: &[usize]) -> u64 {
    rows.iter().map(|row| blocks.targets(*row) as u64).sum()
}

/// Real tokens of these rows.
pub fn tokens(blocks: &Blocks, rows: &[usize]) -> u64 {
    rows.iter().map(|row| blocks.length(*row) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Padding is never scored; a real token 0 is (CASES 35).
    #[test]
    fn padding_and_a_real_token_zero_are_told_apart() {
        let blocks = Blocks::per_document(&[5, 0, 6, 7, 8, 0], &[3, 6], 4);
        let batch = batch(&blocks, &[0, 1]);
        assert_eq!(batch.ids, [5, 0, 6, 0, 7, 8, 0, 0]);
        assert_eq!(batch.scored, Some(vec![true, true, true, false, true, true, true, false]));
        assert_eq!((targets(&blocks, &[0, 1]), tokens(&blocks, &[0, 1])), (4, 6));
    }

    #[test]
    fn a_rank_without_rows_scores_nothing() {
        let blocks = Blocks::cut((0..8).collect(), 4);
        assert_eq!(batch(&blocks, &[]), Batch { ids: vec![0, 1, 2, 3], scored: Some(vec![false; 4]), rows: 1, block_size: 4 });
        assert_eq!(batch(&blocks, &[1]).scored, None);
    }
}
