//! A small Llama through `sweep run`: sizes from a folder with a `config.json` of transformers 5, random weights, trained in shards, saved, and begun with again.

use std::fs;

use sweep::protocol::TrialResult;
use sweep::store::read_json;

use crate::world::World;

const CONFIG: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 80, "hidden_size": 48, "intermediate_size": 100,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-05,
    "hidden_act": "silu", "tie_word_embeddings": true, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1}"#;

fn sweep(model: &str, init: &str, train: &str) -> String {
    format!(
        r#"
        model = {{ id = "{model}", init = "{init}" }}
        data = {{ dataset = {{ synthetic = {{ vocab = 64, train_tokens = 8192, eval_tokens = 1024 }} }} }}
        fsdp = {{ auto_wrap_policy = "TRANSFORMER_BASED_WRAP", activation_checkpointing = true }}
        device = {{ kind = "cpu", world_size = 2 }}
        checkpoint = {{ save_model = true }}

        [train]
        block_size = 16
        eval_block_size = 16
        per_device_train_batch_size = 4
        {train}
    "#
    )
}

/// The result of the only trial of the newest run of `sweep`, and the folder of its model.
fn result(world: &World, sweep: &str) -> (TrialResult, std::path::PathBuf) {
    let trials = world.path("results").join(sweep).join("latest/trials");
    let trial = fs::read_dir(trials).unwrap().next().unwrap().unwrap().path();
    (read_json(&trial.join("attempt-1/result.json")).unwrap(), trial.join("model"))
}

#[test]
fn a_llama_is_trained_saved_and_begun_with_again() {
    let mut world = World::new("");
    world.program = env!("CARGO_BIN_EXE_sweep").into();
    fs::create_dir(world.path("small")).unwrap();
    fs::write(world.path("small/config.json"), CONFIG).unwrap();
    let run = |name: &str, text: String| {
        fs::write(world.path(&format!("{name}.toml")), text).unwrap();
        let output = world.command(&["run", &format!("{name}.toml")]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        result(&world, name)
    };
    let (trained, model) = run("first", sweep("small", "random", "max_steps = 40\n learning_rate = 1e-2"));
    let perplexity = trained.evaluation.as_ref().unwrap().perplexity.0;
    assert!(perplexity < 55.0, "it has learnt something: {perplexity} of 64 tokens");
    assert_eq!(trained.parameters, 80 * 48 + 2 * (48 * 60 + 2 * 48 * 20 + 60 * 48 + 3 * 48 * 100 + 2 * 48) + 48);
    let config: serde_json::Value = read_json(&model.join("config.json")).unwrap();
    assert_eq!((&config["model_type"], &config["head_dim"]), (&"llama".into(), &10.into()));
    // A step that changes nothing, for a training has one at least.
    let (again, _) = run("second", sweep(&model.display().to_string(), "pretrained", "max_steps = 1\n learning_rate = 0.0"));
    let losses = [&trained, &again].map(|result| result.evaluation.as_ref().unwrap().loss.0);
    assert_eq!(losses[0], losses[1]);
    // Half precision, another strategy.
    let halves = sweep("llama-tiny", "random", "max_steps = 4")
        .replace("activation_checkpointing = true", "mixed_precision = \"bf16\", use_orig_params = false");
    let (halves, _) = run("third", halves);
    assert_eq!(halves.optimizer_steps, 4);
}
