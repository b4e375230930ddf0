//! What the machine says while a trial runs: processor use and memory of the child's process tree, and of its GPUs.
//!
//! Samplers have no threads and no clocks of their own: whoever runs the attempt calls [`Recorder::record`] at `[telemetry] interval` and says how much
//! time has passed. No sampler ever fails as a whole. What cannot be read is left empty, and the reason is handed over once as a sentence.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod gpu;
mod host;
mod nvml;
mod process_tree;
mod visible;

pub use gpu::{GpuDevice, GpuError, GpuLibrary, GpuMemory, GpuReading, GpuSampler, Gpus};
pub use host::{available_memory_bytes, cpu_features, cpu_name, host};
pub use nvml::NvmlLibrary;
pub use process_tree::ProcessTreeSampler;
pub use visible::{Visible, visible_devices};

use crate::store::{StoreError, TELEMETRY_COLUMNS, io_error};

/// What one source said at one moment. `None` where it could not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// `host` for the child's process tree, otherwise a GPU's UUID.
    pub source: String,
    /// Percent of one core for the process tree (two busy cores are 200), percent of the time a kernel ran for a GPU.
    pub utilization_percent: Option<f64>,
    /// Resident bytes of the process tree, or bytes in use on the GPU.
    pub memory_bytes: Option<u64>,
    /// All the bytes the source has.
    pub memory_total_bytes: Option<u64>,
    /// Power draw in watts.
    pub power_watts: Option<f64>,
    /// Temperature in degrees Celsius.
    pub temperature_celsius: Option<f64>,
}

/// Something that can be sampled again and again.
pub trait Sampler: Send {
    /// Reads every source once. `elapsed` is the time since the attempt began; it never goes back from call to call.
    fn sample(&mut self, elapsed: Duration) -> Vec<Sample>;

    /// Reasons why something is missing, a sentence each, that were not handed over before.
    fn take_reasons(&mut self) -> Vec<String>;
}

/// Sentences that are each said once.
#[derive(Debug, Default)]
pub(crate) struct Reasons {
    said: BTreeSet<String>,
    new: Vec<String>,
}

impl Reasons {
    /// Keeps `reason` unless it was kept before.
    pub(crate) fn add(&mut self, reason: String) {
        if self.said.insert(reason.clone()) {
            self.new.push(reason);
        }
    }

    /// Those that are new since the last call.
    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.new)
    }
}

/// Appends the samples of one attempt to its `telemetry.csv`, columns [`TELEMETRY_COLUMNS`].
pub struct Recorder {
    path: PathBuf,
    file: File,
    samplers: Vec<Box<dyn Sampler>>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Recorder").field("path", &self.path).field("samplers", &self.samplers.len()).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Opens `path` for appending and writes the header where the file is new.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn create(path: &Path, samplers: Vec<Box<dyn Sampler>>) -> Result<Self, StoreError> {
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(io_error("write", path))?;
        if file.metadata().map_err(io_error("read", path))?.len() == 0 {
            writeln!(file, "{}", TELEMETRY_COLUMNS.join(",")).map_err(io_error("write", path))?;
        }
        Ok(Self { path: path.to_owned(), file, samplers })
    }

    /// Samples every source once and appends the rows in one write, so that a crash tears at most the last. Returns the reasons for what is missing that
    /// were not returned before.
    ///
    /// # Errors
    /// The file could not be written.
    pub fn record(&mut self, elapsed: Duration) -> Result<Vec<String>, StoreError> {
        let mut rows = String::new();
        let mut reasons = Vec::new();
        for sampler in &mut self.samplers {
            for sample in sampler.sample(elapsed) {
                rows.push_str(&csv_row(elapsed, &sample));
            }
            reasons.extend(sampler.take_reasons());
        }
        self.file.write_all(rows.as_bytes()).map_err(io_error("write", &self.path))?;
        Ok(reasons)
    }
}

