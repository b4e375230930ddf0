//! SLURM's client programs: started, and what they print read. Nothing here decides anything.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::trial::JobState;

/// A client program failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// It is not there.
    #[error("{program} is not on PATH")]
    Missing {
        /// Which.
        program: &'static str,
    },
    /// It could not be started, or said that it failed.
    #[error("{program}: {said}")]
    Failed {
        /// Which.
        program: &'static str,
        /// What it, or the system, said.
        said: String,
    },
}

impl ClientError {
    /// Whether trying again may help without any change: the controller did not answer.
    pub fn may_pass(&self) -> bool {
        const PASSING: [&str; 7] = [
            "Unable to contact slurm controller",
            "Connection refused",
            "Connection timed out",
            "Socket timed out",
            "Zero Bytes were transmitted",
            "Slurm backup controller in standby mode",
            "temporarily unable",
        ];
        matches!(self, Self::Failed { said, .. } if PASSING.iter().any(|text| said.contains(text)))
    }
}

/// A job, or a task of an array, as the queue shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Queued {
    /// Name of the job.
    pub(super) name: String,
    pub(super) state: JobState,
    /// Why it is in this state, in SLURM's words.
    pub(super) reason: String,
}

/// Jobs by their id: `<array>_<task>`.
pub(super) type Queue = BTreeMap<String, Queued>;

/// Submits a script and returns the id of its job.
pub(super) fn sbatch(script: &Path) -> Result<String, ClientError> {
    let printed = run("sbatch", Command::new("sbatch").arg("--parsable").arg(script))?;
    job_id(&printed).ok_or_else(|| ClientError::Failed { program: "sbatch", said: format!("it printed no job id but {:?}", printed.trim()) })
}

/// Asks whether a script would be accepted; nothing is submitted.
pub(super) fn sbatch_test_only(script: &Path) -> Result<(), ClientError> {
    run("sbatch", Command::new("sbatch").arg("--test-only").arg(script)).map(drop)
}

/// Every job of this user that SLURM still knows, in one call.
pub(super) fn squeue() -> Result<Queue, ClientError> {
    let user = rustix::process::getuid().as_raw().to_string();
    let printed = run("squeue", Command::new("squeue").args(["--noheader", "--array", "--states=all", "--user", &user, "--format=%i|%j|%T|%r"]))?;
    Ok(queue(&printed))
}

/// How a job ended that is no longer in the queue; `None` where the accounting does not know it either.
pub(super) fn sacct(id: &str) -> Result<Option<JobState>, ClientError> {
    let printed = run("sacct", Command::new("sacct").args(["--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", id]))?;
    Ok(printed.lines().find(|line| !line.trim().is_empty()).map(|line| JobState::parse(line.trim())))
}

/// Ends jobs; those that have ended are left alone.
pub(super) fn scancel(ids: &[String], at_once: bool) -> Result<(), ClientError> {
    let mut command = Command::new("scancel");
    if at_once {
        // The batch script too: nothing is asked of it any more.
        command.args(["--full", "--signal=KILL"]);
    }
    run("scancel", command.args(ids)).map(drop)
}

fn run(program: &'static str, command: &mut Command) -> Result<String, ClientError> {
    // Ctrl-C is for sweep, which ends what it has begun: half a submission helps nobody.
    let output = command.stdin(Stdio::null()).process_group(0).output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ClientError::Missing { program },
        _ => ClientError::Failed { program, said: error.to_string() },
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        let said = if said.is_empty() { output.status.to_string() } else { said };
        return Err(ClientError::Failed { program, said });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The id in what `sbatch --parsable` prints: `id` or `id;cluster`.
fn job_id(printed: &str) -> Option<String> {
    let id = printed.lines().last()?.split(';').next()?.trim();
    (!id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())).then(|| id.to_owned())
}

/// The lines of `squeue`. Those that are none are left out: sites print all kinds of greetings.
fn queue(printed: &str) -> Queue {
    let job = |line: &str| {
        let mut fields = line.splitn(4, '|');
        let (id, name, state, reason) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let queued = Queued { name: name.to_owned(), state: JobState::parse(state.trim()), reason: reason.trim().to_owned() };
        (!id.trim().is_empty()).then(|| (id.trim().to_owned(), queued))
    };
    printed.lines().filter_map(job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::JobEnd;

    #[test]
    fn the_id_of_a_submission() {
        assert_eq!(job_id("1234\n"), Some("1234".into()));
        assert_eq!(job_id("1234;cluster\n"), Some("1234".into()));
        assert_eq!(job_id("Welcome to the cluster!\n1234\n"), Some("1234".into()));
        assert_eq!(job_id(""), None);
        assert_eq!(job_id("Submitted batch job 12\n"), None);
    }

    #[test]
    fn the_queue_as_squeue_prints_it() {
        let printed =
            "greetings\n4_1|sweep-a-1|RUNNING|None\n4_2|sweep-a-1|PENDING|launch failed requeued held\n5|other|COMPLETED|None\n6_1|x|NODE_FAIL|a|b\n";
        let queue = queue(printed);
        let job = |name: &str, state, reason: &str| Queued { name: name.into(), state, reason: reason.into() };
        let expected = [
            ("4_1", job("sweep-a-1", JobState::Running, "None")),
            ("4_2", job("sweep-a-1", JobState::Pending, "launch failed requeued held")),
            ("5", job("other", JobState::Ended(JobEnd::Completed), "None")),
            ("6_1", job("x", JobState::Ended(JobEnd::NodeFailed), "a|b")),
        ];
        assert_eq!(queue, expected.map(|(id, job)| (id.to_owned(), job)).into_iter().collect());
    }

    #[test]
    fn what_may_pass_is_told_from_what_will_not() {
        let failed = |said: &str| ClientError::Failed { program: "sbatch", said: said.into() };
        assert!(failed("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)").may_pass());
        assert!(failed("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation").may_pass());
        assert!(!failed("sbatch: error: invalid partition specified: gpuu").may_pass());
        assert!(!ClientError::Missing { program: "sbatch" }.may_pass());
    }
}
