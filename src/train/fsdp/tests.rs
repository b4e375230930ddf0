//! The engine against PyTorch's measured references in `tests/gold`.

mod memory_use;
mod overlap;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use serde_json::Value;

use super::*;
use crate::protocol::{Gpt2Config, LlamaConfig};
use crate::spec::settings::{AutoWrapPolicy, BackwardPrefetch, DType, MixedPrecision, ReshardAfterForward, ShardingStrategy, StateDictType};
use crate::train::model::gpt2::Gpt2;
use crate::train::model::llama::Llama;
use crate::train::model::ops::AttentionKind;
use crate::train::model::tree::{Module, ModuleTree};
use crate::train::optim::{self, AdamW, FlatShard, Run, clip_coefficient, runs};

fn gold(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gold").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(gold(name)).unwrap()).unwrap()
}

/// A safetensors file of references.
pub(super) struct File(Vec<u8>);

impl File {
    pub(super) fn open(name: &str) -> Self {
        Self(std::fs::read(gold(name)).unwrap())
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().data().chunks_exact(4).map(|bytes| bytes.try_into().unwrap()).collect()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name).into_iter().map(f32::from_le_bytes).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.words(name).into_iter().map(u32::from_le_bytes).collect()
    }
}

impl WeightSource for File {
    fn read(&self, name: &str, _: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
        Ok(self.floats(name)[elements].to_vec())
    }
}

pub(super) fn defaults() -> FsdpSettings {
    FsdpSettings {
        fsdp_version: 1,
        sharding_strategy: ShardingStrategy::FullShard,
        hybrid_shard_size: None,
        auto_wrap_policy: AutoWrapPolicy::TransformerBasedWrap,
        transformer_layer_cls_to_wrap: None,
        min_num_params: 2000,
        backward_prefetch: BackwardPrefetch::BackwardPre,
        forward_prefetch: false,
        limit_all_gathers: true,
        use_orig_params: true,
        cpu_offload: false,
        activation_checkpointing: false,
        sync_module_states: true,
        cpu_ram_efficient_loading: true,
        state_dict_type: StateDictType::FullStateDict,
        reshard_after_forward: None,
        mixed_precision: MixedPrecision::uniform(DType::Fp32),
        initial_loss_scale: 65536.0,
    }
}

pub(super) fn tiny(dropout: f64) -> Gpt2Config {
    Gpt2Config { vocab_size: 1024, n_positions: 128, n_embd: 64, n_layer: 2, n_head: 2, dropout, ..Gpt2Config::DEFAULT }
}

pub(in crate::train) fn tiny_llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 1024,
        max_position_embeddings: 128,
        hidden_size: 64,
        intermediate_size: 172,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        rms_norm_eps: 1e-5,
        ..LlamaConfig::DEFAULT
    }
}

pub(super) fn tiny_model() -> Arc<dyn Model> {
    Arc::new(Gpt2::new(tiny(0.0), AttentionKind::Flash))
}

fn engine(context: RankContext, model: Arc<dyn Model>, settings: &FsdpSettings, weights: &File) -> FullyShardedDataParallel {
    FullyShardedDataParallel::new(context, model, settings, &EngineOptions::default(), weights).unwrap()
}

pub(in crate::train) fn ranks<T: Send>(world_size: usize, body: impl Fn(RankContext) -> Result<T, TrainError> + Sync) -> Vec<T> {
    run_ranks(&RankOptions::new(world_size, 1), |_| {}, body).unwrap()
}

/// The trainer's optimiser for all that an engine trains.
fn optimizer(engine: &mut FullyShardedDataParallel) -> AdamW {
    let run = |segment: &Segment| Some(Run { range: segment.range.clone(), gradient: segment.gradient?, decays: true });
    AdamW::new(&optim::tests::settings(), engine.shards().iter().map(|shard| (runs(shard.segments.iter().filter_map(run)), shard.offloaded)))
}

/// Clips to a global norm of 1, steps, and gives the norm before clipping.
fn optimizer_step(optimizer: &mut AdamW, engine: &mut FullyShardedDataParallel, loss_scale: f32) -> f64 {
    let replicas = engine.shards()[0].replicas as f64;
    let squares = optimizer.squared_norm(engine.shards().iter().map(|shard| shard.gradient.as_deref()), 1.0 / loss_scale) / replicas;
    let norm = engine.group().all_reduce_numbers(&[squares]).unwrap()[0].sqrt();
    let mut shards: Vec<FlatShard<'_>> =
        engine.shards().iter_mut().map(|shard| FlatShard { values: &mut shard.values, gradient: shard.gradient.as_deref() }).collect();
    optimizer.step(&mut shards, 1e-3, 1.0 / loss_scale, clip_coefficient(norm, 1.0));
    engine.zero_grad();
    norm
}

