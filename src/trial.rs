//! Trials and how they end: plain data that crosses rooms, and the one pure function that classifies an ending.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::format;
use crate::protocol::{OutOfMemory, TrialEnding, TrialResult};

mod job;

pub use job::{EndedJob, JobEnd, JobState};

/// Identifies a trial: a hash of its canonical resolved parameters and of the contents of model and data. The same on every machine, safe as a
/// folder name on any file system.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct TrialId(pub String);

impl fmt::Display for TrialId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Identifies a configuration: the same hash without block size, purpose and repeat.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct ConfigurationId(pub String);

impl fmt::Display for ConfigurationId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What a trial is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Does this block size fit: a few applied optimiser steps and one full-size evaluation batch.
    Probe,
    /// The training whose numbers the tables show.
    Train,
}

/// Every way an attempt can end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum TrialOutcome {
    /// Ran to its end and left a complete result.
    Done,
    /// A rank needed more device memory than its budget or its device has. A result of a probe, not a failure.
    OutOfDeviceMemory {
        /// What the child said, where it could.
        details: Option<OutOfMemory>,
    },
    /// The host had no more memory.
    OutOfHostMemory {
        /// Who said so: the kernel's out-of-memory killer, or the child.
        #[serde(default)]
        reason: String,
    },
    /// No progress for `stall_timeout` (or `startup_timeout` before the first step).
    Stalled {
        /// Seconds without progress. Records that an outcome is part of have `seconds` of their own.
        #[serde(rename = "after_seconds")]
        seconds: f64,
        /// The last phase the child named.
        phase: Option<String>,
    },
    /// Took longer than `trial_timeout`.
    TimedOut {
        /// Seconds it ran.
        #[serde(rename = "after_seconds")]
        seconds: f64,
    },
    /// The loss became NaN or infinite.
    Diverged {
        /// What the child said.
        reason: String,
    },
    /// The child refused its request.
    BadConfiguration {
        /// What the child said.
        reason: String,
    },
    /// Training failed for a reason the child could name.
    Failed {
        /// What the child said.
        reason: String,
    },
    /// Ended by a signal, or by an exit code outside the contract.
    Crashed {
        /// Exit code, where there is one.
        code: Option<i32>,
        /// Signal number, where there is one.
        signal: Option<i32>,
    },
    /// Ended because the user asked.
    KilledByUser,
    /// Checkpointed and asked to be run again.
    Preempted,
    /// The machine failed: the child could not be started, its folder could not be written.
    Infrastructure {
        /// What went wrong.
        reason: String,
    },
    /// Exit code 0 without a result that can be read, or a result that contradicts the exit code.
    ProtocolBroken {
        /// What was wrong.
        reason: String,
    },
}

impl TrialOutcome {
    /// Whether the attempt needs no other: it is done, or out of memory, which a search asks about.
    pub fn is_result(&self) -> bool {
        matches!(self, Self::Done | Self::OutOfDeviceMemory { .. })
    }

    /// Whether trying again may help without any change.
    pub fn is_infrastructure(&self) -> bool {
        matches!(self, Self::Infrastructure { .. })
    }

    /// Whether the trial itself is settled by this ending. What the user, the cluster or the machine ended says nothing about the trial: it is run
    /// again when the run goes on.
    pub fn settles_the_trial(&self) -> bool {
        !matches!(self, Self::KilledByUser | Self::Preempted | Self::Infrastructure { .. })
    }

    /// Whether a later attempt may go on from the checkpoints of this one: what ended it says nothing about the training.
    pub fn leaves_training_intact(&self) -> bool {
        match self {
            Self::KilledByUser
            | Self::Preempted
            | Self::Infrastructure { .. }
            | Self::OutOfHostMemory { .. }
            | Self::Stalled { .. }
            | Self::TimedOut { .. }
            | Self::Crashed { .. } => true,
            Self::Done
            | Self::OutOfDeviceMemory { .. }
            | Self::Diverged { .. }
            | Self::BadConfiguration { .. }
            | Self::Failed { .. }
            | Self::ProtocolBroken { .. } => false,
        }
    }

