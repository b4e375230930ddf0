//! Checkpoints across worlds, strategies and layouts, and every way to damage one.

use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::protocol::{Architecture, Gpt2Config};
use crate::spec::settings::{FsdpSettings, TrainSettings};
use crate::train::fsdp::{Batch, EngineOptions, LossSum, RankContext, RankOptions, WeightSource, run_ranks};
use crate::train::memory::Accounts;
use crate::train::model::Model;
use crate::train::model::gpt2::Gpt2;
use crate::train::model::ops::AttentionKind;
use crate::train::optim::{FlatShard, Run};
use crate::train::weights::RandomWeights;

/// FSDP's settings, `changes` laid over them.
fn settings(changes: &serde_json::Value) -> FsdpSettings {
    let mut settings = json!({
        "fsdp_version": 1, "sharding_strategy": "FULL_SHARD", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 500,
        "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": false, "limit_all_gathers": true, "use_orig_params": true, "cpu_offload": false,
        "activation_checkpointing": false, "sync_module_states": true, "cpu_ram_efficient_loading": true, "state_dict_type": "FULL_STATE_DICT",
        "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}, "initial_loss_scale": 65536.0
    });
    for (key, value) in changes.as_object().unwrap() {
        settings[key] = value.clone();
    }
    serde_json::from_value(settings).unwrap()
}

fn train_settings() -> TrainSettings {
    serde_json::from_value(json!({
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 1, "sync_each_batch": false,
        "duration": {"max_steps": 4}, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
        "decay_norm_and_bias": false, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "eval_block_size": 8,
        "seed": 42
    }))
    .unwrap()
}

/// A GPT-2 whose sizes divide by little.
fn sizes() -> Gpt2Config {
    Gpt2Config { vocab_size: 37, n_positions: 16, n_embd: 15, n_layer: 2, n_head: 3, ..Gpt2Config::DEFAULT }
}

fn model() -> Arc<dyn Model> {
    Arc::new(Gpt2::new(sizes(), AttentionKind::Flash))
}

fn batch(rank: usize) -> Batch {
    Batch { ids: (0..32).map(|index| (index * 7 + rank as u32 * 5) % 37).collect(), scored: None, rows: 4, block_size: 8 }
}

fn state() -> TrainingState {
    TrainingState {
        optimizer: crate::train::optim::AdamWState { step: 2 },
        lr_scheduler: SchedulerState { last_epoch: 2 },
        scaler: None,
        rng: crate::train::fsdp::RngState { seed: 1, passes: 2 },
        data: DataPosition { epoch: 0, blocks: 16 },
        progress: Progress { steps: vec![(0.1, 8), (0.3, 8)], ..Progress::default() },
    }
}

fn checkpoints(folder: &Path, state_dict_type: &str) -> Checkpoints {
    Checkpoints {
        trial: TrialId("trial".to_owned()),
        folder: folder.to_owned(),
        save_steps: Some(1),
        save_total_limit: None,
        state_dict_type: serde_json::from_value(json!(state_dict_type)).unwrap(),
    }
}

/// A rank's engine and optimiser.
struct Rank {
    engine: FullyShardedDataParallel,
    optimizer: AdamW,
}

impl Rank {
    fn new(context: RankContext, settings: &FsdpSettings, options: &EngineOptions, weights: &dyn WeightSource) -> Self {
        let mut engine = FullyShardedDataParallel::new(context, model(), settings, options, weights).unwrap();
        let runs = |shard: &crate::train::fsdp::Shard| {
            let trained = shard.segments.iter().filter_map(|segment| Some((segment, segment.gradient?)));
            crate::train::optim::runs(trained.map(|(segment, gradient)| Run { range: segment.range.clone(), gradient, decays: true }))
        };
        let layouts: Vec<_> = engine.shards().iter().map(|shard| (runs(shard), shard.offloaded)).collect();
        Self { optimizer: AdamW::new(&train_settings(), layouts), engine }
    }

    fn step(&mut self, rank: usize) {
        self.engine.forward_backward(&batch(rank), 1.0, true).unwrap();
        let mut shards: Vec<_> =
            self.engine.shards().iter_mut().map(|shard| FlatShard { values: &mut shard.values, gradient: shard.gradient.as_deref() }).collect();
        self.optimizer.step(&mut shards, 1e-3, 1.0, 1.0);
        self.engine.zero_grad();
    }

