//! Profiles and `--set`.

use super::super::settings::*;
use super::*;

const FILE: &str = r#"
[model]
id = "gpt2"
[data]
dataset = "wikitext-2-v1"
tokenizer = "gpt2"
[train]
num_train_epochs = 3
per_device_train_batch_size = 24
[grid]
learning_rate = [1e-5, 2e-5]
[profile.cpu.model]
id = "gpt2-tiny"
[profile.cpu.data]
dataset = { synthetic = { vocab = 64 } }
[profile.cpu.train]
max_steps = 5
[profile.cpu.grid]
learning_rate = [1e-3]
[profile.quick.train]
max_steps = 1
[profile.card.device]
kind = "cpu"
"#;

fn load_profile(profile: Option<&str>, surroundings: Surroundings) -> SweepPlan {
    let overlays = Overlays { profile: profile.map(str::to_owned), sets: Vec::new() };
    load("night.toml", FILE, &overlays, &surroundings).unwrap_or_else(|errors| panic!("{errors}"))
}

const GPU: Surroundings = Surroundings { cuda_device_visible: true, built_with_cuda: true };

#[test]
fn the_cpu_profile_is_applied_by_itself_where_there_is_no_cuda_device() {
    let plan = load_profile(None, Surroundings::default());
    assert_eq!(plan.profiles, ["cpu"]);
    assert_eq!(plan.notices, ["[profile.cpu] is applied by itself: kind = \"auto\" finds no CUDA device to train on."]);
    let row = only_row(&plan);
    assert_eq!(row.settings.train.duration, TrainDuration::MaxSteps(5), "the other key of the pair is gone");
    assert_eq!(row.settings.train.per_device_train_batch_size, 24, "what the profile does not name stays");
    assert_eq!(row.settings.data.tokenizer, None, "another data set takes the tokenizer with it");
    assert_eq!(row.settings.train.learning_rate, 1e-3, "an axis is replaced whole");
    assert_eq!(row.settings.device.kind, DeviceKind::Cpu);

    let plan = load_profile(None, GPU);
    assert_eq!((plan.profiles.len(), plan.rows.len()), (0, 2));
    assert_eq!(plan.rows.get(0).map(|row| row.settings.device.kind), Some(DeviceKind::Cuda));

    let plan = load_profile(Some("card"), Surroundings::default());
    assert_eq!(plan.profiles, ["card"], "kind is not \"auto\"");
    let plan = load_profile(Some("quick"), Surroundings::default());
    assert_eq!(plan.profiles, ["cpu", "quick"]);
    assert_eq!(only_row(&plan).settings.train.duration, TrainDuration::MaxSteps(1));
}

#[test]
fn a_gpu_that_this_build_cannot_use_is_said_so() {
    let seen = Surroundings { cuda_device_visible: true, built_with_cuda: false };
    let plan = load_profile(None, seen);
    assert_eq!(
        plan.notices[0],
        "A CUDA device is there, but this sweep was built without CUDA: everything runs on the CPU. Build it with `cargo build --release --features cuda`."
    );
    let text = format!("{BASE}[device]\nkind = \"cuda\"\n");
    let errors = load("x.toml", &text, &Overlays::default(), &seen).expect_err("kind = \"cuda\" cannot be had");
    assert_eq!(errors.errors[0].message, "this sweep was built without CUDA");
    assert!(errors.errors[0].help[0].contains("cargo build --release --features cuda"), "{errors}");
}

#[test]
fn an_unknown_profile_is_named_with_those_there_are() {
    let overlays = Overlays { profile: Some("qick".to_owned()), sets: Vec::new() };
    let errors = load("night.toml", FILE, &overlays, &GPU).expect_err("there is no such profile");
    assert_eq!(errors.errors[0].message, "there is no [profile.qick] (--profile qick)");
    assert_eq!(errors.errors[0].help, ["did you mean `quick`?", "profiles: `cpu`, `quick`, `card`"]);
}

