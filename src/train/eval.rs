//! Perplexity: exp(sum of token losses / number of scored tokens) over all ranks.

use std::time::Instant;

use super::dataset::batch;
use super::error::TrainError;
use super::fsdp::{FullyShardedDataParallel, LossSum};
use super::memory::{self, Phase};
use crate::data::{Blocks, Dealing};
use crate::protocol::{Evaluation, Number};

/// How an evaluation ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Evaluated {
    /// Every block was scored; `None` where there is nothing to score.
    Whole(Option<Evaluation>),
    /// A rank was asked to end.
    Interrupted,
}

/// Scores every block once; the same numbers on every rank. Ends early, on all ranks together, once `interrupted` says so on any.
///
/// # Errors
/// A rank failed.
pub fn evaluate(
    engine: &mut FullyShardedDataParallel,
    blocks: &Blocks,
    per_device_batch_size: usize,
    interrupted: impl Fn() -> bool,
) -> Result<Evaluated, TrainError> {
    let began = Instant::now();
    memory::set_phase(Phase::Evaluate);
    let (rank, world_size) = (engine.group().rank(), engine.group().world_size());
    let dealing = Dealing::evaluation(world_size, per_device_batch_size);
    // In the order of the data, whether or not the tokens were cut for a global batch.
    let rows: Vec<usize> = memory::host(|| (0..blocks.count()).collect());
    let mut total = LossSum::default();
    for pass in rows.chunks(dealing.global_batch_size()) {
        if engine.group().all_reduce_numbers(&[f64::from(interrupted())])?[0] > 0.0 {
            return Ok(Evaluated::Interrupted);
        }
        let mine = &pass[pass.len() * rank / world_size..pass.len() * (rank + 1) / world_size];
        let loss = engine.evaluate(&batch(blocks, mine))?;
        total.sum += loss.sum;
        total.targets += loss.targets;
    }
    let sums = engine.group().all_reduce_numbers(&[total.sum, total.targets as f64])?;
    if sums[1] == 0.0 {
        return Ok(Evaluated::Whole(None));
    }
    let loss = sums[0] / sums[1];
    let seconds = began.elapsed().as_secs_f64();
    Ok(Evaluated::Whole(Some(Evaluation {
        block_size: blocks.block_size(),
        loss: Number(loss),
        perplexity: Number(loss.exp()),
        scored_tokens: sums[1] as u64,
        seconds,
    })))
}

/// Runs one evaluation pass of full size, for the memory it takes: the blocks are repeated until every rank has a full batch.
///
/// # Errors
/// A rank failed.
pub fn evaluate_full_batch(engine: &mut FullyShardedDataParallel, blocks: &Blocks, per_device_batch_size: usize) -> Result<(), TrainError> {
    memory::set_phase(Phase::Evaluate);
    let rank = engine.group().rank();
    let rows: Vec<usize> = (0..per_device_batch_size).map(|row| (rank * per_device_batch_size + row) % blocks.count()).collect();
    engine.evaluate(&batch(blocks, &rows))?;
    engine.group().barrier()
}
