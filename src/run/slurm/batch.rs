//! What is on record of submissions: a folder for each job array, written before SLURM hears of it, so that whoever comes after a crash finds every job.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::store::{AttemptFolder, RunFolder, StoreError, io_error, read_json, write_json, write_whole};
use crate::trial::{TrialId, child_exit};

/// `<run>/slurm/<number>`: `job.sh`, `tasks.txt`, the tasks' logs, and `job.json` once SLURM has taken it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) folder: PathBuf,
    /// Name of its jobs: run and number, so that no other job of this user has it.
    pub(super) name: String,
}

/// `job.json`
#[derive(Debug, Serialize, Deserialize)]
struct JobRecord {
    /// Id of the array.
    job: String,
}

/// `exit.json` in an attempt's folder, written by the batch script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct ExitRecord {
    /// As a shell has it: 128 and a signal's number where a signal ended the trial.
    pub(super) exit_code: i32,
    /// Whether that is the last word on the attempt: SLURM may put a task back into its queue that was ended from outside.
    #[serde(rename = "final")]
    pub(super) is_final: bool,
    /// Whether SLURM asked the task to end.
    pub(super) terminated: bool,
    /// Whether the task saved its state and could not put itself back into the queue.
    pub(super) requeue_failed: bool,
    /// Seconds the task took.
    pub(super) seconds: u64,
}

impl ExitRecord {
    /// Reads the record of an attempt; `None` where there is none yet.
    pub(super) fn read(attempt: &AttemptFolder) -> Option<Self> {
        read_json(&attempt.exit()).ok()
    }

    /// Exit code and signal, of which a process has one; none where SLURM ended it: then the end of the job tells more.
    pub(super) fn code_and_signal(self) -> (Option<i32>, Option<i32>) {
        match self.exit_code {
            code if self.is_final || code == child_exit::CHECKPOINTED => (Some(code), None),
            _ if self.terminated => (None, None),
            code => (None, Some(code - 128)),
        }
    }
}

/// A task of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) trial: TrialId,
    pub(super) attempt: u32,
    /// From 1, its place in the array.
    pub(super) number: usize,
}

impl Batch {
    /// Makes the folder of the next batch.
    pub(super) fn create(run: &RunFolder) -> Result<Self, StoreError> {
        let parent = run.slurm();
        fs::create_dir_all(&parent).map_err(io_error("create", &parent))?;
        let mut number = numbers(&parent)?.last().map_or(1, |last| last + 1);
        loop {
            let batch = Self::of(run, number);
            match fs::create_dir(&batch.folder) {
                Ok(()) => return Ok(batch),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(io_error("create", &batch.folder)(error)),
            }
        }
    }

    fn of(run: &RunFolder, number: u64) -> Self {
        Self { folder: run.slurm().join(number.to_string()), name: format!("sweep-{}-{number}", run.name()) }
    }

    /// Every batch of a run, oldest first.
    pub(super) fn all(run: &RunFolder) -> Result<Vec<Self>, StoreError> {
        Ok(numbers(&run.slurm())?.into_iter().map(|number| Self::of(run, number)).collect())
    }

    /// Path of its script.
    pub(super) fn script(&self) -> PathBuf {
        self.folder.join("job.sh")
    }

    /// Path of a task's log: what the script and `srun` say.
    pub(super) fn log(&self, task: usize) -> PathBuf {
        self.folder.join(format!("{task}.log"))
    }

    /// Writes down what is going to be submitted.
    pub(super) fn prepare(&self, script: &str, attempts: &[AttemptFolder]) -> Result<(), StoreError> {
        let tasks: String = attempts.iter().map(|attempt| format!("{}\n", attempt.0.display())).collect();
        write_whole(&self.folder.join("tasks.txt"), tasks.as_bytes())?;
        write_whole(&self.script(), script.as_bytes())
    }

    /// Writes down that SLURM has taken it.
    pub(super) fn submitted(&self, job: &str) -> Result<(), StoreError> {
        write_json(&self.folder.join("job.json"), &JobRecord { job: job.to_owned() })
    }

    /// The id of its array, where it is on record.
    pub(super) fn job(&self) -> Option<String> {
        read_json::<JobRecord>(&self.folder.join("job.json")).ok().map(|record| record.job)
    }

    /// Its tasks. A line that names no attempt is nobody's.
    pub(super) fn tasks(&self) -> Vec<Task> {
        let text = fs::read_to_string(self.folder.join("tasks.txt")).unwrap_or_default();
        let task = |(index, line): (usize, &str)| {
            let path = Path::new(line);
            let attempt = path.file_name()?.to_str()?.strip_prefix("attempt-")?.parse().ok()?;
            let trial = path.parent()?.file_name()?.to_str()?;
            Some(Task { trial: TrialId(trial.to_owned()), attempt, number: index + 1 })
        };
        text.lines().enumerate().filter_map(task).collect()
    }
}

/// Numbers of the batches in `folder`, ascending.
fn numbers(folder: &Path) -> Result<Vec<u64>, StoreError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("read", folder)(error)),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry.map_err(io_error("read", folder))?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_submitted_is_found_again() {
        let world = tempfile::tempdir().unwrap();
        let run = RunFolder(world.path().join("20261130T154932.123456Z-abcdef"));
        assert_eq!(Batch::all(&run).unwrap(), []);
        let batch = Batch::create(&run).unwrap();
        assert_eq!(batch.name, "sweep-20261130T154932.123456Z-abcdef-1");
        let attempts = [run.attempt(&TrialId("aa".into()), 1), run.attempt(&TrialId("bb".into()), 12)];
        batch.prepare("#!/bin/bash\n", &attempts).unwrap();
        assert_eq!(batch.job(), None);
        batch.submitted("77").unwrap();
        fs::write(run.slurm().join("greetings"), "").unwrap();
        for _ in 0..10 {
            Batch::create(&run).unwrap();
        }
        let found = Batch::all(&run).unwrap();
        assert_eq!((found.len(), &found[0], found[0].job()), (11, &batch, Some("77".into())));
        assert!(found[10].name.ends_with("-11"));
        let task = |trial: &str, attempt, number| Task { trial: TrialId(trial.into()), attempt, number };
        assert_eq!(found[0].tasks(), [task("aa", 1, 1), task("bb", 12, 2)]);
    }

    #[test]
    fn exit_codes_are_a_shells() {
        let world = tempfile::tempdir().unwrap();
        let attempt = AttemptFolder(world.path().to_owned());
        assert_eq!(ExitRecord::read(&attempt), None);
        // Exit code, whether that is the last word, whether the task was asked to end.
        let table = [
            (0, true, false, (Some(0), None)),
            (3, true, true, (Some(3), None)),
            (127, true, false, (Some(127), None)),
            (75, false, false, (Some(75), None)),
            (75, false, true, (Some(75), None)),
            (137, false, false, (None, Some(9))),
            (143, false, true, (None, None)),
            (1, false, true, (None, None)),
        ];
        for (code, is_final, terminated, expected) in table {
            let record =
                format!("{{\"exit_code\":{code},\"final\":{is_final},\"terminated\":{terminated},\"requeue_failed\":false,\"seconds\":3}}\n");
            fs::write(attempt.exit(), record).unwrap();
            assert_eq!(ExitRecord::read(&attempt).unwrap().code_and_signal(), expected, "{code}");
        }
    }
}
