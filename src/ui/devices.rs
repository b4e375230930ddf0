//! The text of `sweep devices`. Pure.

use std::fmt::Write as _;

use crate::format;

/// Everything `sweep devices` shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesView {
    /// Name of the machine.
    pub host: String,
    /// Product name of the processor, where the system gives one.
    pub cpu: Option<String>,
    /// Cores this process may use.
    pub cores: usize,
    /// Vector instructions that decide how fast training is.
    pub cpu_features: Vec<&'static str>,
    /// Memory this process may use, in bytes.
    pub memory_bytes: u64,
    /// Of which this much is available now.
    pub available_memory_bytes: Option<u64>,
    /// What can be measured of a child's process tree.
    pub host_measurements: Vec<Measurement>,
    /// The visible GPUs.
    pub gpus: Vec<GpuView>,
    /// Why there are none, or fewer than there could be.
    pub reasons: Vec<String>,
    /// Whether this build can train on GPUs.
    pub trains_on_gpus: bool,
}

/// A GPU as `sweep devices` shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuView {
    /// Product name.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// All its memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Of which this much is free.
    pub free_bytes: Option<u64>,
    /// What can be measured on it.
    pub measurements: Vec<Measurement>,
}

/// Whether one quantity can be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Its name.
    pub quantity: &'static str,
    /// Why it cannot be measured, if so.
    pub missing: Option<String>,
}

/// The text, a paragraph per device.
pub fn devices_text(view: &DevicesView) -> String {
    let mut text = format!("{}\n", view.host);
    let cores = format!("{} {}", view.cores, if view.cores == 1 { "core" } else { "cores" });
    let features = if view.cpu_features.is_empty() { String::new() } else { format!(", {}", view.cpu_features.join(", ")) };
    let avx_512 = if view.cpu_features.contains(&"AVX-512") { "" } else { ", no AVX-512" };
    let _ = writeln!(text, "\nCPU    {}", view.cpu.as_deref().unwrap_or("unnamed processor"));
    let _ = writeln!(text, "       {cores}{features}{avx_512}");
    let available = view.available_memory_bytes.map_or(String::new(), |bytes| format!(", {} available", format::bytes(bytes)));
    let _ = writeln!(text, "       {} memory{available}", format::bytes(view.memory_bytes));
    measurements(&mut text, &view.host_measurements);
    for (index, gpu) in view.gpus.iter().enumerate() {
        let _ = writeln!(text, "\nGPU {index}  {}\n       {}", gpu.name, gpu.uuid);
        if let Some(bytes) = gpu.memory_bytes {
            let free = gpu.free_bytes.map_or(String::new(), |bytes| format!(", {} free", format::bytes(bytes)));
            let _ = writeln!(text, "       {} memory{free}", format::bytes(bytes));
        }
        measurements(&mut text, &gpu.measurements);
    }
    if !view.gpus.is_empty() && !view.trains_on_gpus {
        text.push_str("\nThis build of sweep measures GPUs and trains on the CPU only.\n");
    }
    for reason in &view.reasons {
        let _ = write!(text, "\n{reason}\n");
    }
    super::printable(&text)
}

fn measurements(text: &mut String, measurements: &[Measurement]) {
    let measured: Vec<&str> =
        measurements.iter().filter(|measurement| measurement.missing.is_none()).map(|measurement| measurement.quantity).collect();
    if !measured.is_empty() {
        let _ = writeln!(text, "       measured: {}", measured.join(", "));
    }
    for Measurement { quantity, missing } in measurements {
        if let Some(reason) = missing {
            let _ = writeln!(text, "       not measured: {quantity} ({reason})");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DevicesView, GpuView, Measurement, devices_text};

    fn measured(quantity: &'static str) -> Measurement {
        Measurement { quantity, missing: None }
    }

    #[test]
    fn devices_are_listed_with_what_can_be_measured() {
        let view = DevicesView {
            host: "node-7".into(),
            cpu: Some("Example CPU @ 2.00GHz".into()),
            cores: 2,
            cpu_features: vec!["AVX2", "AVX-512"],
            memory_bytes: 8 << 30,
            available_memory_bytes: Some(6 << 30),
            host_measurements: vec![measured("processor use"), measured("resident memory")],
            gpus: vec![GpuView {
                name: "Tesla T4".into(),
                uuid: "GPU-1".into(),
                memory_bytes: Some(15 << 30),
                free_bytes: Some(14 << 30),
                measurements: vec![measured("memory"), Measurement { quantity: "power", missing: Some("no permission".into()) }],
            }],
            reasons: vec!["GPU 1 cannot be used: it is lost.".into()],
            trains_on_gpus: false,
        };
        assert_eq!(
            devices_text(&view),
            "node-7

CPU    Example CPU @ 2.00GHz
       2 cores, AVX2, AVX-512
       8.00 GiB memory, 6.00 GiB available
       measured: processor use, resident memory

GPU 0  Tesla T4
       GPU-1
       15.00 GiB memory, 14.00 GiB free
       measured: memory
       not measured: power (no permission)

This build of sweep measures GPUs and trains on the CPU only.

GPU 1 cannot be used: it is lost.
"
        );
        let bare = DevicesView { host: "h".into(), cores: 1, ..DevicesView::default() };
        assert_eq!(devices_text(&bare), "h\n\nCPU    unnamed processor\n       1 core, no AVX-512\n       0 B memory\n");
    }
}