/// Rows `rows` of step `step`.
fn batch(ids: &[u32], step: usize, rows: Range<usize>) -> Batch {
    let start = step * 8;
    Batch { ids: ids[(start + rows.start) * 64..(start + rows.end) * 64].to_vec(), scored: None, rows: rows.len(), block_size: 64 }
}

/// How a training of the references differs from the plain one.
#[derive(Clone, Copy)]
struct Recipe {
    world_size: usize,
    steps: usize,
    accumulation: usize,
    synchronise_each: bool,
    scale: f32,
}

const PLAIN: Recipe = Recipe { world_size: 2, steps: 30, accumulation: 1, synchronise_each: true, scale: 1.0 };

/// Loss and gradient norm of each step, as rank 0 sees them.
fn train(settings: &FsdpSettings, recipe: Recipe) -> Vec<(f64, f64)> {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let curves = ranks(recipe.world_size, |context| {
        let (rank, group) = (context.rank, context.group.clone());
        let mut engine = engine(context, tiny_model(), settings, &weights);
        let mut optimizer = optimizer(&mut engine);
        let mut curve = Vec::new();
        let each = 8 / recipe.world_size / recipe.accumulation;
        for step in 0..recipe.steps {
            let mut loss = 0.0;
            for pass in 0..recipe.accumulation {
                let first = rank * 8 / recipe.world_size + pass * each;
                let last = pass + 1 == recipe.accumulation;
                let scale = recipe.scale / recipe.accumulation as f32;
                loss += engine.forward_backward(&batch(&ids, step, first..first + each), scale, recipe.synchronise_each || last)?.mean();
            }
            let norm = optimizer_step(&mut optimizer, &mut engine, recipe.scale);
            let loss = group.all_reduce_numbers(&[loss / (recipe.world_size * recipe.accumulation) as f64])?[0];
            curve.push((loss, norm));
        }
        Ok(curve)
    });
    curves.into_iter().next().unwrap()
}

