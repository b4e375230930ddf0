//! Switches that cannot matter, set to one canonical value, so that trials that would measure the same thing run once.

use super::settings::{AutoWrapPolicy, BackwardPrefetch, DType, Dataset, Settings, ShardingStrategy};

/// Smallest unit of `SIZE_BASED_WRAP` where it plays no part: accelerate's default.
const UNUSED_MIN_NUM_PARAMS: u64 = 100_000_000;
/// PyTorch's `GradScaler` starts there; what stands where there is no fp16.
const UNUSED_LOSS_SCALE: f64 = 65536.0;

/// The settings that decide what a trial measures, and a sentence for every switch that was changed to get there.
pub fn collapse(settings: &Settings) -> (Settings, Vec<String>) {
    let mut effective = settings.clone();
    let mut reasons = Vec::new();
    strategy(&mut effective, &mut reasons);
    wrapping(&mut effective, &mut reasons);
    communication(&mut effective, &mut reasons);
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
    match fsdp.sharding_strategy {
        NoShard => {
            let because = "has no effect under NO_SHARD, which gathers nothing";
            set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, &format!("backward_prefetch {because}"), reasons);
            set(&mut fsdp.forward_prefetch, false, &format!("forward_prefetch {because}"), reasons);
            set(&mut fsdp.limit_all_gathers, true, &format!("limit_all_gathers {because}"), reasons);
            set(&mut fsdp.reshard_after_forward, None, &format!("reshard_after_forward {because}"), reasons);
        }
        ShardGradOp | HybridShardZero2 => {
            let sentence = "backward_prefetch has no effect where parameters stay gathered until backward";
            set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, sentence, reasons);
        }
        _ => {}
    }
    if fsdp.auto_wrap_policy == AutoWrapPolicy::NoWrap && fsdp.fsdp_version == 1 {
        let because = "has no effect under NO_WRAP, which has one unit only";
        set(&mut fsdp.backward_prefetch, BackwardPrefetch::BackwardPre, &format!("backward_prefetch {because}"), reasons);
        set(&mut fsdp.forward_prefetch, false, &format!("forward_prefetch {because}"), reasons);
        set(&mut fsdp.limit_all_gathers, true, &format!("limit_all_gathers {because}"), reasons);
    }
}
