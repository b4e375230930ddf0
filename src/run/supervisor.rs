//! The supervisor: a small process between `sweep` and the trials of one slot, which sees to it that nothing of a trial survives it.
//!
//! It is the subreaper of everything that it starts: whatever a trial's processes do (fork twice, begin sessions of their own), they stay its descendants, and
//! it ends them when the trial ends. It is told what to do through a socket. When `sweep` goes away, however it goes, the socket is closed and the
//! supervisor ends everything and itself. When the supervisor is killed, the kernel kills the trial, and `sweep` looks for the rest by its mark.
//!
//! One supervisor serves many attempts one after another, so that an attempt costs one `fork` of a small process.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process_group, wait};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::processes;

/// How long a killed process may take to be gone. One that hangs in a device driver may take for ever.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a supervisor is told.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start an attempt. There is none at the time.
    Start(Start),
    /// Send a signal to the attempt's process group; KILL reaches everything that descends from it.
    Signal(i32),
}

/// An attempt to start.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// The program; this executable where there is none.
    pub(super) program: Option<OsString>,
    /// Its arguments.
    pub(super) arguments: Vec<OsString>,
    /// Variables of its environment beside the supervisor's own.
    pub(super) environment: Vec<(String, OsString)>,
    /// Where its standard output goes.
    pub(super) stdout: OsString,
    /// Where its standard error goes.
    pub(super) stderr: OsString,
    /// Cores it may run on; all where none is named.
    pub(super) cores: Vec<usize>,
}

/// What a supervisor says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// The attempt's process runs.
    Started {
        /// Its id, which is also that of its session and process group.
        process: u32,
    },
    /// It could not be started.
    NotStarted {
        /// What the system said.
        reason: String,
    },
    /// It ended, and so did everything that it started.
    Ended {
        /// Its exit code, if it exited.
        code: Option<i32>,
        /// The signal, if one ended it.
        signal: Option<i32>,
        /// Processes that do not end although they were killed. A supervisor that has some takes no more orders.
        survivors: Vec<u32>,
    },
}

/// Writes an order or a report: a line of JSON.
pub(super) fn send<T: Serialize>(mut socket: &UnixStream, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Takes the first whole line off what was read so far.
pub(super) fn take<T: DeserializeOwned>(read: &mut Vec<u8>) -> io::Result<Option<T>> {
    let Some(end) = read.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
    let message = serde_json::from_slice(&read[..end])?;
    read.drain(..=end);
    Ok(Some(message))
}

/// Reads what the other side has sent; `false` where it has gone away.
pub(super) fn receive(mut socket: &UnixStream, read: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; 4096];
    match socket.read(&mut chunk) {
        Ok(0) => Ok(false),
        Ok(count) => {
            read.extend_from_slice(&chunk[..count]);
            Ok(true)
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(false),
        Err(error) => Err(error),
    }
}

/// Waits until one of `streams` can be read or `timeout` has passed; says whether one can.
pub(super) fn wait_readable(streams: &[&UnixStream], timeout: Option<Duration>) -> bool {
    let timeout =
        timeout.map(|timeout| Timespec { tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX), tv_nsec: timeout.subsec_nanos().into() });
    let mut polled: Vec<PollFd<'_>> = streams.iter().map(|stream| PollFd::new(*stream, PollFlags::IN)).collect();
    // An interrupted wait is a short wait.
    poll(&mut polled, timeout.as_ref()).is_ok_and(|ready| ready > 0)
}

/// A stream that can be read after one of `signals` came.
fn on_signals(signals: &[i32]) -> io::Result<UnixStream> {
    let (reading, writing) = UnixStream::pair()?;
    reading.set_nonblocking(true)?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, writing.try_clone()?)?;
    }
    Ok(reading)
}

/// Whether a stream of [`on_signals`] holds signals; takes them off.
fn took_signals(mut stream: &UnixStream) -> bool {
    let mut any = false;
    while matches!(stream.read(&mut [0; 64]), Ok(count) if count > 0) {
        any = true;
    }
    any
}

/// Serves attempts until the other end of standard input, a socket, is closed.
///
/// # Errors
/// Standard input is no socket, or the system refuses what a supervisor needs.
pub fn supervise() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    rustix::process::set_child_subreaper(Some(getpid()))?;
    let mut supervisor =
        Supervisor { socket, children: on_signals(&[SIGCHLD])?, stop: on_signals(&[SIGTERM, SIGINT, SIGHUP, SIGQUIT])?, attempt: None };
    let mut read = Vec::new();
    loop {
        wait_readable(&[&supervisor.socket, &supervisor.children, &supervisor.stop], None);
        if took_signals(&supervisor.stop) {
            break;
        }
        took_signals(&supervisor.children);
        supervisor.look_after_children()?;
        // Only read where there is something, for the read waits.
        if wait_readable(&[&supervisor.socket], Some(Duration::ZERO)) && !receive(&supervisor.socket, &mut read)? {
            break;
        }
        while let Some(order) = take(&mut read)? {
            supervisor.obey(order)?;
        }
    }
    supervisor.end_all(None);
    Ok(())
}

