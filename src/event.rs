//! What happens during a run, in order. The run loop emits events; `events.jsonl`, the terminal and `--json` are three readers of the same stream.

use serde::{Deserialize, Serialize};

use crate::protocol::{Message, Timestamp};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub at: Timestamp,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Every kind of event. Unknown kinds of newer versions are skipped by readers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventKind {
    /// The run began, or went on.
    RunStarted {
        /// Name of the sweep.
        sweep: String,
        /// Name of the run folder.
        run: String,
        /// Configurations to settle.
        configurations: usize,
        /// Whether an unfinished run goes on.
        resumed: bool,
    },
    /// Something the user should know about the results; a sentence. Part of the report.
    Notice {
        /// The sentence.
        text: String,
    },
    /// Something the user should know about the course of the run: that it goes on, or stops; a sentence. No part of the report, which is the same however often
    /// the run was cut off.
    Remark {
        /// The sentence.
        text: String,
    },
    /// A child process was assigned to a trial. Written before the child starts.
    TrialStarted {
        /// Which trial.
        trial: TrialId,
        /// Its configuration.
        configuration: ConfigurationId,
        /// Label of the first row it serves.
        label: String,
        /// What it is for.
        purpose: Purpose,
        /// Tokens per sequence.
        block_size: usize,
        /// Which repeat, from 0.
        repeat: u32,
        /// Which attempt, from 1.
        attempt: u32,
        /// Device memory each rank may use; `None` where there is no budget.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        budget_bytes: Option<u64>,
    },
    /// A message of a running trial. Not stored in `events.jsonl`: it stands in the attempt's own `messages.jsonl`.
    TrialProgress {
        /// Which trial.
        trial: TrialId,
        /// What the child said.
        message: Message,
    },
    /// The attempt ended and was classified.
    TrialEnded {
        /// Which trial.
        trial: TrialId,
        /// Label of the first row it serves.
        label: String,
        /// What it was for.
        purpose: Purpose,
        /// Tokens per sequence.
        block_size: usize,
        /// Which attempt.
        attempt: u32,
        /// How it ended.
        #[serde(flatten)]
        outcome: TrialOutcome,
        /// Seconds it ran.
        seconds: f64,
        /// Last lines of stderr, for trials that failed.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        stderr_tail: String,
    },
    /// The search of a configuration ended.
    BlockSizeFound {
        /// Which configuration.
        configuration: ConfigurationId,
        /// Label of its first row.
        label: String,
        /// The largest block size that fits; `None` when not even the smallest candidate does.
        block_size: Option<usize>,
        /// What stands in the way of a larger one.
        limited_by: LimitedBy,
    },
    /// The user asked to stop; `now` after the second request.
    StopRequested {
        /// Kill at once instead of waiting for the grace period.
        now: bool,
    },
    /// The run ended.
    RunEnded {
        /// Exit code of `sweep run`.
        exit_code: u8,
        /// Trials that ended well.
        done: usize,
        /// Trials that failed.
        failed: usize,
        /// Trials that have not run.
        outstanding: usize,
    },
}

/// What stands in the way of a larger block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedBy {
    /// The next candidate runs out of device memory.
    Memory,
    /// The next candidate exceeds the model's positions.
    Model,
    /// The largest candidate fits.
    Candidates,
    /// The next candidate leaves less than one global batch of data.
    Data,
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::{Event, EventKind};
    use crate::protocol::Timestamp;
    use crate::trial::{Purpose, TrialId, TrialOutcome};

    /// Every outcome is flattened into its event, so none of its fields may have the name of one of the event's.
    #[test]
    fn every_outcome_survives_being_written_and_read() {
        let reason = || "why".to_owned();
        let outcomes = [
            TrialOutcome::Done,
            TrialOutcome::OutOfDeviceMemory { details: None },
            TrialOutcome::OutOfHostMemory { reason: reason() },
            TrialOutcome::Stalled { seconds: 61.0, phase: Some("train".into()) },
            TrialOutcome::TimedOut { seconds: 3600.0 },
            TrialOutcome::Diverged { reason: reason() },
            TrialOutcome::BadConfiguration { reason: reason() },
            TrialOutcome::Failed { reason: reason() },
            TrialOutcome::Crashed { code: None, signal: Some(11) },
            TrialOutcome::KilledByUser,
            TrialOutcome::Preempted,
            TrialOutcome::Infrastructure { reason: reason() },
            TrialOutcome::ProtocolBroken { reason: reason() },
        ];
        for outcome in outcomes {
            let event = Event {
                at: Timestamp(SystemTime::UNIX_EPOCH),
                kind: EventKind::TrialEnded {
                    trial: TrialId("t".into()),
                    label: "row".into(),
                    purpose: Purpose::Train,
                    block_size: 64,
                    attempt: 1,
                    outcome,
                    seconds: 70.0,
                    stderr_tail: "last words".into(),
                },
            };
            let text = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&text).map_err(|error| format!("{error}: {text}")), Ok(event));
        }
    }
}