    fn save(&mut self, checkpoints: &Checkpoints) -> PathBuf {
        checkpoints.save(&mut self.engine, &self.optimizer, &model().modules().parameters(), 2, state()).unwrap()
    }
}

/// Two checkpoints of the same training, one of each kind, in `full` and `sharded`; and the loss of an evaluation.
fn trained(folder: &Path, world_size: usize, settings: &FsdpSettings, options: &EngineOptions) -> LossSum {
    let weights = RandomWeights::new(&Architecture::Gpt2(sizes()), 3);
    let losses = run_ranks(
        &RankOptions::new(world_size, 1),
        |_| {},
        |context| {
            let number = context.rank;
            let mut rank = Rank::new(context, settings, options, &weights);
            (0..2).for_each(|_| rank.step(number));
            rank.save(&checkpoints(&folder.join("full"), "FULL_STATE_DICT"));
            rank.save(&checkpoints(&folder.join("sharded"), "SHARDED_STATE_DICT"));
            rank.engine.evaluate(&batch(0))
        },
    );
    losses.unwrap()[0]
}

/// CASES 32: saved at world size 2, or 3 or 4, loaded at 1, 2, 3, 4 and 7 under other strategies, versions, policies and layouts: the same evaluation loss, and
/// saved again the same bytes, moments included.
#[test]
fn any_world_reads_what_any_other_wrote() {
    let trainable = |pattern: &str| EngineOptions { seed: 1, trainable: Some(regex::Regex::new(pattern).unwrap()) };
    // World size, settings, which parameters are trained, and how many ranks write.
    let writers = [
        (2, json!({}), EngineOptions::default(), 2),
        // Replicas write nothing.
        (2, json!({"sharding_strategy": "NO_SHARD"}), EngineOptions::default(), 1),
        (4, json!({"sharding_strategy": "HYBRID_SHARD", "hybrid_shard_size": 2}), EngineOptions::default(), 2),
        (
            2,
            json!({"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": "SIZE_BASED_WRAP", "use_orig_params": false}),
            EngineOptions::default(),
            2,
        ),
        // Sizes that three ranks cannot share evenly.
        (3, json!({"fsdp_version": 2, "reshard_after_forward": true}), EngineOptions::default(), 3),
        // Frozen parameters have no moments.
        (2, json!({}), trainable("mlp"), 2),
    ];
    let readers = [
        (1, json!({})),
        (2, json!({"sharding_strategy": "NO_SHARD"})),
        (3, json!({"auto_wrap_policy": "NO_WRAP"})),
        (4, json!({"auto_wrap_policy": "SIZE_BASED_WRAP"})),
        (4, json!({"sharding_strategy": "HYBRID_SHARD_ZERO2", "hybrid_shard_size": 2})),
        (4, json!({"fsdp_version": 2, "reshard_after_forward": false})),
        (7, json!({"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": true})),
    ];
    for (world_size, writer, options, writing) in &writers {
        let folder = TempDir::new().unwrap();
        let loss = trained(folder.path(), *world_size, &settings(writer), options);
        let full = |name: &str| std::fs::read(folder.path().join(name).join("step-2/full.safetensors")).unwrap();
        let parameters = model().modules().parameters();
        for kind in ["full", "sharded"] {
            let checkpoint = Checkpoint::open(&folder.path().join(kind).join("step-2"), &TrialId("trial".to_owned()), &parameters).unwrap();
            assert_eq!((checkpoint.step(), checkpoint.state()), (2, &state()));
            for (number, (world_size, reader)) in readers.iter().enumerate() {
                let again = format!("again-{kind}-{number}");
                let losses = run_ranks(
                    &RankOptions::new(*world_size, 1),
                    |_| {},
                    |context| {
                        let mut rank = Rank::new(context, &settings(reader), options, &checkpoint);
                        checkpoint.load_moments(rank.engine.shards(), &mut rank.optimizer)?;
                        rank.save(&checkpoints(&folder.path().join(&again), "FULL_STATE_DICT"));
                        rank.engine.evaluate(&batch(0))
                    },
                );
                for found in losses.unwrap() {
                    assert_eq!(found, loss, "{writer} {kind}, read by {world_size} {reader}");
                }
                assert!(full(&again) == full("full"), "{writer} {kind}, read by {world_size} {reader}: other bytes");
            }
        }
        let files = |name: &str| std::fs::read_dir(folder.path().join(name).join("step-2")).unwrap().count();
        assert_eq!((files("full"), files("sharded")), (2, writing + 1), "{writer}: nothing is written twice");
    }
}

