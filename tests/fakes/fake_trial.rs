//! The fake trial program of the process tests and benches: reads a real request, writes real messages and a real result, and misbehaves as it is told.
//!
//! It is told by the environment variable `SWEEP_FAKE`, the JSON of [`Fake`]; without it every trial with enough memory takes a few steps and ends well.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use sweep::protocol::{
    DataCounts, Evaluation, Message, MessageKind, Number, OutOfMemory, PROTOCOL, Step, Timestamp, Timing, TrialEnding, TrialRequest, TrialResult,
};
use sweep::spec::settings::{DType, ShardingStrategy};
use sweep::store::{AttemptFolder, JsonLines, read_json, write_json};
use sweep::trial::{Purpose, child_exit};

/// How trials behave.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fake {
    /// What a trial needs.
    memory: Memory,
    /// A file to which every trial appends a line when it begins and one when it ends.
    log: Option<PathBuf>,
    /// The first rule that matches a trial says how it behaves.
    rules: Vec<Rule>,
}

/// Bytes a rank needs: `base` (divided by the ranks where it is sharded) and `per_token` for each token of its batch, halved by 16-bit parameters and by
/// activation checkpointing.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Memory {
    base: u64,
    per_token: u64,
    /// More of it in training than in a probe.
    training_extra: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self { base: 1 << 20, per_token: 1 << 10, training_extra: 0 }
    }
}

/// A behaviour and the trials that show it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rule {
    when: When,
    r#do: Behaviour,
}

/// A trial must match everything that is given.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct When {
    label: Option<String>,
    purpose: Option<Purpose>,
    block_size: Option<usize>,
    /// Attempts up to this one.
    attempts_up_to: Option<u32>,
}

/// What a trial does; nothing of it where nothing is given.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Behaviour {
    /// End before the first message with this exit code.
    exit_at_once: Option<u8>,
    /// Before the first message, wait for this file, or for ever where the path is empty.
    wait_before_first_message: Option<PathBuf>,
    /// Steps to take.
    steps: Option<u64>,
    /// The loss is NaN from this step on.
    diverge_at: Option<u64>,
    /// After the steps, write this to standard error.
    stderr: Option<String>,
    /// After the steps, write this many bytes to standard error.
    flood_stderr: Option<usize>,
    /// After the steps, this many processes write [`LINES_PER_RANK`] lines each to standard error at once: see [`rank_line`].
    ranks_write: Option<usize>,
    /// After the steps, take memory until somebody ends it.
    eat_memory: bool,
    /// After the steps, write a line of a kind nobody knows, one that is damaged, and half a line.
    garble_messages: bool,
    /// After the steps, wait for this file, or for ever where the path is empty.
    wait_for: Option<PathBuf>,
    /// TERM does nothing.
    ignore_term: bool,
    /// TERM or USR2 makes it save its state and ask to be run again.
    checkpoint_on_term: bool,
    /// Start a process that ignores TERM and waits for ever; its id goes to this file.
    grandchild: Option<PathBuf>,
    /// Start one that also leaves the family: it forks twice, begins a session of its own and keeps the logs open; its id goes to this file.
    daemon: Option<PathBuf>,
    /// The daemon drops its environment too.
    daemon_drops_environment: bool,
    /// End by this signal.
    signal: Option<i32>,
    /// End with this exit code and no result.
    exit: Option<u8>,
    /// Leave half a result.
    tear_result: bool,
}

/// Lines that each process of `ranks_write` writes.
const LINES_PER_RANK: usize = 40;

