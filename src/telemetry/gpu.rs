//! GPUs behind a trait, so that tests need none, and the sampler over it.

use std::sync::Arc;
use std::time::Duration;

use super::{NvmlLibrary, Reasons, Sample, Sampler, visible_devices};

/// A call of a GPU library that gave no answer, with the reason in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// There is no such library or no driver on this machine. Nothing is wrong: it has no GPUs.
    #[error("{0}")]
    Absent(String),
    /// The device cannot answer this question. Nothing is wrong: the value is missing.
    #[error("{0}")]
    NotAvailable(String),
    /// The device or its driver should have answered and did not.
    #[error("{0}")]
    Failed(String),
}

impl GpuError {
    /// Whether something that is there does not work.
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// A GPU, or a MIG instance of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuDevice {
    /// `GPU-...` or `MIG-...`: what `CUDA_VISIBLE_DEVICES` takes.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Domain, bus, device and function; what CUDA orders devices by under `CUDA_DEVICE_ORDER=PCI_BUS_ID`. `None` where it could not be read.
    pub pci_bus_id: Option<String>,
    /// Instances, where the GPU is in MIG mode; an instance has none.
    pub mig_instances: Vec<GpuDevice>,
}

/// Device memory in bytes; each `None` where the library does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// In use, by whomever.
    pub used: Option<u64>,
    /// All there is.
    pub total: Option<u64>,
}

/// One reading of one device; every call may fail on its own.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuReading {
    /// Percent of the time a kernel ran, since the library's last sample.
    pub utilization_percent: Result<f64, GpuError>,
    /// Device memory.
    pub memory: Result<GpuMemory, GpuError>,
    /// Watts.
    pub power_watts: Result<f64, GpuError>,
    /// Degrees Celsius.
    pub temperature_celsius: Result<f64, GpuError>,
}

impl GpuReading {
    /// A reading that failed as a whole.
    pub fn failed(error: &GpuError) -> Self {
        Self {
            utilization_percent: Err(error.clone()),
            memory: Err(error.clone()),
            power_watts: Err(error.clone()),
            temperature_celsius: Err(error.clone()),
        }
    }

    /// The one reason why nothing at all could be read, where that is so.
    fn common_error(&self) -> Option<&GpuError> {
        let error = self.memory.as_ref().err()?;
        [&self.utilization_percent, &self.power_watts, &self.temperature_celsius]
            .iter()
            .all(|value| value.as_ref().err() == Some(error))
            .then_some(error)
    }
}

/// What is asked of a GPU management library. Implementations never panic and keep no state between calls that a lost device could spoil.
pub trait GpuLibrary: Send + Sync {
    /// All devices, in the library's own order. A device that cannot even be named is an error in its place.
    ///
    /// # Errors
    /// The devices could not be counted.
    fn devices(&self) -> Result<Vec<Result<GpuDevice, GpuError>>, GpuError>;

    /// Reads one device by its UUID.
    fn read(&self, uuid: &str) -> GpuReading;
}

/// The GPUs that this process may use.
#[derive(Clone)]
pub struct Gpus {
    /// What reads them; `None` where there is no library.
    pub library: Option<Arc<dyn GpuLibrary>>,
    /// Those that `CUDA_VISIBLE_DEVICES` leaves visible, in its order.
    pub devices: Vec<GpuDevice>,
    /// Why there are none, or fewer than there could be, a sentence each.
    pub reasons: Vec<String>,
    /// Those of the reasons that are faults: something is there and does not work.
    pub faults: Vec<String>,
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Gpus").field("devices", &self.devices).field("reasons", &self.reasons).finish_non_exhaustive()
    }
}

impl Gpus {
    /// Loads NVML and lists what `CUDA_VISIBLE_DEVICES` of this process leaves visible.
    pub fn of_this_machine() -> Self {
        let library = NvmlLibrary::load().map(|library| Arc::new(library) as Arc<dyn GpuLibrary>);
        Self::discover(library, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
    }

    /// Lists what `cuda_visible_devices` (`None` where it is not set) leaves visible of the library's devices.
    pub fn discover(library: Result<Arc<dyn GpuLibrary>, GpuError>, cuda_visible_devices: Option<&str>) -> Self {
        let mut gpus = Self { library: None, devices: Vec::new(), reasons: Vec::new(), faults: Vec::new() };
        let library = match library {
            Ok(library) => library,
            Err(error) => {
                gpus.missing(format!("No GPU can be seen: {error}."), &error);
                return gpus;
            }
        };
        let listed = library.devices().unwrap_or_else(|error| {
            gpus.missing(format!("GPUs cannot be listed: {error}."), &error);
            Vec::new()
        });
        gpus.library = Some(library);
        let mut devices = Vec::new();
        for (index, device) in listed.into_iter().enumerate() {
            match device {
                Ok(device) => devices.push(device),
                Err(error) => gpus.missing(format!("GPU {index} cannot be used: {error}."), &error),
            }
        }
        let visible = visible_devices(&devices, cuda_visible_devices);
        gpus.devices = visible.devices;
        gpus.reasons.extend(visible.reasons);
        gpus
    }

    fn missing(&mut self, reason: String, error: &GpuError) {
        if error.is_fault() {
            self.faults.push(reason.clone());
        }
        self.reasons.push(reason);
    }
}

/// Samples GPUs by UUID.
pub struct GpuSampler {
    library: Arc<dyn GpuLibrary>,
    uuids: Vec<String>,
    reasons: Reasons,
}

impl std::fmt::Debug for GpuSampler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("GpuSampler").field("uuids", &self.uuids).finish_non_exhaustive()
    }
}

