//! What each strategy and switch holds, in bytes, by the counting allocator.

use super::*;

/// A model that writes down what its rank holds: before each block, and after its own forward.
struct Watched {
    model: Gpt2,
    held: std::sync::Mutex<Vec<u64>>,
}

impl Watched {
    fn look(&self) {
        self.held.lock().unwrap().extend(memory::current().map(|account| account.usage().allocated));
    }
}

impl Model for Watched {
    fn modules(&self) -> &ModuleTree {
        self.model.modules()
    }

    fn block_class(&self) -> &'static str {
        self.model.block_class()
    }

    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences, scope: &dyn crate::train::model::Scope) -> Tensor<2> {
        self.look();
        self.model.block(index, hidden, sequences, scope)
    }

    fn forward(&self, ids: &[u32], sequences: Sequences, scope: &dyn crate::train::model::Scope) -> Tensor<2> {
        let logits = self.model.forward(ids, sequences, scope);
        self.look();
        logits
    }
}

/// What rank 0 of two holds in its third step: before block 0, before block 1, after forward, after the step; and the most it ever held in that step.
fn held(settings: &FsdpSettings) -> [u64; 5] {
    held_by(settings, 2, None)
}

/// The same for other worlds, with frozen parameters.
fn held_by(settings: &FsdpSettings, world_size: usize, trainable: Option<&str>) -> [u64; 5] {
    let options = EngineOptions { seed: 0, trainable: trainable.map(|pattern| regex::Regex::new(pattern).unwrap()) };
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let accounts = memory::Accounts::new(world_size).unwrap();
    let of_rank = accounts.ranks().to_vec();
    let body = |context: RankContext| {
        let rank = context.rank;
        let model = Arc::new(Watched { model: Gpt2::new(tiny(0.0), AttentionKind::Flash), held: Default::default() });
        let mut engine = FullyShardedDataParallel::new(context, model.clone(), settings, &options, &weights)?;
        for step in 0..3 {
            model.held.lock().unwrap().clear();
            memory::current().unwrap().reset_peak();
            engine.zero_grad();
            // Two sequences a rank, whatever the world.
            engine.forward_backward(&batch(&ids, step, rank * 2..rank * 2 + 2), 1.0, true)?;
        }
        let usage = memory::current().unwrap().usage();
        // A checkpointed block is looked at again in backward.
        let held = model.held.lock().unwrap().clone();
        Ok([held[0], held[1], held[2], usage.allocated, usage.peak])
    };
    run_ranks(&RankOptions::new(world_size, 1), move |rank| of_rank[rank].adopt_thread(), body).unwrap()[0]
}

/// Bytes of the tiny model's parts in f32.
const BLOCK: u64 = 49_984 * 4;
const ROOT: u64 = 73_856 * 4;

/// Whether `more` holds `bytes` more than `less`, up to what the autodiff graph's own tables take: far less than any unit.
#[track_caller]
fn assert_more(more: u64, less: u64, bytes: u64, why: &str) {
    let difference = more as i64 - less as i64;
    assert!((difference - bytes as i64).abs() < 8 * 1024, "{why}: {difference} bytes more, where {bytes} are expected");
}

/// Full weights of every unit but the root are gone between forward and backward, and nothing keeps them: what `SHARD_GRAD_OP` holds more then is exactly the
/// weights of its blocks. After the step only shards and their gradients are left.
#[test]
fn no_unit_is_pinned() {
    let full = held(&defaults());
    let grad_op = held(&FsdpSettings { sharding_strategy: ShardingStrategy::ShardGradOp, ..defaults() });
    assert_more(grad_op[0], full[0], 0, "before block 0 both hold the root and block 0");
    assert_more(grad_op[1], full[1], BLOCK, "before block 1, block 0 is still there");
    assert_more(grad_op[2], full[2], 2 * BLOCK, "after forward both blocks are still there");
    assert_more(grad_op[3], full[3], 0, "after the step both hold shards and gradients");
    let whole = held(&FsdpSettings { sharding_strategy: ShardingStrategy::NoShard, ..defaults() });
    assert_more(whole[3], full[3], ROOT + 2 * BLOCK, "after the step all of parameters and gradients, rather than half");
}

/// Prefetch holds one unit more, checkpointing fewer activations, half precision half of what is gathered, offload no shards.
#[test]
fn switches_cost_what_they_should() {
    let plain = held(&FsdpSettings { backward_prefetch: BackwardPrefetch::NoPrefetch, ..defaults() });
    let forward_prefetch = held(&FsdpSettings { backward_prefetch: BackwardPrefetch::NoPrefetch, forward_prefetch: true, ..defaults() });
    assert_more(forward_prefetch[0], plain[0], BLOCK, "block 1 is gathered before block 0 runs");
    assert_more(forward_prefetch[1], plain[1], 0, "before block 1 there is nothing more to gather");
    let checkpointed = held(&FsdpSettings { activation_checkpointing: true, ..defaults() });
    assert!(checkpointed[2] + 512 * 1024 < plain[2], "{} against {}", checkpointed[2], plain[2]);
    let half = held(&FsdpSettings { mixed_precision: MixedPrecision::uniform(DType::Bf16), ..defaults() });
    assert!(half[4] * 10 < plain[4] * 9, "peak {} against {}", half[4], plain[4]);
    let offloaded = held(&FsdpSettings { cpu_offload: true, ..defaults() });
    assert_more(plain[3], offloaded[3], ROOT + 2 * BLOCK, "between steps shards and gradients are not on the device");
}

/// Hybrid strategies hold what their shard group's size says; FSDP2 frees its root too, and with a number keeps that group's part.
#[test]
fn meshes_hold_their_part() {
    let all = ROOT + 2 * BLOCK;
    let [full, of_two] = [defaults(), hybrid(ShardingStrategy::HybridShard, 2)].map(|settings| held_by(&settings, 4, None));
    assert_more(of_two[3], full[3], all / 2, "after the step, halves of parameters and gradients rather than quarters");
    assert_more(of_two[2], full[2], all / 4, "after forward, a half of the parameters rather than a quarter");
    let zero2 = held_by(&hybrid(ShardingStrategy::HybridShardZero2, 2), 4, None);
    assert_more(zero2[2], of_two[2], 2 * BLOCK, "after forward both blocks are still there");
    let flag = |reshard| held_by(&version_2(ReshardAfterForward::Flag(reshard)), 4, None);
    let (freed, kept) = (flag(true), flag(false));
    assert_more(full[2], freed[2], ROOT, "after forward FSDP2 has freed the root, too");
    assert_more(kept[2], freed[2], all, "after forward everything is still there");
    let halves = held_by(&version_2(ReshardAfterForward::Ranks(2)), 4, None);
    assert_more(halves[2], freed[2], all / 2, "after forward a half of everything is there");
    for held in [&kept, &halves, &full] {
        assert_more(held[3], freed[3], 0, "after the step shards and gradients are left");
    }
}

/// CASES 29: frozen parameters have no gradients, and frozen units are freed on the way back although they wait for none.
#[test]
fn frozen_units_cost_no_gradient() {
    for settings in [defaults(), version_2(ReshardAfterForward::Flag(true))] {
        let all = held_by(&settings, 2, None);
        let embedding = held_by(&settings, 2, Some("wte|wpe"));
        assert_more(all[3], embedding[3], BLOCK, "after the step, no half of the gradients of two blocks");
        assert_more(all[2], embedding[2], 0, "after forward there is no gradient yet");
        assert!(embedding[4] < all[4] + 8 * 1024, "peak {} against {}", embedding[4], all[4]);
    }
}