    /// Whether the user must hear of it: neither a result nor an end from outside.
    pub fn is_failure(&self) -> bool {
        !self.is_result() && !matches!(self, Self::KilledByUser | Self::Preempted)
    }
}

/// A sentence without its full stop, for the terminal, the log and the tables' footnotes.
impl fmt::Display for TrialOutcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => formatter.write_str("done"),
            Self::OutOfDeviceMemory { details: None } => formatter.write_str("out of device memory"),
            Self::OutOfDeviceMemory { details: Some(details) } => write!(
                formatter,
                "out of device memory: rank {} asked for {} with {} of {} in use ({})",
                details.rank,
                format::bytes(details.requested_bytes),
                format::bytes(details.in_use_bytes),
                format::bytes(details.budget_bytes),
                details.phase
            ),
            Self::OutOfHostMemory { reason } => write!(formatter, "out of host memory: {reason}"),
            Self::Stalled { seconds, phase: None } => write!(formatter, "stalled: no progress for {seconds:.0} s"),
            Self::Stalled { seconds, phase: Some(phase) } => write!(formatter, "stalled: no progress for {seconds:.0} s in phase {phase}"),
            Self::TimedOut { seconds } => write!(formatter, "timed out after {seconds:.0} s"),
            Self::Diverged { reason } => write!(formatter, "diverged: {reason}"),
            Self::BadConfiguration { reason } => write!(formatter, "request refused: {reason}"),
            Self::Failed { reason } => write!(formatter, "failed: {reason}"),
            Self::Crashed { signal: Some(signal), .. } => write!(formatter, "crashed: ended by {}", signal_name(*signal)),
            Self::Crashed { code: Some(code), .. } => write!(formatter, "crashed with exit code {code}"),
            Self::Crashed { .. } => formatter.write_str("crashed"),
            Self::KilledByUser => formatter.write_str("ended because the run was stopped"),
            Self::Preempted => formatter.write_str("saved its state to be run again"),
            Self::Infrastructure { reason } => write!(formatter, "infrastructure: {reason}"),
            Self::ProtocolBroken { reason } => write!(formatter, "broke the protocol: {reason}"),
        }
    }
}

/// The name of a signal that commonly ends a process, or its number.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// Everything that is known when an attempt has ended; the input of [`classify`].
#[derive(Clone, Debug, Default)]
pub struct AttemptEnding {
    /// Why the child could not be started, if so.
    pub spawn_error: Option<String>,
    /// Whether it said that it runs, by any message of the protocol.
    pub started: bool,
    /// Exit code, if it exited.
    pub exit_code: Option<i32>,
    /// Signal, if one ended it.
    pub signal: Option<i32>,
    /// `result.json`, if there is one: parsed, or why it cannot be read.
    pub result: Option<Result<TrialResult, String>>,
    /// The `oom` message, if one was written.
    pub out_of_memory: Option<OutOfMemory>,
    /// Last phase the child named.
    pub last_phase: Option<String>,
    /// Last lines of stderr, decoded lossily; what the user is shown.
    pub stderr_tail: String,
    /// The end of both logs, decoded lossily: other runners say there that memory ran out, often long before the last line.
    pub log_end: String,
    /// Whether the kernel's out-of-memory killer ended it.
    pub kernel_oom_kill: bool,
    /// Why the results folder takes nothing more, where it does not.
    pub disk_error: Option<String>,
    /// The SLURM job it ran in, if it did.
    pub job: Option<EndedJob>,
    /// GPUs whose memory did not come back after it.
    pub unreturned_memory: Vec<UnreturnedMemory>,
    /// Why we ended it, if we did.
    pub ended_by: Option<EndedBy>,
    /// Seconds the attempt ran.
    pub seconds: f64,
}

/// A GPU whose memory did not come back after an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreturnedMemory {
    /// Its UUID.
    pub device: String,
    /// Bytes in use beyond those before the attempt.
    pub bytes: u64,
}