/// Rank 0 writes a full state dict without ever holding more than the largest parameter of it, none of it on the device.
#[test]
fn a_full_state_dict_is_streamed() {
    let folder = TempDir::new().unwrap();
    let sizes = Gpt2Config { vocab_size: 1024, n_embd: 64, n_head: 2, n_layer: 8, ..sizes() };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(sizes.clone(), AttentionKind::Flash));
    let parameters = model.modules().parameters();
    let (largest, all) = (parameters.iter().map(|parameter| parameter.numel() * 4).max().unwrap() as u64, model.modules().numel() as u64 * 4);
    let accounts = Accounts::new(2).unwrap();
    let of_rank = accounts.ranks().to_vec();
    let adopt = {
        let of_rank = of_rank.clone();
        move |rank: usize| of_rank[rank].adopt_thread()
    };
    run_ranks(&RankOptions::new(2, 1), adopt, |context| {
        let account = of_rank[context.rank];
        let mut engine = FullyShardedDataParallel::new(
            context,
            model.clone(),
            &settings(&json!({})),
            &EngineOptions::default(),
            &RandomWeights::new(&Architecture::Gpt2(sizes.clone()), 3),
        )?;
        let optimizer = AdamW::new(&train_settings(), engine.shards().iter().map(|_| (Vec::new(), false)));
        account.reset_peak();
        let before = account.usage();
        crate::train::memory::host(|| {
            checkpoints(folder.path(), "FULL_STATE_DICT").save(&mut engine, &optimizer, &parameters, 2, state())?;
            Ok::<_, TrainError>(())
        })?;
        let usage = account.usage();
        assert_eq!(usage.peak, before.allocated, "nothing on the device");
        let held = usage.host_peak - before.host;
        assert!(held < 4 * largest && held < all / 2, "{held} bytes, the largest parameter has {largest}, all {all}");
        Ok(())
    })
    .unwrap();
}

/// Why the checkpoint in `folder` is refused.
#[track_caller]
fn refusal(folder: &Path) -> String {
    Checkpoint::open(folder, &TrialId("trial".to_owned()), &model().modules().parameters()).unwrap_err().to_string()
}

/// CASES 32: whichever byte of whichever file changes or is missing, the checkpoint is refused and the file is named.
#[test]
fn damage_of_any_byte_is_found() {
    let folder = TempDir::new().unwrap();
    trained(folder.path(), 2, &settings(&json!({})), &EngineOptions::default());
    for kind in ["full", "sharded"] {
        let checkpoint = folder.path().join(kind).join("step-2");
        for entry in std::fs::read_dir(&checkpoint).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let contents = std::fs::read(&path).unwrap();
            let check = |damaged: &[u8], how: &str| {
                std::fs::write(&path, damaged).unwrap();
                let refusal = refusal(&checkpoint);
                assert!(refusal.contains(&format!("step-2 cannot be used: {name} is ")), "{how}: {refusal}");
            };
            // All of the header, and bytes of the data here and there.
            let places = (0..contents.len().min(200)).chain((200..contents.len()).step_by(997)).chain([contents.len() - 1]);
            for place in places {
                let mut damaged = contents.clone();
                damaged[place] ^= 1 << (place % 8);
                check(&damaged, &format!("byte {place}"));
            }
            for length in [0, 1, contents.len() / 2, contents.len() - 1] {
                check(&contents[..length], &format!("cut at {length}"));
            }
            check(&[&contents[..], b" "].concat(), "one byte more");
            std::fs::remove_file(&path).unwrap();
            assert!(refusal(&checkpoint).contains(&format!("{name} is missing")));
            std::fs::write(&path, &contents).unwrap();
        }
        assert!(Checkpoint::open(&checkpoint, &TrialId("trial".to_owned()), &model().modules().parameters()).is_ok());
    }
}

