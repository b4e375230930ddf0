//! GPUs behind a trait, so that tests need none, and the sampler over it.

use std::sync::Arc;
use std::time::Duration;

use super::{NvmlLibrary, Reasons, Sample, Sampler, visible_devices};

/// A call of a GPU library that failed, in the library's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GpuError(pub String);

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
        let library = match library {
            Ok(library) => library,
            Err(error) => return Self { library: None, devices: Vec::new(), reasons: vec![format!("No GPU can be seen: {error}.")] },
        };
        let listed = match library.devices() {
            Ok(listed) => listed,
            Err(error) => {
                let reasons = vec![format!("GPUs cannot be listed: {error}.")];
                return Self { library: Some(library), devices: Vec::new(), reasons };
            }
        };
        let mut reasons = Vec::new();
        let mut devices = Vec::new();
        for (index, device) in listed.into_iter().enumerate() {
            match device {
                Ok(device) => devices.push(device),
                Err(error) => reasons.push(format!("GPU {index} cannot be used: {error}.")),
            }
        }
        let visible = visible_devices(&devices, cuda_visible_devices);
        reasons.extend(visible.reasons);
        Self { library: Some(library), devices: visible.devices, reasons }
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
            let mut keep = |what: &str, error: GpuError| self.reasons.add(format!("{what} of {uuid} is missing: {error}."));
            let memory = match reading.memory {
                Ok(GpuMemory { used: None, total }) => {
                    keep("memory in use", GpuError("not available".to_owned()));
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
