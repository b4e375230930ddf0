//! A trial's process as its watcher sees it: started, signalled and waited for through a [supervisor](super::supervisor).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::leases::Place;
use super::ports::Port;
use super::processes::{self, MARK};
use super::supervisor::{self, Order, Report, Start};
use crate::store::AttemptFolder;

/// Environment variable that names the program started for each trial instead of this executable; for the tests' fake trial program.
pub const TRIAL_PROGRAM: &str = "SWEEP_TRIAL_PROGRAM";
/// How long a supervisor may take to say that an attempt which was killed has ended, before it is taken for dead itself.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long starting a process may take where the program lies on a slow disk.
const SLOWEST_START: Duration = Duration::from_secs(120);

/// What is started for each trial, and what starts it.
#[derive(Debug)]
pub struct TrialProgram {
    /// This executable where there is none.
    path: Option<PathBuf>,
    supervisor: PathBuf,
    /// A program that starts it in turn, with its arguments; empty where it is started as it is.
    before: Vec<OsString>,
    /// Keeps `supervisor` valid where it names a descriptor.
    _executable: Option<File>,
}

impl TrialProgram {
    /// What [`TRIAL_PROGRAM`] names, or this executable. This executable is opened now, so that a rebuild under a running sweep does no harm.
    ///
    /// # Errors
    /// This executable cannot be opened.
    pub fn from_environment() -> io::Result<Self> {
        let executable = File::open("/proc/self/exe")?;
        // In the child `/proc/self` is the child, which has the same descriptor until its exec closes it.
        let supervisor = format!("/proc/self/fd/{}", executable.as_raw_fd()).into();
        Ok(Self { path: std::env::var_os(TRIAL_PROGRAM).map(PathBuf::from), supervisor, before: Vec::new(), _executable: Some(executable) })
    }

    /// A command that starts the program in turn, `trial` and the request being added to its arguments.
    ///
    /// # Errors
    /// This executable cannot be opened.
    pub fn behind(mut command: Vec<OsString>) -> io::Result<Self> {
        let path = command.pop().map(PathBuf::from);
        Ok(Self { path, before: command, ..Self::from_environment()? })
    }

    /// The program at `path`, supervised by the `sweep` at `supervisor`.
    pub fn at(path: &Path, supervisor: &Path) -> Self {
        Self { path: Some(path.to_owned()), supervisor: supervisor.to_owned(), before: Vec::new(), _executable: None }
    }
}

/// Supervisors that wait for their next attempt.
#[derive(Debug, Default)]
pub(super) struct Supervisors(Mutex<Vec<Supervisor>>);

impl Supervisors {
    fn idle(&self) -> MutexGuard<'_, Vec<Supervisor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, program: &TrialProgram) -> io::Result<Supervisor> {
        loop {
            let idle = self.idle().pop();
            match idle {
                None => return Supervisor::start(&program.supervisor),
                Some(mut supervisor) => {
                    // One that was killed while it was idle is dropped.
                    if supervisor.process.try_wait()?.is_none() {
                        return Ok(supervisor);
                    }
                }
            }
        }
    }
}

#[derive(Debug)]
struct Supervisor {
    process: Child,
    socket: UnixStream,
    /// What was read and is no whole line yet.
    read: Vec<u8>,
}

