//! Keeping a second `sweep run` out of a run folder that is in use.
//!
//! The lock is the system's lock on the file `lock`, which the system lets go of when its holder ends, however it ends. The file's contents name the holder, for
//! people, and for file systems that several machines share: there one machine's lock may be invisible to another.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{RunFolder, StoreError, io_error};
use crate::protocol::Timestamp;

/// Who works in a run folder: the contents of its file `lock`, which is empty where nobody does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockOwner {
    /// Name of its machine.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// The machine's `boot_id`: another one since means that the machine has been restarted.
    pub boot_id: String,
    /// Ticks since boot when the process started, by which it is told from a later one with the same id; `None` where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_started: Option<u64>,
    /// Since when.
    pub since: Timestamp,
}

impl LockOwner {
    fn this() -> Self {
        let pid = std::process::id();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid,
            boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
            process_started: started(pid),
            since: Timestamp::now(),
        }
    }
}

/// For people: `process 123 on node7, since 2026-11-30T12:00:00Z`.
impl std::fmt::Display for LockOwner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "process {} on {}, since {}", self.pid, self.host, humantime::format_rfc3339_seconds(self.since.0))
    }
}

/// When the process with this id started, in ticks since boot; `None` where there is none.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The second field, the program's name in parentheses, may hold anything.
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace();
    // A zombie works in no folder any more.
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// What the contents of a lock file mean to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Its owner has ended without taking its name off.
    Dead,
    /// Its owner runs on this machine.
    Alive,
    /// Its owner runs or ran on another machine, which only people can know.
    Elsewhere,
}

/// `started` says when a process of this machine started.
fn standing(owner: &LockOwner, this: &LockOwner, started: impl Fn(u32) -> Option<u64>) -> Standing {
    if owner.host != this.host {
        return Standing::Elsewhere;
    }
    if owner.boot_id != this.boot_id || owner.pid == this.pid {
        return Standing::Dead;
    }
    match (started(owner.pid), owner.process_started) {
        (None, _) => Standing::Dead,
        (Some(now), Some(then)) if now != then => Standing::Dead,
        (Some(_), _) => Standing::Alive,
    }
}

/// Holds a run folder: as long as it lives no other `sweep run` works in it.
#[derive(Debug)]
pub struct RunLock {
    file: File,
}

/// What came of the wish to hold a run folder.
#[derive(Debug)]
pub enum LockAttempt {
    /// It is held now.
    Taken {
        /// The lock.
        lock: RunLock,
        /// Who held it before and ended without letting go.
        abandoned_by: Option<LockOwner>,
    },
    /// A process of this machine holds it.
    Held {
        /// Which, where it has said so.
        by: Option<LockOwner>,
    },
    /// It bears the name of another machine, whose processes cannot be seen from here.
    Elsewhere {
        /// Whose.
        by: LockOwner,
    },
}

impl RunLock {
    /// Takes the lock. `force` takes it from another machine, never from a process that runs on this one.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn take(folder: &RunFolder, force: bool) -> Result<LockAttempt, StoreError> {
        let path = folder.lock();
        let this = LockOwner::this();
        let mut file = open(&path)?;
        let locked = try_lock(&file, &path)?;
        let owner = read_owner(&mut file);
        let abandoned_by = match owner {
            Some(owner) => match standing(&owner, &this, started) {
                Standing::Elsewhere if !force => return Ok(LockAttempt::Elsewhere { by: owner }),
                Standing::Elsewhere if !locked => {
                    // The file server holds on to a lock of a machine that the user knows to be gone. Nobody holds a new file.
                    fs::remove_file(&path).map_err(io_error("remove", &path))?;
                    file = open(&path)?;
                    if !try_lock(&file, &path)? {
                        return Ok(LockAttempt::Held { by: None });
                    }
                    Some(owner)
                }
                Standing::Alive => return Ok(LockAttempt::Held { by: Some(owner) }),
                Standing::Dead if !locked => return Ok(LockAttempt::Held { by: None }),
                Standing::Elsewhere | Standing::Dead => Some(owner),
            },
            None if !locked => return Ok(LockAttempt::Held { by: None }),
            None => None,
        };
        let mut lock = Self { file };
        lock.write(&this).map_err(io_error("write", &path))?;
        Ok(LockAttempt::Taken { lock, abandoned_by })
    }

    fn write(&mut self, owner: &LockOwner) -> io::Result<()> {
        let mut line = serde_json::to_vec(owner)?;
        line.push(b'\n');
        self.file.set_len(0)?;
        self.file.write_all(&line)
    }

    /// Whether a process works in the folder, or may do so on another machine. Only looks: it makes no file, and works where the folder cannot be written.
    pub fn is_held(folder: &RunFolder) -> bool {
        let Ok(mut file) = File::open(folder.lock()) else { return false };
        matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock))
            || read_owner(&mut file).is_some_and(|owner| standing(&owner, &LockOwner::this(), started) != Standing::Dead)
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Where the name stays, the next `sweep` finds its owner dead.
        let _ = self.file.set_len(0);
    }
}

fn open(path: &Path) -> Result<File, StoreError> {
    OpenOptions::new().create(true).read(true).append(true).open(path).map_err(io_error("write", path))
}