/// Why `sweep` itself ended an attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EndedBy {
    /// Ctrl-C or TERM.
    User,
    /// `trial_timeout`.
    TimeLimit,
    /// `stall_timeout` or `startup_timeout`; seconds without progress.
    Stall {
        /// Seconds without progress.
        seconds: f64,
    },
}

/// Exit codes of the child, as the protocol fixes them.
pub mod child_exit {
    /// Done.
    pub const DONE: i32 = 0;
    /// Bad request.
    pub const BAD_REQUEST: i32 = 2;
    /// Training failed.
    pub const FAILED: i32 = 3;
    /// Out of device memory.
    pub const OUT_OF_DEVICE_MEMORY: i32 = 4;
    /// Checkpointed, run me again.
    pub const CHECKPOINTED: i32 = 75;
}

/// Texts by which runners other than ours, and their libraries, say that device memory ran out.
const OUT_OF_DEVICE_MEMORY: [&str; 14] = [
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED: Out of memory",
    "NCCL error: out of memory",
];

/// The same where two words must stand on one line, for what is between them differs: NCCL's `Cuda failure 2 'out of memory'`.
const OUT_OF_DEVICE_MEMORY_PAIRS: [(&str, &str); 3] = [("Cuda failure", "out of memory"), ("NCCL", "out of memory"), ("cuMemAlloc", "out of memory")];

/// Texts by which allocators of host memory say that there is none.
const OUT_OF_HOST_MEMORY: [&str; 6] = [
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "ArrayMemoryError",
    "Cannot allocate memory",
    "OutOfMemoryError: Java heap space",
];

/// The same where two words must stand on one line: Rust's `memory allocation of 16 bytes failed`.
const OUT_OF_HOST_MEMORY_PAIRS: [(&str, &str); 1] = [("memory allocation of", "bytes failed")];

/// Texts of the system for a disk that takes nothing more. They are the machine's fault, whoever stumbles over them.
const DISK_FAILED: [&str; 4] = ["No space left on device", "Disk quota exceeded", "Read-only file system", "Input/output error"];

/// The first line of `log` that holds one of `texts` or both of one of `pairs`.
fn line_with<'l>(log: &'l str, texts: &[&str], pairs: &[(&str, &str)]) -> Option<&'l str> {
    let says =
        |line: &&str| texts.iter().any(|text| line.contains(text)) || pairs.iter().any(|(one, other)| line.contains(one) && line.contains(other));
    log.lines().find(says).map(str::trim)
}

