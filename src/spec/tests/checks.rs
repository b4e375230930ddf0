//! Rows held against themselves, the model, the data and the machine.

use super::super::check::{Facts, check};
use super::*;
use crate::protocol::{Architecture, Gpt2Config, PreparedData};

fn problems(text: &str, facts: &Facts) -> Vec<String> {
    check(&base_and(text), facts).into_iter().map(|problem| problem.message).collect()
}

/// What is wrong with a file on a machine about which nothing is known.
fn alone(text: &str) -> Vec<String> {
    problems(text, &Facts::default())
}

const NONE: [&str; 0] = [];

/// Case 28: a class the model lacks is named with the candidates before anything starts.
#[test]
fn a_class_that_the_model_lacks_is_refused_with_the_candidates() {
    let text = "[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\ntransformer_layer_cls_to_wrap = \"GPTBlock\"\n";
    let found = check(&base_and(text), &Facts::default());
    assert_eq!(found[0].message, "the model has no class `GPTBlock` to wrap");
    assert_eq!(found[0].help, "did you mean `GPT2Block`? candidates: `GPT2Block`, `GPT2Attention`, `GPT2MLP`, `Conv1D`, `LayerNorm`, `Embedding`");
    assert_eq!(alone("[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\ntransformer_layer_cls_to_wrap = \"GPT2Block\"\n"), NONE);
    assert_eq!(alone("[fsdp]\ntransformer_layer_cls_to_wrap = \"GPTBlock\"\n"), NONE, "without the policy it plays no part");
}

#[test]
fn models_are_checked_by_their_sizes() {
    assert_eq!(alone("config = { n_embd = 130 }\n"), ["4 heads do not divide a width of 130"]);
    assert_eq!(alone("[train]\nblock_size = 2048\n"), ["block size 2048 exceeds the model's 1024 positions"]);
    assert_eq!(alone("[train]\nblock_size = 64\neval_block_size = 2048\n"), ["eval_block_size 2048 exceeds the model's 1024 positions"]);
    assert_eq!(alone("config = { vocab_size = 1000 }\n"), ["the data's vocabulary of 1024 does not fit the model's 1000"]);
    assert_eq!(alone("init = \"pretrained\"\n"), ["gpt2-tiny has no pretrained weights"]);
    let changed = plan("[model]\nid = \"gpt2\"\ninit = \"pretrained\"\nconfig = { n_layer = 2 }\n");
    assert_eq!(check(&changed, &Facts::default())[0].message, "model.config changes the model, so its pretrained weights do not fit");
}

#[test]
fn a_llama_is_checked_by_its_own_keys() {
    let llama = |text: &str| {
        let plan = plan(&format!("[model]\nid = \"llama-tiny\"\n{text}"));
        check(&plan, &Facts::default()).into_iter().map(|problem| problem.message).collect::<Vec<_>>()
    };
    assert_eq!(llama(""), NONE);
    assert_eq!(llama("config = { hidden_size = 130 }\n"), ["4 heads do not divide a width of 130"]);
    assert_eq!(llama("config = { num_key_value_heads = 3 }\n"), ["3 key-value heads do not divide 4 heads"]);
    assert_eq!(
        llama("config = { max_position_embeddings = 64 }\n[train]\nblock_size = 128\neval_block_size = 64\n"),
        ["block size 128 exceeds the model's 64 positions"]
    );
    assert_eq!(llama("config = { n_layer = 2 }\n"), ["model.config: n_layer is a key of GPT-2, the model is a Llama: say num_hidden_layers"]);
    let wrapped = "[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\ntransformer_layer_cls_to_wrap = ";
    assert_eq!(llama(&format!("{wrapped}\"LlamaDecoderLayer\"\n")), NONE);
    assert_eq!(llama(&format!("{wrapped}\"GPT2Block\"\n")), ["the model has no class `GPT2Block` to wrap"]);
}

/// Case 36, as far as the file alone decides: candidates above the positions are limited by the model, no mistake.
#[test]
fn candidates_above_the_models_positions_are_no_mistake() {
    assert_eq!(alone("[search.block_size]\ncandidates = [64, 4096]\n"), NONE);
}