fn differences(curve: &[(f64, f64)], reference: &Value) -> (f64, f64) {
    let numbers = |key: &str| reference[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect::<Vec<_>>();
    let (losses, norms) = (numbers("loss"), numbers("grad_norm_before_clip"));
    let loss = curve.iter().zip(&losses).map(|((loss, _), want)| (loss - want).abs()).fold(0.0, f64::max);
    let norm = curve.iter().zip(&norms).map(|((_, norm), want)| (norm - want).abs() / want).fold(0.0, f64::max);
    (loss, norm)
}

fn strategy(name: &str) -> ShardingStrategy {
    serde_json::from_value(Value::String(name.to_owned())).unwrap()
}

/// The settings that a reference's configuration means.
fn settings_of(config: &Value) -> FsdpSettings {
    let mut settings = defaults();
    if let Some(name) = config["strategy"].as_str() {
        settings.sharding_strategy = strategy(name);
    }
    let prefetch = config.get("backward_prefetch").or(config.get("bp"));
    settings.backward_prefetch = match prefetch.map(Value::as_str) {
        None | Some(Some("BACKWARD_PRE")) => BackwardPrefetch::BackwardPre,
        Some(Some("BACKWARD_POST")) => BackwardPrefetch::BackwardPost,
        Some(_) => BackwardPrefetch::NoPrefetch,
    };
    if config["kind"] == "fsdp2" {
        settings.fsdp_version = 2;
        settings.reshard_after_forward = Some(ReshardAfterForward::Flag(config["reshard"] != false));
    }
    if config["kind"] == "ddp" {
        settings.sharding_strategy = ShardingStrategy::NoShard;
        settings.auto_wrap_policy = AutoWrapPolicy::NoWrap;
    }
    settings.cpu_offload = config["cpu_offload"] == true;
    settings.forward_prefetch = config["forward_prefetch"] == true || config["fp"] == true;
    settings.limit_all_gathers = config["limit_all_gathers"] != false;
    settings.activation_checkpointing = config["ac"] == true;
    settings.use_orig_params = config["use_orig_params"] != false && config["uo"] != false;
    if config["wrap"] == "none" {
        settings.auto_wrap_policy = AutoWrapPolicy::NoWrap;
    } else if config["wrap"] == "size2000" {
        settings.auto_wrap_policy = AutoWrapPolicy::SizeBasedWrap;
    }
    let dtype = |key: &str| match config["mp"][key].as_str() {
        Some("bfloat16") => DType::Bf16,
        Some("float16") => DType::Fp16,
        _ => DType::Fp32,
    };
    settings.mixed_precision =
        MixedPrecision { param_dtype: dtype("param_dtype"), reduce_dtype: dtype("reduce_dtype"), buffer_dtype: dtype("buffer_dtype") };
    if config["bf16"] == true {
        settings.mixed_precision = MixedPrecision::uniform(DType::Bf16);
    }
    settings
}

fn recipe_of(name: &str, config: &Value) -> Recipe {
    Recipe {
        world_size: if name.starts_with("w1/") { 1 } else { 2 },
        accumulation: config["accum"].as_u64().unwrap_or(1) as usize,
        synchronise_each: config["no_sync"] != true,
        scale: config["scaler"].as_f64().unwrap_or(1.0) as f32,
        ..PLAIN
    }
}

/// Thirty steps of every strategy, layout, prefetch and precision that PyTorch was measured with.
#[test]
fn training_follows_pytorchs_curves() {
    for (name, reference) in json("fsdp/training_curves.json").as_object().unwrap() {
        let settings = settings_of(&reference["config"]);
        let curve = train(&settings, recipe_of(name, &reference["config"]));
        let (loss, norm) = differences(&curve, reference);
        let (loss_bound, norm_bound) = match settings.mixed_precision.param_dtype {
            DType::Fp32 => (2e-6, 2e-6),
            DType::Bf16 => (1e-3, 1e-2),
            DType::Fp16 => (2e-4, 1e-3),
        };
        assert!(loss < loss_bound && norm < norm_bound, "{name}: loss off by {loss:.2e}, gradient norm by {norm:.2e}");
    }
}

/// A hybrid of groups of `size` ranks.
fn hybrid(sharding_strategy: ShardingStrategy, size: usize) -> FsdpSettings {
    FsdpSettings { sharding_strategy, hybrid_shard_size: Some(size), ..defaults() }
}

fn version_2(reshard: ReshardAfterForward) -> FsdpSettings {
    FsdpSettings { fsdp_version: 2, reshard_after_forward: Some(reshard), ..defaults() }
}

/// Every strategy for a world of this size.
fn strategies(world_size: usize) -> Vec<FsdpSettings> {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let mut all: Vec<_> = [FullShard, ShardGradOp, NoShard].map(|sharding_strategy| FsdpSettings { sharding_strategy, ..defaults() }).into();
    all.extend([true, false].map(|reshard| version_2(ReshardAfterForward::Flag(reshard))));
    for size in (1..=world_size).filter(|size| world_size.is_multiple_of(*size)) {
        all.extend([HybridShard, HybridShardZero2].map(|strategy| hybrid(strategy, size)));
        all.push(FsdpSettings { hybrid_shard_size: Some(size), ..version_2(ReshardAfterForward::Flag(true)) });
        all.push(version_2(ReshardAfterForward::Ranks(size)));
    }
    all
}

/// CASES 31, 33: where PyTorch fails or unties the head, the run must equal the one without sharding; so must offload, more ranks, and checkpointing under every policy.
#[test]
fn policies_change_nothing_of_the_result() {
    let reference = &json("fsdp/training_curves.json")["w1/single"];
    let mut variants = Vec::new();
    for use_orig_params in [false, true] {
        for min_num_params in [2000, 100_000] {
            variants.push((2, FsdpSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, min_num_params, use_orig_params, ..defaults() }));
        }
    }
    let size = FsdpSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, ..defaults() };
    variants.push((2, FsdpSettings { activation_checkpointing: true, ..size.clone() }));
    variants.push((2, FsdpSettings { activation_checkpointing: true, sharding_strategy: ShardingStrategy::ShardGradOp, ..size.clone() }));
    variants.push((2, FsdpSettings { activation_checkpointing: true, auto_wrap_policy: AutoWrapPolicy::NoWrap, ..defaults() }));
    variants.push((2, FsdpSettings { forward_prefetch: true, backward_prefetch: BackwardPrefetch::BackwardPost, ..size.clone() }));
    variants.push((4, FsdpSettings { forward_prefetch: true, limit_all_gathers: false, ..size }));
    for class in ["GPT2Attention", "GPT2MLP", "Conv1D", "LayerNorm", "Embedding"] {
        let transformer_layer_cls_to_wrap = Some(class.to_owned());
        variants.push((2, FsdpSettings { transformer_layer_cls_to_wrap, activation_checkpointing: class == "GPT2MLP", ..defaults() }));
    }
    variants.push((2, FsdpSettings { cpu_offload: true, ..defaults() }));
    variants.push((8, FsdpSettings { use_orig_params: false, ..defaults() }));
    variants.push((1, FsdpSettings { ..version_2(ReshardAfterForward::Flag(true)) }));
    for settings in strategies(4) {
        variants.push((4, settings.clone()));
        // Everything at once, in units smaller than a block, with the head's embedding in a unit of its own.
        let auto_wrap_policy = AutoWrapPolicy::SizeBasedWrap;
        variants.push((4, FsdpSettings { auto_wrap_policy, activation_checkpointing: true, cpu_offload: true, use_orig_params: false, ..settings }));
    }
    for (world_size, settings) in variants {
        let curve = train(&settings, Recipe { world_size, steps: 6, ..PLAIN });
        let (loss, norm) = differences(&curve, reference);
        assert!(loss < 2e-6 && norm < 2e-6, "world {world_size}, {settings:?}: loss off by {loss:.2e}, gradient norm by {norm:.2e}");
    }
}

