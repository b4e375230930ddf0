//! NVIDIA's management library, loaded while the program runs. Its absence is an ordinary answer.

use std::ffi::OsStr;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::{GpuDevice, GpuError, GpuLibrary, GpuMemory, GpuReading};

/// NVML's "value not available": all ones.
const NOT_AVAILABLE: u64 = u64::MAX;

/// NVML, loaded and initialised.
#[derive(Debug)]
pub struct NvmlLibrary {
    nvml: Nvml,
}

impl From<NvmlError> for GpuError {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::LibloadingError(error) => Self::Absent(format!("the NVIDIA management library could not be loaded ({error})")),
            NvmlError::DriverNotLoaded => Self::Absent("the NVIDIA driver is not loaded".to_owned()),
            // Functions are looked up when they are called; an old driver lacks the newer ones.
            NvmlError::FailedToLoadSymbol(_) => Self::NotAvailable("this NVIDIA driver is too old to say".to_owned()),
            NvmlError::NotSupported | NvmlError::NoData => Self::NotAvailable("the device does not support it".to_owned()),
            NvmlError::NoPermission => Self::Failed("no permission".to_owned()),
            NvmlError::GpuLost => Self::Failed("the GPU is lost: it fell off the bus or cannot be reached".to_owned()),
            NvmlError::LibRmVersionMismatch => {
                Self::Failed("the NVIDIA driver and its management library differ in version; a reboot usually helps".to_owned())
            }
            NvmlError::UnexpectedVariant(code) => Self::Failed(format!("the NVIDIA management library answered with the unknown code {code}")),
            other => Self::Failed(other.to_string()),
        }
    }
}

impl NvmlLibrary {
    /// Loads the library from where the system's loader finds it.
    ///
    /// # Errors
    /// It is not there, or it refuses to start: no driver, a driver of another version, no permission.
    pub fn load() -> Result<Self, GpuError> {
        Self::start(None)
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    /// As [`NvmlLibrary::load`].
    pub fn load_from(path: &OsStr) -> Result<Self, GpuError> {
        Self::start(Some(path))
    }

    fn start(path: Option<&OsStr>) -> Result<Self, GpuError> {
        let mut builder = Nvml::builder();
        if let Some(path) = path {
            builder.lib_path(path);
        }
        let nvml = builder.init()?;
        // The wrapper panics on drop where the library cannot be shut down; one that cannot is kept loaded.
        if nvml.lib().nvmlShutdown.is_err() {
            std::mem::forget(nvml);
            return Err(GpuError::Failed("the NVIDIA management library lacks nvmlShutdown".to_owned()));
        }
        Ok(Self { nvml })
    }
}

impl GpuLibrary for NvmlLibrary {
    fn devices(&self) -> Result<Vec<Result<GpuDevice, GpuError>>, GpuError> {
        let count = self.nvml.device_count()?;
        Ok((0..count).map(|index| describe(&self.nvml.device_by_index(index)?)).collect())
    }

    fn read(&self, uuid: &str) -> GpuReading {
        match self.nvml.device_by_uuid(uuid) {
            Ok(device) => GpuReading {
                utilization_percent: utilization(&device),
                memory: memory(&device),
                power_watts: power(&device),
                temperature_celsius: temperature(&device),
            },
            Err(error) => GpuReading::failed(&error.into()),
        }
    }
}

fn describe(device: &Device<'_>) -> Result<GpuDevice, GpuError> {
    let mut described = identify(device)?;
    described.pci_bus_id = device.pci_info().ok().map(|info| info.bus_id);
    // Older GPUs do not know MIG; the slots of those that do may be empty.
    if device.mig_mode().is_ok_and(|mode| mode.current != 0) {
        let slots = device.mig_device_count().unwrap_or(0);
        described.mig_instances = (0..slots).filter_map(|slot| identify(&device.mig_device_by_index(slot).ok()?).ok()).collect();
    }
    Ok(described)
}

fn identify(device: &Device<'_>) -> Result<GpuDevice, GpuError> {
    let uuid = device.uuid()?;
    // A device without a name is still a device.
    let name = device.name().unwrap_or_else(|_| "unnamed GPU".to_owned());
    Ok(GpuDevice { uuid, name, pci_bus_id: None, mig_instances: Vec::new() })
}

fn unavailable() -> GpuError {
    GpuError::NotAvailable("the library does not say".to_owned())
}

fn utilization(device: &Device<'_>) -> Result<f64, GpuError> {
    match device.utilization_rates()?.gpu {
        percent @ 0..=100 => Ok(f64::from(percent)),
        other => Err(GpuError::Failed(format!("{other} is not a percentage"))),
    }
}

fn memory(device: &Device<'_>) -> Result<GpuMemory, GpuError> {
    let info = device.memory_info()?;
    let known = |bytes| (bytes != NOT_AVAILABLE).then_some(bytes);
    let memory = GpuMemory { used: known(info.used), total: known(info.total) };
    if memory == GpuMemory::default() { Err(unavailable()) } else { Ok(memory) }
}

fn power(device: &Device<'_>) -> Result<f64, GpuError> {
    match device.power_usage()? {
        u32::MAX => Err(unavailable()),
        milliwatts => Ok(f64::from(milliwatts) / 1000.0),
    }
}

fn temperature(device: &Device<'_>) -> Result<f64, GpuError> {
    match device.temperature(TemperatureSensor::Gpu)? {
        u32::MAX => Err(unavailable()),
        degrees => Ok(f64::from(degrees)),
    }
}