/// Decides how an attempt ended. Pure: everything it may look at is in `ending`.
pub fn classify(ending: &AttemptEnding) -> TrialOutcome {
    if let Some(reason) = &ending.spawn_error {
        return TrialOutcome::Infrastructure { reason: reason.clone() };
    }
    // A complete result counts even when the request to end crossed it on its way.
    if ending.exit_code == Some(child_exit::DONE)
        && let Some(Ok(TrialResult { ending: TrialEnding::Done, .. })) = &ending.result
    {
        return TrialOutcome::Done;
    }
    // A trial that was over its time or stuck has failed, whatever it saved when it was asked to end.
    if ending.exit_code == Some(child_exit::CHECKPOINTED) && matches!(ending.ended_by, None | Some(EndedBy::User)) {
        return TrialOutcome::Preempted;
    }
    match ending.ended_by {
        Some(EndedBy::User) => return TrialOutcome::KilledByUser,
        Some(EndedBy::TimeLimit) => return TrialOutcome::TimedOut { seconds: ending.seconds },
        Some(EndedBy::Stall { seconds }) => return TrialOutcome::Stalled { seconds, phase: ending.last_phase.clone() },
        None => {}
    }
    if let Some(reason) = &ending.disk_error {
        return TrialOutcome::Infrastructure { reason: reason.clone() };
    }
    if let Some(outcome) = ending.job.as_ref().and_then(|job| job.outcome(ending.exit_code.is_some(), ending.signal, ending.seconds)) {
        return outcome;
    }
    let said = || match &ending.result {
        Some(Ok(TrialResult { ending: TrialEnding::Failed { reason } | TrialEnding::Diverged { reason }, .. })) => reason.clone(),
        _ => last_line(&ending.stderr_tail),
    };
    match (ending.exit_code, ending.signal) {
        (Some(child_exit::DONE), _) => TrialOutcome::ProtocolBroken {
            reason: match &ending.result {
                None => "exit code 0 without a result.json".to_owned(),
                Some(Err(error)) => format!("exit code 0, but its result.json cannot be read: {error}"),
                Some(Ok(_)) => "exit code 0, but its result.json says that it did not end well".to_owned(),
            },
        },
        (Some(child_exit::OUT_OF_DEVICE_MEMORY), _) => TrialOutcome::OutOfDeviceMemory { details: ending.out_of_memory.clone() },
        (Some(child_exit::BAD_REQUEST | child_exit::FAILED), _) if line_with(&said(), &DISK_FAILED, &[]).is_some() => {
            TrialOutcome::Infrastructure { reason: said() }
        }
        (Some(child_exit::BAD_REQUEST), _) => TrialOutcome::BadConfiguration { reason: said() },
        (Some(child_exit::FAILED), _) => match &ending.result {
            Some(Ok(TrialResult { ending: TrialEnding::Diverged { reason }, .. })) => TrialOutcome::Diverged { reason: reason.clone() },
            _ => TrialOutcome::Failed { reason: said() },
        },
        (_, Some(9)) if ending.kernel_oom_kill => TrialOutcome::OutOfHostMemory { reason: "ended by the kernel's out-of-memory killer".to_owned() },
        // The `oom` message is the last a child writes: however it went down afterwards, that is why.
        _ if ending.out_of_memory.is_some() => TrialOutcome::OutOfDeviceMemory { details: ending.out_of_memory.clone() },
        _ if line_with(&ending.log_end, &OUT_OF_DEVICE_MEMORY, &OUT_OF_DEVICE_MEMORY_PAIRS).is_some() => {
            TrialOutcome::OutOfDeviceMemory { details: None }
        }
        _ if let Some(line) = out_of_host_memory(&ending.log_end) => TrialOutcome::OutOfHostMemory { reason: line.to_owned() },
        (Some(_), _) if line_with(&last_line(&ending.stderr_tail), &DISK_FAILED, &[]).is_some() => TrialOutcome::Infrastructure { reason: said() },
        // Whatever ends a child before its first word has nothing to do with what it was asked: a library that is missing, a binary for another
        // processor.
        (code, signal) if !ending.started => {
            TrialOutcome::Infrastructure { reason: format!("{} before its first message: {}", TrialOutcome::Crashed { code, signal }, said()) }
        }
        (code, signal) => TrialOutcome::Crashed { code, signal },
    }
}

/// The line of `log` that says that host memory ran out. Python's `MemoryError` is a whole line, or begins one.
fn out_of_host_memory(log: &str) -> Option<&str> {
    let python = || log.lines().map(str::trim).find(|line| *line == "MemoryError" || line.starts_with("MemoryError:"));
    line_with(log, &OUT_OF_HOST_MEMORY, &OUT_OF_HOST_MEMORY_PAIRS).or_else(python)
}