/// Thirty steps of a world of four, whatever the strategy, with and without synchronisation of each of two passes.
#[test]
fn four_ranks_are_as_right_as_one() {
    let reference = &json("fsdp/training_curves.json")["w1/single"];
    for settings in strategies(4) {
        for (accumulation, synchronise_each) in [(1, true), (2, false)] {
            let curve =
                train(&settings, Recipe { world_size: 4, steps: if accumulation == 1 { 30 } else { 8 }, accumulation, synchronise_each, ..PLAIN });
            let (loss, norm) = differences(&curve, reference);
            assert!(loss < 2e-6 && norm < 2e-6, "{accumulation} passes, {settings:?}: loss off by {loss:.2e}, gradient norm by {norm:.2e}");
        }
    }
}

/// The first gradient of every parameter before clipping, and its value after 1 and 30 steps.
#[test]
fn parameters_are_those_of_pytorch() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let references = ["step0_grads_before_clip", "params_after_step1", "params_after_step30"];
    let references = references.map(|name| File::open(&format!("fsdp/single_{name}.safetensors")));
    let worst = |got: &[f32], name: &str, reference: &File| {
        let want = reference.floats(name);
        assert_eq!(got.len(), want.len());
        // The keys' bias moves no softmax, so its gradient is rounding, which Adam makes as large as any other.
        let counts = |index: usize| !(name.ends_with("c_attn.bias") && (64..128).contains(&index));
        got.iter().zip(&want).enumerate().filter(|(index, _)| counts(*index)).map(|(_, (got, want))| (got - want).abs()).fold(0.0, f32::max)
    };
    let flat = FsdpSettings { use_orig_params: false, ..defaults() };
    for (world_size, settings) in
        [(1, defaults()), (2, defaults()), (2, flat), (4, hybrid(ShardingStrategy::HybridShard, 2)), (4, version_2(ReshardAfterForward::Ranks(2)))]
    {
        ranks(world_size, |context| {
            let rank = context.rank;
            let mut engine = engine(context, tiny_model(), &settings, &weights);
            let mut optimizer = optimizer(&mut engine);
            let names: Vec<String> = tiny_model().modules().parameters().into_iter().map(|parameter| parameter.name).collect();
            let rows = rank * 8 / world_size..(rank + 1) * 8 / world_size;
            for step in 0..30 {
                engine.forward_backward(&batch(&ids, step, rows.clone()), 1.0, true)?;
                if step == 0 {
                    for name in &names {
                        let difference = worst(&engine.full_gradient(name)?, name, &references[0]);
                        assert!(difference < 1e-6, "world {world_size}, {settings:?}: gradient of {name} off by {difference:.2e}");
                    }
                }
                optimizer_step(&mut optimizer, &mut engine, 1.0);
                let Some(reference) = (step == 0).then_some(&references[1]).or((step == 29).then_some(&references[2])) else { continue };
                for name in &names {
                    let difference = worst(&engine.full_parameter(name)?, name, reference);
                    assert!(difference < 1e-5, "world {world_size}, {settings:?}: {name} off by {difference:.2e} after step {step}");
                }
            }
            Ok(())
        });
    }
}

/// CASES 34: ranks of different replicas hold the same values after a step, to the last bit, and those of one shard group hold different parts.
#[test]
fn replicas_hold_the_same_parameters() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    for settings in [
        hybrid(ShardingStrategy::HybridShard, 2),
        hybrid(ShardingStrategy::HybridShardZero2, 2),
        hybrid(ShardingStrategy::HybridShard, 1),
        FsdpSettings { hybrid_shard_size: Some(2), ..version_2(ReshardAfterForward::Flag(true)) },
    ] {
        let shard_size = settings.hybrid_shard_size.unwrap();
        let held = ranks(4, |context| {
            let rank = context.rank;
            let mut engine = engine(context, tiny_model(), &settings, &weights);
            let mut optimizer = optimizer(&mut engine);
            engine.forward_backward(&batch(&ids, 0, rank * 2..rank * 2 + 2), 1.0, true)?;
            optimizer_step(&mut optimizer, &mut engine, 1.0);
            assert_eq!((engine.shards()[0].replicas, engine.shards()[0].replica), (4 / shard_size, rank / shard_size));
            Ok(engine.shards().iter().map(|shard| shard.values.clone()).collect::<Vec<_>>())
        });
        for rank in 0..4 {
            assert_eq!(held[rank], held[rank % shard_size], "{settings:?}: rank {rank}");
            let whole: usize = held[rank].iter().map(Vec::len).sum();
            assert_eq!(whole, 173_824 / shard_size);
        }
        assert!(shard_size == 1 || held[0] != held[1]);
    }
}

