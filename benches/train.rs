//! Speed and memory of sharded training on two ranks with one thread each, at two GPT-2 shapes, each strategy, in f32 and bf16: `cargo bench --bench train`.
//!
//! With `SWEEP_TORCH_PYTHON` (a Python with torch and transformers) and `SWEEP_TORCH_BENCH` (a script that trains the same shapes with PyTorch FSDP over gloo
//! and prints one JSON line) it alternates the two and prints ratios. `SWEEP_BENCH_ROUNDS` is how often, 3 by default; `SWEEP_BENCH_ONLY` names what is run, as
//! in `gpt2-124m FULL_SHARD fp32`, by words that all must occur. It asserts nothing.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use sweep::format;
use sweep::protocol::{Architecture, Gpt2Config, Message, MessageKind, PROTOCOL, PreparedData, ResolvedModel, TrialRequest, TrialResult};
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::{AttemptFolder, read_json, read_json_lines, write_json};
use sweep::trial::{Purpose, TrialId};

const WORLD_SIZE: usize = 2;
const WARMUP_STEPS: usize = 5;
const STEPS: usize = 20;

/// A model and a batch.
struct Shape {
    name: &'static str,
    n_layer: usize,
    n_embd: usize,
    n_head: usize,
    vocab_size: usize,
    n_positions: usize,
    block_size: usize,
    batch_size: usize,
}

const SHAPES: [Shape; 2] = [
    Shape { name: "small", n_layer: 4, n_embd: 256, n_head: 4, vocab_size: 8192, n_positions: 128, block_size: 128, batch_size: 8 },
    Shape { name: "gpt2-124m", n_layer: 12, n_embd: 768, n_head: 12, vocab_size: 50257, n_positions: 1024, block_size: 64, batch_size: 2 },
];

/// What is sharded how: the script's name of it, and our settings.
const STRATEGIES: [(&str, &str); 5] = [
    ("FULL_SHARD", "sharding_strategy = \"FULL_SHARD\""),
    ("SHARD_GRAD_OP", "sharding_strategy = \"SHARD_GRAD_OP\""),
    ("NO_SHARD", "sharding_strategy = \"NO_SHARD\""),
    ("FSDP2", "fsdp_version = 2, reshard_after_forward = true"),
    ("FSDP2_NORESHARD", "fsdp_version = 2, reshard_after_forward = false"),
];

/// A line of the table.
#[derive(Clone, Copy)]
struct Method {
    shape: &'static Shape,
    /// The script's name of the strategy.
    mode: &'static str,
    settings: &'static str,
    bf16: bool,
}

impl Method {
    fn name(self) -> String {
        format!("{} {} {}", self.shape.name, self.mode, if self.bf16 { "bf16" } else { "fp32" })
    }
}

