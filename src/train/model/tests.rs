//! Models against transformers: logits and gradients from `tests/gold`, published parameter counts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};

use super::*;
use crate::data::{self, Hub};
use crate::protocol::{Gpt2Config, LlamaConfig, ResolvedModel};
use crate::spec::presets::preset;
use crate::spec::settings::{
    AttnImplementation, AutoWrapPolicy, DType, Dataset, FsdpSettings, Init, MixedPrecision, ModelConfigOverrides, ModelSettings, ShardingStrategy,
    Tokenizer,
};
use crate::train::fsdp::tests::{ranks, tiny_llama};
use crate::train::fsdp::{Batch, EngineOptions, FullyShardedDataParallel, RankOptions, WeightSource, run_ranks};
use crate::train::memory;
use crate::train::weights::{self, RandomWeights, SafetensorsWeights};

fn gold(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gold").join(name)
}

/// A safetensors file of references.
struct Reference(Vec<u8>);

impl Reference {
    fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap())
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().data().as_chunks().0.to_vec()
    }

    fn batch(&self) -> Batch {
        let ids: Vec<u32> = self.words("input_ids").into_iter().map(u32::from_le_bytes).collect();
        Batch { block_size: ids.len() / 2, ids, scored: None, rows: 2 }
    }

    /// The largest difference.
    #[track_caller]
    fn worst(&self, got: &[f32], name: &str) -> f32 {
        let want: Vec<f32> = self.words(name).into_iter().map(f32::from_le_bytes).collect();
        assert_eq!(got.len(), want.len(), "{name}");
        got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
    }
}

fn fsdp() -> FsdpSettings {
    let settings = crate::spec::load("t.toml", "[model]\nid = \"gpt2-tiny\"\n", &Default::default(), &Default::default());
    let mut fsdp = settings.unwrap().rows.get(0).unwrap().settings.fsdp;
    fsdp.auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    fsdp.use_orig_params = true;
    fsdp
}

/// The model in `folder`.
pub(in crate::train) fn resolve(folder: &Path) -> ResolvedModel {
    let settings = ModelSettings {
        id: folder.display().to_string(),
        init: Init::Pretrained,
        revision: None,
        trainable: None,
        attn_implementation: AttnImplementation::Auto,
        config: ModelConfigOverrides::default(),
    };
    data::model::resolve(&settings, 2, &Hub::new("/nowhere", "http://127.0.0.1:1", None, true)).unwrap()
}

/// The furthest that logits and gradients of a model lie from their references.
fn compare(model: &ResolvedModel, kind: AttentionKind, reference: &Reference, world_size: usize, settings: &FsdpSettings) -> (f32, f32) {
    let batch = reference.batch();
    let source = weights::open(model, 0).unwrap();
    ranks(world_size, |context| {
        let model = build(&model.architecture, kind);
        let mut engine = FullyShardedDataParallel::new(context, model.clone(), settings, &EngineOptions::default(), &*source)?;
        let logits = reference.worst(&engine.logits(&batch)?, "logits");
        let evaluated = engine.evaluate(&batch)?;
        assert_eq!(engine.forward_backward(&batch, 1.0, true)?, evaluated);
        let mut gradients = 0.0f32;
        for parameter in model.modules().parameters() {
            gradients = gradients.max(reference.worst(&engine.full_gradient(&parameter.name)?, &format!("grad.{}", parameter.name)));
        }
        Ok((logits, gradients))
    })[0]
}

#[test]
fn logits_and_gradients_of_a_llama_are_transformers() {
    let reference = Reference::open(&gold("tiny-llama-perturbed.golden.safetensors"));
    let model =
        ResolvedModel { architecture: Architecture::Llama(tiny_llama()), weights: Some(gold("tiny-llama-perturbed.safetensors")), fingerprint: None };
    let checkpointed = FsdpSettings { activation_checkpointing: true, ..fsdp() };
    for (kind, world_size, settings) in [
        (AttentionKind::Flash, 1, fsdp()),
        (AttentionKind::Eager, 1, fsdp()),
        (AttentionKind::Flash, 2, fsdp()),
        (AttentionKind::Flash, 2, checkpointed),
    ] {
        let (logits, gradients) = compare(&model, kind, &reference, world_size, &settings);
        assert!(logits < 1e-5 && gradients < 1e-6, "{kind:?}, world {world_size}: logits off by {logits:.2e}, gradients by {gradients:.2e}");
    }
    for (dtype, tolerance) in [(DType::Bf16, 0.15), (DType::Fp16, 0.02)] {
        let settings = FsdpSettings { mixed_precision: MixedPrecision::uniform(dtype), ..fsdp() };
        let (logits, _) = compare(&model, AttentionKind::Flash, &reference, 2, &settings);
        assert!(logits < tolerance, "{dtype:?}: logits off by {logits:.2e}");
    }
}