/// Prefetch, checkpointing, resharding and the limit decide when things happen, not what is computed.
#[test]
fn switches_change_no_bit() {
    let recipe = Recipe { steps: 3, ..PLAIN };
    let plain = train(&defaults(), recipe);
    for settings in [
        FsdpSettings { sharding_strategy: ShardingStrategy::ShardGradOp, ..defaults() },
        FsdpSettings { activation_checkpointing: true, ..defaults() },
        FsdpSettings { forward_prefetch: true, ..defaults() },
        FsdpSettings { backward_prefetch: BackwardPrefetch::NoPrefetch, ..defaults() },
        FsdpSettings { cpu_offload: true, ..defaults() },
        FsdpSettings { limit_all_gathers: false, forward_prefetch: true, ..defaults() },
        hybrid(ShardingStrategy::HybridShard, 2),
    ] {
        assert_eq!(train(&settings, recipe), plain, "{settings:?}");
    }
    let plain = train(&version_2(ReshardAfterForward::Flag(true)), recipe);
    assert_eq!(train(&version_2(ReshardAfterForward::Flag(false)), recipe), plain);
    assert_eq!(train(&FsdpSettings { activation_checkpointing: true, ..version_2(ReshardAfterForward::Flag(true)) }, recipe), plain);
}

/// Logits and the gradient of every parameter of one batch, whole and sharded in two.
#[test]
fn logits_and_gradients_are_transformers() {
    let (weights, reference) = (File::open("tiny-gpt2-perturbed.safetensors"), File::open("tiny-gpt2-perturbed.golden.safetensors"));
    let batch = Batch { ids: reference.ids("input_ids"), scored: None, rows: 2, block_size: 64 };
    let worst = |got: &[f32], name: &str| {
        let want = reference.floats(name);
        assert_eq!(got.len(), want.len());
        got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
    };
    for kind in [AttentionKind::Flash, AttentionKind::Eager] {
        for world_size in [1, 2] {
            ranks(world_size, |context| {
                let model: Arc<dyn Model> = Arc::new(Gpt2::new(tiny(0.0), kind));
                let mut engine = engine(context, model.clone(), &defaults(), &weights);
                let logits = worst(&engine.logits(&batch)?, "logits");
                assert!(logits < 1e-5, "logits off by {logits:.2e}");
                let evaluated = engine.evaluate(&batch)?;
                let loss = engine.forward_backward(&batch, 1.0, true)?;
                assert_eq!(loss, evaluated);
                assert!((loss.mean() - 7.031_568_383_876_632).abs() < 2e-6, "loss {}", loss.mean());
                for parameter in model.modules().parameters() {
                    let gradient = worst(&engine.full_gradient(&parameter.name)?, &format!("grad.{}", parameter.name));
                    assert!(gradient < 1e-6, "gradient of {} off by {gradient:.2e}", parameter.name);
                }
                Ok(())
            });
        }
    }
}

/// With flat parameters PyTorch unties a head that is wrapped apart. Tied, it has no unit: it gathers the embedding's in forward and, after the root has gathered
/// ahead what comes next, in backward, and its gradient is reduced with the embedding's.
fn tie_the_head(events: &mut Vec<&str>) {
    let heads: Vec<usize> = (0..events.len()).filter(|index| events[*index].ends_with(" lm_head")).collect();
    let [forward, backward] = heads[..] else { panic!("{events:?}") };
    events[forward] = "all_gather 65536 float32 transformer.wte";
    events[backward] = events[forward];
    events.swap(backward, backward + 1);
    let reduced = events.remove(backward + 2);
    assert_eq!(reduced, "reduce_scatter 65536 float32");
}

/// What rank 0 does in its third step, in order, against PyTorch's record.
#[test]
fn collectives_come_in_pytorchs_order() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    for (name, reference) in json("fsdp/collectives.json").as_object().unwrap() {
        let config = &reference["config"];
        let (settings, recipe) = (settings_of(config), recipe_of(name, config));
        let traces = ranks(2, |context| {
            let rank = context.rank;
            let mut engine = engine(context, tiny_model(), &settings, &weights);
            let mut events = Vec::new();
            for step in 0..3 {
                engine.trace(true);
                let each = 4 / recipe.accumulation;
                for pass in 0..recipe.accumulation {
                    let first = rank * 4 + pass * each;
                    engine.forward_backward(
                        &batch(&ids, step, first..first + each),
                        1.0,
                        recipe.synchronise_each || pass + 1 == recipe.accumulation,
                    )?;
                }
                events = engine.trace(false);
                engine.zero_grad();
            }
            Ok(events)
        });
        let mut want: Vec<&str> = reference["events"].as_array().unwrap().iter().map(|event| event.as_str().unwrap()).collect();
        if name == "fsdp1_FULL_SHARD_size2000_flat" {
            tie_the_head(&mut want);
        }
        // PyTorch's record does not always say which unit.
        let got: Vec<String> = traces[0].iter().map(ToString::to_string).collect();
        let same = got.len() == want.len() && got.iter().zip(&want).all(|(got, want)| got.starts_with(want));
        assert!(same, "{name}:\n{got:#?}\n{want:#?}");
    }
}