/// A line of 64 KiB with everything that logs hold: progress bars, bytes that are no UTF-8, NUL. The integration test makes the same.
fn rank_line(rank: usize, line: usize) -> Vec<u8> {
    let mut bytes = format!("rank {rank} line {line}\r 10%\r\0\u{1b}[31m").into_bytes();
    bytes.push(0xff);
    bytes.resize((64 << 10) - 1, b'a' + rank as u8);
    bytes.push(b'\n');
    bytes
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match &arguments[..] {
        [_, trial, request] if trial == "trial" => match run(Path::new(request)) {
            Ok(code) => code,
            Err(error) => {
                complain(&error.to_string());
                ExitCode::from(child_exit::BAD_REQUEST as u8)
            }
        },
        [_, rank, number] if rank == "rank" => {
            let rank = number.parse().unwrap_or(0);
            let all_written = (0..LINES_PER_RANK).all(|line| io::stderr().write_all(&rank_line(rank, line)).is_ok());
            if all_written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        _ => {
            complain(&format!("usage: fake-trial trial REQUEST, not {arguments:?}"));
            ExitCode::from(child_exit::BAD_REQUEST as u8)
        }
    }
}

fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn run(request: &Path) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let folder = AttemptFolder(request.parent().ok_or("a request has a folder")?.to_owned());
    let request: TrialRequest = read_json(request)?;
    let fake: Fake = match std::env::var("SWEEP_FAKE") {
        Ok(text) => serde_json::from_str(&text)?,
        Err(_) => Fake::default(),
    };
    let attempt: u32 = folder.0.to_string_lossy().rsplit('-').next().ok_or("an attempt has a number")?.parse()?;
    let matches = |Rule { when, .. }: &&Rule| {
        when.label.as_ref().is_none_or(|label| *label == request.label)
            && when.purpose.is_none_or(|purpose| purpose == request.purpose)
            && when.block_size.is_none_or(|block_size| block_size == request.block_size)
            && when.attempts_up_to.is_none_or(|last| attempt <= last)
    };
    let behaviour = fake.rules.iter().find(matches).map(|rule| rule.r#do.clone()).unwrap_or_default();
    log(&fake, "begin", &request, attempt)?;
    let code = behave(&fake, &behaviour, &request, &folder)?;
    log(&fake, "end", &request, attempt)?;
    Ok(code)
}

fn log(fake: &Fake, what: &str, request: &TrialRequest, attempt: u32) -> io::Result<()> {
    let Some(path) = &fake.log else { return Ok(()) };
    let purpose = if request.purpose == Purpose::Probe { "probe" } else { "train" };
    let cores: Vec<String> = request.cores.iter().map(usize::to_string).collect();
    // A dash stands for what is not set.
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| "-".to_owned());
    let (devices, order, port) = (variable("CUDA_VISIBLE_DEVICES"), variable("CUDA_DEVICE_ORDER"), variable("MASTER_PORT"));
    let (process, cores) = (std::process::id(), cores.join(","));
    let line = format!("{what} {} {purpose} {} {attempt} {process} {cores} {devices} {order} {port}\n", request.trial, request.block_size);
    OpenOptions::new().create(true).append(true).open(path)?.write_all(line.as_bytes())
}

