//! Switches that cannot matter, set to one canonical value, so that trials that would measure the same thing run once.

use super::settings::{AutoWrapPolicy, BackwardPrefetch, DType, Dataset, ReshardAfterForward, Settings, ShardingStrategy, StateDictType};

/// Smallest unit of `SIZE_BASED_WRAP` where it plays no part: accelerate's default.
const UNUSED_MIN_NUM_PARAMS: u64 = 100_000_000;
/// PyTorch's `GradScaler` starts there; what stands where there is no fp16.
const UNUSED_LOSS_SCALE: f64 = 65536.0;

/// The settings that decide what a trial measures, and a sentence for every switch that was changed to get there.
pub fn collapse(settings: &Settings) -> (Settings, Vec<String>) {
    let mut effective = settings.clone();
    let mut reasons = Vec::new();
    if effective.fsdp.fsdp_version == 2 {
        version_2(&mut effective, &mut reasons);
    } else {
        strategy(&mut effective, &mut reasons);
        communication(&mut effective, &mut reasons);
    }
    wrapping(&mut effective, &mut reasons);
    let fsdp = &mut effective.fsdp;
    if fsdp.mixed_precision.param_dtype != DType::Fp16 {
        set(&mut fsdp.initial_loss_scale, UNUSED_LOSS_SCALE, "initial_loss_scale has no effect without fp16 parameters", &mut reasons);
    }
    if fsdp.cpu_ram_efficient_loading {
        // As accelerate: ranks that read nothing get their weights by broadcast.
        set(&mut fsdp.sync_module_states, true, "cpu_ram_efficient_loading turns sync_module_states on", &mut reasons);
    }
    if effective.train.gradient_accumulation_steps == 1 {
        let sentence = "sync_each_batch has no effect with gradient_accumulation_steps = 1";
        set(&mut effective.train.sync_each_batch, false, sentence, &mut reasons);
    }
    if matches!(effective.data.dataset, Dataset::TokenBlocks { .. }) {
        // The default is to shuffle, so this is no news to anybody.
        effective.data.shuffle = false;
    }
    (effective, reasons)
}

/// What goes with a sweep that saves no checkpoints.
pub(super) fn collapse_state_dicts(effective: &mut Settings, reasons: &mut Vec<String>) {
    let sentence = "state_dict_type has no effect without checkpoint.save_steps";
    set(&mut effective.fsdp.state_dict_type, StateDictType::FullStateDict, sentence, reasons);
}

fn set<T: PartialEq>(field: &mut T, canonical: T, sentence: &str, reasons: &mut Vec<String>) {
    if *field != canonical {
        *field = canonical;
        reasons.push(sentence.to_owned());
    }
}

fn strategy(settings: &mut Settings, reasons: &mut Vec<String>) {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let world_size = settings.device.world_size;
    let fsdp = &mut settings.fsdp;
    if world_size == 1 {
        set(&mut fsdp.sharding_strategy, NoShard, "with one rank nothing is sharded: the same as NO_SHARD", reasons);
    }
    if fsdp.hybrid_shard_size.is_none_or(|size| size == world_size) {
        match fsdp.sharding_strategy {
            HybridShard => set(&mut fsdp.sharding_strategy, FullShard, "the shard group is the whole world: HYBRID_SHARD is FULL_SHARD", reasons),
            HybridShardZero2 => {
                set(&mut fsdp.sharding_strategy, ShardGradOp, "the shard group is the whole world: HYBRID_SHARD_ZERO2 is SHARD_GRAD_OP", reasons);
            }
            FullShard | ShardGradOp | NoShard => {}
        }
    }
    if !matches!(fsdp.sharding_strategy, HybridShard | HybridShardZero2) {
        fsdp.hybrid_shard_size = None;
    }
    if fsdp.auto_wrap_policy == AutoWrapPolicy::NoWrap && fsdp.sharding_strategy == ShardGradOp {
        let sentence = "NO_WRAP makes one unit, which stays gathered from forward to backward: SHARD_GRAD_OP is FULL_SHARD";
        set(&mut fsdp.sharding_strategy, FullShard, sentence, reasons);
    }
}