impl GpuSampler {
    /// A sampler of the devices in `uuids`.
    pub fn new(library: Arc<dyn GpuLibrary>, uuids: Vec<String>) -> Self {
        Self { library, uuids, reasons: Reasons::default() }
    }
}

impl Sampler for GpuSampler {
    fn sample(&mut self, _elapsed: Duration) -> Vec<Sample> {
        let mut samples = Vec::with_capacity(self.uuids.len());
        for uuid in &self.uuids {
            let reading = self.library.read(uuid);
            if let Some(error) = reading.common_error() {
                self.reasons.add(format!("{uuid} cannot be read: {error}."));
                samples.push(Sample { source: uuid.clone(), ..Sample::default() });
                continue;
            }
            let mut keep = |what: &str, error: GpuError| self.reasons.add(format!("{what} of {uuid} is missing: {error}."));
            let memory = match reading.memory {
                Ok(GpuMemory { used: None, total }) => {
                    keep("memory in use", GpuError::NotAvailable("the library does not say".to_owned()));
                    GpuMemory { used: None, total }
                }
                Ok(memory) => memory,
                Err(error) => {
                    keep("memory", error);
                    GpuMemory::default()
                }
            };
            samples.push(Sample {
                source: uuid.clone(),
                utilization_percent: reading.utilization_percent.map_err(|error| keep("utilization", error)).ok(),
                memory_bytes: memory.used,
                memory_total_bytes: memory.total,
                power_watts: reading.power_watts.map_err(|error| keep("power", error)).ok(),
                temperature_celsius: reading.temperature_celsius.map_err(|error| keep("temperature", error)).ok(),
            });
        }
        samples
    }

    fn take_reasons(&mut self) -> Vec<String> {
        self.reasons.take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::{GpuDevice, GpuError, GpuLibrary, GpuMemory, GpuReading, GpuSampler, Gpus, Sampler};

    /// Two GPUs; the second is lost from the second reading on.
    #[derive(Default)]
    struct Fake {
        readings: AtomicUsize,
    }

    fn gpu(uuid: &str) -> GpuDevice {
        GpuDevice { uuid: uuid.into(), name: "Fake".into(), pci_bus_id: Some(uuid.into()), mig_instances: Vec::new() }
    }

    impl GpuLibrary for Fake {
        fn devices(&self) -> Result<Vec<Result<GpuDevice, GpuError>>, GpuError> {
            Ok(vec![Ok(gpu("GPU-a")), Err(GpuError::Failed("broken".into())), Ok(gpu("GPU-b"))])
        }

        fn read(&self, uuid: &str) -> GpuReading {
            let reading = self.readings.fetch_add(1, Ordering::Relaxed);
            if uuid == "GPU-b" && reading >= 2 {
                return GpuReading::failed(&GpuError::Failed("lost".into()));
            }
            GpuReading {
                utilization_percent: Ok(50.0),
                memory: Ok(GpuMemory { used: (uuid == "GPU-b").then_some(1), total: Some(2) }),
                power_watts: Err(GpuError::NotAvailable("not supported".into())),
                temperature_celsius: Ok(40.0),
            }
        }
    }

    /// CASES 24: each value may be missing by itself, its reason is given once, and the other devices go on.
    #[test]
    fn a_lost_device_leaves_the_others_alone() {
        let mut sampler = GpuSampler::new(Arc::new(Fake::default()), vec!["GPU-a".into(), "GPU-b".into()]);
        let first = sampler.sample(Duration::ZERO);
        assert_eq!(first.iter().map(|sample| sample.memory_bytes).collect::<Vec<_>>(), [None, Some(1)]);
        assert_eq!(first.iter().map(|sample| sample.memory_total_bytes).collect::<Vec<_>>(), [Some(2), Some(2)]);
        assert_eq!(
            sampler.take_reasons(),
            [
                "memory in use of GPU-a is missing: the library does not say.",
                "power of GPU-a is missing: not supported.",
                "power of GPU-b is missing: not supported."
            ]
        );
        let second = sampler.sample(Duration::from_millis(200));
        assert_eq!(second.iter().map(|sample| sample.utilization_percent).collect::<Vec<_>>(), [Some(50.0), None]);
        assert_eq!(sampler.take_reasons(), ["GPU-b cannot be read: lost."]);
        sampler.sample(Duration::from_millis(400));
        assert_eq!(sampler.take_reasons(), Vec::<String>::new());
    }

    #[test]
    fn what_cannot_be_seen_is_said_and_told_apart_from_absence() {
        let gpus = Gpus::discover(Ok(Arc::new(Fake::default())), Some("1"));
        assert_eq!(gpus.devices, [gpu("GPU-b")]);
        assert_eq!(gpus.reasons, ["GPU 1 cannot be used: broken."]);
        assert_eq!(gpus.faults, gpus.reasons);
        let absent = Gpus::discover(Err(GpuError::Absent("no library".into())), None);
        assert_eq!((absent.reasons, absent.faults), (vec!["No GPU can be seen: no library.".to_owned()], Vec::new()));
        let mismatch = Gpus::discover(Err(GpuError::Failed("version mismatch".into())), None);
        assert_eq!(mismatch.faults, ["No GPU can be seen: version mismatch."]);
    }
}
