//! What SLURM says of a job, and what that means for the attempt that ran in it.

use super::TrialOutcome;

/// The state of a job that is still known to SLURM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waits for its turn, for the first time or again: a job that was requeued has not failed.
    Pending,
    /// Runs, or is held up while it does.
    Running,
    /// Has ended and is being cleaned up; what comes of it is not known yet.
    Completing,
    /// Has ended.
    Ended(JobEnd),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// `COMPLETED`
    Completed,
    /// `FAILED`
    Failed,
    /// `TIMEOUT`
    TimeLimit,
    /// `NODE_FAIL`, `BOOT_FAIL`
    NodeFailed,
    /// `OUT_OF_MEMORY`
    OutOfMemory,
    /// `PREEMPTED`
    Preempted,
    /// `CANCELLED`
    Cancelled,
    /// SLURM no longer knows it.
    Forgotten,
    /// Another word of SLURM's.
    Other(String),
}

impl JobState {
    /// Reads a state as `squeue` and `sacct` write it.
    pub fn parse(word: &str) -> Self {
        // sacct: "CANCELLED by 1000".
        let word = word.split([' ', '+']).next().unwrap_or_default();
        match word {
            "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD" | "RESV_DEL_HOLD" | "SPECIAL_EXIT" => Self::Pending,
            "RUNNING" | "SUSPENDED" | "STOPPED" | "RESIZING" | "SIGNALING" => Self::Running,
            "COMPLETING" | "STAGE_OUT" => Self::Completing,
            "COMPLETED" => Self::Ended(JobEnd::Completed),
            "FAILED" => Self::Ended(JobEnd::Failed),
            "TIMEOUT" => Self::Ended(JobEnd::TimeLimit),
            "NODE_FAIL" | "BOOT_FAIL" => Self::Ended(JobEnd::NodeFailed),
            "OUT_OF_MEMORY" => Self::Ended(JobEnd::OutOfMemory),
            "PREEMPTED" => Self::Ended(JobEnd::Preempted),
            "CANCELLED" => Self::Ended(JobEnd::Cancelled),
            other => Self::Ended(JobEnd::Other(other.to_owned())),
        }
    }
}

/// The job of an attempt that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedJob {
    /// Its id, `<array>_<task>`.
    pub id: String,
    /// How it ended.
    pub end: JobEnd,
}

/// The signal that ended a process, as a number.
const KILL: i32 = 9;

