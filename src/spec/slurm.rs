//! The `[slurm]` table: what a trial asks of a SLURM cluster. It says where trials run and not what they are, so nothing of it is in a trial's id.

use std::ops::Range;
use std::time::Duration;

use serde::{Serialize, Serializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::value::{Kind, Refused};

/// `[slurm]`: used with `--launcher slurm` alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SlurmSettings {
    /// Where jobs queue; the cluster's default without it.
    pub partition: Option<String>,
    /// Which account pays.
    pub account: Option<String>,
    /// Quality of service.
    pub qos: Option<String>,
    /// Features that nodes must have.
    pub constraint: Option<String>,
    /// Time limit of one attempt; the partition's default without it.
    #[serde(rename = "time_seconds", serialize_with = "seconds_if_any")]
    pub time: Option<Duration>,
    /// Nodes of one trial.
    pub nodes: usize,
    /// GPUs on each node; one for each rank without it, where ranks compute on GPUs.
    pub gpus_per_node: Option<usize>,
    /// Cores on each node; one for each rank without it.
    pub cpus_per_task: Option<usize>,
    /// Memory on each node in bytes; the cluster's default without it.
    #[serde(rename = "mem_bytes")]
    pub mem: Option<u64>,
    /// Shell lines that run before each attempt.
    pub setup: Vec<String>,
    /// Trials of one job array that run at a time.
    pub array_limit: Option<usize>,
    /// How long before the time limit a trial is told to save its state.
    #[serde(rename = "signal_before_seconds", serialize_with = "seconds")]
    pub signal_before: Duration,
    /// Time between two looks at the queue.
    #[serde(rename = "poll_interval_seconds", serialize_with = "seconds")]
    pub poll_interval: Duration,
    /// How long a file written on a node may take to be seen here.
    #[serde(rename = "file_delay_seconds", serialize_with = "seconds")]
    pub file_delay: Duration,
    /// More options of `sbatch`, in file order.
    pub options: Vec<SbatchOption>,
}

/// An option of `sbatch` that has no key of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SbatchOption {
    /// Its long name without the dashes.
    pub name: String,
    /// Its value; `None` for an option that is a word alone.
    pub value: Option<String>,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

fn seconds_if_any<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    duration.as_ref().map(Duration::as_secs_f64).serialize(serializer)
}

/// Options that have a key of their own.
const WITH_KEY: [(&str, &str); 11] = [
    ("partition", "partition"),
    ("account", "account"),
    ("qos", "qos"),
    ("constraint", "constraint"),
    ("time", "time"),
    ("nodes", "nodes"),
    ("gpus-per-node", "gpus_per_node"),
    ("cpus-per-task", "cpus_per_task"),
    ("mem", "mem"),
    ("signal", "signal_before"),
    ("array", "array_limit"),
];

/// Options that are sweep's to set: with others it would not find its jobs again.
const TAKEN: [&str; 17] = [
    "job-name",
    "output",
    "error",
    "input",
    "open-mode",
    "requeue",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "parsable",
    "wait",
    "wrap",
    "test-only",
    "clusters",
    "chdir",
    "hold",
    "uid",
];

/// Reads `options`.
pub(super) fn read_options(table: &DeTable<'_>) -> Result<Vec<SbatchOption>, Refused> {
    table.iter().map(|(name, value)| read_option(name.get_ref(), name.span(), value)).collect()
}

fn read_option(name: &str, span: Range<usize>, value: &Spanned<DeValue<'_>>) -> Result<SbatchOption, Refused> {
    let fits = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-';
    if !name.starts_with(|first: char| first.is_ascii_lowercase()) || !name.chars().all(fits) {
        let long = name.trim_start_matches('-').replace('_', "-").to_lowercase();
        return Err(Refused::new(span, format!("`{name}` is not the long name of an option of sbatch"))
            .help(format!("such as `{long}`, without dashes in front")));
    }
    if let Some((_, key)) = WITH_KEY.iter().find(|(option, _)| *option == name) {
        return Err(Refused::new(span, format!("`{name}` has a key of its own")).help(format!("write `{key}` in [slurm]")));
    }
    if TAKEN.contains(&name) {
        return Err(Refused::new(span, format!("`{name}` is sweep's to set")));
    }
    let value = match value.get_ref() {
        DeValue::Boolean(true) => None,
        DeValue::Boolean(false) => return Err(Refused::new(value.span(), "an option that is not wanted is left out")),
        DeValue::Integer(_) => Some(Kind::Integer(0).read(value)?.integer().to_string()),
        DeValue::String(_) => Some(Kind::Line.read(value)?.text()),
        _ => {
            return Err(Refused::new(value.span(), "not the value of an option")
                .help("expected text in quotes, a whole number, or `true` for an option that is a word alone"));
        }
    };
    Ok(SbatchOption { name: name.to_owned(), value })
}

/// Text that may stand on one line of a script.
pub(super) fn line(value: &str, span: &Range<usize>) -> Result<String, Refused> {
    match value {
        _ if value.trim().is_empty() => Err(Refused::new(span.clone(), "the text is empty")),
        _ if value.contains(char::is_control) => {
            Err(Refused::new(span.clone(), "the text is longer than a line, or holds characters that cannot be seen"))
        }
        _ => Ok(value.trim().to_owned()),
    }
}

/// Reads `setup`.
pub(super) fn read_lines(values: &[Spanned<DeValue<'_>>]) -> Result<Vec<String>, Refused> {
    values
        .iter()
        .map(|value| match value.get_ref() {
            DeValue::String(text) if !text.contains('\0') => Ok(text.to_string()),
            DeValue::String(_) => Err(Refused::new(value.span(), "a line of a script cannot hold NUL")),
            other => Err(Refused::new(value.span(), format!("this is {}", super::value::type_of(other)))
                .help("expected lines of a shell script, each in quotes")),
        })
        .collect()
}