fn odd() -> ModuleTree {
    let linear = |name: &str, from: usize, to: usize, bias: bool| {
        let mut parameters = vec![("weight", vec![to, from])];
        parameters.extend(bias.then(|| ("bias", vec![to])));
        Module::leaf(name, "Linear", parameters)
    };
    let norm = Module::leaf("n", "LayerNorm", vec![("weight", vec![5]), ("bias", vec![5])]);
    ModuleTree {
        root: Module::container("", "Odd", vec![linear("a", 7, 5, true), norm, linear("b", 5, 3, true), linear("c", 3, 2, false)]),
        ties: Vec::new(),
    }
}

/// Units, their order, sizes, padding and the place of every parameter, for four models, every policy, both layouts and two world sizes.
#[test]
fn flat_parameters_are_laid_out_as_pytorchs() {
    let small = Gpt2Config { vocab_size: 50257, n_positions: 1024, n_embd: 768, n_layer: 12, n_head: 12, ..tiny(0.0) };
    let trees = [
        ("tiny-gpt2", Gpt2::new(tiny(0.0), AttentionKind::Flash).modules().clone()),
        ("gpt2-124M", Gpt2::new(small, AttentionKind::Flash).modules().clone()),
        ("tiny-llama", Llama::new(tiny_llama(), AttentionKind::Flash).modules().clone()),
        ("toy-odd", odd()),
    ];
    let mut checked = 0;
    for (key, reference) in json("fsdp/wrap_units.json").as_object().unwrap() {
        let parts: Vec<&str> = key.split('/').collect();
        let [world, model, policy, layout] = parts[..] else { panic!("{key}") };
        let world_size: usize = world.trim_start_matches("world_").parse().unwrap();
        let tree = &trees.iter().find(|(name, _)| *name == model).unwrap().1;
        let use_orig_params = layout.ends_with("True");
        let mut settings = FsdpSettings { use_orig_params, auto_wrap_policy: AutoWrapPolicy::NoWrap, ..defaults() };
        if policy == "transformer" {
            settings.auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
        } else if let Some(size) = policy.strip_prefix("size") {
            settings.auto_wrap_policy = AutoWrapPolicy::SizeBasedWrap;
            settings.min_num_params = size.parse().unwrap();
        }
        let class = match model {
            "toy-odd" => "Linear",
            "tiny-llama" => "LlamaDecoderLayer",
            _ => "GPT2Block",
        };
        let paths = wrap::unit_paths(tree, &settings, class).unwrap();
        let layouts = layout::flat_layouts(tree, &paths, &settings, world_size, |_| true);
        // PyTorch lists a wrapped tied head without parameters, or, with flat parameters, with an untied copy; here it is no unit.
        let tied = |unit: &&Value| !tree.ties.is_empty() && (unit["unit"] == "lm_head" || unit["layout"][0][0] == "lm_head.weight");
        let real = |unit: &&Value| unit.get("flat").is_some() && !tied(unit);
        let wanted: Vec<&Value> = reference.as_array().unwrap().iter().filter(real).collect();
        let layouts: Vec<_> = layouts.into_iter().filter(|layout| layout.numel > 0).collect();
        let names: Vec<_> = layouts.iter().map(|layout| (layout.unit.as_str(), layout.class)).collect();
        let want: Vec<_> = wanted.iter().map(|unit| (unit["unit"].as_str().unwrap(), unit["class"].as_str().unwrap())).collect();
        let untied = model == "gpt2-124M" && want.len() == names.len() + 1 && want[0].0.is_empty() && want[0] != names[0];
        assert_eq!(names, &want[usize::from(untied)..], "{key}");
        for (layout, want) in layouts.iter().zip(&wanted[usize::from(untied)..]) {
            assert_eq!(layout.parameters.len() as u64, want["parameters"].as_u64().unwrap(), "{key} {}", layout.unit);
            assert_eq!(layout.cut.shard_numel[0] as u64, want["shard"].as_u64().unwrap(), "{key} {}", layout.unit);
            let flat = want["flat"].as_u64().unwrap();
            assert!(if use_orig_params { layout.cut.full_numel as u64 == flat } else { layout.numel as u64 == flat }, "{key} {}", layout.unit);
            let shard = layout.cut.shard_numel[0];
            for (rank, pad) in want["pad"].as_array().unwrap().iter().enumerate() {
                // With original parameters the padding at the end belongs to the flat parameter, and PyTorch counts none in the shards.
                let missing = ((rank + 1) * shard).saturating_sub(layout.numel).min(shard);
                assert_eq!(if use_orig_params { 0 } else { missing as u64 }, pad.as_u64().unwrap(), "{key} {} rank {rank}", layout.unit);
            }
            if let Some(places) = want["layout"].as_array() {
                let prefix = if layout.unit.is_empty() { String::new() } else { format!("{}.", layout.unit) };
                for (placed, place) in layout.parameters.iter().zip(places) {
                    assert_eq!(placed.info.name, format!("{prefix}{}", place[0].as_str().unwrap()), "{key}");
                    assert_eq!(placed.range.start as u64, place[1].as_u64().unwrap(), "{key} {}", placed.info.name);
                }
            }
            checked += 1;
        }
    }
    assert!(checked > 300, "only {checked} units were compared");
}