/// An index that is whole and promises something else.
#[test]
fn what_does_not_fit_is_refused() {
    let folder = TempDir::new().unwrap();
    trained(folder.path(), 2, &settings(&json!({})), &EngineOptions::default());
    let checkpoint = folder.path().join("sharded/step-2");
    let index = Index::read(&checkpoint).unwrap();
    type Change = fn(&mut Index);
    let cases: [(Change, &str); 9] = [
        (|index| index.trial = TrialId("other".to_owned()), "it belongs to trial other, not to trial"),
        (|index| index.format_version = 9, "it has format 9, this sweep reads format 1"),
        (|index| index.step = 3, "it holds step 3, which is not what its name says"),
        (|index| index.state.progress.steps.clear(), "it holds step 2 and tells of 0 steps"),
        (|index| drop(index.parameters.remove("transformer.ln_f.bias")), "the parameter transformer.ln_f.bias is missing"),
        (|index| drop(index.parameters.insert("transformer.ln_f.bias".into(), vec![3, 5])), "has shape [3, 5], the model needs [15]"),
        (|index| drop(index.parameters.insert("lora".into(), vec![1])), "it holds the parameter lora, which the model lacks"),
        (|index| drop(index.files.pop()), "are missing or there twice"),
        (|index| index.files[0].name = "../sharded/step-2/rank-0.safetensors".to_owned(), "which is not in the folder"),
    ];
    for (change, expected) in cases {
        let mut changed = index.clone();
        change(&mut changed);
        changed.write(&checkpoint).unwrap();
        let refusal = refusal(&checkpoint);
        assert!(refusal.contains(expected), "{expected}: {refusal}");
    }
    let twice = Index { files: [&index.files[..], &index.files[..1]].concat(), ..index.clone() };
    twice.write(&checkpoint).unwrap();
    assert!(refusal(&checkpoint).contains("are missing or there twice"));
    index.write(&checkpoint).unwrap();
    assert_eq!(Index::read(&checkpoint), Ok(index));
}

/// The newest that can be used is taken, the others are named; where none can, that is an error.
#[test]
fn the_newest_complete_checkpoint_is_taken() {
    let folder = TempDir::new().unwrap();
    trained(folder.path(), 2, &settings(&json!({})), &EngineOptions::default());
    let (ours, parameters) = (checkpoints(&folder.path().join("full"), "FULL_STATE_DICT"), model().modules().parameters());
    for name in ["step-10", "step-9", "step-011", "step-x", ".partial-step-30"] {
        std::fs::create_dir(ours.folder.join(name)).unwrap();
    }
    assert_eq!(ours.steps().unwrap(), [2, 9, 10]);
    let (checkpoint, warnings) = ours.newest(&parameters).unwrap().unwrap();
    assert_eq!((checkpoint.step(), warnings.len()), (2, 2));
    assert!(warnings[0].contains("step-10 cannot be used: index.json is missing"), "{warnings:?}");
    std::fs::remove_dir_all(ours.folder.join("step-2")).unwrap();
    let error = ours.newest(&parameters).unwrap_err().to_string();
    assert!(error.contains("step-10 cannot be used") && error.contains("none of the 1 older ones can"), "{error}");
    assert!(checkpoints(&folder.path().join("nowhere"), "FULL_STATE_DICT").newest(&parameters).unwrap().is_none());
}

#[test]
fn tensors_are_named_by_what_they_hold() {
    for (kind, elements) in [(Kind::Model, None), (Kind::ExpAvg, Some(0..7)), (Kind::ExpAvgSq, Some(12..13))] {
        let name = kind.tensor_name("h.0.weight", elements.as_ref());
        assert_eq!(Kind::parse(&name), Some((kind, "h.0.weight", elements)), "{name}");
    }
    for name in ["h.0.weight", "step/h", "model/h[3..3]", "model/h[3..x]", "model/h[..]"] {
        assert_eq!(Kind::parse(name), None, "{name}");
    }
}

#[test]
fn paths_are_seen_from_the_request() {
    let resolved = |of_request: &str, folder: &str| resolve(Path::new(of_request), Path::new(folder));
    assert_eq!(resolved("results/trials/t/attempt-2", "../checkpoints"), Path::new("results/trials/t/checkpoints"));
    assert_eq!(resolved("attempt-2", "../checkpoints"), Path::new("checkpoints"));
    assert_eq!(resolved("", "../checkpoints"), Path::new("../checkpoints"));
    assert_eq!(resolved("a/b", "/c/d"), Path::new("/c/d"));
    assert_eq!(resolved("a/b", "c"), Path::new("a/b/c"));
}