/// What one run took.
#[derive(Clone, Copy)]
struct Measured {
    tokens_per_second: f64,
    /// CPU seconds of the whole process tree, start included.
    cpu_seconds: f64,
    /// Highest over ranks; of PyTorch what its process has taken since it imported its libraries.
    peak_bytes: Option<u64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::var("SWEEP_BENCH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3_usize);
    let only = std::env::var("SWEEP_BENCH_ONLY").unwrap_or_default();
    let torch = std::env::var_os("SWEEP_TORCH_PYTHON").zip(std::env::var_os("SWEEP_TORCH_BENCH"));
    println!("{WORLD_SIZE} ranks x 1 thread, a unit per transformer block; median of {STEPS} steps after {WARMUP_STEPS}, median of {rounds} rounds");
    for shape in &SHAPES {
        for bf16 in [false, true] {
            for (mode, settings) in STRATEGIES {
                let method = Method { shape, mode, settings, bf16 };
                let name = method.name();
                if !only.split_whitespace().all(|word| name.split(' ').any(|part| part == word)) {
                    continue;
                }
                let (mut ours, mut theirs) = (Vec::new(), Vec::new());
                for _ in 0..rounds {
                    ours.push(sweep(method)?);
                    if let Some((python, script)) = &torch {
                        theirs.push(pytorch(method, python, script)?);
                    }
                }
                let ours = middle(&ours);
                println!("{name:<30} sweep    {}", line(ours));
                if !theirs.is_empty() {
                    let theirs = middle(&theirs);
                    println!("{name:<30} PyTorch  {}", line(theirs));
                    let memory = ours.peak_bytes.zip(theirs.peak_bytes).map_or(f64::NAN, |(ours, theirs)| ours as f64 / theirs as f64);
                    let speed = ours.tokens_per_second / theirs.tokens_per_second;
                    println!("{name:<30} ratio    {speed:>9.2} tokens/s  {:>7.2} CPU s  {memory:>6.2} peak", ours.cpu_seconds / theirs.cpu_seconds);
                }
            }
        }
    }
    Ok(())
}

/// The median of each measure.
fn middle(runs: &[Measured]) -> Measured {
    let of = |measure: &dyn Fn(&Measured) -> f64| median(runs.iter().map(measure).collect());
    Measured {
        tokens_per_second: of(&|run| run.tokens_per_second),
        cpu_seconds: of(&|run| run.cpu_seconds),
        peak_bytes: runs[0].peak_bytes.map(|_| of(&|run| run.peak_bytes.unwrap_or_default() as f64) as u64),
    }
}

fn line(measured: Measured) -> String {
    let peak = measured.peak_bytes.map_or(String::new(), |bytes| format!("  peak per rank {}", format::bytes(bytes)));
    format!("{:>9.0} tokens/s  {:>7.1} CPU s{peak}", measured.tokens_per_second, measured.cpu_seconds)
}

/// Trains with `sweep trial`.
fn sweep(method: Method) -> Result<Measured, Box<dyn Error>> {
    let shape = method.shape;
    let mixed_precision = if method.bf16 { "bf16" } else { "no" };
    let folder = tempfile::TempDir::new()?;
    let attempt = AttemptFolder(folder.path().to_owned());
    let tokens = folder.path().join("tokens.safetensors");
    let steps = WARMUP_STEPS + STEPS;
    let global_batch = WORLD_SIZE * shape.batch_size;
    write_tokens(&tokens, &[steps, global_batch, shape.block_size], shape.vocab_size)?;
    let text = format!(
        r#"
        model = {{ id = "gpt2-tiny", init = "random" }}
        data = {{ dataset = {{ token_blocks = "tokens.safetensors" }}, shuffle = false }}
        train = {{ block_size = {}, per_device_train_batch_size = {}, max_steps = {steps}, learning_rate = 1e-3, weight_decay = 0.01, lr_scheduler_type = "constant" }}
        fsdp = {{ auto_wrap_policy = "TRANSFORMER_BASED_WRAP", mixed_precision = "{mixed_precision}", {} }}
        device = {{ kind = "cpu", world_size = {WORLD_SIZE} }}
        "#,
        shape.block_size, shape.batch_size, method.settings
    );
    let plan = spec::load("bench.toml", &text, &Overlays::default(), &Surroundings::default()).map_err(|errors| errors.to_string())?;
    let row = plan.rows.get(0).ok_or("a sweep file without grid has one row")?;
    let architecture = Architecture::Gpt2(Gpt2Config {
        vocab_size: shape.vocab_size,
        n_positions: shape.n_positions,
        n_embd: shape.n_embd,
        n_layer: shape.n_layer,
        n_head: shape.n_head,
        ..Gpt2Config::DEFAULT
    });
    let request = TrialRequest {
        protocol: PROTOCOL,
        trial: TrialId("bench".to_owned()),
        label: shape.name.to_owned(),
        purpose: Purpose::Train,
        probe_steps: None,
        block_size: shape.block_size,
        seed: 0,
        settings: row.effective,
        model: ResolvedModel { architecture, weights: None, fingerprint: None },
        data: PreparedData {
            train: tokens,
            eval: None,
            fingerprint: String::new(),
            vocab_size: shape.vocab_size,
            train_tokens: (steps * global_batch * shape.block_size) as u64,
            eval_tokens: 0,
            floor_perplexity: None,
            description: String::new(),
        },
        cores: vec![0, 1],
        placement: None,
        checkpoint: None,
        stall_timeout_seconds: None,
        save_model: None,
    };
    write_json(&attempt.request(), &request)?;
    let before = children_cpu_seconds()?;
    let output = Command::new(env!("CARGO_BIN_EXE_sweep")).arg("trial").arg(attempt.request()).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let cpu_seconds = children_cpu_seconds()? - before;
    let messages = read_json_lines::<Message>(&attempt.messages())?;
    let step_seconds = |message: &Message| if let MessageKind::Step(step) = &message.kind { Some(step.step_seconds) } else { None };
    let seconds: Vec<f64> = messages.records.iter().filter_map(step_seconds).skip(WARMUP_STEPS).collect();
    let result: TrialResult = read_json(&attempt.result())?;
    let tokens_per_second = (global_batch * shape.block_size) as f64 / median(seconds);
    Ok(Measured { tokens_per_second, cpu_seconds, peak_bytes: result.peak_bytes.into_iter().max() })
}

/// Trains with PyTorch.
fn pytorch(method: Method, python: &OsString, script: &OsString) -> Result<Measured, Box<dyn Error>> {
    let shape = method.shape;
    let numbers = [
        ("--layers", shape.n_layer),
        ("--embd", shape.n_embd),
        ("--heads", shape.n_head),
        ("--vocab", shape.vocab_size),
        ("--positions", shape.n_positions),
        ("--block", shape.block_size),
        ("--batch", shape.batch_size),
        ("--steps", STEPS),
        ("--warmup", WARMUP_STEPS),
        ("--threads", 1),
    ];
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--nproc_per_node"]).arg(WORLD_SIZE.to_string()).arg(script);
    for (name, number) in numbers {
        command.arg(name).arg(number.to_string());
    }
    command.args(["--mode", method.mode]).args(method.bf16.then_some("--bf16"));
    let before = children_cpu_seconds()?;
    let output = command.output()?;
    let cpu_seconds = children_cpu_seconds()? - before;
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.lines().rev().find(|line| line.starts_with('{')).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let json: serde_json::Value = serde_json::from_str(json)?;
    let tokens_per_second = json["tokens_per_s"].as_f64().ok_or("the script's line has no tokens_per_s")?;
    let taken = |rank: &serde_json::Value| Some(rank["mem"]["peak_mib"].as_f64()? - rank["mem"]["import_mib"].as_f64()?);
    let peak_mib = json["ranks"].as_array().and_then(|ranks| ranks.iter().filter_map(taken).max_by(f64::total_cmp));
    Ok(Measured { tokens_per_second, cpu_seconds, peak_bytes: peak_mib.map(|mib| (mib * 1024.0 * 1024.0) as u64) })
}

/// Token ids with Zipf-like frequencies, the same every time.
fn write_tokens(path: &Path, shape: &[usize], vocab_size: usize) -> Result<(), Box<dyn Error>> {
    let mut state = 1_u64;
    let mut bytes = Vec::new();
    for _ in 0..shape.iter().product::<usize>() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = (state >> 11) as f64 / (1_u64 << 53) as f64;
        // The inverse of the distribution function of a density that falls as 1 / id.
        let id = ((vocab_size as f64 + 1.0).powf(uniform) - 1.0) as i32;
        bytes.extend(id.min(vocab_size as i32 - 1).to_le_bytes());
    }
    serialize_to_file([("ids", TensorView::new(Dtype::I32, shape.to_vec(), &bytes)?)], None, path)?;
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// CPU time of children that ended and were waited for: fields 16 and 17 of `/proc/self/stat`, in hundredths of a second.
fn children_cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after_name.split_whitespace().skip(13).take(2).map(|field| field.parse::<u64>().unwrap_or(0)).sum();
    Ok(ticks as f64 / 100.0)
}
