//! Sweep files as users write them, right and wrong.

use super::settings::*;
use super::*;

fn load_with(text: &str, sets: &[&str]) -> Result<SweepPlan, SpecErrors> {
    let overlays = Overlays { profile: None, sets: sets.iter().map(|set| (*set).to_owned()).collect() };
    load("night.toml", text, &overlays, &Surroundings::default())
}

fn plan(text: &str) -> SweepPlan {
    load_with(text, &[]).unwrap_or_else(|errors| panic!("{errors}"))
}

fn mistakes_of(text: &str) -> String {
    load_with(text, &[]).map(|plan| panic!("accepted: {} rows", plan.rows.len())).unwrap_or_else(|errors| errors.to_string())
}

fn labels(plan: &SweepPlan) -> Vec<String> {
    plan.rows.iter().map(|row| row.label).collect()
}

const BASE: &str = "model.id = \"gpt2-tiny\"\n";

#[test]
fn a_file_without_grid_and_cases_is_one_configuration_with_every_default() {
    let plan = plan(BASE);
    assert_eq!(labels(&plan), ["night"]);
    let row = plan.rows.get(0).expect("one row");
    assert_eq!(row.block_size, Some(1024));
    assert_eq!(row.settings.train.seed, 42);
    assert_eq!(row.settings.train.duration, TrainDuration::NumTrainEpochs(3.0));
    assert_eq!(row.settings.model.init, Init::Random);
    assert_eq!(row.settings.fsdp.sharding_strategy, ShardingStrategy::FullShard);
    assert_eq!(row.settings.data.dataset, Dataset::Synthetic { vocab: 1024, train_tokens: 262_144, eval_tokens: 16_384 });
}

#[test]
fn several_mistakes_are_shown_at_once() {
    let text = "model.id = \"gpt2-tiny\"\n[train]\nlearning_rat = 3\nlearning_rate = \"2e-5\"\n";
    let shown = mistakes_of(text);
    assert!(shown.starts_with("night.toml has 2 mistakes\n\nnight.toml:3:1: unknown key `learning_rat` in [train]"), "{shown}");
    assert!(shown.contains("night.toml:4:17: train.learning_rate: this is a string"), "{shown}");
}
