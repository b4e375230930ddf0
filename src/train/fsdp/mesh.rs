//! Which ranks share a unit's shards and which hold copies: PyTorch's two-dimensional `DeviceMesh` of replicas by shards, and what follows from the settings.

use std::sync::Arc;

use super::group::ProcessGroup;
use super::ranks::RankContext;
use crate::spec::settings::{FsdpSettings, ReshardAfterForward, ShardingStrategy};
use crate::train::error::TrainError;

/// What becomes of a unit's gathered parameters when its forward ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reshard {
    /// They stay until backward.
    Not,
    /// They are freed and gathered again.
    ToShards,
    /// A part of them stays, cut among so many consecutive ranks, who gather it among themselves (FSDP2 with a number).
    ToRanks(usize),
}

/// One rank's place in the mesh.
pub(super) struct DeviceMesh {
    /// Ranks among which a unit is cut: consecutive ones. `None` where a rank holds all of it.
    pub(super) shard_group: Option<Arc<dyn ProcessGroup>>,
    /// Ranks that hold the same shard: those of equal place in their shard groups. `None` where no other rank does.
    pub(super) replicate_group: Option<Arc<dyn ProcessGroup>>,
    /// The ranks of [`Reshard::ToRanks`].
    pub(super) post_forward_group: Option<Arc<dyn ProcessGroup>>,
    /// When units are resharded. The root unit of FSDP1 is not.
    pub(super) reshard: Reshard,
    /// Ranks in a shard group.
    pub(super) shard_size: usize,
    /// This rank's place in its shard group.
    pub(super) shard_rank: usize,
    /// Shard groups.
    pub(super) replicas: usize,
    /// Which of them this rank is in.
    pub(super) replica: usize,
}

impl DeviceMesh {
    /// This rank's place in a mesh as `settings` want it. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`TrainError::Request`] where ranks cannot be divided so.
    pub(super) fn new(context: &RankContext, settings: &FsdpSettings) -> Result<Self, TrainError> {
        let world_size = context.world_size;
        let hybrid = settings.hybrid_shard_size.unwrap_or(world_size);
        let (shard_size, reshard) = match (settings.fsdp_version, settings.sharding_strategy) {
            (2, _) => (hybrid, reshard_of_version_2(settings, hybrid)?),
            // PyTorch turns every strategy into `NO_SHARD` for a single rank.
            (_, ShardingStrategy::NoShard) => (1, Reshard::Not),
            (_, ShardingStrategy::FullShard) => (world_size, Reshard::ToShards),
            (_, ShardingStrategy::ShardGradOp) => (world_size, Reshard::Not),
            (_, ShardingStrategy::HybridShard) => (hybrid, Reshard::ToShards),
            (_, ShardingStrategy::HybridShardZero2) => (hybrid, Reshard::Not),
        };
        if shard_size == 0 || !world_size.is_multiple_of(shard_size) {
            return Err(TrainError::Request(format!(
                "fsdp.hybrid_shard_size = {shard_size}: {world_size} ranks cannot be divided into groups of that size"
            )));
        }
        let (rank, replicas) = (context.rank, world_size / shard_size);
        let (shard_rank, replica) = (rank % shard_size, rank / shard_size);
        let group = |size: usize, ranks: Vec<usize>| (size > 1).then(|| context.group.subgroup(&ranks));
        let neighbours = |size: usize| (rank / size * size..(rank / size + 1) * size).collect();
        let post_forward = if let Reshard::ToRanks(ranks) = reshard { ranks } else { 1 };
        Ok(Self {
            shard_group: group(shard_size, neighbours(shard_size)),
            replicate_group: group(replicas, (0..replicas).map(|replica| replica * shard_size + shard_rank).collect()),
            post_forward_group: group(post_forward, neighbours(post_forward)),
            reshard: if shard_size == 1 { Reshard::Not } else { reshard },
            shard_size,
            shard_rank,
            replicas,
            replica,
        })
    }
}

/// FSDP2's `reshard_after_forward`, which accelerate passes for the root as well.
fn reshard_of_version_2(settings: &FsdpSettings, shard_size: usize) -> Result<Reshard, TrainError> {
    match settings.reshard_after_forward.unwrap_or(ReshardAfterForward::Flag(true)) {
        ReshardAfterForward::Flag(false) | ReshardAfterForward::Ranks(1) => Ok(Reshard::Not),
        ReshardAfterForward::Flag(true) => Ok(Reshard::ToShards),
        ReshardAfterForward::Ranks(ranks) if ranks == shard_size => Ok(Reshard::ToShards),
        ReshardAfterForward::Ranks(ranks) if ranks > 0 && shard_size.is_multiple_of(ranks) => Ok(Reshard::ToRanks(ranks)),
        ReshardAfterForward::Ranks(ranks) => Err(TrainError::Request(format!(
            "fsdp.reshard_after_forward = {ranks}: a number must be a divisor of the {shard_size} ranks that share a unit"
        ))),
    }
}