impl Supervisor {
    fn start(program: &Path) -> io::Result<Self> {
        let (socket, other) = UnixStream::pair()?;
        let mut command = Command::new(program);
        // A process group of its own, so that Ctrl-C reaches `sweep` alone.
        command.arg0("sweep").arg("supervise").process_group(0);
        command.stdin(OwnedFd::from(other)).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { process: command.spawn()?, socket, read: Vec::new() })
    }

    /// The next report; `None` after `timeout`. An error means that the supervisor is gone.
    fn next_report(&mut self, timeout: Option<Duration>) -> io::Result<Option<Report>> {
        loop {
            if let Some(report) = supervisor::take(&mut self.read)? {
                return Ok(Some(report));
            }
            if !supervisor::wait_readable(&[&self.socket], timeout) {
                return Ok(None);
            }
            if !supervisor::receive(&self.socket, &mut self.read)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Without its socket it ends whatever it still has and then itself. One that cannot is left to do so alone.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let limit = Instant::now() + Duration::from_secs(5);
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A process that runs, as others than its watcher may see it: they may signal it, never another attempt that the same supervisor serves later.
#[derive(Debug, Default)]
pub(super) struct Handle(Mutex<Line>);

#[derive(Debug, Default)]
struct Line {
    /// To the supervisor, from the process's start until its end.
    socket: Option<UnixStream>,
    /// A signal that came before the process did.
    early: Option<Signal>,
    /// When it was killed.
    killed: Option<Instant>,
    /// Its folder and its id, while it runs.
    process: Option<(AttemptFolder, u32)>,
}

impl Line {
    fn send(&self, signal: Signal) {
        if let Some(socket) = &self.socket {
            // A supervisor that has gone away is noticed by the watcher.
            let _ = supervisor::send(socket, &Order::Signal(signal.as_raw()));
        }
    }
}

impl Handle {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends `signal` to the process group, KILL to all descendants; a process that has not started yet gets it as soon as it has, one that has ended is
    /// left alone.
    pub(super) fn signal(&self, signal: Signal) {
        let mut line = self.line();
        if signal == Signal::KILL {
            line.killed.get_or_insert_with(Instant::now);
        }
        if line.socket.is_some() {
            line.send(signal);
        } else {
            line.early = Some(signal);
        }
    }

    /// The attempt's folder and its process, while it runs.
    pub(super) fn examined(&self) -> Option<(AttemptFolder, u32)> {
        self.line().process.clone()
    }

    /// Whether it was told to be killed.
    pub(super) fn was_killed(&self) -> bool {
        self.line().killed.is_some()
    }

    fn killed_for(&self) -> Option<Duration> {
        Some(self.line().killed?.elapsed())
    }
}

/// A process that its watcher owns.
#[derive(Debug)]
pub(super) struct Process<'w> {
    /// `None` once it is lost.
    supervisor: Option<Supervisor>,
    supervisors: &'w Supervisors,
    handle: &'w Handle,
    /// The attempt's folder.
    mark: PathBuf,
    id: u32,
    exit: Option<Exit>,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// It ended, and nothing of it is left but `survivors`, which do not end although they were killed.
    Ended { code: Option<i32>, signal: Option<i32>, survivors: Vec<u32> },
    /// Its supervisor ended, and it with it.
    SupervisorLost,
    /// It was killed and does not end, as where it hangs in a device driver.
    Stuck,
}

/// Starts `<program> trial <attempt>/request.json` in a session and process group of its own, its output in the attempt's folder.
pub(super) fn spawn<'w>(
    program: &TrialProgram,
    supervisors: &'w Supervisors,
    attempt: &AttemptFolder,
    place: &Place,
    port: Option<&Port<'_>>,
    handle: &'w Handle,
) -> io::Result<Process<'w>> {
    let mark = std::path::absolute(&attempt.0)?;
    let mut environment: BTreeMap<&str, OsString> = BTreeMap::new();
    environment.insert(MARK, mark.clone().into());
    environment.insert("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into());
    if let Some(port) = port {
        environment.insert("MASTER_ADDR", "127.0.0.1".into());
        environment.insert("MASTER_PORT", port.number.to_string().into());
    }
    if !place.gpus.is_empty() {
        environment.insert("CUDA_VISIBLE_DEVICES", place.gpus.join(",").into());
    }
    let mut words = program.before.iter().cloned().chain(program.path.clone().map(PathBuf::into_os_string));
    let order = Order::Start(Start {
        program: words.next(),
        arguments: words.chain(["trial".into(), attempt.request().into()]).collect(),
        environment: environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        stdout: attempt.stdout().into(),
        stderr: attempt.stderr().into(),
        cores: place.cores.clone(),
    });
    let lost = |error: io::Error| io::Error::new(error.kind(), format!("the supervisor of its process is gone: {error}"));
    let mut supervisor = supervisors.take(program)?;
    supervisor::send(&supervisor.socket, &order).map_err(lost)?;
    let began = Instant::now();
    let id = loop {
        match supervisor.next_report(Some(Duration::from_secs(1))).map_err(lost)? {
            Some(Report::Started { process }) => break process,
            Some(Report::NotStarted { reason }) => {
                supervisors.idle().push(supervisor);
                return Err(io::Error::other(reason));
            }
            Some(other) => return Err(io::Error::other(format!("its supervisor answered {other:?}"))),
            None if began.elapsed() > SLOWEST_START || handle.killed_for().is_some() => {
                let _ = supervisor.process.kill();
                return Err(io::Error::new(io::ErrorKind::TimedOut, "its supervisor does not answer"));
            }
            None => {}
        }
    };
    let mut line = handle.line();
    line.socket = Some(supervisor.socket.try_clone()?);
    line.process = Some((attempt.clone(), id));
    if let Some(early) = line.early.take() {
        line.send(early);
    }
    drop(line);
    Ok(Process { supervisor: Some(supervisor), supervisors, handle, mark, id, exit: None })
}

impl Process<'_> {
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Waits until the process has ended, at most `timeout`; says whether it has.
    pub(super) fn wait_at_most(&mut self, timeout: Duration) -> bool {
        if self.exit.is_none()
            && let Some(supervisor) = &mut self.supervisor
        {
            match supervisor.next_report(Some(timeout)) {
                Ok(None) if self.handle.killed_for().is_none_or(|killed| killed < PATIENCE) => {}
                Ok(Some(Report::Ended { code, signal, survivors })) => self.exit = Some(Exit::Ended { code, signal, survivors }),
                Ok(None) => self.exit = Some(Exit::Stuck),
                // It went away, or says what makes no sense.
                _ => self.exit = Some(Exit::SupervisorLost),
            }
        }
        self.exit.is_some()
    }

    /// Waits for the end of the process and everything that it started, and says how it ended itself.
    pub(super) fn reap(mut self) -> Exit {
        while !self.wait_at_most(Duration::from_secs(1)) {}
        self.settle()
    }

    fn settle(&mut self) -> Exit {
        // From here on the supervisor may serve another attempt, which must not get this one's signals.
        let mut line = self.handle.line();
        (line.socket, line.process) = (None, None);
        drop(line);
        let exit = self.exit.take().unwrap_or(Exit::SupervisorLost);
        let Some(mut supervisor) = self.supervisor.take() else { return exit };
        match &exit {
            Exit::Ended { survivors, .. } if survivors.is_empty() => self.supervisors.idle().push(supervisor),
            Exit::Ended { .. } => {}
            Exit::SupervisorLost | Exit::Stuck => {
                // The kernel ends the process with its supervisor; what it started is found by its session and its mark.
                let _ = supervisor.process.kill();
                processes::kill_marked(&self.mark, Some(self.id));
            }
        }
        exit
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        // Only where its watcher panicked: without its supervisor it ends.
        if self.supervisor.is_some() {
            self.settle();
        }
    }
}