/// One key-value head, heads wider than the model, biases, tied and untied heads, scaled frequencies, a padding token, other activations, odd widths: read from
/// the folders that transformers wrote.
#[test]
fn models_of_unusual_shapes_are_transformers() {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(gold("shapes")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 5);
    for folder in folders {
        let reference = Reference::open(&folder.join("golden.safetensors"));
        let model = resolve(&folder);
        let size = FsdpSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, min_num_params: 500, use_orig_params: false, ..fsdp() };
        for (kind, world_size, settings) in [
            (AttentionKind::Flash, 1, fsdp()),
            (AttentionKind::Eager, 3, fsdp()),
            (AttentionKind::Flash, 2, size),
            (AttentionKind::Flash, 3, FsdpSettings { fsdp_version: 2, ..fsdp() }),
        ] {
            let (logits, gradients) = compare(&model, kind, &reference, world_size, &settings);
            let name = folder.display();
            assert!(logits < 1e-5 && gradients < 1e-6, "{name}, {kind:?}: logits off by {logits:.2e}, gradients by {gradients:.2e}");
        }
    }
}

/// Counts and shapes as transformers instantiates the published models, tied parameters once.
#[test]
fn presets_have_the_published_numbers_of_parameters() {
    for (id, total, layer) in [
        ("gpt2", 124_439_808, 7_087_872),
        ("gpt2-medium", 354_823_168, 12_596_224),
        ("gpt2-large", 774_030_080, 19_677_440),
        ("gpt2-xl", 1_557_611_200, 30_740_800),
        ("llama-2-7b", 6_738_415_616, 202_383_360),
        ("llama-2-13b", 13_015_864_320, 317_204_480),
        ("llama-2-70b", 68_976_648_192, 855_654_400),
    ] {
        let model = build(&preset(id).unwrap().architecture(0), AttentionKind::Flash);
        let first: usize = model.modules().parameters().iter().filter(|parameter| parameter.name.contains(".0.")).map(ParameterInfo::numel).sum();
        assert_eq!((model.modules().numel(), first), (total, layer), "{id}");
    }
}

/// Three steps of plain gradient descent from random weights: every strategy and layout gives what one rank alone does.
#[test]
fn a_sharded_llama_learns_what_a_whole_one_does() {
    let losses = |world_size: usize, settings: &FsdpSettings| {
        let source = RandomWeights::new(&Architecture::Llama(tiny_llama()), 3);
        ranks(world_size, |context| {
            let rank = context.rank;
            let model: Arc<dyn Model> = build(&Architecture::Llama(tiny_llama()), AttentionKind::Flash);
            let mut engine = FullyShardedDataParallel::new(context, model, settings, &EngineOptions::default(), &source)?;
            let rows = 6 / world_size;
            let ids = (rank * rows * 16..(rank + 1) * rows * 16).map(|index| (index * index % 1021) as u32).collect();
            let batch = Batch { ids, scored: None, rows, block_size: 16 };
            let mut losses = Vec::new();
            for _ in 0..3 {
                let loss = engine.forward_backward(&batch, 1.0, true)?.mean();
                losses.push(engine.group().all_reduce_numbers(&[loss])?[0] / world_size as f64);
                for shard in engine.shards() {
                    let Some(gradient) = &shard.gradient else { continue };
                    shard.values.iter_mut().zip(gradient).for_each(|(value, gradient)| *value -= 0.5 * gradient);
                }
                engine.zero_grad();
            }
            Ok(losses)
        })
        .swap_remove(0)
    };
    let whole = losses(1, &fsdp());
    assert!(whole[2] < whole[0] - 0.1, "{whole:?}");
    let size = FsdpSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, min_num_params: 2000, ..fsdp() };
    for (world_size, settings) in [
        (2, fsdp()),
        (3, FsdpSettings { use_orig_params: false, ..fsdp() }),
        (2, FsdpSettings { sharding_strategy: ShardingStrategy::ShardGradOp, ..size.clone() }),
        (2, FsdpSettings { activation_checkpointing: true, ..size }),
        (2, FsdpSettings { sharding_strategy: ShardingStrategy::NoShard, ..fsdp() }),
    ] {
        let sharded = losses(world_size, &settings);
        assert!(sharded.iter().zip(&whole).all(|(sharded, whole)| (sharded - whole).abs() < 2e-6), "{settings:?}: {sharded:?} against {whole:?}");
    }
}