/// Case 21: a `--set` value is typed by the schema, whether its key is dotted or bare.
#[test]
fn set_is_typed_by_the_schema_and_replaces_an_axis_wherever_it_stands() {
    let grid = format!("{BASE}[grid]\nlearning_rate = [1e-5, 3e-5]\nseed = [1, 2]\n[[case]]\nlabel = \"a\"\nlearning_rate = 1\n");
    let plan = plan_with(&grid, &["learning_rate=2e-5"]);
    assert_eq!(labels(&plan), ["seed=1", "seed=2", "a"]);
    assert!(plan.rows.iter().all(|row| row.settings.train.learning_rate == 2e-5));
    let plan = plan_with(&grid, &["learning_rate=[7, 8, 9]"]);
    assert_eq!(plan.rows.len(), 9);
    assert_eq!(mistakes_with(&grid, &["learning_rate=\"2e-5\""]), ["--set learning_rate=\"2e-5\": train.learning_rate: this is a string"]);
    assert_eq!(mistakes_with(&grid, &["seed=3"]), ["--set seed=3: `seed` is ambiguous"]);
    assert_eq!(mistakes_with(&grid, &["train.sed=3"]), ["--set train.sed=3: unknown key `sed` in [train]"]);
    assert_eq!(mistakes_with(&grid, &["lerning_rate=3"]), ["--set lerning_rate=3: unknown key `lerning_rate`"]);
    assert_eq!(mistakes_with(&grid, &["max_steps"]), ["--set max_steps: no `=`"]);
    assert_eq!(
        mistakes_with(&grid, &["weight_decay=[0.1, 0.2]"]),
        ["--set weight_decay=[0.1, 0.2]: `train.weight_decay` is no axis of this sweep, so it takes one value"]
    );
    let errors = errors_with(&grid, &["sharding_strategy=NO_SHARD"]);
    assert_eq!(errors.errors[0].help, ["text needs quotes that survive the shell: --set 'sharding_strategy=\"NO_SHARD\"'"]);
}

#[test]
fn set_comes_after_profiles_and_in_order() {
    let row = only_row(&plan_with(FILE, &["train.max_steps=7", "num_train_epochs=2"]));
    assert_eq!(row.settings.train.duration, TrainDuration::NumTrainEpochs(2.0));
    let text = "{ train = \"a.txt\", eval = \"b.txt\" }";
    let row = only_row(&plan_with(FILE, &["data.tokenizer=\"t.json\"", &format!("data.dataset={text}")]));
    assert_eq!(row.settings.data.dataset, Dataset::Files { train: "a.txt".to_owned(), eval: Some("b.txt".to_owned()) });
    assert_eq!(row.settings.data.tokenizer, Some(Tokenizer::Source("t.json".to_owned())), "one --set does not take another back");
    let row = only_row(&plan_with(FILE, &["data.dataset.train=\"a.txt\""]));
    assert_eq!(row.settings.data.dataset, Dataset::Files { train: "a.txt".to_owned(), eval: None });
}

#[test]
fn a_block_size_set_turns_the_search_off() {
    let text = format!("{BASE}[search.block_size]\ncandidates = [64, 128]\n");
    let plan = plan_with(&text, &["train.block_size=32"]);
    assert_eq!((plan.search.clone(), only_row(&plan).block_size), (None, Some(32)));
    assert_eq!(mistakes_in(&format!("{text}[train]\nblock_size = 64\n")), ["6:1: `block_size` beside [search.block_size]"]);
    assert_eq!(mistakes_in(&format!("{text}[[case]]\nblock_size = [64]\n")), ["6:1: `block_size` beside [search.block_size]"]);
    let plan = plan_with(BASE, &["search.block_size.candidates=[16, 32]"]);
    assert_eq!(plan.search.map(|search| search.candidates), Some(vec![16, 32]));
}
