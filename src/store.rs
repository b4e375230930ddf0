//! The results folder: where everything lies, how it is written so that nothing is lost, and how it is read back.
//!
//! Layout: `<results>/<sweep>/<run>/{sweep.toml,run.json,events.jsonl,trials/<id>/...,report/...}`; `<results>/<sweep>/latest` points to the newest run.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::protocol::{PreparedData, Timestamp};
use crate::spec::plan::{BlockSizeSearch, CheckpointSettings, Limits, ReportSettings, Row};
use crate::spec::settings::Settings;
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

mod lock;
mod runs;
mod state;

pub use lock::{LockAttempt, LockOwner, RunLock};
pub use runs::{check_writable, choose_run, create_run, newest_run};
pub use state::{BlockSizeResult, RunState, TrialState};

/// Version of the results folder. Readers refuse a higher one by name.
pub const FORMAT_VERSION: u32 = 1;

/// `run.json`: what the run set out to do. Written once, before the first trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunManifest {
    /// [`FORMAT_VERSION`] of its writer.
    pub format_version: u32,
    /// Version of `sweep` that wrote it.
    pub sweep_version: String,
    /// Name of the sweep.
    pub sweep: String,
    /// Name of the run folder.
    pub run: String,
    /// What the sweep is for.
    pub description: Option<String>,
    /// When it began.
    pub created_at: Timestamp,
    /// SHA-256 of the sweep file as it was read, hexadecimal.
    pub sweep_file_sha256: String,
    /// Profiles applied, in order.
    pub profiles: Vec<String>,
    /// `--set` arguments, in order.
    pub overrides: Vec<String>,
    /// Where it runs.
    pub host: Host,
    /// Label of the row that others are compared with.
    pub control: Option<String>,
    /// Trainings per configuration and block size.
    pub repeats: u32,
    /// Rows of the tables, in order.
    pub rows: Vec<ManifestRow>,
    /// The search, where there is one.
    pub search: Option<BlockSizeSearch>,
    /// `[checkpoint]`
    #[serde(default)]
    pub checkpoint: CheckpointSettings,
    /// `[limits]`
    pub limits: Limits,
    /// `[report]`
    pub report: ReportSettings,
    /// What the user was told before anything started.
    pub notices: Vec<String>,
}

/// A row and the configuration that fills it; rows whose differences cannot matter share one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ManifestRow {
    /// The row.
    #[serde(flatten)]
    pub row: Row,
    /// Its configuration.
    pub configuration: ConfigurationId,
    /// The data it trains on.
    pub data: PreparedData,
}

/// The machine of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Names of its GPUs, as NVML lists them.
    pub gpus: Vec<String>,
}

/// `trial.json`: what a trial is, beside its attempts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialRecord {
    /// Its id, also the folder's name.
    pub id: TrialId,
    /// Label of the first row it serves.
    pub label: String,
    /// What it is for.
    pub purpose: Purpose,
    /// Its configuration.
    pub configuration: ConfigurationId,
    /// Tokens per sequence.
    pub block_size: usize,
    /// Which repeat, from 0.
    pub repeat: u32,
    /// All resolved parameters.
    pub settings: Settings,
}

/// `outcome.json`: how an attempt ended, as the run classified it. With it a trial's folder says by itself whether the trial is finished, whatever
/// became of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptRecord {
    /// Which trial.
    pub trial: TrialId,
    /// Which attempt, from 1.
    pub attempt: u32,
    /// When it was assigned.
    pub started_at: Timestamp,
    /// Seconds it ran.
    pub seconds: f64,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: TrialOutcome,
    /// Last lines of stderr, for trials that failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr_tail: String,
}

/// A file of the results folder could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// `read`, `write`, `create`, `rename` ...
        action: &'static str,
        /// Which file or folder.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong, with its line where there is one.
        reason: String,
    },
    /// A newer `sweep` wrote it.
    #[error("{} has results format {found}, this sweep reads up to {FORMAT_VERSION}; use sweep {writer} or newer", path.display())]
    NewerFormat {
        /// The run folder.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// Version of `sweep` that wrote it.
        writer: String,
    },
}

/// Names the action and the path of an I/O error.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |error| StoreError::Io { action, path: path.to_owned(), error }
}

/// Name of the folder, beside a trial's attempts, that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// Name of the folder, beside a trial's attempts, that holds the trained model.
pub const MODEL: &str = "model";

/// Paths of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder(pub PathBuf);

