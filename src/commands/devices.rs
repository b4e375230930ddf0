//! `sweep devices`: what this machine can train on, and what can be measured while it does.

use std::time::{Duration, Instant};

use crate::cli::DevicesArguments;
use crate::error::{CommandError, ErrorKind};
use crate::telemetry::{self, GpuDevice, GpuError, GpuReading, Gpus, ProcessTreeSampler, Sampler};
use crate::ui::{self, DevicesView, GpuView, Measurement};

/// Runs the command.
///
/// # Errors
/// With `--self-test`: something that is there could not be measured, exit 1.
pub fn devices(arguments: &DevicesArguments) -> Result<(), CommandError> {
    let gpus = Gpus::of_this_machine();
    let mut check = Check { faults: gpus.faults.clone() };
    let view = look(&gpus, &mut check);
    ui::print(&ui::devices_text(&view));
    if !arguments.self_test {
        return Ok(());
    }
    if check.faults.is_empty() {
        ui::print("\nSelf-test passed: everything that is there was sampled twice.\n");
        return Ok(());
    }
    let faults: Vec<String> = check.faults.iter().map(|fault| format!("\n  {fault}")).collect();
    Err(CommandError::new(ErrorKind::Findings, format!("the self-test failed:{}", faults.concat())))
}

/// Faults found so far, a sentence each.
struct Check {
    faults: Vec<String>,
}

/// Samples everything twice and describes it.
fn look(gpus: &Gpus, check: &mut Check) -> DevicesView {
    let host = telemetry::host(gpus);
    let first: Vec<Option<GpuReading>> = gpus.devices.iter().map(|gpu| read(gpus, gpu)).collect();
    // The samples of the process tree lie further apart than the kernel's clock ticks, and the second readings of the GPUs come after them.
    let host_measurements = host_measurements(check);
    let gpu_views = gpus.devices.iter().zip(first).map(|(gpu, first)| gpu_view(gpu, first, read(gpus, gpu), check)).collect();
    DevicesView {
        host: host.name,
        cpu: telemetry::cpu_name(),
        cores: host.cores,
        cpu_features: telemetry::cpu_features(),
        memory_bytes: host.memory_bytes,
        available_memory_bytes: telemetry::available_memory_bytes(),
        host_measurements,
        gpus: gpu_views,
        reasons: gpus.reasons.clone(),
        trains_on_gpus: false,
    }
}

fn read(gpus: &Gpus, gpu: &GpuDevice) -> Option<GpuReading> {
    gpus.library.as_ref().map(|library| library.read(&gpu.uuid))
}

/// Samples this very process twice, computing in between so that there is something to see.
fn host_measurements(check: &mut Check) -> Vec<Measurement> {
    let mut sampler = ProcessTreeSampler::new(std::process::id());
    let began = Instant::now();
    sampler.sample(began.elapsed());
    while began.elapsed() < Duration::from_millis(50) {
        std::hint::spin_loop();
    }
    let second = sampler.sample(began.elapsed());
    let reason = sampler.take_reasons().into_iter().next().unwrap_or_else(|| "the system does not say".to_owned());
    let measured = |quantity, present: bool| Measurement { quantity, missing: (!present).then(|| reason.clone()) };
    let measurements = vec![
        measured("processor use", second.iter().any(|sample| sample.utilization_percent.is_some())),
        measured("resident memory", second.iter().any(|sample| sample.memory_bytes.is_some_and(|bytes| bytes > 0))),
    ];
    for Measurement { quantity, missing } in &measurements {
        check.faults.extend(missing.as_ref().map(|reason| format!("{quantity} of a process: {reason}")));
    }
    measurements
}

/// What two readings of a GPU said. A device that answered once and then no more is at fault.
fn gpu_view(gpu: &GpuDevice, first: Option<GpuReading>, second: Option<GpuReading>, check: &mut Check) -> GpuView {
    let mut view = GpuView { name: gpu.name.clone(), uuid: gpu.uuid.clone(), ..GpuView::default() };
    for reading in [first, second].into_iter().flatten() {
        if let Ok(memory) = &reading.memory {
            view.memory_bytes = memory.total;
            view.free_bytes = memory.total.zip(memory.used).map(|(total, used)| total.saturating_sub(used));
        }
        view.measurements = [
            ("utilization", reading.utilization_percent.err()),
            ("memory", reading.memory.err()),
            ("power", reading.power_watts.err()),
            ("temperature", reading.temperature_celsius.err()),
        ]
        .into_iter()
        .map(|(quantity, error)| measurement(&gpu.uuid, quantity, error, check))
        .collect();
    }
    view
}

fn measurement(uuid: &str, quantity: &'static str, error: Option<GpuError>, check: &mut Check) -> Measurement {
    if let Some(error) = &error
        && error.is_fault()
    {
        let fault = format!("{quantity} of {uuid}: {error}");
        if !check.faults.contains(&fault) {
            check.faults.push(fault);
        }
    }
    Measurement { quantity, missing: error.map(|error| error.to_string()) }
}
