//! Trials as jobs of a SLURM cluster: what is ready goes off together as a job array, one thread asks the queue and reads the files that the tasks write.
//!
//! Nothing is lost with this process: jobs go on without it, and the next `sweep run` [adopts](adopt) them.

mod adopt;
mod allocation;
mod batch;
mod client;
mod script;
mod watcher;

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use sha2::{Digest, Sha256};

use super::child::TRIAL_PROGRAM;
use super::dispatcher::Input;
use super::launcher::{Launch, Launcher};
use crate::spec::slurm::SlurmSettings;
use crate::store::{RunFolder, StoreError, io_error};
use crate::trial::TrialId;

pub use adopt::{AdoptError, Adoption, Found};
pub use allocation::Allocation;
pub use client::ClientError;
use watcher::{Order, Watcher};

/// How trials are submitted and followed.
#[derive(Clone, Debug)]
pub struct SlurmOptions {
    /// `[slurm]`
    pub settings: SlurmSettings,
    /// What is started for each attempt, on a file system that the nodes share.
    pub program: PathBuf,
    /// Jobs of an earlier `sweep run` that this one follows.
    pub found: Vec<Found>,
}

/// What is started on the nodes: what `SWEEP_TRIAL_PROGRAM` names, or a copy of this executable in the run folder, which a rebuild does no harm.
///
/// # Errors
/// The operating system refused.
pub fn program(run: &RunFolder) -> Result<PathBuf, StoreError> {
    if let Some(path) = std::env::var_os(TRIAL_PROGRAM) {
        return std::path::absolute(&path).map_err(io_error("find", Path::new(&path)));
    }
    let own = Path::new("/proc/self/exe");
    let mut file = fs::File::open(own).map_err(io_error("read", own))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => hash.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(io_error("read", own)(error)),
        }
    }
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let folder = run.slurm();
    fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
    let path = std::path::absolute(folder.join(format!("sweep-{hash}"))).map_err(io_error("find", &folder))?;
    if !path.exists() {
        // Whole or not at all.
        let half = tempfile::Builder::new().prefix(".partial-").tempfile_in(&folder).map_err(io_error("write", &path))?;
        fs::copy(own, half.path()).map_err(io_error("write", &path))?;
        half.persist(&path).map_err(|error| io_error("rename", &path)(error.error))?;
    }
    Ok(path)
}

/// Asks SLURM whether it would take a trial of `ranks` ranks, before anything is prepared.
///
/// # Errors
/// What SLURM says against it.
pub fn check(settings: &SlurmSettings, ranks: usize, on_gpus: bool) -> Result<(), ClientError> {
    let failed = |error: io::Error| ClientError::Failed { program: "sbatch", said: error.to_string() };
    let folder = tempfile::tempdir().map_err(failed)?;
    let array = script::Array {
        name: "sweep-test-only",
        tasks: 1,
        needs: needs(settings, ranks, on_gpus),
        folder: folder.path(),
        program: Path::new("sweep"),
    };
    let path = folder.path().join("job.sh");
    fs::write(&path, script::script(&array, settings)).map_err(failed)?;
    client::sbatch_test_only(&path)
}

/// What a trial of `ranks` ranks needs where the sweep file does not say: a core, or a GPU, for each rank.
fn needs(settings: &SlurmSettings, ranks: usize, on_gpus: bool) -> script::Needs {
    let ranks_per_node = ranks.div_ceil(settings.nodes.max(1));
    script::Needs {
        nodes: settings.nodes.max(1),
        cpus_per_task: settings.cpus_per_task.unwrap_or(ranks_per_node),
        gpus_per_node: settings.gpus_per_node.or(on_gpus.then_some(ranks_per_node)),
    }
}

/// Attempts as tasks of job arrays.
#[derive(Debug)]
pub(super) struct Slurm {
    /// Attempts that go off with the next flush.
    gathered: Vec<Launch>,
    orders: Sender<Order>,
    watcher: JoinHandle<()>,
}

impl Slurm {
    pub(super) fn new(options: SlurmOptions, run: &RunFolder, inbox: Sender<Input>) -> Self {
        let (orders, receiver) = mpsc::channel();
        // Jobs have working directories of their own.
        let run = RunFolder(std::path::absolute(&run.0).unwrap_or_else(|_| run.0.clone()));
        let watcher = thread::spawn(move || Watcher::new(options, run, inbox).run(&receiver));
        Self { gathered: Vec::new(), orders, watcher }
    }

    fn order(&mut self, order: Order) {
        self.flush();
        // The watcher goes after its orders only.
        drop(self.orders.send(order));
    }
}

impl Launcher for Slurm {
    fn spawn(&mut self, launch: Launch) {
        self.gathered.push(launch);
    }

    fn flush(&mut self) {
        if !self.gathered.is_empty() {
            drop(self.orders.send(Order::Submit(std::mem::take(&mut self.gathered))));
        }
    }

    fn terminate(&mut self, trial: &TrialId) {
        self.order(Order::End { trial: trial.clone(), at_once: false });
    }

    fn kill(&mut self, trial: &TrialId) {
        self.order(Order::End { trial: trial.clone(), at_once: true });
    }

    fn join(self: Box<Self>) {
        drop(self.orders);
        // Its panics were caught.
        drop(self.watcher.join());
    }
}
