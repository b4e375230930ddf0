//! What is saved is read again by this program, bit for bit, from every way in which a model can be sharded.

use super::*;
use crate::spec::settings::{AutoWrapPolicy, FsdpSettings, ShardingStrategy};
use crate::train::fsdp::{EngineOptions, RankOptions, run_ranks};
use crate::train::model::tests::resolve;
use crate::train::weights;

fn gold(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gold").join(name)
}

fn fsdp(sharding_strategy: ShardingStrategy, auto_wrap_policy: AutoWrapPolicy, use_orig_params: bool) -> FsdpSettings {
    let plan = crate::spec::load("t.toml", "[model]\nid = \"gpt2-tiny\"\n", &Default::default(), &Default::default()).unwrap();
    FsdpSettings { sharding_strategy, auto_wrap_policy, use_orig_params, ..plan.rows.get(0).unwrap().settings.fsdp }
}

/// Shards `model` and saves it.
fn save(
    model: &ResolvedModel,
    settings: &FsdpSettings,
    world_size: usize,
    largest_file: u64,
    tokens: &Path,
    folder: &Path,
) -> Result<(), TrainError> {
    let source = weights::open(model, 5)?;
    run_ranks(
        &RankOptions::new(world_size, 1),
        |_| {},
        |context| {
            let network = model::build(&model.architecture, AttentionKind::Flash);
            let mut engine = FullyShardedDataParallel::new(context, network, settings, &EngineOptions::default(), &*source)?;
            save_in_files_of(largest_file, &mut engine, model, tokens, folder)
        },
    )
    .map(|_| ())
}

#[track_caller]
fn assert_same(first: &ResolvedModel, second: &ResolvedModel) {
    assert_eq!(first.architecture, second.architecture);
    let [one, two] = [first, second].map(|model| weights::open(model, 5).unwrap());
    for ParameterInfo { name, shape, .. } in model::build(&first.architecture, AttentionKind::Flash).modules().parameters() {
        let [one, two] = [&one, &two].map(|weights| weights.read(&name, &shape, 0..shape.iter().product()).unwrap());
        assert!(one.iter().map(|value| value.to_bits()).eq(two.iter().map(|value| value.to_bits())), "{name}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_was_saved_is_read_again() {
    use AutoWrapPolicy::{NoWrap, TransformerBasedWrap};
    use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("trial").join("model");
    for (name, world_size, settings) in [
        ("llama-one-kv-head", 1, fsdp(FullShard, TransformerBasedWrap, true)),
        ("llama-one-kv-head", 3, fsdp(FullShard, TransformerBasedWrap, false)),
        ("llama-linear-rope", 2, fsdp(ShardGradOp, NoWrap, true)),
        ("llama-llama3-rope", 2, fsdp(NoShard, TransformerBasedWrap, true)),
        ("gpt2-relu-inner", 3, fsdp(FullShard, NoWrap, false)),
        ("gpt2-gelu-untied", 2, fsdp(FullShard, TransformerBasedWrap, true)),
        ("llama-one-kv-head", 4, FsdpSettings { hybrid_shard_size: Some(2), ..fsdp(HybridShard, TransformerBasedWrap, true) }),
        ("llama-llama3-rope", 3, FsdpSettings { fsdp_version: 2, ..fsdp(FullShard, TransformerBasedWrap, true) }),
    ] {
        let original = resolve(&gold("shapes").join(name));
        // Over the one before, which is replaced.
        save(&original, &settings, world_size, LARGEST_FILE, Path::new("/nowhere/tokens"), &to).unwrap();
        assert_same(&original, &resolve(&to));
        assert_eq!(names(&to), ["config.json", "model.safetensors"]);
        assert_eq!(names(to.parent().unwrap()), ["model"], "nothing is left lying about");
        let config: Value = serde_json::from_slice(&fs::read(to.join(CONFIG)).unwrap()).unwrap();
        assert_eq!(
            (&config["dtype"], &config["bos_token_id"]),
            (&json!("float32"), &json!(0)),
            "what the original says and training does not is kept"
        );
    }
}

/// Random weights have no `config.json` to begin with; and a model that is too large for one file has an index over several.
#[test]
fn large_models_are_cut_into_files() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    let tokens = folder.path().join("train.tokens");
    fs::write(tokens.with_file_name(TOKENIZER), "{}").unwrap();
    for id in ["llama-tiny", "gpt2-tiny"] {
        let architecture = crate::spec::presets::preset(id).unwrap().architecture(61);
        let random = ResolvedModel { architecture, weights: None, fingerprint: None };
        let settings = fsdp(ShardingStrategy::FullShard, AutoWrapPolicy::NoWrap, true);
        save(&random, &settings, 2, 500_000, &tokens, &to).unwrap();
        assert_same(&random, &resolve(&to));
        let names = names(&to);
        let count = names.len() - 3;
        assert!(count > 3, "{names:?}");
        assert!(names.contains(&format!("model-00002-of-{count:05}.safetensors")) && names.contains(&TOKENIZER.to_owned()), "{names:?}");
    }
}

/// No rank holds more than its shard and a few pieces while the model is saved, although it is one unit.
#[test]
fn saving_takes_no_memory_to_speak_of() {
    let folder = tempfile::tempdir().unwrap();
    let architecture = crate::spec::presets::preset("gpt2-tiny").unwrap().architecture(32_768);
    let random = ResolvedModel { architecture, weights: None, fingerprint: None };
    let source = weights::open(&random, 5).unwrap();
    let settings = fsdp(ShardingStrategy::FullShard, AutoWrapPolicy::NoWrap, true);
    let accounts = memory::Accounts::new(2).unwrap();
    let of_rank = accounts.ranks().to_vec();
    let more = run_ranks(
        &RankOptions::new(2, 1),
        move |rank| of_rank[rank].adopt_thread(),
        |context| {
            let network = model::build(&random.architecture, AttentionKind::Flash);
            let mut engine = FullyShardedDataParallel::new(context, network, &settings, &EngineOptions::default(), &*source)?;
            let account = memory::current().unwrap();
            account.reset_peak();
            let before = account.usage();
            save_model(&mut engine, &random, Path::new("/nowhere/tokens"), &folder.path().join("model"))?;
            let after = account.usage();
            Ok((after.peak - before.allocated, after.host_peak))
        },
    )
    .unwrap();
    let piece = 4 * PIECE as u64;
    assert!(more.iter().all(|&(device, host)| device < 3 * piece && host < 4 * piece), "{more:?}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let to = folder.path().join("file").join("model");
    let model = resolve(&gold("shapes/gpt2-relu-inner"));
    let settings = fsdp(ShardingStrategy::FullShard, AutoWrapPolicy::NoWrap, true);
    let error = save(&model, &settings, 2, LARGEST_FILE, Path::new("/nowhere/tokens"), &to).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot save the model in {}: ", to.display())), "{error}");
}