/// Dropout of grouped-query attention: drawn again alike when a checkpointed block runs again, and in backward whatever attention keeps.
#[test]
fn dropout_of_a_llama_repeats() {
    let run = |attention_dropout: f64, kind: AttentionKind, activation_checkpointing: bool| {
        let architecture = Architecture::Llama(LlamaConfig { attention_dropout, ..tiny_llama() });
        let source = RandomWeights::new(&architecture, 3);
        ranks(1, |context| {
            let settings = FsdpSettings { activation_checkpointing, ..fsdp() };
            let mut engine = FullyShardedDataParallel::new(context, build(&architecture, kind), &settings, &EngineOptions::default(), &source)?;
            let batch = Batch { ids: (0..64).map(|index| index * index % 1021).collect(), scored: None, rows: 2, block_size: 32 };
            let loss = engine.forward_backward(&batch, 1.0, true)?.sum;
            Ok((loss, engine.full_gradient("model.layers.0.self_attn.k_proj.weight")?))
        })
        .swap_remove(0)
    };
    let plain = run(0.3, AttentionKind::Flash, false);
    assert_eq!(plain, run(0.3, AttentionKind::Flash, true));
    assert_ne!(plain.0, run(0.0, AttentionKind::Flash, false).0);
    let eager = run(0.3, AttentionKind::Eager, false);
    assert!((plain.0 - eager.0).abs() < 1e-4 && plain.1.iter().zip(&eager.1).all(|(flash, eager)| (flash - eager).abs() < 1e-6));
}

/// Files of the same model: keys as on the hub, with buffers that are no weights and a tied head that is stored again; an index over several files; half
/// precision, which rounds and does nothing else.
#[test]
fn every_layout_of_files_gives_the_same_weights() {
    let gpt2 = std::fs::read(gold("tiny-gpt2-perturbed.safetensors")).unwrap();
    let llama = std::fs::read(gold("tiny-llama-perturbed.safetensors")).unwrap();
    for (bytes, prefix, embedding) in [(&gpt2, "transformer.", "transformer.wte.weight"), (&llama, "model.", "model.embed_tokens.weight")] {
        let file = SafeTensors::deserialize(bytes).unwrap();
        let world = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = world.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            folder
        };
        let whole = folder("whole");
        std::fs::write(whole.join("model.safetensors"), bytes).unwrap();

        let hub = folder("hub");
        let mask = TensorView::new(Dtype::U8, vec![4], &[1, 0, 1, 1]).unwrap();
        let mut tensors: Vec<_> = file.iter().map(|(name, view)| (name.strip_prefix(prefix).unwrap_or(name).to_owned(), view)).collect();
        tensors.extend([("h.0.attn.bias".to_owned(), mask.clone()), ("h.1.attn.masked_bias".to_owned(), mask)]);
        if !tensors.iter().any(|(name, _)| name == "lm_head.weight") {
            tensors.push(("lm_head.weight".to_owned(), file.tensor(embedding).unwrap()));
        }
        serialize_to_file(tensors, None, &hub.join("model.safetensors")).unwrap();

        let cut = folder("cut");
        let names: Vec<_> = file.names().into_iter().map(ToString::to_string).collect();
        let mut places = std::collections::BTreeMap::new();
        for (part, names) in names.chunks(5).enumerate() {
            let part = format!("model-{part}.safetensors");
            serialize_to_file(names.iter().map(|name| (name, file.tensor(name).unwrap())), None, &cut.join(&part)).unwrap();
            names.iter().for_each(|name| drop(places.insert(name.clone(), part.clone())));
        }
        let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": places});
        std::fs::write(cut.join("model.safetensors.index.json"), index.to_string()).unwrap();

        let halves = folder("halves");
        let half = |view: &TensorView<'_>| {
            let numbers = view.data().as_chunks().0.iter().map(|bytes| half::f16::from_f32(f32::from_le_bytes(*bytes)));
            numbers.flat_map(half::f16::to_le_bytes).collect::<Vec<u8>>()
        };
        let numbers: Vec<_> = file.iter().map(|(name, view)| (name, view.shape().to_vec(), half(&view))).collect();
        let views = numbers.iter().map(|(name, shape, bytes)| (*name, TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap()));
        serialize_to_file(views, None, &halves.join("model.safetensors")).unwrap();

        let [whole, hub, cut, halves] = [whole, hub, cut, halves].map(|folder| SafetensorsWeights::open(&folder).unwrap());
        for (name, view) in file.iter() {
            let read = |weights: &SafetensorsWeights| weights.read(name, view.shape(), 0..view.shape().iter().product()).unwrap();
            let numbers = read(&whole);
            assert_eq!(numbers, read(&hub), "{name}");
            assert_eq!(numbers, read(&cut), "{name}");
            let rounded: Vec<f32> = numbers.iter().map(|&number| half::f16::from_f32(number).to_f32()).collect();
            assert_eq!(rounded, read(&halves), "{name}");
        }
    }
}

