//! A run as a list of events, for the tests of its readers: a probe that fits, one that does not, a training, failures of several kinds.

use std::time::{Duration, SystemTime};

use super::{BriefRow, ReportBrief};
use crate::event::{Event, EventKind, LimitedBy};
use crate::protocol::{Evaluation, Message, MessageKind, Number, OutOfMemory, Step, Timestamp};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

const FULL_SHARD: &str = "FSDP + full_shard";
const SIZE_BASED: &str = "FSDP + size-based, 2K";

pub(super) fn at(seconds: f64) -> Timestamp {
    Timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds))
}

fn event(seconds: f64, kind: EventKind) -> Event {
    Event { at: at(seconds), kind }
}

pub(super) fn started(seconds: f64, trial: &str, label: &str, purpose: Purpose, block_size: usize, attempt: u32) -> Event {
    event(
        seconds,
        EventKind::TrialStarted {
            trial: TrialId(trial.into()),
            configuration: ConfigurationId(label.into()),
            label: label.into(),
            purpose,
            block_size,
            repeat: 0,
            attempt,
            budget_bytes: Some(64 << 20),
        },
    )
}

pub(super) fn said(seconds: f64, trial: &str, kind: MessageKind) -> Event {
    event(seconds, EventKind::TrialProgress { trial: TrialId(trial.into()), message: Message { at: at(seconds), kind } })
}

pub(super) fn step(step: u64, loss: f64, skipped: bool) -> MessageKind {
    MessageKind::Step(Step {
        step,
        steps: 96,
        loss: Number(loss),
        grad_norm: Number(1.0),
        learning_rate: 1e-4,
        tokens: 6144,
        step_seconds: 0.5,
        allocated_bytes: vec![30 << 20, 20 << 20],
        peak_bytes: vec![48 << 20, 40 << 20],
        loss_scale: Some(32768.0),
        skipped,
    })
}

fn ended(seconds: f64, trial: &str, label: &str, purpose: Purpose, block_size: usize, outcome: TrialOutcome, stderr_tail: &str) -> Event {
    event(
        seconds,
        EventKind::TrialEnded {
            trial: TrialId(trial.into()),
            label: label.into(),
            purpose,
            block_size,
            attempt: 1,
            outcome,
            seconds: 12.4,
            stderr_tail: stderr_tail.into(),
        },
    )
}

fn evaluation(block_size: usize, perplexity: f64) -> MessageKind {
    let evaluation = Evaluation { block_size, loss: Number(perplexity.ln()), perplexity: Number(perplexity), scored_tokens: 1000, seconds: 0.5 };
    MessageKind::Eval { step: 96, evaluation }
}

/// The run.
pub(super) fn run() -> Vec<Event> {
    let out_of_memory = OutOfMemory { rank: 1, requested_bytes: 3 << 20, in_use_bytes: 62 << 20, budget_bytes: 64 << 20, phase: "backward".into() };
    let refused =
        "rank 1: reading shard\rrank 1: reading shard 2\n\u{1b}[31mTraceback\u{1b}[0m (most recent call last):\n\n  RuntimeError: no\tshard\n";
    let kind = |label: &str, block_size, limited_by| EventKind::BlockSizeFound {
        configuration: ConfigurationId(label.into()),
        label: label.into(),
        block_size,
        limited_by,
    };
    vec![
        event(0.0, EventKind::RunStarted { sweep: "gpt2_blocksize".into(), run: "20261130T120000Z-abc".into(), configurations: 2, resumed: false }),
        event(0.0, EventKind::Notice { text: "[profile.cpu] was applied: there is no CUDA device.".into() }),
        started(0.1, "p128", FULL_SHARD, Purpose::Probe, 128, 1),
        ended(12.5, "p128", FULL_SHARD, Purpose::Probe, 128, TrialOutcome::OutOfDeviceMemory { details: Some(out_of_memory) }, ""),
        started(12.6, "p64", FULL_SHARD, Purpose::Probe, 64, 1),
        said(12.7, "p64", MessageKind::Phase { phase: "train".into() }),
        said(12.9, "p64", step(1, 6.9, false)),
        ended(25.0, "p64", FULL_SHARD, Purpose::Probe, 64, TrialOutcome::Done, ""),
        event(25.0, kind(FULL_SHARD, Some(64), LimitedBy::Memory)),
        started(25.1, "t64", FULL_SHARD, Purpose::Train, 64, 1),
        said(25.2, "t64", MessageKind::Warning { message: "96 tokens were dropped".into() }),
        said(25.3, "t64", MessageKind::Warning { message: "96 tokens were dropped".into() }),
        said(25.4, "t64", MessageKind::Phase { phase: "train".into() }),
        said(26.0, "t64", step(1, 6.912_34, true)),
        said(30.2, "t64", step(9, 5.5, false)),
        said(30.7, "t64", step(10, 5.25, false)),
        said(34.0, "t64", MessageKind::Phase { phase: "evaluate".into() }),
        said(36.0, "t64", evaluation(64, 85.128)),
        said(36.5, "t64", evaluation(32, 99.0)),
        ended(37.5, "t64", FULL_SHARD, Purpose::Train, 64, TrialOutcome::Done, ""),
        event(37.6, kind(SIZE_BASED, Some(256), LimitedBy::Candidates)),
        started(37.7, "t256", SIZE_BASED, Purpose::Train, 256, 1),
        ended(50.0, "t256", SIZE_BASED, Purpose::Train, 256, TrialOutcome::Crashed { code: Some(1), signal: None }, refused),
        event(50.1, EventKind::StopRequested { now: false }),
        event(50.2, EventKind::StopRequested { now: true }),
        event(112.0, EventKind::RunEnded { exit_code: 100, done: 3, failed: 1, outstanding: 0 }),
    ]
}

/// What came of its report.
pub(super) fn report() -> ReportBrief {
    ReportBrief {
        folder: "results/gpt2_blocksize/latest/report".into(),
        rows: vec![
            BriefRow { method: FULL_SHARD.into(), block_size_max: Some(64), time_per_epoch_seconds: Some(112.0), perplexity: Some(85.128) },
            BriefRow { method: SIZE_BASED.into(), block_size_max: Some(256), ..BriefRow::default() },
        ],
    }
}
