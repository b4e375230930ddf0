//! Trials on GPUs, as far as that can be seen without one: a library of fake devices, and real processes that log what they were lent.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sweep::event::{Event, EventKind};
use sweep::protocol::{Architecture, Gpt2Config, PreparedData, ResolvedModel};
use sweep::run::{Configuration, ConfigurationTrials, ExecutorOptions, Machine, Observer, Selection, TrialProgram, Work, run};
use sweep::spec::settings::DeviceKind;
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::create_run;
use sweep::telemetry::{GpuDevice, GpuError, GpuLibrary, GpuMemory, GpuReading};
use sweep::trial::{ConfigurationId, TrialId};

/// Devices by UUID with the bytes in use; one of them keeps gigabytes once it has been used.
struct Fakes {
    leaky: &'static str,
    readings: Mutex<BTreeMap<String, u32>>,
}

impl GpuLibrary for Fakes {
    fn devices(&self) -> Result<Vec<Result<GpuDevice, GpuError>>, GpuError> {
        Ok(Vec::new())
    }

    fn read(&self, uuid: &str) -> GpuReading {
        let mut readings = self.readings.lock().unwrap();
        let reading = readings.entry(uuid.to_owned()).or_default();
        *reading += 1;
        let used = if uuid == self.leaky && *reading > 1 { 9 << 30 } else { 300 << 20 };
        GpuReading { memory: Ok(GpuMemory { used: Some(used), total: Some(16 << 30) }), ..GpuReading::failed(&GpuError::NotAvailable("no".into())) }
    }
}

#[derive(Default)]
struct Notices(Vec<String>);

impl Observer for Notices {
    fn event(&mut self, event: &Event) {
        if let EventKind::Notice { text } = &event.kind {
            self.0.push(text.clone());
        }
    }
}

/// Six trainings of one rank each.
fn work(machine: Machine) -> Work {
    let text = "[model]\nid = \"gpt2-tiny\"\ninit = \"random\"\n[train]\nblock_size = 64\nmax_steps = 4\n[device]\nkind = \"cpu\"\nworld_size = 1\n\
                [grid]\ntrain.learning_rate = [1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5]\n";
    let plan = spec::load("devices.toml", text, &Overlays::default(), &Surroundings::default()).unwrap();
    let configuration = |(number, row): (usize, spec::plan::Row)| {
        let mut settings = row.effective;
        // The sweep file cannot ask for it yet; the run can.
        settings.device.kind = DeviceKind::Cuda;
        Configuration {
            id: ConfigurationId(format!("c{number}")),
            label: row.label,
            settings,
            model: ResolvedModel { architecture: Architecture::Gpt2(Gpt2Config::DEFAULT), weights: None, fingerprint: None },
            data: PreparedData {
                train: "train".into(),
                eval: None,
                fingerprint: "f".into(),
                vocab_size: 64,
                train_tokens: 65536,
                eval_tokens: 4096,
                floor_perplexity: None,
                description: String::new(),
            },
            trials: ConfigurationTrials::Fixed { block_size: 64, trainings: vec![TrialId(format!("t{number}"))] },
        }
    };
    Work {
        sweep: "devices".into(),
        run: "run".into(),
        resumed: false,
        configurations: plan.rows.iter().enumerate().map(configuration).collect(),
        probe_steps: 0,
        selection: Selection::default(),
        checkpoint: plan.checkpoint.clone(),
        limits: plan.limits.clone(),
        fail_fast: false,
        machine,
        cluster: None,
        adopted: BTreeMap::new(),
        known: BTreeMap::new(),
        lost: Default::default(),
        recovered: Vec::new(),
        announced: BTreeMap::new(),
        notices: Vec::new(),
        remarks: Vec::new(),
    }
}

/// Cases 20, 25 and 26: trials at once are lent disjoint GPUs by their UUIDs, the one whose memory does not come back is lent once, and the others do the rest.
#[test]
fn trials_share_no_gpu_and_a_leaky_one_is_used_once() {
    let world = tempfile::tempdir().unwrap();
    let (log, program) = (world.path().join("trials.log"), world.path().join("program"));
    let script = format!("#!/bin/sh\nSWEEP_FAKE='{{\"log\": \"{}\"}}' exec {} \"$@\"\n", log.display(), env!("CARGO_BIN_EXE_fake-trial"));
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let gpus = ["GPU-aaaa", "GPU-bbbb"];
    let machine = Machine { cores: vec![0, 1], memory_bytes: 1 << 30, gpus: gpus.map(str::to_owned).into() };
    let options = ExecutorOptions {
        program: Arc::new(TrialProgram::at(&program, Path::new(env!("CARGO_BIN_EXE_sweep")))),
        telemetry_interval: Duration::from_millis(200),
        pin_cores: false,
        samplers: Arc::new(|_, _| Vec::new()),
        gpus: Some(Arc::new(Fakes { leaky: "GPU-aaaa", readings: Mutex::default() })),
    };
    let folder = create_run(world.path(), "devices").unwrap();
    let mut notices = Notices::default();
    let summary = run(work(machine), &folder, options, false, &mut notices).unwrap();
    assert_eq!((summary.done, summary.outstanding), (6, 0), "{summary:?}");
    let text = fs::read_to_string(log).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
    let lent: Vec<&str> = lines.iter().filter(|line| line[0] == "begin").map(|line| line[7]).collect();
    assert_eq!(lent.iter().filter(|gpu| **gpu == "GPU-aaaa").count(), 1, "{lent:?}");
    assert_eq!(lent.iter().filter(|gpu| **gpu == "GPU-bbbb").count(), 5, "{lent:?}");
    assert!(lines.iter().all(|line| line[8] == "PCI_BUS_ID"), "{lines:?}");
    let mut running: Vec<&str> = Vec::new();
    for line in &lines {
        if line[0] == "begin" {
            assert!(!running.contains(&line[7]), "two trials on {}", line[7]);
            running.push(line[7]);
        } else {
            running.retain(|gpu| *gpu != line[7]);
        }
    }
    assert_eq!(notices.0.iter().filter(|text| text.starts_with("GPU-aaaa is used no more: 8.71 GiB")).count(), 1, "{:?}", notices.0);
}