fn last_line(text: &str) -> String {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it gave no reason").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{DataCounts, PROTOCOL, Timing};

    fn result(ending: TrialEnding) -> Option<Result<TrialResult, String>> {
        Some(Ok(TrialResult {
            protocol: PROTOCOL,
            trial: TrialId("t".into()),
            ending,
            optimizer_steps: 1,
            skipped_steps: 0,
            tokens_seen: 1,
            evaluation: None,
            evaluation_common: None,
            timing: Timing::default(),
            peak_bytes: vec![],
            host_bytes: vec![],
            parameters: 1,
            data: DataCounts::default(),
            warnings: vec![],
        }))
    }

    fn oom() -> OutOfMemory {
        OutOfMemory { rank: 2, requested_bytes: 3 << 20, in_use_bytes: 1 << 30, budget_bytes: 1 << 30, phase: "forward".into() }
    }

    fn ended(code: Option<i32>, signal: Option<i32>) -> AttemptEnding {
        AttemptEnding { started: true, exit_code: code, signal, seconds: 2.0, ..AttemptEnding::default() }
    }

    /// Every row is one way to end; cases 16, 17 and 19 are among them.
    #[test]
    fn every_ending_has_its_outcome() {
        let text = |reason: &str| reason.to_owned();
        let table: Vec<(&str, AttemptEnding, TrialOutcome)> = vec![
            (
                "exec fails",
                AttemptEnding { spawn_error: Some(text("no such file")), ..AttemptEnding::default() },
                TrialOutcome::Infrastructure { reason: text("no such file") },
            ),
            ("done", AttemptEnding { result: result(TrialEnding::Done), ..ended(Some(0), None) }, TrialOutcome::Done),
            (
                "done while it was asked to end",
                AttemptEnding { result: result(TrialEnding::Done), ended_by: Some(EndedBy::User), ..ended(Some(0), None) },
                TrialOutcome::Done,
            ),
            (
                "exit 0, \"out of memory\" in its log",
                AttemptEnding { result: result(TrialEnding::Done), log_end: text("CUDA out of memory, retrying"), ..ended(Some(0), None) },
                TrialOutcome::Done,
            ),
            ("exit 0 without a result", ended(Some(0), None), TrialOutcome::ProtocolBroken { reason: text("exit code 0 without a result.json") }),
            (
                "exit 0, result damaged",
                AttemptEnding { result: Some(Err(text("EOF"))), ..ended(Some(0), None) },
                TrialOutcome::ProtocolBroken { reason: text("exit code 0, but its result.json cannot be read: EOF") },
            ),
            (
                "exit 0, result says failed",
                AttemptEnding { result: result(TrialEnding::Failed { reason: text("x") }), ..ended(Some(0), None) },
                TrialOutcome::ProtocolBroken { reason: text("exit code 0, but its result.json says that it did not end well") },
            ),
            ("asked to end", AttemptEnding { ended_by: Some(EndedBy::User), ..ended(None, Some(15)) }, TrialOutcome::KilledByUser),
            ("asked to end, saved its state", AttemptEnding { ended_by: Some(EndedBy::User), ..ended(Some(75), None) }, TrialOutcome::Preempted),
            ("saved its state", ended(Some(75), None), TrialOutcome::Preempted),
            (
                "over its time, saved its state when it was asked to end",
                AttemptEnding { ended_by: Some(EndedBy::TimeLimit), ..ended(Some(75), None) },
                TrialOutcome::TimedOut { seconds: 2.0 },
            ),
            ("over its time", AttemptEnding { ended_by: Some(EndedBy::TimeLimit), ..ended(None, Some(9)) }, TrialOutcome::TimedOut { seconds: 2.0 }),
            (
                "stuck",
                AttemptEnding { ended_by: Some(EndedBy::Stall { seconds: 1.5 }), last_phase: Some(text("train")), ..ended(None, Some(9)) },
                TrialOutcome::Stalled { seconds: 1.5, phase: Some(text("train")) },
            ),
            ("out of memory, no details", ended(Some(4), None), TrialOutcome::OutOfDeviceMemory { details: None }),
            (
                "out of memory",
                AttemptEnding { out_of_memory: Some(oom()), ..ended(Some(4), None) },
                TrialOutcome::OutOfDeviceMemory { details: Some(oom()) },
            ),
            (
                "out of memory, then aborted",
                AttemptEnding { out_of_memory: Some(oom()), ..ended(None, Some(6)) },
                TrialOutcome::OutOfDeviceMemory { details: Some(oom()) },
            ),
            (
                "out of memory in another runner's words",
                AttemptEnding { log_end: text("RuntimeError: CUDA error: out of memory\n\nTraceback ..."), ..ended(Some(1), None) },
                TrialOutcome::OutOfDeviceMemory { details: None },
            ),
            (
                "out of memory in another runner's words, and no result",
                AttemptEnding { log_end: text("CUDA out of memory"), ..ended(Some(0), None) },
                TrialOutcome::ProtocolBroken { reason: text("exit code 0 without a result.json") },
            ),
            (
                "the disk is full, and says so",
                AttemptEnding {
                    result: result(TrialEnding::Failed { reason: text("cannot write step-8: No space left on device") }),
                    ..ended(Some(3), None)
                },
                TrialOutcome::Infrastructure { reason: text("cannot write step-8: No space left on device") },
            ),
            (
                "the disk is full, and nothing can be said",
                AttemptEnding { disk_error: Some(text("cannot write attempt-1: No space left on device")), ..ended(Some(3), None) },
                TrialOutcome::Infrastructure { reason: text("cannot write attempt-1: No space left on device") },
            ),
            (
                "the disk is full in another runner's words",
                AttemptEnding { stderr_tail: text("OSError: [Errno 28] No space left on device: 'x.pt'\n"), ..ended(Some(1), None) },
                TrialOutcome::Infrastructure { reason: text("OSError: [Errno 28] No space left on device: 'x.pt'") },
            ),
            (
                "a full disk is mentioned on the way to something else",
                AttemptEnding { stderr_tail: text("No space left on device, writing elsewhere\nKeyError: 'x'"), ..ended(Some(1), None) },
                TrialOutcome::Crashed { code: Some(1), signal: None },
            ),
            (
                "request refused",
                AttemptEnding { stderr_tail: text("error: unknown key\n\n"), ..ended(Some(2), None) },
                TrialOutcome::BadConfiguration { reason: text("error: unknown key") },
            ),
            (
                "diverged",
                AttemptEnding { result: result(TrialEnding::Diverged { reason: text("loss is NaN at step 3") }), ..ended(Some(3), None) },
                TrialOutcome::Diverged { reason: text("loss is NaN at step 3") },
            ),
            (
                "failed",
                AttemptEnding { result: result(TrialEnding::Failed { reason: text("rank 1 panicked") }), ..ended(Some(3), None) },
                TrialOutcome::Failed { reason: text("rank 1 panicked") },
            ),
            ("failed without a word", ended(Some(3), None), TrialOutcome::Failed { reason: text("it gave no reason") }),
            (
                "kernel's killer",
                AttemptEnding { kernel_oom_kill: true, ..ended(None, Some(9)) },
                TrialOutcome::OutOfHostMemory { reason: text("ended by the kernel's out-of-memory killer") },
            ),
            ("killed by another", ended(None, Some(9)), TrialOutcome::Crashed { code: None, signal: Some(9) }),
            (
                "the kernel's killer struck elsewhere",
                AttemptEnding { kernel_oom_kill: true, ..ended(Some(1), None) },
                TrialOutcome::Crashed { code: Some(1), signal: None },
            ),
            (
                "died before its first word",
                AttemptEnding { started: false, stderr_tail: text("libcuda.so.1: cannot open"), ..ended(Some(127), None) },
                TrialOutcome::Infrastructure { reason: text("crashed with exit code 127 before its first message: libcuda.so.1: cannot open") },
            ),
        ];
        for (name, ending, expected) in table {
            assert_eq!(classify(&ending), expected, "{name}");
        }
    }

    /// Case 17: the words of runners and libraries that are not ours.
    #[test]
    fn other_runners_words_for_out_of_memory_are_known() {
        for line in [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.2 GiB is free.",
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity)",
            "RuntimeError: CUDA error: out of memory",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/ProcessGroupNCCL.cpp:1331, unhandled cuda error, out of memory",
            "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'",
            "node7:301:377 [0] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'",
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 MiB",
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.",
            "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        ] {
            // A launcher's own table follows the line that says it.
            let log_end = format!("step 3\n  {line}\n{}", "  File \"train.py\", line 7\n".repeat(50));
            for (code, signal) in [(Some(1), None), (None, Some(6))] {
                let ending = AttemptEnding { log_end: log_end.clone(), ..ended(code, signal) };
                assert_eq!(classify(&ending), TrialOutcome::OutOfDeviceMemory { details: None }, "{line}");
            }
            let well = AttemptEnding { result: result(TrialEnding::Done), log_end, ..ended(Some(0), None) };
            assert_eq!(classify(&well), TrialOutcome::Done, "{line}");
        }
        for line in [
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            "memory allocation of 68719476736 bytes failed",
            "OSError: [Errno 12] Cannot allocate memory",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array",
            "MemoryError",
        ] {
            let ending = AttemptEnding { log_end: format!("step 3\n{line}\n"), ..ended(Some(1), None) };
            assert_eq!(classify(&ending), TrialOutcome::OutOfHostMemory { reason: line.to_owned() }, "{line}");
        }
        for line in ["the model is not out of memory budget", "OutOfMemory handler installed", "MemoryErrors are caught", "NCCL INFO ok"] {
            let ending = AttemptEnding { log_end: line.to_owned(), ..ended(Some(1), None) };
            assert_eq!(classify(&ending), TrialOutcome::Crashed { code: Some(1), signal: None }, "{line}");
        }
    }

    /// Outcomes are part of larger records, whose field names they must not repeat.
    #[test]
    fn outcomes_survive_being_written_down() {
        let reason = || "why".to_owned();
        for outcome in [
            TrialOutcome::Done,
            TrialOutcome::OutOfDeviceMemory { details: Some(oom()) },
            TrialOutcome::OutOfDeviceMemory { details: None },
            TrialOutcome::OutOfHostMemory { reason: reason() },
            TrialOutcome::Stalled { seconds: 1.5, phase: Some("train".into()) },
            TrialOutcome::TimedOut { seconds: 2.5 },
            TrialOutcome::Diverged { reason: reason() },
            TrialOutcome::BadConfiguration { reason: reason() },
            TrialOutcome::Failed { reason: reason() },
            TrialOutcome::Crashed { code: Some(1), signal: None },
            TrialOutcome::KilledByUser,
            TrialOutcome::Preempted,
            TrialOutcome::Infrastructure { reason: reason() },
            TrialOutcome::ProtocolBroken { reason: reason() },
        ] {
            let at = crate::protocol::Timestamp(std::time::SystemTime::UNIX_EPOCH);
            let record = crate::store::AttemptRecord {
                trial: TrialId("t".into()),
                attempt: 1,
                started_at: at,
                seconds: 9.0,
                outcome: outcome.clone(),
                stderr_tail: "tail".into(),
            };
            assert_eq!(serde_json::from_str::<crate::store::AttemptRecord>(&serde_json::to_string(&record).unwrap()).unwrap(), record);
            let kind = crate::event::EventKind::TrialEnded {
                trial: TrialId("t".into()),
                label: "l".into(),
                purpose: Purpose::Train,
                block_size: 1,
                attempt: 1,
                outcome,
                seconds: 9.0,
                stderr_tail: "tail".into(),
            };
            let event = crate::event::Event { at, kind };
            assert_eq!(serde_json::from_str::<crate::event::Event>(&serde_json::to_string(&event).unwrap()).unwrap(), event);
        }
    }

    #[test]
    fn outcomes_read_as_sentences() {
        assert_eq!(
            TrialOutcome::OutOfDeviceMemory { details: Some(oom()) }.to_string(),
            "out of device memory: rank 2 asked for 3.00 MiB with 1.00 GiB of 1.00 GiB in use (forward)"
        );
        assert_eq!(TrialOutcome::Crashed { code: None, signal: Some(11) }.to_string(), "crashed: ended by SIGSEGV");
    }
}