/// A folder of larger references, which are not part of this repository.
#[expect(clippy::print_stderr, reason = "says why a test did nothing")]
fn larger_references() -> Option<PathBuf> {
    let folder = std::env::var_os("SWEEP_GOLD").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: SWEEP_GOLD names no folder with models/, golden/, text/ and tokenizer/");
    }
    folder
}

/// Folders as transformers wrote them: whole and in several files, half precision, keys as on the hub, `config.json` of transformers 4 and 5.
#[test]
fn every_folder_of_the_references_gives_their_logits() {
    let Some(gold) = larger_references() else { return };
    let mut checked = 0;
    for entry in std::fs::read_dir(gold.join("models")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap();
        let base = ["-sharded", "-fp16", "-hublayout"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        let reference = Reference::open(&gold.join("golden").join(format!("{base}.safetensors")));
        let model = resolve(&folder);
        let (logits, gradients) = compare(&model, AttentionKind::Flash, &reference, 2, &fsdp());
        if name.ends_with("-fp16") {
            assert!(logits < 0.01, "{name}: logits off by {logits:.2e}");
        } else {
            assert!(logits < 1e-5 && gradients < 1e-6, "{name}: logits off by {logits:.2e}, gradients by {gradients:.2e}");
        }
        if folder.join("config_v4.json").exists() {
            let other = tempfile::tempdir().unwrap();
            std::fs::copy(folder.join("config_v4.json"), other.path().join("config.json")).unwrap();
            std::fs::copy(folder.join("model.safetensors"), other.path().join("model.safetensors")).unwrap();
            assert_eq!(resolve(other.path()).architecture, model.architecture, "{name}");
        }
        checked += 1;
    }
    assert!(checked >= 8, "only {checked} folders");
}

/// Evaluation losses of real text, from the text itself to the perplexity.
#[test]
fn perplexities_of_real_text_are_transformers() {
    let Some(gold) = larger_references() else { return };
    let world = tempfile::tempdir().unwrap();
    let hub = Hub::new("/nowhere", "http://127.0.0.1:1", None, true);
    let text = |name: &str| gold.join("text").join(name).display().to_string();
    let settings = crate::spec::load("t.toml", "[model]\nid = \"gpt2-tiny\"\n", &Default::default(), &Default::default()).unwrap();
    let mut data = settings.rows.get(0).unwrap().settings.data;
    data.dataset = Dataset::Files { train: text("wiki.valid.raw"), eval: Some(text("wiki.test.raw")) };
    data.tokenizer = Some(Tokenizer::Source(gold.join("tokenizer/tiny1024").display().to_string()));
    let model = settings.rows.get(0).unwrap().settings.model;
    let prepared = data::prepare(&data, &model, &hub, &data::Cache::at(world.path())).unwrap().data;
    let all = data::load(&prepared, data::Split::Eval, 64, data.packing).unwrap();
    let references: serde_json::Value = serde_json::from_slice(&std::fs::read(gold.join("golden/eval.json")).unwrap()).unwrap();
    assert_eq!(all.count() as u64, references["blocks_total"].as_u64().unwrap());
    let blocks = data::Blocks::cut((0..references["blocks_used"].as_u64().unwrap()).flat_map(|row| all.row(row as usize).to_vec()).collect(), 64);
    for name in ["tiny-gpt2", "tiny-gpt2-perturbed", "tiny-llama"] {
        let model = resolve(&gold.join("models").join(name));
        let source = weights::open(&model, 0).unwrap();
        let evaluation = ranks(2, |context| {
            let network = build(&model.architecture, AttentionKind::Flash);
            let mut engine = FullyShardedDataParallel::new(context, network, &fsdp(), &EngineOptions::default(), &*source)?;
            match crate::train::eval::evaluate(&mut engine, &blocks, 8, || false)? {
                crate::train::eval::Evaluated::Whole(Some(evaluation)) => Ok(evaluation),
                other => panic!("{other:?}"),
            }
        })
        .swap_remove(0);
        let want = |key: &str| references[name][key].as_f64().unwrap();
        assert!((evaluation.loss.0 - want("loss")).abs() < 1e-6, "{name}: {} against {}", evaluation.loss.0, want("loss"));
        assert!((evaluation.perplexity.0 / want("perplexity") - 1.0).abs() < 1e-6, "{name}: {:?}", evaluation.perplexity);
    }
}

/// A model that writes down how much more its rank holds after its forward pass than before it.
struct Weighed {
    model: Arc<dyn Model>,
    held: std::sync::Mutex<u64>,
}

impl Model for Weighed {
    fn modules(&self) -> &ModuleTree {
        self.model.modules()
    }

    fn block_class(&self) -> &'static str {
        self.model.block_class()
    }

    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        self.model.block(index, hidden, sequences, scope)
    }

    fn forward(&self, ids: &[u32], sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        let held = || memory::current().unwrap().usage().allocated;
        let before = held();
        let logits = self.model.forward(ids, sequences, scope);
        *self.held.lock().unwrap() = held() - before;
        logits
    }
}