impl EndedJob {
    /// What the end of the job alone makes of an attempt; `None` where the child's own end says more. `exited` says whether the child ended by itself,
    /// `signal` which signal ended it: SLURM ends a job by ending its processes.
    pub(super) fn outcome(&self, exited: bool, signal: Option<i32>, seconds: f64) -> Option<TrialOutcome> {
        if exited {
            return None;
        }
        let infrastructure = |what: &str| Some(TrialOutcome::Infrastructure { reason: format!("SLURM job {} {what}", self.id) });
        match &self.end {
            JobEnd::OutOfMemory if signal.is_none_or(|signal| signal == KILL) => {
                Some(TrialOutcome::OutOfHostMemory { reason: format!("SLURM job {} used more memory than it was given", self.id) })
            }
            JobEnd::TimeLimit => Some(TrialOutcome::TimedOut { seconds }),
            JobEnd::Preempted => Some(TrialOutcome::Preempted),
            JobEnd::NodeFailed => infrastructure("lost its node"),
            JobEnd::Cancelled => infrastructure("was cancelled by somebody else"),
            // The child was killed by a signal while its job went on.
            _ if signal.is_some() => None,
            JobEnd::Completed | JobEnd::Failed => infrastructure("ended before its trial did"),
            JobEnd::OutOfMemory => None,
            JobEnd::Forgotten => infrastructure("is no longer known to SLURM and left no exit code"),
            JobEnd::Other(word) => infrastructure(&format!("ended as {word}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AttemptEnding, EndedBy, classify};
    use super::*;

    #[test]
    fn every_word_of_slurm_is_understood() {
        let table = [
            ("PENDING", JobState::Pending),
            ("REQUEUED", JobState::Pending),
            ("REQUEUE_HOLD", JobState::Pending),
            ("SPECIAL_EXIT", JobState::Pending),
            ("CONFIGURING", JobState::Pending),
            ("RUNNING", JobState::Running),
            ("SUSPENDED", JobState::Running),
            ("COMPLETING", JobState::Completing),
            ("COMPLETED", JobState::Ended(JobEnd::Completed)),
            ("FAILED", JobState::Ended(JobEnd::Failed)),
            ("TIMEOUT", JobState::Ended(JobEnd::TimeLimit)),
            ("NODE_FAIL", JobState::Ended(JobEnd::NodeFailed)),
            ("BOOT_FAIL", JobState::Ended(JobEnd::NodeFailed)),
            ("OUT_OF_MEMORY", JobState::Ended(JobEnd::OutOfMemory)),
            ("PREEMPTED", JobState::Ended(JobEnd::Preempted)),
            ("CANCELLED", JobState::Ended(JobEnd::Cancelled)),
            ("CANCELLED by 1000", JobState::Ended(JobEnd::Cancelled)),
            ("CANCELLED+", JobState::Ended(JobEnd::Cancelled)),
            ("DEADLINE", JobState::Ended(JobEnd::Other("DEADLINE".into()))),
        ];
        for (word, expected) in table {
            assert_eq!(JobState::parse(word), expected, "{word}");
        }
    }

    /// Every way a job ends, with and without a word of the child.
    #[test]
    fn every_end_of_a_job_has_its_outcome() {
        let infrastructure = |what: &str| TrialOutcome::Infrastructure { reason: format!("SLURM job 7_2 {what}") };
        let crashed = |signal| TrialOutcome::Crashed { code: None, signal: Some(signal) };
        let failed = |reason: &str| TrialOutcome::Failed { reason: reason.into() };
        let out_of_memory = || TrialOutcome::OutOfHostMemory { reason: "SLURM job 7_2 used more memory than it was given".into() };
        let timed_out = || TrialOutcome::TimedOut { seconds: 2.0 };
        type Row = (JobEnd, Option<i32>, Option<i32>, TrialOutcome);
        let table: Vec<Row> = vec![
            // The child's exit code, the signal that ended it.
            (JobEnd::Failed, Some(3), None, failed("it gave no reason")),
            (JobEnd::Completed, Some(75), None, TrialOutcome::Preempted),
            (JobEnd::Failed, Some(75), None, TrialOutcome::Preempted),
            (JobEnd::TimeLimit, Some(75), None, TrialOutcome::Preempted),
            (JobEnd::Cancelled, Some(75), None, TrialOutcome::Preempted),
            (JobEnd::TimeLimit, None, Some(15), timed_out()),
            (JobEnd::TimeLimit, None, None, timed_out()),
            (JobEnd::OutOfMemory, None, Some(9), out_of_memory()),
            (JobEnd::OutOfMemory, None, None, out_of_memory()),
            (JobEnd::OutOfMemory, None, Some(11), crashed(11)),
            (JobEnd::OutOfMemory, Some(3), None, failed("it gave no reason")),
            (JobEnd::NodeFailed, None, None, infrastructure("lost its node")),
            (JobEnd::Preempted, None, Some(9), TrialOutcome::Preempted),
            (JobEnd::Preempted, None, None, TrialOutcome::Preempted),
            (JobEnd::Cancelled, None, Some(15), infrastructure("was cancelled by somebody else")),
            (JobEnd::Cancelled, None, None, infrastructure("was cancelled by somebody else")),
            (JobEnd::Failed, None, Some(11), crashed(11)),
            (JobEnd::Failed, None, None, infrastructure("ended before its trial did")),
            (JobEnd::Completed, None, None, infrastructure("ended before its trial did")),
            (JobEnd::Forgotten, None, None, infrastructure("is no longer known to SLURM and left no exit code")),
            (JobEnd::Forgotten, None, Some(11), crashed(11)),
            (JobEnd::Other("DEADLINE".into()), None, None, infrastructure("ended as DEADLINE")),
        ];
        for (end, exit_code, signal, expected) in table {
            let job = Some(EndedJob { id: "7_2".into(), end });
            let ending = AttemptEnding { started: true, exit_code, signal, job, seconds: 2.0, ..AttemptEnding::default() };
            assert_eq!(classify(&ending), expected, "{ending:?}");
            if exit_code.is_none() {
                let asked = AttemptEnding { ended_by: Some(EndedBy::User), ..ending };
                assert_eq!(classify(&asked), TrialOutcome::KilledByUser, "{asked:?}");
            }
        }
    }
}