/// FSDP2's groups and the rows of every parameter on each of two, three and four ranks.
#[test]
fn rows_are_dealt_as_pytorchs() {
    let trees = [
        ("tiny-gpt2", tiny_model().modules().clone()),
        ("tiny-llama", Llama::new(tiny_llama(), AttentionKind::Flash).modules().clone()),
        ("toy-odd", odd()),
    ];
    for (world, models) in json("fsdp/fsdp2_shards.json").as_object().unwrap() {
        let world_size: usize = world.trim_start_matches("world_").parse().unwrap();
        for (model, tree) in &trees {
            let reference = &models[model];
            let mut settings = version_2(ReshardAfterForward::Flag(true));
            if *model == "toy-odd" {
                settings.auto_wrap_policy = AutoWrapPolicy::NoWrap;
            }
            let paths = wrap::unit_paths(tree, &settings, if *model == "tiny-llama" { "LlamaDecoderLayer" } else { "GPT2Block" }).unwrap();
            let layouts = layout::flat_layouts(tree, &paths, &settings, world_size, |_| true);
            let groups: Vec<_> = layouts
                .iter()
                .map(|layout| {
                    let unit = if layout.unit.is_empty() { "<root>" } else { &layout.unit };
                    let names: Vec<_> = layout.parameters.iter().map(|placed| placed.info.name.as_str()).collect();
                    serde_json::json!({ "unit": unit, "params": names })
                })
                .collect();
            assert_eq!(&Value::Array(groups), &reference["groups"], "{world} {model}");
            for layout in &layouts {
                let padded = |placed: &layout::Placed| reference["params"][&placed.info.name]["padded_local_shape"].as_array().unwrap();
                let numel = |shape: &[Value]| shape.iter().map(|size| size.as_u64().unwrap() as usize).product::<usize>();
                assert_eq!(layout.cut.shard_numel, vec![layout.parameters.iter().map(|placed| numel(padded(placed))).sum::<usize>(); world_size]);
                for rank in 0..world_size {
                    let segments = layout.segments(rank);
                    for placed in &layout.parameters {
                        let local = reference["params"][&placed.info.name]["local_shape_by_rank"][rank].as_array().unwrap();
                        let held = segments.iter().find(|segment| segment.name == placed.info.name).map_or(0, |segment| segment.range.len());
                        assert_eq!(held, numel(local), "{world} {model} {} rank {rank}", placed.info.name);
                    }
                }
            }
        }
    }
}

/// CASES 33: every element of every parameter is in exactly one shard, whatever the sizes; more ranks than elements leave some ranks with nothing. So is every
/// element of every trained parameter's gradient, and nothing else is.
#[test]
fn shards_cover_everything_once() {
    let versions = [defaults(), FsdpSettings { use_orig_params: false, ..defaults() }, version_2(ReshardAfterForward::Flag(true))];
    for world_size in [1, 2, 3, 5, 64, 200] {
        for settings in &versions {
            for trained in ["", "weight", "b"] {
                let layouts = layout::flat_layouts(&odd(), &[String::new()], settings, world_size, |name| name.contains(trained));
                let mut next = std::collections::HashMap::new();
                for rank in 0..world_size {
                    let mut end = 0;
                    for segment in layouts[0].segments(rank) {
                        assert_eq!(segment.range.len(), segment.parameter_range.len());
                        assert!(segment.range.end <= layouts[0].cut.shard_numel[rank]);
                        assert_eq!(segment.gradient.is_some(), segment.name.contains(trained));
                        if let Some(gradient) = segment.gradient {
                            assert!(gradient >= end, "gradients do not overlap");
                            end = gradient + segment.range.len();
                        }
                        let next = next.entry(segment.name).or_insert(0);
                        assert_eq!(segment.parameter_range.start, *next);
                        *next = segment.parameter_range.end;
                    }
                    assert!(end <= layouts[0].gradient_cut.shard_numel[rank]);
                }
                assert!(odd().parameters().iter().all(|parameter| next.get(&parameter.name) == Some(&parameter.numel())));
                let trained_numel: usize = odd().parameters().iter().filter(|one| one.name.contains(trained)).map(|one| one.numel()).sum();
                assert!(trained.is_empty() || layouts[0].gradient_cut.full_numel == trained_numel);
            }
        }
    }
}

/// CASES 28: a class that the model lacks is refused, and the classes it has are named.
#[test]
fn an_unknown_wrap_class_is_refused() {
    let settings = FsdpSettings { transformer_layer_cls_to_wrap: Some("GPT2Blok".to_owned()), ..defaults() };
    let error = wrap::unit_paths(tiny_model().modules(), &settings, "GPT2Block").unwrap_err().to_string();
    assert!(error.contains("\"GPT2Blok\"") && error.contains("GPT2Block, LayerNorm"), "{error}");
}