/// What a block keeps for backward: its norms' and projections' inputs, queries, keys and values, and the inputs of the activation, but not what the
/// activation makes of them.
#[test]
fn blocks_keep_little_for_backward() {
    let kept = |architecture: &Architecture, settings: &FsdpSettings| {
        let accounts = memory::Accounts::new(1).unwrap();
        let account = accounts.rank(0);
        let source = RandomWeights::new(architecture, 3);
        let body = |context| {
            let model = Arc::new(Weighed { model: build(architecture, AttentionKind::Flash), held: Default::default() });
            let mut engine = FullyShardedDataParallel::new(context, model.clone(), settings, &EngineOptions::default(), &source)?;
            let batch = Batch { ids: (0..4 * 64).collect(), scored: None, rows: 4, block_size: 64 };
            engine.forward_backward(&batch, 1.0, true)?;
            let held = *model.held.lock().unwrap();
            Ok(held)
        };
        run_ranks(&RankOptions::new(1, 1), move |_| account.adopt_thread(), body).unwrap()[0]
    };
    let llama = |num_hidden_layers| Architecture::Llama(LlamaConfig { num_hidden_layers, ..tiny_llama() });
    let gpt2 = |n_layer| Architecture::Gpt2(Gpt2Config { vocab_size: 1024, n_positions: 128, n_embd: 64, n_layer, n_head: 2, ..Gpt2Config::DEFAULT });
    let tokens = 4 * 64;
    for (one, three, numbers) in [
        // Four of the width, queries, the attention's output, keys and values, gate and up.
        (llama(1), llama(3), 4 * 64 + 2 * 64 + 2 * 32 + 2 * 172),
        // Four of the width, queries, keys and values, the attention's output, the MLP's inside.
        (gpt2(1), gpt2(3), 4 * 64 + 3 * 64 + 64 + 4 * 64),
    ] {
        for (dtype, bytes) in [(DType::Fp32, 4), (DType::Bf16, 2)] {
            let settings = FsdpSettings { auto_wrap_policy: AutoWrapPolicy::NoWrap, mixed_precision: MixedPrecision::uniform(dtype), ..fsdp() };
            let two_layers = kept(&three, &settings) - kept(&one, &settings);
            let weights = |architecture: &Architecture| build(architecture, AttentionKind::Flash).modules().numel() as u64;
            // Halves of the weights are made in the forward pass.
            let halves = if dtype == DType::Fp32 { 0 } else { (weights(&three) - weights(&one)) * bytes };
            let want = 2 * tokens * numbers * bytes + halves;
            // Statistics of norms and softmax, and the graph's own tables.
            assert!((want..want + 32 * 1024).contains(&two_layers), "{one:?} in {dtype:?}: {two_layers} bytes, where {want} are expected");
        }
    }
}
