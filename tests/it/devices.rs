//! `sweep devices`, as a user runs it: with and without a GPU library where the loader looks.

use std::path::Path;
use std::process::{Command, Output};

use crate::nvml::{FIRST, SECOND, compile};

fn devices(library_folder: &Path, arguments: &[&str], visible: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
    command.arg("devices").args(arguments).env_clear().env("LD_LIBRARY_PATH", library_folder);
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    command.output().expect("sweep runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// The part of the output from the first GPU on.
fn from_gpus(output: &Output) -> String {
    let text = stdout(output);
    let start = text.find("\nGPU 0").unwrap_or(text.len());
    text[start..].to_owned()
}

#[test]
fn the_host_is_always_there() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = devices(folder.path(), &["--self-test"], Some(""));
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("\n       measured: processor use, resident memory\n"), "{text}");
    assert!(text.contains(" GiB memory, "), "{text}");
    assert!(text.ends_with("\nSelf-test passed: everything that is there was sampled twice.\n"), "{text}");
}

#[test]
fn gpus_are_listed_in_the_order_of_cuda() {
    let folder = tempfile::tempdir().expect("temporary folder");
    compile(folder.path(), "UNSUPPORTED");
    let output = devices(folder.path(), &["--self-test"], None);
    assert_eq!(
        from_gpus(&output),
        format!(
            "
GPU 0  Fake A100
       {FIRST}
       16.00 GiB memory, 15.00 GiB free
       measured: utilization, memory, temperature
       not measured: power (the device does not support it)

GPU 1  Fake A100
       {SECOND}
       16.00 GiB memory, 14.00 GiB free
       measured: utilization, memory, temperature
       not measured: power (the device does not support it)

This build of sweep measures GPUs and trains on the CPU only.

Self-test passed: everything that is there was sampled twice.
"
        )
    );
    assert_eq!(output.status.code(), Some(0), "what a device does not support is no fault");
    let hidden = devices(folder.path(), &[], Some("-1"));
    assert_eq!(from_gpus(&hidden), "");
    assert!(stdout(&hidden).ends_with("\nCUDA_VISIBLE_DEVICES=\"-1\" hides every GPU.\n"));
}

#[test]
fn the_self_test_fails_where_something_that_is_there_does_not_work() {
    for (trouble, fault) in [
        ("VERSION_MISMATCH", "No GPU can be seen: the NVIDIA driver and its management library differ in version".to_owned()),
        ("NOT_PERMITTED", format!("power of {FIRST}: no permission")),
        ("GPU_LOST", format!("memory of {SECOND}: the GPU is lost")),
        ("ONE_BROKEN", "GPU 0 cannot be used: the GPU is lost".to_owned()),
    ] {
        let folder = tempfile::tempdir().expect("temporary folder");
        compile(folder.path(), trouble);
        let output = devices(folder.path(), &["--self-test"], None);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{trouble}: {stderr}");
        assert!(stderr.starts_with("error: the self-test failed:\n") && stderr.contains(&fault), "{trouble}: {stderr}");
        let listing = devices(folder.path(), &[], None);
        assert_eq!(listing.status.code(), Some(0), "{trouble}: listing is no test");
    }
}

#[test]
fn absence_is_no_fault() {
    let folder = tempfile::tempdir().expect("temporary folder");
    compile(folder.path(), "NO_DRIVER");
    let output = devices(folder.path(), &["--self-test"], None);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("\nNo GPU can be seen: the NVIDIA driver is not loaded.\n"));
}