fn behave(fake: &Fake, behaviour: &Behaviour, request: &TrialRequest, folder: &AttemptFolder) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let term = Arc::new(AtomicBool::new(false));
    if behaviour.ignore_term || behaviour.checkpoint_on_term {
        signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&term))?;
        signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::clone(&term))?;
    }
    if let Some(code) = behaviour.exit_at_once {
        complain(behaviour.stderr.as_deref().unwrap_or_default());
        return Ok(ExitCode::from(code));
    }
    wait_for(behaviour.wait_before_first_message.as_deref(), || false);
    let mut messages = JsonLines::append_to(&folder.messages())?;
    let mut say = |kind| messages.push(&Message { at: Timestamp::now(), kind });
    let ranks = request.settings.device.world_size;
    say(MessageKind::Started { protocol: PROTOCOL, pid: std::process::id(), ranks })?;
    say(MessageKind::Phase { phase: "train".into() })?;

    let needed = needed_bytes(fake, request);
    if let Some(budget) = request.settings.device.memory.filter(|budget| needed > *budget) {
        let details =
            OutOfMemory { rank: ranks - 1, requested_bytes: needed - budget, in_use_bytes: budget, budget_bytes: budget, phase: "train".into() };
        say(MessageKind::Oom(details))?;
        return Ok(ExitCode::from(child_exit::OUT_OF_DEVICE_MEMORY as u8));
    }
    if let Some(path) = &behaviour.grandchild {
        let script = "trap '' TERM; while :; do sleep 0.01; done";
        let grandchild = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn()?;
        write_json(path, &grandchild.id())?;
    }

    if let Some(path) = &behaviour.daemon {
        let script = "trap '' TERM HUP; echo $$ > \"$0.partial\"; mv \"$0.partial\" \"$0\"; while :; do sleep 0.01; done";
        let mut daemon = Command::new("setsid");
        daemon.args(["--fork", "sh", "-c", script]).arg(path).stdin(Stdio::null());
        if behaviour.daemon_drops_environment {
            daemon.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        }
        daemon.status()?;
        wait_for(Some(path), || false);
    }

    let steps = behaviour.steps.or(request.probe_steps).unwrap_or(4);
    let global_batch = request.settings.train.per_device_train_batch_size * ranks;
    let tokens = (global_batch * request.block_size) as u64;
    for step in 1..=steps {
        let diverged = behaviour.diverge_at.is_some_and(|first| step >= first);
        let loss = if diverged { f64::NAN } else { 6.0 / (1.0 + step as f64).ln() };
        say(MessageKind::Step(Step {
            step,
            steps,
            loss: Number(loss),
            grad_norm: Number(if diverged { f64::INFINITY } else { 1.0 / step as f64 }),
            learning_rate: request.settings.train.learning_rate,
            tokens,
            step_seconds: 0.001,
            allocated_bytes: vec![needed / 2; ranks],
            peak_bytes: vec![needed; ranks],
            loss_scale: (request.settings.fsdp.mixed_precision.param_dtype == DType::Fp16).then_some(65536.0),
            skipped: false,
        }))?;
        if diverged {
            let ending = TrialEnding::Diverged { reason: format!("the loss is NaN at step {step}") };
            write_json(&folder.result(), &result(request, needed, step, ending))?;
            return Ok(ExitCode::from(child_exit::FAILED as u8));
        }
    }
    misbehave(behaviour, folder)?;
    if wait_for(behaviour.wait_for.as_deref(), || behaviour.checkpoint_on_term && term.load(Ordering::Relaxed)) {
        write_json(&folder.result(), &result(request, needed, steps, TrialEnding::Checkpointed { step: steps }))?;
        return Ok(ExitCode::from(child_exit::CHECKPOINTED as u8));
    }
    if let Some(signal) = behaviour.signal {
        signal_hook::low_level::raise(signal)?;
        thread::sleep(Duration::from_secs(10));
    }
    if let Some(code) = behaviour.exit {
        return Ok(ExitCode::from(code));
    }
    say(MessageKind::Phase { phase: "evaluate".into() })?;
    let result = result(request, needed, steps, TrialEnding::Done);
    if let Some(evaluation) = result.evaluation.clone() {
        say(MessageKind::Eval { step: steps, evaluation })?;
    }
    if behaviour.tear_result {
        File::create(folder.result())?.write_all(b"{\"protocol\": 1, \"tri")?;
    } else {
        write_json(&folder.result(), &result)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until the file exists; without a file not at all, with an empty path for ever. Says whether `interrupted` ended the wait.
fn wait_for(path: Option<&Path>, interrupted: impl Fn() -> bool) -> bool {
    let Some(path) = path else { return false };
    // A test that fails must not leave processes behind for ever.
    let limit = Instant::now() + Duration::from_secs(300);
    while (path.as_os_str().is_empty() || !path.exists()) && Instant::now() < limit {
        if interrupted() {
            return true;
        }
        thread::sleep(Duration::from_millis(2));
    }
    false
}

fn misbehave(behaviour: &Behaviour, folder: &AttemptFolder) -> io::Result<()> {
    if let Some(text) = &behaviour.stderr {
        complain(text);
    }
    if let Some(bytes) = behaviour.flood_stderr {
        let line = [b"x".repeat(4095), vec![b'\n']].concat();
        for _ in 0..bytes / line.len() {
            io::stderr().write_all(&line)?;
        }
        complain("the flood is over");
    }
    if let Some(ranks) = behaviour.ranks_write {
        let program = std::env::current_exe()?;
        let rank = |rank: usize| Command::new(&program).args(["rank", &rank.to_string()]).stdin(Stdio::null()).spawn();
        let ranks = (0..ranks).map(rank).collect::<io::Result<Vec<_>>>()?;
        for mut rank in ranks {
            assert!(rank.wait()?.success(), "a rank could not write");
        }
        io::stderr().write_all(b"no newline at the end \xff\0")?;
    }
    if behaviour.eat_memory {
        let mut eaten: Vec<Vec<u8>> = Vec::new();
        loop {
            eaten.push(vec![1; 4 << 20]);
        }
    }
    if behaviour.garble_messages {
        let lines = "{\"at\":\"2026-01-01T00:00:00.000Z\",\"kind\":\"from_the_future\"}\n\0damaged\n";
        OpenOptions::new().append(true).open(folder.messages())?.write_all(lines.as_bytes())?;
        let mut half = OpenOptions::new().append(true).open(folder.messages())?;
        half.write_all(b"{\"at\":\"2026-01-01T00:00:00.000Z\",")?;
        thread::sleep(Duration::from_millis(5));
        half.write_all(b"\"kind\":\"warning\",\"message\":\"whole again\"}\n")?;
    }
    Ok(())
}

fn needed_bytes(fake: &Fake, request: &TrialRequest) -> u64 {
    let settings = &request.settings;
    let sharded = settings.fsdp.sharding_strategy != ShardingStrategy::NoShard;
    let base = if sharded { fake.memory.base / settings.device.world_size as u64 } else { fake.memory.base };
    let mut activations = fake.memory.per_token * (settings.train.per_device_train_batch_size * request.block_size) as u64;
    if settings.fsdp.mixed_precision.param_dtype.size() == 2 {
        activations /= 2;
    }
    if settings.fsdp.activation_checkpointing {
        activations /= 2;
    }
    let extra = if request.purpose == Purpose::Train { fake.memory.training_extra } else { 0 };
    base + activations + extra
}

fn result(request: &TrialRequest, needed: u64, steps: u64, ending: TrialEnding) -> TrialResult {
    let ranks = request.settings.device.world_size;
    let global_batch = (request.settings.train.per_device_train_batch_size * ranks) as u64;
    let block = request.block_size as u64;
    let evaluation = |block_size: usize| Evaluation {
        block_size,
        loss: Number(4.0 - (block_size as f64).ln() / 8.0),
        perplexity: Number((4.0 - (block_size as f64).ln() / 8.0).exp()),
        scored_tokens: request.data.eval_tokens,
        seconds: 0.001,
    };
    let steps_per_epoch = request.data.train_tokens as f64 / (block * global_batch) as f64;
    TrialResult {
        protocol: PROTOCOL,
        trial: request.trial.clone(),
        ending,
        optimizer_steps: steps,
        skipped_steps: 0,
        tokens_seen: steps * global_batch * block,
        evaluation: (request.purpose == Purpose::Train).then(|| evaluation(request.block_size)),
        evaluation_common: (request.purpose == Purpose::Train).then(|| evaluation(request.settings.train.eval_block_size)),
        timing: Timing {
            steady_steps: steps.saturating_sub(3),
            step_seconds: Some(0.001),
            steps_per_epoch,
            epoch_seconds: Some(0.001 * steps_per_epoch),
            tokens_per_second: Some((global_batch * block) as f64 / 0.001),
            evaluation_seconds: 0.002,
            checkpoint_seconds: 0.0,
            startup_seconds: 0.001,
        },
        peak_bytes: vec![needed; ranks],
        host_bytes: vec![0; ranks],
        parameters: 1_000_000,
        data: DataCounts {
            train_blocks: request.data.train_tokens / block,
            train_dropped_tokens: request.data.train_tokens % block,
            eval_blocks: request.data.eval_tokens / block,
            eval_dropped_tokens: request.data.eval_tokens % block,
        },
        warnings: vec![],
    }
}