impl RunFolder {
    /// The sweep file as it was read.
    pub fn sweep_file(&self) -> PathBuf {
        self.0.join("sweep.toml")
    }
    /// What the run set out to do.
    pub fn manifest(&self) -> PathBuf {
        self.0.join("run.json")
    }
    /// What happened, a line each.
    pub fn events(&self) -> PathBuf {
        self.0.join("events.jsonl")
    }
    /// All trials.
    pub fn trials(&self) -> PathBuf {
        self.0.join("trials")
    }
    /// One trial.
    pub fn trial(&self, id: &TrialId) -> PathBuf {
        self.trials().join(&id.0)
    }
    /// What a trial is: a [`TrialRecord`].
    pub fn trial_record(&self, id: &TrialId) -> PathBuf {
        self.trial(id).join("trial.json")
    }
    /// One attempt of a trial, from 1.
    pub fn attempt(&self, id: &TrialId, attempt: u32) -> AttemptFolder {
        AttemptFolder(self.trial(id).join(format!("attempt-{attempt}")))
    }
    /// State saved by the attempts of a trial.
    pub fn checkpoints(&self, id: &TrialId) -> PathBuf {
        self.trial(id).join(CHECKPOINTS)
    }
    /// Job arrays submitted to SLURM, a folder each.
    pub fn slurm(&self) -> PathBuf {
        self.0.join("slurm")
    }
    /// Tables, page and plots.
    pub fn report(&self) -> PathBuf {
        self.0.join("report")
    }
}

/// Paths of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptFolder(pub PathBuf);

impl AttemptFolder {
    /// What the child is asked.
    pub fn request(&self) -> PathBuf {
        self.0.join("request.json")
    }
    /// What it says while it runs.
    pub fn messages(&self) -> PathBuf {
        self.0.join("messages.jsonl")
    }
    /// Its standard output.
    pub fn stdout(&self) -> PathBuf {
        self.0.join("stdout.log")
    }
    /// Its standard error.
    pub fn stderr(&self) -> PathBuf {
        self.0.join("stderr.log")
    }
    /// Samples taken while it ran; columns [`TELEMETRY_COLUMNS`].
    pub fn telemetry(&self) -> PathBuf {
        self.0.join("telemetry.csv")
    }
    /// What its threads were doing when it was ended for doing nothing.
    pub fn stacks(&self) -> PathBuf {
        self.0.join("stacks.txt")
    }
    /// What it measured, and how it says that it ended.
    pub fn result(&self) -> PathBuf {
        self.0.join("result.json")
    }
    /// The exit code of its process, where a batch script rather than `sweep run` saw it end.
    pub fn exit(&self) -> PathBuf {
        self.0.join("exit.json")
    }
    /// How the run classified its end: an [`AttemptRecord`].
    pub fn outcome(&self) -> PathBuf {
        self.0.join("outcome.json")
    }
}

/// Header of `telemetry.csv`: one row per source and sample, empty where the source cannot say. `source` is `host` (the child's process tree:
/// `utilization_percent` in percent of one core, `memory_bytes` resident) or a GPU's UUID.
pub const TELEMETRY_COLUMNS: [&str; 7] =
    ["elapsed_s", "source", "utilization_percent", "memory_bytes", "memory_total_bytes", "power_watts", "temperature_celsius"];

/// Reads a JSON file.
///
/// # Errors
/// The file cannot be read, or is not what it should be.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, StoreError> {
    let text = fs::read(path).map_err(io_error("read", path))?;
    serde_json::from_slice(&text).map_err(|error| StoreError::Malformed { path: path.to_owned(), reason: error.to_string() })
}

/// Writes a JSON file whole or not at all: temporary file, fsync, rename, fsync of the folder.
///
/// # Errors
/// The operating system refused.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|error| StoreError::Malformed { path: path.to_owned(), reason: error.to_string() })?;
    text.push(b'\n');
    write_whole(path, &text)
}

/// Writes a file whole or not at all: temporary file, fsync, rename, fsync of the folder.
///
/// # Errors
/// The operating system refused.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), StoreError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".partial-").tempfile_in(folder).map_err(io_error("write", path))?;
    file.write_all(contents).map_err(io_error("write", path))?;
    file.as_file().sync_all().map_err(io_error("write", path))?;
    file.persist(path).map_err(|error| io_error("rename", path)(error.error))?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("write", folder))
}

/// Writes a JSON file whole or not at all as long as the machine runs: temporary file and rename. What must outlive the machine is [synced](sync) later, or
/// written by [`write_json`].
///
/// # Errors
/// The operating system refused.
pub fn replace_json<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let malformed = |error: serde_json::Error| StoreError::Malformed { path: path.to_owned(), reason: error.to_string() };
    let mut text = serde_json::to_vec_pretty(value).map_err(malformed)?;
    text.push(b'\n');
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".partial-{name}"));
    fs::write(&temporary, &text).map_err(io_error("write", &temporary))?;
    fs::rename(&temporary, path).map_err(io_error("rename", path))
}

/// Waits until a file's contents, or a folder's entries, are on disk.
///
/// # Errors
/// The operating system refused.
pub fn sync(path: &Path) -> Result<(), StoreError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(io_error("write", path))
}

