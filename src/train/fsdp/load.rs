//! First values: who reads them, and how they come into the shards of all ranks.
//!
//! - `cpu_ram_efficient_loading`: rank 0 alone reads. Every parameter goes through the process group a piece at a time, and each rank keeps what lies in its
//!   shard, so that no rank ever holds more than its shard and a piece.
//! - Without it every rank reads for itself, and no more than lies in its shard.
//! - `sync_module_states`, which efficient loading implies as it does in accelerate: rank 0's values go to all ranks and win over what these have read.
//!
//! Weights that are drawn at random are the same on every rank that draws them, so there is nothing to read or to send.

use std::ops::Range;
use std::sync::Arc;

use super::{Buffer, RankContext, Shard, WeightSource};
use crate::spec::settings::FsdpSettings;
use crate::train::error::TrainError;
use crate::train::model::ParameterInfo;

/// Elements that are read, and sent, at a time: 1 MiB.
pub(super) const PIECE: usize = 256 * 1024;

/// Fills the shards of this rank. Every rank must call it, with the same `parameters` in the same order.
pub(super) fn load(
    context: &RankContext,
    settings: &FsdpSettings,
    parameters: &[ParameterInfo],
    weights: &dyn WeightSource,
    shards: &mut [Shard],
) -> Result<(), TrainError> {
    let synchronise = settings.sync_module_states || settings.cpu_ram_efficient_loading;
    let broadcast = context.world_size > 1 && synchronise && !weights.same_on_every_rank();
    let reads_own = !broadcast || (!settings.cpu_ram_efficient_loading && context.rank != 0);
    for parameter in parameters {
        let numel = parameter.numel();
        for start in (0..numel).step_by(PIECE) {
            let piece = start..(start + PIECE).min(numel);
            if reads_own {
                fill(shards, parameter, &piece, |part| read(weights, parameter, part))?;
            }
            if broadcast {
                let mine = if context.rank == 0 { Some(Arc::new(Buffer::F32(read(weights, parameter, piece.clone())?))) } else { None };
                let Buffer::F32(whole) = context.group.broadcast(mine, 0)? else {
                    return Err(TrainError::Failed("first values are f32".to_owned()));
                };
                fill(shards, parameter, &piece, |part| Ok(whole[part.start - piece.start..part.end - piece.start].to_vec()))?;
            }
        }
    }
    Ok(())
}

/// Puts what `values` gives for each part of a piece that lies in the shards there.
fn fill(
    shards: &mut [Shard],
    parameter: &ParameterInfo,
    piece: &Range<usize>,
    mut values: impl FnMut(Range<usize>) -> Result<Vec<f32>, TrainError>,
) -> Result<(), TrainError> {
    for shard in shards {
        for segment in shard.segments.iter().filter(|segment| segment.name == parameter.name) {
            let part = segment.parameter_range.start.max(piece.start)..segment.parameter_range.end.min(piece.end);
            if part.start < part.end {
                let at = segment.range.start + part.start - segment.parameter_range.start;
                shard.values[at..at + part.len()].copy_from_slice(&values(part)?);
            }
        }
    }
    Ok(())
}

fn read(weights: &dyn WeightSource, parameter: &ParameterInfo, elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
    let wanted = elements.len();
    let read = weights.read(&parameter.name, &parameter.shape, elements)?;
    if read.len() != wanted {
        return Err(TrainError::Input(format!("{}: {} numbers where {wanted} are needed", parameter.name, read.len())));
    }
    Ok(read)
}

#[cfg(test)]
mod tests;