/// Whether the system's lock could be taken. Where the file system knows none the contents alone decide.
fn try_lock(file: &File, path: &Path) -> Result<bool, StoreError> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(fs::TryLockError::WouldBlock) => Ok(false),
        Err(fs::TryLockError::Error(error)) => {
            let unknown = error.kind() == io::ErrorKind::Unsupported
                || error
                    .raw_os_error()
                    .is_some_and(|code| code == rustix::io::Errno::NOLCK.raw_os_error() || code == rustix::io::Errno::NOSYS.raw_os_error());
            if unknown { Ok(true) } else { Err(io_error("lock", path)(error)) }
        }
    }
}

/// The owner a lock file names. Contents that are damaged name nobody.
fn read_owner(file: &mut File) -> Option<LockOwner> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    serde_json::from_str(&text).ok()
}

impl RunFolder {
    /// Names whoever works in the folder.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }
}

#[cfg(test)]
mod tests {
    use super::super::create_run;
    use super::*;

    fn owner(host: &str, pid: u32, boot_id: &str, process_started: Option<u64>) -> LockOwner {
        LockOwner { host: host.to_owned(), pid, boot_id: boot_id.to_owned(), process_started, since: Timestamp(std::time::SystemTime::UNIX_EPOCH) }
    }

    #[test]
    fn the_dead_the_living_and_the_unknown_are_told_apart() {
        let this = owner("here", 10, "boot", Some(5));
        // Process 7 started at 70, process 8 does not exist.
        let started = |pid: u32| (pid == 7).then_some(70);
        for (name, other, expected) in [
            ("another machine", owner("there", 7, "boot", Some(70)), Standing::Elsewhere),
            ("before the machine was restarted", owner("here", 7, "earlier", Some(70)), Standing::Dead),
            ("no such process", owner("here", 8, "boot", Some(80)), Standing::Dead),
            ("another process with its id", owner("here", 7, "boot", Some(71)), Standing::Dead),
            ("this process, which knows that it holds nothing", owner("here", 10, "boot", Some(5)), Standing::Dead),
            ("the process itself", owner("here", 7, "boot", Some(70)), Standing::Alive),
            ("a process that cannot be told from a later one", owner("here", 7, "boot", None), Standing::Alive),
        ] {
            assert_eq!(standing(&other, &this, started), expected, "{name}");
        }
    }

    fn taken(attempt: LockAttempt) -> Option<(RunLock, Option<LockOwner>)> {
        match attempt {
            LockAttempt::Taken { lock, abandoned_by } => Some((lock, abandoned_by)),
            LockAttempt::Held { .. } | LockAttempt::Elsewhere { .. } => None,
        }
    }

    #[test]
    fn one_lock_at_a_time() {
        let results = tempfile::tempdir().unwrap();
        let run = create_run(results.path(), "sweep").unwrap();
        let take = || taken(RunLock::take(&run, false).unwrap());
        assert!(!RunLock::is_held(&run), "nobody ever worked in it");
        let (held, abandoned_by) = take().unwrap();
        assert_eq!(abandoned_by, None);
        assert!(RunLock::is_held(&run));
        let named: LockOwner = serde_json::from_str(&fs::read_to_string(run.lock()).unwrap()).unwrap();
        assert_eq!((named.pid, named.process_started), (std::process::id(), started(std::process::id())));
        assert!(!named.host.is_empty() && !named.boot_id.is_empty());
        assert!(take().is_none());
        assert!(taken(RunLock::take(&run, true).unwrap()).is_none(), "a process of this machine loses its lock to nobody");
        drop(held);
        assert!(!RunLock::is_held(&run));
        assert_eq!(fs::read_to_string(run.lock()).unwrap(), "");
        assert!(take().is_some());
    }

    #[test]
    fn another_machine_loses_its_lock_only_by_force() {
        let results = tempfile::tempdir().unwrap();
        let run = create_run(results.path(), "sweep").unwrap();
        let other = owner("elsewhere.example", 7, "boot", Some(70));
        let name = |owner: &LockOwner| fs::write(run.lock(), serde_json::to_vec(owner).unwrap()).unwrap();
        name(&other);
        assert!(matches!(RunLock::take(&run, false).unwrap(), LockAttempt::Elsewhere { by } if by == other));
        assert!(RunLock::is_held(&run));
        let (lock, abandoned_by) = taken(RunLock::take(&run, true).unwrap()).unwrap();
        assert_eq!(abandoned_by, Some(other.clone()));
        // The same where the file server still holds the other machine's lock.
        name(&other);
        assert!(matches!(RunLock::take(&run, false).unwrap(), LockAttempt::Elsewhere { .. }));
        assert!(taken(RunLock::take(&run, true).unwrap()).is_some());
        drop(lock);

        let this = LockOwner::this();
        name(&LockOwner { boot_id: "before".to_owned(), ..this.clone() });
        assert_eq!(taken(RunLock::take(&run, false).unwrap()).unwrap().1.map(|owner| owner.boot_id), Some("before".to_owned()));
        fs::write(run.lock(), "\0damaged").unwrap();
        assert!(taken(RunLock::take(&run, false).unwrap()).is_some());
    }
}
