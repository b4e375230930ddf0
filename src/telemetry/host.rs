//! Facts about this machine as far as this process may use it: cores and memory, control groups respected.

use std::fs;
use std::path::Path;
use std::thread;

use super::Gpus;
use crate::store::Host;

/// This machine: its name, the cores and memory this process may use, and the names of its visible GPUs.
pub fn host(gpus: &Gpus) -> Host {
    Host {
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        // The standard library counts the affinity mask and the quotas of control groups, versions 1 and 2.
        cores: thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_bytes(Path::new("/")).total.unwrap_or(0),
        gpus: gpus.devices.iter().map(|gpu| gpu.name.clone()).collect(),
    }
}

/// Bytes that could be allocated now without swapping, within the limits of this process's control groups. `None` where the system does not say.
pub fn available_memory_bytes() -> Option<u64> {
    memory_bytes(Path::new("/")).available
}

/// Product name of the processor, as the system gives it.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix("model name")?.trim_start().strip_prefix(':')?.trim().to_owned()))
}

/// Vector instructions of this processor that decide how fast training on it is; empty where there are none of them.
pub fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut features = Vec::new();
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            features.push("AVX2");
        }
        if std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512cd")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl")
        {
            features.push("AVX-512");
        }
        features
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Vec::new()
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: Option<u64>,
    available: Option<u64>,
}

/// Reads the memory of the machine whose file system begins at `root`, and every control group above this process that limits it.
fn memory_bytes(root: &Path) -> Memory {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let mut memory = Memory { total: meminfo_bytes(&meminfo, "MemTotal:"), available: meminfo_bytes(&meminfo, "MemAvailable:") };
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (hierarchy, limit, usage) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        // A limit of any group above counts. In a container the path may be the host's, of which only the top is there.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let folder = root.join(hierarchy).join(group);
            let Some(limit) = read_number(&folder.join(limit)) else { continue };
            memory.total = memory.total.map(|total| total.min(limit));
            if let Some(usage) = read_number(&folder.join(usage)) {
                memory.available = memory.available.map(|available| available.min(limit.saturating_sub(usage)));
            }
        }
    }
    memory
}

/// A number alone in a file; `max` and absent files are none.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A line of `/proc/meminfo` in bytes.
fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let kibibytes: u64 = meminfo.lines().find_map(|line| line.strip_prefix(key))?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{Memory, meminfo_bytes, memory_bytes};

    const MEMINFO: &str = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\n";

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temporary folder");
        for (path, contents) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            fs::write(path, contents).expect("written");
        }
        root
    }

    fn memory(files: &[(&str, &str)]) -> (u64, u64) {
        let memory = memory_bytes(machine(files).path());
        (memory.total.expect("total") / 1024, memory.available.expect("available") / 1024)
    }

    #[test]
    fn memory_is_the_least_of_the_machine_and_every_control_group_above() {
        assert_eq!(memory(&[]), (16384, 8192), "no control groups");
        let unlimited = [("proc/self/cgroup", "0::/a/b\n"), ("sys/fs/cgroup/a/b/memory.max", "max\n")];
        assert_eq!(memory(&unlimited), (16384, 8192), "no limit");
        let parent = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "4194304\n"),
            ("sys/fs/cgroup/a/memory.current", "1048576\n"),
        ];
        assert_eq!(memory(&parent), (4096, 3072), "the parent's limit");
        let container =
            [("proc/self/cgroup", "0::/host/only\n"), ("sys/fs/cgroup/memory.max", "2097152\n"), ("sys/fs/cgroup/memory.current", "4194304\n")];
        assert_eq!(memory(&container), (2048, 0), "the top of a container, over its limit");
        let version_1 = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1048576\n"),
            ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "524288\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(memory(&version_1), (1024, 512), "version 1");
    }

    #[test]
    fn a_system_that_says_nothing_is_no_panic() {
        assert_eq!(memory_bytes(Path::new("/nowhere")), Memory::default());
        for text in ["", "MemTotal:", "MemTotal: many kB", "MemTotal: 12", "MemTotal: 99999999999999999999 kB", "MemTotal: 18446744073709551615 kB"] {
            assert_eq!(meminfo_bytes(text, "MemTotal:"), None, "{text}");
        }
    }
}