/// CASES 29: a unit trained in part cannot be one flat parameter; with original parameters it can, and what is frozen gets no gradient, nor memory for one.
#[test]
fn frozen_parameters_follow_use_orig_params() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let options = EngineOptions { seed: 0, trainable: Some(regex::Regex::new(r"\.mlp\.|h\.1\.ln_2").unwrap()) };
    let trained = [("h.0.mlp.c_fc.weight", 64 * 256), ("h.0.mlp.c_proj.bias", 64), ("h.1.ln_2.weight", 64)];
    for settings in [
        defaults(),
        FsdpSettings { cpu_offload: true, ..defaults() },
        hybrid(ShardingStrategy::HybridShard, 1),
        version_2(ReshardAfterForward::Flag(true)),
    ] {
        ranks(2, |context| {
            let refused = FsdpSettings { fsdp_version: 1, use_orig_params: false, ..settings.clone() };
            let error = FullyShardedDataParallel::new(context.clone(), tiny_model(), &refused, &options, &weights).err().unwrap();
            assert!(error.to_string().contains("use_orig_params"), "{error}");
            let rank = context.rank;
            let mut whole = engine(context.clone(), tiny_model(), &settings, &weights);
            let mut engine = FullyShardedDataParallel::new(context.clone(), tiny_model(), &settings, &options, &weights)?;
            let batch = batch(&ids, 0, rank * 4..rank * 4 + 4);
            for _ in 0..2 {
                whole.forward_backward(&batch, 1.0, true)?;
                engine.forward_backward(&batch, 1.0, true)?;
            }
            assert!(engine.shards()[0].gradient.is_none(), "nothing of the root is trained");
            assert!(engine.full_gradient("transformer.h.1.attn.c_attn.weight")?.iter().all(|&gradient| gradient == 0.0));
            for (name, numel) in trained {
                let name = format!("transformer.{name}");
                let gradient = engine.full_gradient(&name)?;
                assert_eq!(gradient.len(), numel);
                assert_eq!(gradient, whole.full_gradient(&name)?, "{name}");
            }
            // The MLPs of both blocks, and a norm of the second.
            let mine: usize = engine.shards().iter().filter_map(|shard| shard.gradient.as_ref()).map(Vec::len).sum();
            let all = context.group.all_reduce_numbers(&[mine as f64])?[0] as usize / engine.shards()[0].replicas;
            assert_eq!(all, 2 * (64 * 256 + 256 + 256 * 64 + 64) + 2 * 64);
            let mut optimizer = optimizer(&mut engine);
            let before: Vec<Vec<f32>> = engine.shards().iter().map(|shard| shard.values.clone()).collect();
            optimizer_step(&mut optimizer, &mut engine, 1.0);
            for (shard, before) in engine.shards().iter().zip(&before) {
                for segment in &shard.segments {
                    let moved = shard.values[segment.range.clone()] != before[segment.range.clone()];
                    assert_eq!(moved, segment.gradient.is_some(), "{}", segment.name);
                }
            }
            Ok(())
        });
    }
}

/// Dropout acts in training only, follows the seed, and is the same when a checkpointed block runs again.
#[test]
fn dropout_acts_and_repeats() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let run = |seed: u64, activation_checkpointing: bool| {
        let settings = FsdpSettings { activation_checkpointing, ..defaults() };
        let options = EngineOptions { seed, trainable: None };
        ranks(2, |context| {
            let model = Arc::new(Gpt2::new(tiny(0.1), AttentionKind::Flash));
            let mut engine = FullyShardedDataParallel::new(context, model, &settings, &options, &weights)?;
            let batch = batch(&ids, 0, 0..4);
            let losses = [engine.forward_backward(&batch, 1.0, true)?.sum, engine.forward_backward(&batch, 1.0, true)?.sum];
            assert_ne!(losses[0], losses[1], "every pass draws its own numbers");
            assert_eq!(engine.evaluate(&batch)?, engine.evaluate(&batch)?);
            Ok((losses, engine.full_gradient("transformer.h.0.mlp.c_fc.weight")?))
        })
    };
    let first = run(1, false);
    assert_eq!(first, run(1, false));
    assert_eq!(first, run(1, true));
    assert_ne!(first[0].0, run(2, false)[0].0);
    assert_ne!(first[0].0, first[1].0, "ranks draw different numbers");
}

/// Tokens that do not count are neither learned nor scored, and no sequence predicts across its end.
#[test]
fn only_scored_tokens_count() {
    let batch = Batch { ids: vec![5, 6, 7, 8, 9, 10], scored: Some(vec![true, true, false, true, true, false]), rows: 2, block_size: 3 };
    assert_eq!(batch.targets(), [Some(6), None, None, Some(9), None, None]);
}