struct Supervisor {
    socket: UnixStream,
    /// Readable after a child ended.
    children: UnixStream,
    /// Readable after somebody asked this process to end.
    stop: UnixStream,
    /// The process of the attempt, until it is waited for.
    attempt: Option<Pid>,
}

impl Supervisor {
    fn obey(&mut self, order: Order) -> io::Result<()> {
        match order {
            Order::Start(order) => {
                let report = match start(&order) {
                    Ok(attempt) => {
                        self.attempt = Some(attempt);
                        Report::Started { process: attempt.as_raw_nonzero().get().unsigned_abs() }
                    }
                    Err(error) => Report::NotStarted { reason: error.to_string() },
                };
                self.say(&report)
            }
            Order::Signal(signal) => {
                // It may have ended in this moment: then nothing is left to do.
                if let (Some(attempt), Some(signal)) = (self.attempt, Signal::from_named_raw(signal)) {
                    let _ = kill_process_group(attempt, signal);
                    if signal == Signal::KILL {
                        processes::kill_descendants();
                    }
                }
                Ok(())
            }
        }
    }

    /// Reports, unless nobody listens any more: that is noticed by the next read.
    fn say(&self, report: &Report) -> io::Result<()> {
        match send(&self.socket, report) {
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Ok(()),
            sent => sent,
        }
    }

    /// Waits for what has ended. Where that is the attempt's process, everything that it left behind is ended, and the end reported.
    fn look_after_children(&mut self) -> io::Result<()> {
        while let Ok(Some((process, status))) = wait(WaitOptions::NOHANG) {
            if Some(process) == self.attempt {
                self.attempt = None;
                let survivors = self.end_all(Some(PATIENCE));
                return self.say(&Report::Ended { code: status.exit_status(), signal: status.terminating_signal(), survivors });
            }
        }
        Ok(())
    }

    /// Kills all descendants again and again until there are none, or as long as `patience` lasts; returns those that remain.
    fn end_all(&self, patience: Option<Duration>) -> Vec<u32> {
        let began = Instant::now();
        loop {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
                    Ok(None) => break,
                    // There are no children.
                    Err(_) => return Vec::new(),
                }
            }
            if patience.is_some_and(|patience| began.elapsed() >= patience) {
                return processes::descendants(&processes::all(), std::process::id()).iter().map(|process| process.id).collect();
            }
            processes::kill_descendants();
            wait_readable(&[&self.children], Some(Duration::from_millis(20)));
            took_signals(&self.children);
        }
    }
}

/// Starts the process of an attempt in a session and process group of its own, its output in files.
fn start(order: &Start) -> io::Result<Pid> {
    let mut command = match &order.program {
        Some(program) => Command::new(program),
        // Also where the file was replaced meanwhile.
        None => Command::new("/proc/self/exe"),
    };
    // What starts the trial in turn keeps its own name.
    if order.arguments.first().is_some_and(|argument| argument == "trial") {
        command.arg0("sweep");
    }
    command
        .args(&order.arguments)
        .envs(order.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log(Path::new(&order.stdout))?)
        .stderr(log(Path::new(&order.stderr))?);
    let cores = core_set(&order.cores);
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
    let child = command.spawn().map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", Path::new(command.get_program()).display())))?;
    // It is waited for by its id.
    Ok(Pid::from_child(&child))
}

/// Opens a log for appending, so that processes which open it for themselves overwrite nothing.
fn log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// The cores as the kernel takes them; `None` where there are none, or none that it can name.
fn core_set(cores: &[usize]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for core in cores.iter().filter(|core| **core < CpuSet::MAX_CPU) {
        set.set(*core);
    }
    (set.count() > 0).then_some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_cross_the_socket_whole_and_in_pieces() {
        let (here, there) = UnixStream::pair().unwrap();
        let start = Start {
            program: None,
            arguments: vec!["trial".into()],
            environment: vec![("NAME".to_owned(), "value".into())],
            stdout: "out".into(),
            stderr: "err".into(),
            cores: vec![3],
        };
        send(&here, &Order::Start(start)).unwrap();
        send(&here, &Order::Signal(15)).unwrap();
        drop(here);
        let mut whole = Vec::new();
        while receive(&there, &mut whole).unwrap() {}
        let mut read = Vec::new();
        let mut orders = Vec::new();
        for byte in whole {
            read.push(byte);
            orders.extend(take::<Order>(&mut read).unwrap());
        }
        assert!(matches!(&orders[..], [Order::Start(Start { cores, .. }), Order::Signal(15)] if *cores == [3]), "{orders:?}");
        assert!(take::<Order>(&mut b"nonsense\n".to_vec()).is_err());
    }
}