/// One line of `telemetry.csv`. No field can hold a comma: sources are `host` or UUIDs, the rest are numbers.
fn csv_row(elapsed: Duration, sample: &Sample) -> String {
    fn field<T>(value: Option<T>, write: impl Fn(T) -> String) -> String {
        value.map(write).unwrap_or_default()
    }
    format!(
        "{:.3},{},{},{},{},{},{}\n",
        elapsed.as_secs_f64(),
        sample.source,
        field(sample.utilization_percent, |percent| format!("{percent:.1}")),
        field(sample.memory_bytes, |bytes| bytes.to_string()),
        field(sample.memory_total_bytes, |bytes| bytes.to_string()),
        field(sample.power_watts, |watts| format!("{watts:.2}")),
        field(sample.temperature_celsius, |degrees| format!("{degrees:.0}")),
    )
}

/// The samplers of one attempt: the process tree below `pid`, and the GPUs in `uuids`.
pub fn samplers(pid: u32, gpus: &Gpus, uuids: &[String]) -> Vec<Box<dyn Sampler>> {
    let mut samplers: Vec<Box<dyn Sampler>> = vec![Box::new(ProcessTreeSampler::new(pid))];
    if let Some(library) = &gpus.library
        && !uuids.is_empty()
    {
        samplers.push(Box::new(GpuSampler::new(library.clone(), uuids.to_vec())));
    }
    samplers
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Reasons, Recorder, Sample, Sampler};

    struct Script(Vec<(Vec<Sample>, Vec<String>)>);

    impl Sampler for Script {
        fn sample(&mut self, _: Duration) -> Vec<Sample> {
            self.0.first().map(|(samples, _)| samples.clone()).unwrap_or_default()
        }

        fn take_reasons(&mut self) -> Vec<String> {
            if self.0.is_empty() { Vec::new() } else { self.0.remove(0).1 }
        }
    }

    /// CASES 24: what is missing stays an empty field, and a second recorder of the same attempt appends rather than starts over.
    #[test]
    fn missing_values_are_empty_fields() {
        let world = tempfile::tempdir().expect("temporary folder");
        let path = world.path().join("telemetry.csv");
        let host = Sample { source: "host".into(), utilization_percent: Some(187.25), memory_bytes: Some(4096), ..Sample::default() };
        let gpu = Sample { source: "GPU-1".into(), power_watts: Some(70.5), temperature_celsius: Some(61.0), ..Sample::default() };
        let script = vec![(vec![host.clone(), gpu], vec!["no utilisation".to_owned()]), (vec![host], Vec::new())];
        let mut recorder = Recorder::create(&path, vec![Box::new(Script(script))]).expect("created");
        assert_eq!(recorder.record(Duration::from_millis(200)).expect("written"), ["no utilisation"]);
        assert_eq!(recorder.record(Duration::from_millis(400)).expect("written"), Vec::<String>::new());
        let last = Sample { source: "host".into(), ..Sample::default() };
        let mut again = Recorder::create(&path, vec![Box::new(Script(vec![(vec![last], Vec::new())]))]).expect("opened");
        again.record(Duration::from_secs(61)).expect("written");
        assert_eq!(
            std::fs::read_to_string(&path).expect("readable"),
            "elapsed_s,source,utilization_percent,memory_bytes,memory_total_bytes,power_watts,temperature_celsius\n\
             0.200,host,187.2,4096,,,\n\
             0.200,GPU-1,,,,70.50,61\n\
             0.400,host,187.2,4096,,,\n\
             61.000,host,,,,,\n"
        );
    }

    #[test]
    fn a_recorder_that_cannot_write_names_its_file() {
        let world = tempfile::tempdir().expect("temporary folder");
        let path = world.path().join("absent/telemetry.csv");
        let error = Recorder::create(&path, Vec::new()).expect_err("the folder is missing");
        assert!(error.to_string().contains("absent/telemetry.csv"), "{error}");
    }

    #[test]
    fn a_reason_is_said_once() {
        let mut reasons = Reasons::default();
        reasons.add("a".into());
        reasons.add("b".into());
        reasons.add("a".into());
        assert_eq!(reasons.take(), ["a", "b"]);
        reasons.add("b".into());
        assert_eq!(reasons.take(), Vec::<String>::new());
    }
}