/// Appends records to a JSON-lines file, one write each, so that a crash tears at most the last.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens `path` for appending. What an earlier writer left half written is completed where only its newline is missing, and cut off otherwise, so that
    /// nothing is ever glued to it.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn append_to(path: &Path) -> Result<Self, StoreError> {
        let contents = match fs::read(path) {
            Ok(contents) => contents,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(io_error("read", path)(error)),
        };
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(io_error("write", path))?;
        let whole = contents.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let tail = &contents[whole..];
        if serde_json::from_slice::<serde::de::IgnoredAny>(tail).is_ok() {
            file.write_all(b"\n").map_err(io_error("write", path))?;
        } else if !tail.is_empty() {
            file.set_len(whole as u64).map_err(io_error("write", path))?;
        }
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends one record.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn push<T: Serialize>(&mut self, record: &T) -> Result<(), StoreError> {
        let mut line = serde_json::to_vec(record).map_err(|error| StoreError::Malformed { path: self.path.clone(), reason: error.to_string() })?;
        line.push(b'\n');
        let mut written = 0;
        while written < line.len() {
            match self.file.write(&line[written..]) {
                Ok(0) => return Err(io_error("write", &self.path)(io::ErrorKind::WriteZero.into())),
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // A full disk may have taken the beginning of the line; it is taken back, so that what is there stays whole.
                    if written > 0
                        && let Ok(metadata) = self.file.metadata()
                    {
                        let _ = self.file.set_len(metadata.len().saturating_sub(written as u64));
                    }
                    return Err(io_error("write", &self.path)(error));
                }
            }
        }
        Ok(())
    }

    /// Waits until everything appended so far is on disk.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn sync(&mut self) -> Result<(), StoreError> {
        self.file.sync_data().map_err(io_error("write", &self.path))
    }
}

/// Records of a JSON-lines file, and the lines that could not be read.
#[derive(Debug)]
pub struct JsonLinesContents<T> {
    /// Records in order.
    pub records: Vec<T>,
    /// Line number (from 1) and reason of each unreadable line. A torn last line without its newline is not counted: its writer was cut off. Nor is a
    /// record of a kind that only newer versions know.
    pub unreadable: Vec<(usize, String)>,
}

/// Reads a JSON-lines file; a missing file has no records.
///
/// # Errors
/// The file exists and cannot be read.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<JsonLinesContents<T>, StoreError> {
    let contents = match fs::read(path) {
        Ok(contents) => contents,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(io_error("read", path)(error)),
    };
    let mut found = JsonLinesContents { records: Vec::new(), unreadable: Vec::new() };
    for (index, line) in contents.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let whole = line.ends_with(b"\n");
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(record) => found.records.push(record),
            Err(_) if !whole => {}
            Err(error) if error.to_string().starts_with("unknown variant") => {}
            Err(error) => found.unreadable.push((index + 1, error.to_string())),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, EventKind};

    fn notice(text: &str) -> Event {
        Event { at: Timestamp::now(), kind: EventKind::Notice { text: text.to_owned() } }
    }

    fn texts(path: &Path) -> Vec<String> {
        let contents = read_json_lines::<Event>(path).unwrap();
        assert_eq!(contents.unreadable, [], "nothing may be unreadable");
        let text = |event| match event {
            Event { kind: EventKind::Notice { text }, .. } => text,
            other => panic!("{other:?}"),
        };
        contents.records.into_iter().map(text).collect()
    }

    /// Case 5: the last record cut at every byte.
    #[test]
    fn a_torn_tail_is_never_glued_to_the_next_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut lines = JsonLines::append_to(&path).unwrap();
        lines.push(&notice("first")).unwrap();
        let kept = fs::metadata(&path).unwrap().len();
        lines.push(&notice("second")).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in kept as usize..=whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let second_survives = length + 1 >= whole.len();
            assert_eq!(texts(&path).len(), if second_survives { 2 } else { 1 }, "read when cut at {length}");
            JsonLines::append_to(&path).unwrap().push(&notice("third")).unwrap();
            let expected: &[&str] = if second_survives { &["first", "second", "third"] } else { &["first", "third"] };
            assert_eq!(texts(&path), expected, "cut at {length}");
        }
    }

    /// Case 5: a damaged record in the middle is reported with its line, one of a kind that only newer versions know is skipped.
    #[test]
    fn a_damaged_record_in_the_middle_is_reported_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let line = |text: &str| serde_json::to_string(&notice(text)).unwrap();
        let newer = r#"{"at":"2026-01-01T00:00:00.000Z","kind":"of_the_future","text":"x"}"#;
        fs::write(&path, format!("{}\n{newer}\n{{\"at\":\n\n{}\n", line("first"), line("second"))).unwrap();
        let contents = read_json_lines::<Event>(&path).unwrap();
        assert_eq!(contents.records.len(), 2);
        assert_eq!(contents.unreadable.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn errors_name_the_path() {
        let error = write_whole(Path::new("/proc/no-such-folder/file"), b"x").unwrap_err();
        assert!(error.to_string().starts_with("cannot write /proc/no-such-folder/file: "), "{error}");
    }
}