/// FSDP2 has no such switches as FSDP1's, and says by `reshard_after_forward` what they say by `sharding_strategy`.
fn version_2(settings: &mut Settings, reasons: &mut Vec<String>) {
    let world_size = settings.device.world_size;
    let fsdp = &mut settings.fsdp;
    let has_no = |name: &str| format!("FSDP2 has no {name}");
    set(&mut fsdp.sharding_strategy, ShardingStrategy::FullShard, &has_no("sharding_strategy"), reasons);
    set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, &has_no("backward_prefetch"), reasons);
    set(&mut fsdp.forward_prefetch, false, &has_no("forward_prefetch"), reasons);
    set(&mut fsdp.limit_all_gathers, true, &has_no("limit_all_gathers"), reasons);
    set(&mut fsdp.use_orig_params, true, &has_no("use_orig_params: parameters are always original"), reasons);
    set(&mut fsdp.sync_module_states, true, &has_no("sync_module_states"), reasons);
    fsdp.hybrid_shard_size = fsdp.hybrid_shard_size.filter(|size| *size != world_size);
    let shard_size = fsdp.hybrid_shard_size.unwrap_or(world_size);
    let reshard = fsdp.reshard_after_forward.get_or_insert(ReshardAfterForward::Flag(true));
    match *reshard {
        _ if shard_size == 1 => {
            let sentence = "reshard_after_forward has no effect where nothing is sharded";
            set(reshard, ReshardAfterForward::Flag(true), sentence, reasons);
        }
        ReshardAfterForward::Ranks(1) => {
            set(reshard, ReshardAfterForward::Flag(false), "reshard_after_forward = 1 keeps parameters whole: the same as false", reasons);
        }
        ReshardAfterForward::Ranks(ranks) if ranks == shard_size => {
            set(reshard, ReshardAfterForward::Flag(true), "reshard_after_forward to all ranks of a shard group is the same as true", reasons);
        }
        ReshardAfterForward::Ranks(_) | ReshardAfterForward::Flag(_) => {}
    }
}

fn wrapping(settings: &mut Settings, reasons: &mut Vec<String>) {
    let fsdp = &mut settings.fsdp;
    if fsdp.auto_wrap_policy != AutoWrapPolicy::SizeBasedWrap {
        set(&mut fsdp.min_num_params, UNUSED_MIN_NUM_PARAMS, "min_num_params has no effect without SIZE_BASED_WRAP", reasons);
    }
    if fsdp.auto_wrap_policy != AutoWrapPolicy::TransformerBasedWrap {
        let sentence = "transformer_layer_cls_to_wrap has no effect without TRANSFORMER_BASED_WRAP";
        set(&mut fsdp.transformer_layer_cls_to_wrap, None, sentence, reasons);
    }
}

fn communication(settings: &mut Settings, reasons: &mut Vec<String>) {
    use ShardingStrategy::{HybridShardZero2, NoShard, ShardGradOp};
    let fsdp = &mut settings.fsdp;
    set(&mut fsdp.reshard_after_forward, None, "FSDP1 has no reshard_after_forward", reasons);
    match fsdp.sharding_strategy {
        NoShard => {
            let because = "has no effect under NO_SHARD, which gathers nothing";
            set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, &format!("backward_prefetch {because}"), reasons);
            set(&mut fsdp.forward_prefetch, false, &format!("forward_prefetch {because}"), reasons);
            set(&mut fsdp.limit_all_gathers, true, &format!("limit_all_gathers {because}"), reasons);
        }
        ShardGradOp | HybridShardZero2 => {
            let sentence = "backward_prefetch has no effect where parameters stay gathered until backward";
            set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, sentence, reasons);
        }
        _ => {}
    }
    if fsdp.auto_wrap_policy == AutoWrapPolicy::NoWrap {
        let because = "has no effect under NO_WRAP, which has one unit only";
        set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, &format!("backward_prefetch {because}"), reasons);
        set(&mut fsdp.forward_prefetch, false, &format!("forward_prefetch {because}"), reasons);
        set(&mut fsdp.limit_all_gathers, true, &format!("limit_all_gathers {because}"), reasons);
    }
}
