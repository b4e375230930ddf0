//! Starting a trial's process, and ending everything that it started.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group, pidfd_open, waitid};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::store::AttemptFolder;

/// Environment variable that names the program started for each trial instead of this executable; for the tests' fake trial program.
pub const TRIAL_PROGRAM: &str = "SWEEP_TRIAL_PROGRAM";

/// What is started for each trial.
#[derive(Debug)]
pub struct TrialProgram {
    path: PathBuf,
    /// Keeps `path` valid where it names a descriptor.
    _executable: Option<File>,
}

impl TrialProgram {
    /// What [`TRIAL_PROGRAM`] names, or this executable through a descriptor that is opened now, so that a rebuild under a running sweep does no harm.
    ///
    /// # Errors
    /// This executable cannot be opened.
    pub fn from_environment() -> io::Result<Self> {
        match std::env::var_os(TRIAL_PROGRAM) {
            Some(path) => Ok(Self::at(Path::new(&path))),
            None => {
                let executable = File::open("/proc/self/exe")?;
                // In the child `/proc/self` is the child, which has the same descriptor until its exec closes it.
                Ok(Self { path: format!("/proc/self/fd/{}", executable.as_raw_fd()).into(), _executable: Some(executable) })
            }
        }
    }

    /// The program at `path`.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), _executable: None }
    }

    /// The program without its arguments.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.arg0("sweep");
        command
    }
}

/// A process that runs, as others than its watcher may see it: they may signal its group, never a process id that the system has given to another.
#[derive(Debug, Default)]
pub(super) struct Handle(Mutex<Group>);

#[derive(Debug, Default)]
struct Group {
    /// The leader, from its start until it is waited for.
    leader: Option<Pid>,
    /// A signal that came before the process did.
    early: Option<Signal>,
}

impl Handle {
    fn group(&self) -> MutexGuard<'_, Group> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends `signal` to the process group; a process that has not started yet gets it as soon as it has, one that has ended is left alone.
    pub(super) fn signal(&self, signal: Signal) {
        let mut group = self.group();
        match group.leader {
            // The group may have ended in this moment: then nothing is left to do.
            Some(leader) => {
                let _ = kill_process_group(leader, signal);
            }
            None => group.early = Some(signal),
        }
    }
}

/// A process that its watcher owns.
#[derive(Debug)]
pub(super) struct Process<'h> {
    child: Child,
    leader: Pid,
    /// Readable once the process has ended; `None` on kernels without it.
    ended: Option<OwnedFd>,
    handle: &'h Handle,
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exit {
    pub(super) code: Option<i32>,
    pub(super) signal: Option<i32>,
}

/// Starts `<program> trial <attempt>/request.json` in a session and process group of its own, its output in the attempt's folder.
///
/// The calling thread must live as long as the process: the kernel kills the process when that thread ends, so that nothing survives a `sweep` that was
/// itself killed.
pub(super) fn spawn<'h>(program: &TrialProgram, attempt: &AttemptFolder, cores: &[usize], handle: &'h Handle) -> io::Result<Process<'h>> {
    let mut command = program.command();
    command
        .arg("trial")
        .arg(attempt.request())
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        .stdin(Stdio::null())
        .stdout(File::create(attempt.stdout())?)
        .stderr(File::create(attempt.stderr())?);
    let cores = core_set(cores);
    let parent = getpid();
    let prepare = move || {
        rustix::process::setsid()?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the line above took effect.
        if getppid() != Some(parent) {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
        if let Some(cores) = &cores {
            sched_setaffinity(None, cores)?;
        }
        Ok(())
    };
    // SAFETY: `prepare` runs between fork and exec, where only async-signal-safe calls are allowed: it makes system calls, allocates nothing and takes no
    // lock.
    #[expect(unsafe_code, reason = "a session of its own, death with the parent and cores can only be set between fork and exec")]
    unsafe {
        command.pre_exec(prepare);
    }
    let mut group = handle.group();
    let child = command.spawn()?;
    let leader = Pid::from_child(&child);
    group.leader = Some(leader);
    let early = group.early.take();
    drop(group);
    if let Some(signal) = early {
        handle.signal(signal);
    }
    Ok(Process { child, leader, ended: pidfd_open(leader, PidfdFlags::empty()).ok(), handle })
}

/// The cores as the kernel takes them; `None` where there are none, or none that it can name.
fn core_set(cores: &[usize]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for core in cores.iter().filter(|core| **core < CpuSet::MAX_CPU) {
        set.set(*core);
    }
    (set.count() > 0).then_some(set)
}

impl Process<'_> {
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has ended, at most `timeout`; says whether it has.
    pub(super) fn wait_at_most(&self, timeout: Duration) -> bool {
        match &self.ended {
            Some(ended) => {
                let timeout = Timespec { tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX), tv_nsec: timeout.subsec_nanos().into() };
                // An interrupted wait is a short wait.
                let _ = poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&timeout));
            }
            None => std::thread::sleep(timeout.min(Duration::from_millis(10))),
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(self.leader), options), Ok(None))
    }

    /// Ends what the process left behind in its group, and says how it ended itself.
    pub(super) fn reap(mut self) -> io::Result<Exit> {
        use std::os::unix::process::ExitStatusExt;
        let mut group = self.handle.group();
        // Until it is waited for the leader's id cannot be given to another process, so this meets its group and no other.
        let _ = kill_process_group(self.leader, Signal::KILL);
        let status = self.child.wait();
        group.leader = None;
        drop(group);
        status.map(|status| Exit { code: status.code(), signal: status.signal() })
    }
}
