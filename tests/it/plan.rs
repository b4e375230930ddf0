//! `sweep plan` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with a sweep file, and nothing of the machine's environment.
struct World(TempDir);

impl World {
    fn with(text: &str) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        fs::write(folder.path().join("night.toml"), text).expect("a sweep file");
        Self(folder)
    }

    fn plan(&self, arguments: &[&str]) -> Output {
        // Without a visible device the outcome is the same on machines with and without GPUs.
        let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
        command.current_dir(&self.0).env_clear().env("CUDA_VISIBLE_DEVICES", "").arg("plan").args(arguments);
        command.output().expect("sweep runs")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Standard output of a plan that succeeds.
fn shown(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

const FILE: &str = r#"
[sweep]
description = "A plan with everything in it"
repeats = 2
[model]
id = "gpt2-tiny"
[device]
world_size = 2
memory = "64MiB"
[search.block_size]
candidates = [64, 128]
[grid]
auto_wrap_policy = ["NO_WRAP", "TRANSFORMER_BASED_WRAP"]
sharding_strategy = ["FULL_SHARD", "SHARD_GRAD_OP"]
[[case]]
label = "half"
mixed_precision = "fp16"
[[exclude]]
auto_wrap_policy = "TRANSFORMER_BASED_WRAP"
sharding_strategy = "FULL_SHARD"
[profile.cpu.train]
max_steps = 3
"#;

#[test]
fn a_plan_shows_rows_by_what_sets_them_apart() {
    insta::assert_snapshot!(shown(&World::with(FILE).plan(&["night.toml"])));
}

#[test]
fn json_holds_every_resolved_value() {
    let output = shown(&World::with(FILE).plan(&["night.toml", "--json", "--set", "train.warmup_steps=2"]));
    let plan: serde_json::Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(plan["profiles"], serde_json::json!(["cpu"]));
    assert_eq!(plan["rows"].as_array().map(Vec::len), Some(4));
    let row = &plan["rows"][1];
    assert_eq!(row["label"], "auto_wrap_policy=NO_WRAP, sharding_strategy=SHARD_GRAD_OP");
    assert_eq!(row["settings"]["fsdp"]["sharding_strategy"], "SHARD_GRAD_OP");
    assert_eq!(row["effective"]["fsdp"]["sharding_strategy"], "FULL_SHARD");
    assert_eq!(row["shares_trials_with"], plan["rows"][0]["label"]);
    assert_eq!(row["settings"]["train"]["warmup_steps"], 2);
    assert_eq!(row["settings"]["device"]["memory"], 64 << 20);
    assert_eq!(row["provisional"], true);
    assert_eq!(plan["rows"][0]["trials"].as_array().map(Vec::len), Some(2 + 2 * 2));
}

#[test]
fn mistakes_end_with_exit_code_2_and_rows_that_cannot_run_are_named() {
    let output = World::with("[model]\nid = \"gpt2-tiny\"\n[train]\nsed = 1\n").plan(&["night.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("night.toml:4:1: unknown key `sed` in [train]"), "{}", text(&output.stderr));

    let output = World::with("[model]\nid = \"gpt2-tiny\"\n[grid]\nblock_size = [64, 2048]\n").plan(&["night.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("refused: block size 2048 exceeds the model's 1024 positions"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("in \"block_size=2048\""), "{}", text(&output.stderr));

    let output = World::with("").plan(&["other.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("other.toml"), "{}", text(&output.stderr));
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The four methods of the tables, on cards and on the CPU.
#[test]
fn the_main_sweep_has_exactly_the_four_methods() {
    let file = repository("sweeps/gpt2_blocksize.toml");
    let output = shown(&World::with("").plan(&[&file.display().to_string(), "--json"]));
    let plan: serde_json::Value = serde_json::from_str(&output).expect("JSON");
    let labels: Vec<&str> = plan["rows"].as_array().expect("rows").iter().filter_map(|row| row["label"].as_str()).collect();
    let third = "FSDP + full_shard + min_num_params = 2K + no-prefetch + no-use_original_params + MPT + fp16";
    let fourth = format!("{third} + Gradient checkpointing");
    assert_eq!(labels, ["FSDP + full_shard", "FSDP + full_shard + transformer_based_wrap", third, &fourth]);
    assert_eq!(plan["profiles"], serde_json::json!(["cpu"]));
    let fsdp = |row: usize, key: &str| plan["rows"][row]["settings"]["fsdp"][key].clone();
    let column = |key: &str| (0..4).map(|row| fsdp(row, key)).collect::<Vec<_>>();
    assert_eq!(column("auto_wrap_policy"), ["NO_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "SIZE_BASED_WRAP"]);
    assert_eq!(column("backward_prefetch"), ["BACKWARD_PRE", "BACKWARD_PRE", "NO_PREFETCH", "NO_PREFETCH"]);
    assert_eq!(column("forward_prefetch"), [true, true, false, false]);
    assert_eq!(column("use_orig_params"), [true, true, false, false]);
    assert_eq!(column("cpu_offload"), [true; 4]);
    assert_eq!(column("cpu_ram_efficient_loading"), [true; 4]);
    assert_eq!(column("activation_checkpointing"), [false, false, false, true]);
    assert_eq!(fsdp(2, "min_num_params"), 2000);
    assert_eq!(fsdp(3, "mixed_precision")["param_dtype"], "fp16");
    assert_eq!(fsdp(0, "mixed_precision")["param_dtype"], "fp32");
}

#[test]
fn the_small_sweep_takes_its_text_from_the_command_line() {
    let file = repository("sweeps/wikitext2_small.toml").display().to_string();
    let dataset = "data.dataset={ train = \"a.txt\", eval = \"b.txt\" }";
    let output = shown(&World::with("").plan(&[&file, "--json", "--set", dataset, "--set", "data.tokenizer=\"t.json\""]));
    let plan: serde_json::Value = serde_json::from_str(&output).expect("JSON");
    let data = &plan["rows"][0]["settings"]["data"];
    assert_eq!(data["dataset"]["files"], serde_json::json!({"train": "a.txt", "eval": "b.txt"}));
    assert_eq!(data["tokenizer"]["source"], "t.json");
}
