//! NVML through the real loader and the real wrapper, with a stand-in library compiled here: one per kind of trouble (CASES 24 and 25).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sweep::telemetry::{GpuError, GpuLibrary, GpuSampler, Gpus, NvmlLibrary, Recorder, Sample, Sampler};

/// UUIDs of the stand-in's devices, by bus id; the library lists them the other way round.
pub(crate) const FIRST: &str = "GPU-aaaaaaaa-0000-0000-0000-000000000000";
/// The second by bus id.
pub(crate) const SECOND: &str = "GPU-bbbbbbbb-0000-0000-0000-000000000000";
const INSTANCE: &str = "MIG-5c89fb0b-0000-0000-0000-000000000001";

/// Compiles the stand-in into `folder` under the name that the system's loader is asked for.
pub(crate) fn compile(folder: &Path, trouble: &str) -> PathBuf {
    let library = folder.join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakes/fake_nvml.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    if !trouble.is_empty() {
        compiler.arg(format!("-D{trouble}"));
    }
    let output = compiler.output().expect("a C compiler runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

struct World {
    folder: tempfile::TempDir,
    library: PathBuf,
}

fn world(trouble: &str) -> World {
    let folder = tempfile::tempdir().expect("temporary folder");
    let library = compile(folder.path(), trouble);
    World { folder, library }
}

fn gpus(world: &World, visible: Option<&str>) -> Gpus {
    let library = NvmlLibrary::load_from(world.library.as_os_str()).map(|library| Arc::new(library) as Arc<dyn GpuLibrary>);
    Gpus::discover(library, visible)
}

fn sampler(gpus: &Gpus) -> GpuSampler {
    let library = gpus.library.clone().expect("loaded");
    GpuSampler::new(library, gpus.devices.iter().map(|device| device.uuid.clone()).collect())
}

fn whole(uuid: &str, memory: u64) -> Sample {
    Sample {
        source: uuid.to_owned(),
        utilization_percent: Some(42.0),
        memory_bytes: Some(memory),
        memory_total_bytes: Some(16 << 30),
        power_watts: Some(70.5),
        temperature_celsius: Some(61.0),
    }
}

#[test]
fn healthy_devices_are_sampled_by_uuid() {
    let world = world("");
    let gpus = gpus(&world, None);
    assert_eq!(gpus.reasons, Vec::<String>::new());
    let mut sampler = sampler(&gpus);
    assert_eq!(sampler.sample(Duration::ZERO), [whole(FIRST, 1 << 30), whole(SECOND, 2 << 30)]);
    assert_eq!(sampler.take_reasons(), Vec::<String>::new());
}

#[test]
fn a_missing_library_is_absence_and_no_fault() {
    let error = NvmlLibrary::load_from(OsStr::new("/nowhere/libnvidia-ml.so.1")).expect_err("it is not there");
    assert!(matches!(error, GpuError::Absent(_)), "{error}");
    let gpus = Gpus::discover(Err(error), None);
    assert_eq!(gpus.reasons.len(), 1);
    assert_eq!((gpus.devices, gpus.faults), (Vec::new(), Vec::new()));
}

#[test]
fn a_library_that_does_not_start_says_why() {
    for (trouble, reason, fault) in [
        ("VERSION_MISMATCH", "No GPU can be seen: the NVIDIA driver and its management library differ in version; a reboot usually helps.", true),
        ("NO_DRIVER", "No GPU can be seen: the NVIDIA driver is not loaded.", false),
        ("WITHOUT_SHUTDOWN", "No GPU can be seen: the NVIDIA management library lacks nvmlShutdown.", true),
    ] {
        let gpus = gpus(&world(trouble), None);
        assert_eq!((gpus.reasons.as_slice(), gpus.faults.len()), (&[reason.to_owned()][..], usize::from(fault)), "{trouble}");
    }
}

/// Each call may fail by itself: the rest is kept, the missing stays missing, and the reason is given once.
#[test]
fn what_one_call_cannot_say_leaves_the_rest() {
    let without = |clear: fn(&mut Sample)| {
        let mut sample = whole(FIRST, 1 << 30);
        clear(&mut sample);
        sample
    };
    for (trouble, sample, reasons) in [
        ("UNSUPPORTED", without(|sample| sample.power_watts = None), vec!["power of GPU-a is missing: the device does not support it."]),
        (
            "UNKNOWN_CODE",
            without(|sample| sample.utilization_percent = None),
            vec!["utilization of GPU-a is missing: the NVIDIA management library answered with the unknown code 4711."],
        ),
        (
            "OLD_DRIVER",
            without(|sample| sample.temperature_celsius = None),
            vec!["temperature of GPU-a is missing: this NVIDIA driver is too old to say."],
        ),
        (
            "NOT_PERMITTED",
            without(|sample| (sample.utilization_percent, sample.power_watts, sample.temperature_celsius) = (None, None, None)),
            vec![
                "utilization of GPU-a is missing: no permission.",
                "power of GPU-a is missing: no permission.",
                "temperature of GPU-a is missing: no permission.",
            ],
        ),
    ] {
        let world = world(trouble);
        let mut sampler = sampler(&gpus(&world, Some("0")));
        assert_eq!(sampler.sample(Duration::ZERO), std::slice::from_ref(&sample), "{trouble}");
        let reasons: Vec<String> = reasons.iter().map(|reason| reason.replace("GPU-a", FIRST)).collect();
        assert_eq!(sampler.take_reasons(), reasons, "{trouble}");
        assert_eq!(sampler.sample(Duration::from_millis(200)), [sample], "{trouble}");
        assert_eq!(sampler.take_reasons(), Vec::<String>::new(), "{trouble}: said once");
    }
}

#[test]
fn all_ones_mean_not_available() {
    let world = world("ALL_ONES");
    let mut sampler = sampler(&gpus(&world, None));
    let samples = sampler.sample(Duration::ZERO);
    let empty = |uuid: &str| Sample { source: uuid.to_owned(), ..Sample::default() };
    assert_eq!(samples, [empty(FIRST), Sample { memory_total_bytes: Some(16 << 30), ..empty(SECOND) }]);
    let reasons = sampler.take_reasons();
    assert!(reasons.contains(&format!("memory of {FIRST} is missing: the library does not say.")), "{reasons:?}");
    assert!(reasons.contains(&format!("memory in use of {SECOND} is missing: the library does not say.")), "{reasons:?}");
    assert!(reasons.contains(&format!("utilization of {FIRST} is missing: 4294967295 is not a percentage.")), "{reasons:?}");
}

#[test]
fn a_gpu_lost_at_the_second_sample_leaves_the_other() {
    let world = world("GPU_LOST");
    let gpus = gpus(&world, Some("1,0"));
    let path = world.folder.path().join("telemetry.csv");
    let mut recorder = Recorder::create(&path, vec![Box::new(sampler(&gpus))]).expect("created");
    assert_eq!(recorder.record(Duration::ZERO).expect("written"), Vec::<String>::new());
    let lost = format!("{SECOND} cannot be read: the GPU is lost: it fell off the bus or cannot be reached.");
    assert_eq!(recorder.record(Duration::from_millis(200)).expect("written"), [lost]);
    assert_eq!(recorder.record(Duration::from_millis(400)).expect("written"), Vec::<String>::new());
    let text = std::fs::read_to_string(path).expect("readable");
    let rows: Vec<&str> = text.lines().skip(1).collect();
    assert_eq!(
        rows,
        [
            format!("0.000,{SECOND},42.0,2147483648,17179869184,70.50,61"),
            format!("0.000,{FIRST},42.0,1073741824,17179869184,70.50,61"),
            format!("0.200,{SECOND},,,,,"),
            format!("0.200,{FIRST},42.0,1073741824,17179869184,70.50,61"),
            format!("0.400,{SECOND},,,,,"),
            format!("0.400,{FIRST},42.0,1073741824,17179869184,70.50,61"),
        ]
    );
}

#[test]
fn a_device_that_cannot_be_named_leaves_the_other() {
    let gpus = gpus(&world("ONE_BROKEN"), None);
    assert_eq!(gpus.devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>(), [FIRST]);
    assert_eq!(gpus.faults, ["GPU 0 cannot be used: the GPU is lost: it fell off the bus or cannot be reached."]);
}

/// In MIG mode a GPU is its first instance, whose utilisation NVML does not know.
#[test]
fn a_mig_instance_is_sampled_by_its_own_uuid() {
    let world = world("MIG");
    for visible in [Some("1"), Some("MIG-5c89fb0b"), Some(INSTANCE)] {
        let gpus = gpus(&world, visible);
        assert_eq!(gpus.devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>(), [INSTANCE], "{visible:?}");
        let mut sampler = sampler(&gpus);
        assert_eq!(sampler.sample(Duration::ZERO), [Sample { utilization_percent: None, ..whole(INSTANCE, 1 << 29) }]);
        assert_eq!(sampler.take_reasons(), [format!("utilization of {INSTANCE} is missing: the device does not support it.")]);
    }
}

#[test]
fn cuda_visible_devices_selects_by_uuid_and_order() {
    let world = world("");
    for (visible, uuids) in
        [(None, &[FIRST, SECOND][..]), (Some(""), &[]), (Some("-1"), &[]), (Some("1,0"), &[SECOND, FIRST]), (Some("GPU-bb"), &[SECOND])]
    {
        let gpus = gpus(&world, visible);
        assert_eq!(gpus.devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>(), uuids, "{visible:?}");
    }
}