#[test]
fn rows_with_the_same_problem_are_named_together() {
    let plan = base_and("[grid]\nseed = [1, 2]\nblock_size = [64, 2048]\n");
    let found = check(&plan, &Facts::default());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].rows, [1, 3]);
}

#[test]
fn data_shorter_than_one_global_batch_is_refused() {
    let text = "[data]\ndataset = { synthetic = { train_tokens = 4000 } }\n[device]\nworld_size = 2\n";
    let expected = "the training data of 4,000 tokens makes 31 blocks of 128, fewer than one global batch of 32";
    assert_eq!(alone(&format!("{text}[train]\nblock_size = 128\ngradient_accumulation_steps = 2\n")), [expected]);
    assert_eq!(alone(&format!("{text}[search.block_size]\ncandidates = [64, 1024]\n")), NONE, "a search is limited by the data");
}

#[test]
fn what_was_found_out_about_model_and_data_is_used() {
    let text = "[model]\nid = \"some/model\"\n[data]\ndataset = { train = \"a.txt\" }\n[train]\nblock_size = 256\n";
    let plan = plan(text);
    assert_eq!(check(&plan, &Facts::default()), []);
    let settings = only_row(&plan).settings;
    let architecture = Architecture::Gpt2(Gpt2Config { vocab_size: 500, n_positions: 128, n_embd: 65, n_layer: 2, n_head: 2, ..Gpt2Config::DEFAULT });
    let data = PreparedData {
        train: "a".into(),
        eval: None,
        fingerprint: String::new(),
        vocab_size: 1000,
        train_tokens: 100,
        eval_tokens: 0,
        floor_perplexity: None,
        description: String::new(),
    };
    let facts = Facts { models: vec![(settings.model.clone(), architecture)], data: vec![(settings.model, settings.data, data)], ..Facts::default() };
    let found: Vec<String> = check(&plan, &facts).into_iter().map(|problem| problem.message).collect();
    assert_eq!(
        found,
        [
            "2 heads do not divide a width of 65",
            "block size 256 exceeds the model's 128 positions",
            "the data's vocabulary of 1000 does not fit the model's 500",
            "the training data of 100 tokens makes 0 blocks of 256, fewer than one global batch of 8",
        ]
    );
}

#[test]
fn ranks_must_fit_the_machine() {
    let facts = Facts { host_memory_bytes: Some(8 << 30), cuda_devices: Some(2), cuda_bf16: Some(false), ..Facts::default() };
    let budget = "[device]\nworld_size = 3\nmemory = \"4GiB\"\n";
    assert_eq!(problems(budget, &facts), ["3 ranks of 4.00 GiB need 12.00 GiB, the host has 8.00 GiB"]);
    assert_eq!(problems("[device]\nworld_size = 2\nmemory = \"4GiB\"\n", &facts), NONE);
    let gpu = Surroundings { cuda_device_visible: true, built_with_cuda: true };
    let text = format!("{BASE}[fsdp]\nmixed_precision = \"bf16\"\n{budget}");
    let plan = load("x.toml", &text, &Overlays::default(), &gpu).unwrap_or_else(|errors| panic!("{errors}"));
    let found: Vec<String> = check(&plan, &facts).into_iter().map(|problem| problem.message).collect();
    assert_eq!(found, ["3 ranks need as many CUDA devices, there are 2", "these CUDA devices do not compute in bf16"]);
}

/// Case 29, and the other combinations that PyTorch refuses or silently gets wrong.
#[test]
fn what_pytorch_gets_wrong_is_refused() {
    let text = "[train]\ngradient_accumulation_steps = 2\n[fsdp]\ncpu_offload = true\n";
    assert_eq!(
        alone(text),
        ["cpu_offload with gradient_accumulation_steps above 1 and sync_each_batch = false: PyTorch accumulates unreduced gradients wrongly there"]
    );
    assert_eq!(alone(&text.replace("= 2", "= 2\nsync_each_batch = true")), NONE);
    let mut row = only_row(&base_and("[fsdp]\nuse_orig_params = false\n"));
    row.settings.model.trainable = Some("h.0".to_owned());
    let plan = SweepPlan { rows: vec![row].into(), ..plan(BASE) };
    let found = check(&plan, &Facts::default());
    assert!(found[0].message.starts_with("frozen parameters with use_orig_params = false"), "{found:?}");
}
