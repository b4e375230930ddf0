//! From a request as written to a training that can be run: everything that can be refused before data is read is refused here.

use std::path::Path;

use serde::Deserialize;

use super::error::TrainError;
use super::fsdp::EngineOptions;
use super::memory::MAX_RANKS;
use crate::place::Place;
use crate::protocol::{PROTOCOL, TrialRequest};
use crate::spec::settings::DeviceKind;
use crate::store;
use crate::trial::Purpose;

/// A request that was checked, and what follows from it.
#[derive(Clone, Debug)]
pub struct TrialConfig {
    /// The request.
    pub request: TrialRequest,
    /// Applied optimiser steps after which the trial ends; `None` trains to the end.
    pub probe_steps: Option<u64>,
    /// Seed of dropout, and which parameters are trained.
    pub engine: EngineOptions,
    /// How ranks share the machine.
    pub cores: CoreShares,
}

impl TrialConfig {
    /// Reads and checks a request.
    ///
    /// # Errors
    /// [`TrainError::Request`]: it cannot be read, speaks another protocol, has an unknown key, or asks for what cannot be done.
    pub fn read(path: &Path) -> Result<Self, TrainError> {
        /// What every version of the protocol has.
        #[derive(Deserialize)]
        struct Version {
            protocol: u32,
        }
        let bad = |error: store::StoreError| TrainError::Request(error.to_string());
        let Version { protocol } = store::read_json(path).map_err(bad)?;
        if protocol != PROTOCOL {
            return Err(TrainError::Request(format!("{} speaks protocol {protocol}, this sweep speaks protocol {PROTOCOL}", path.display())));
        }
        let mut request: TrialRequest = store::read_json(path).map_err(bad)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        request.save_model = request.save_model.map(|model| folder.join(model));
        Self::new(request)
    }

    /// Checks a request.
    ///
    /// # Errors
    /// [`TrainError::Request`]: it asks for what cannot be done.
    pub fn new(request: TrialRequest) -> Result<Self, TrainError> {
        let refuse = |message: String| Err(TrainError::Request(message));
        let TrialRequest { settings, block_size, purpose, model, data, .. } = &request;
        let world_size = settings.device.world_size;
        if settings.device.kind == DeviceKind::Cuda {
            return refuse("device.kind = \"cuda\" is not built yet".to_owned());
        }
        if !(1..=MAX_RANKS).contains(&world_size) {
            return refuse(format!("device.world_size = {world_size}: between 1 and {MAX_RANKS} ranks can run in one process"));
        }
        if let Some(placement) = request.placement.filter(|placement| placement.nodes != 1) {
            return refuse(format!("placement.nodes = {}: all ranks of a trial run in one process, on one machine", placement.nodes));
        }
        let positions = model.architecture.positions();
        if *block_size < 2 || *block_size > positions {
            return refuse(format!("block_size = {block_size}: the model takes 2 to {positions} tokens"));
        }
        if data.vocab_size > model.architecture.vocab_size() {
            return refuse(format!("the data has {} token ids, the model only {}", data.vocab_size, model.architecture.vocab_size()));
        }
        if let Err(reason) = model.architecture.check() {
            return refuse(reason);
        }
        let train = &settings.train;
        let counts = [
            ("per_device_train_batch_size", train.per_device_train_batch_size),
            ("per_device_eval_batch_size", train.per_device_eval_batch_size),
            ("gradient_accumulation_steps", train.gradient_accumulation_steps),
        ];
        for (name, count) in counts {
            if count == 0 {
                return refuse(format!("train.{name} = 0: at least 1 is needed"));
            }
        }
        if train.eval_steps == Some(0) {
            return refuse("train.eval_steps = 0: at least 1 is needed".to_owned());
        }
        let probe_steps = match (purpose, request.probe_steps) {
            (Purpose::Train, None) => None,
            (Purpose::Probe, Some(steps)) if steps > 0 => Some(steps),
            (purpose, steps) => return refuse(format!("purpose {purpose:?} with probe_steps {steps:?}: a probe has at least 1, a training none")),
        };
        let trainable = match &settings.model.trainable {
            None => None,
            Some(pattern) => match regex::Regex::new(pattern) {
                Ok(pattern) => Some(pattern),
                Err(error) => return refuse(format!("model.trainable: {error}")),
            },
        };
        let engine = EngineOptions { seed: request.seed, trainable };
        let machine = std::thread::available_parallelism().map_or(1, usize::from);
        // A cluster that binds no process to its cores still says how many are its own.
        let machine = Place::of_this_process().and_then(|place| place.cpus).map_or(machine, |cpus| cpus.min(machine));
        let cores = CoreShares::new(&request.cores, world_size, machine);
        Ok(Self { probe_steps, engine, cores, request })
    }

    /// Ranks.
    pub fn world_size(&self) -> usize {
        self.request.settings.device.world_size
    }
}

/// How ranks share the machine's cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreShares {
    /// Worker threads of each rank.
    pub threads_per_rank: usize,
    /// Cores of each rank; empty where ranks may run anywhere. Ranks share cores where there are fewer cores than ranks.
    pub of_rank: Vec<Vec<usize>>,
}

impl CoreShares {
    /// Shares `cores` among `world_size` ranks as evenly as can be, or, if none are named, the threads of a machine with `machine` cores.
    pub fn new(cores: &[usize], world_size: usize, machine: usize) -> Self {
        let count = if cores.is_empty() { machine } else { cores.len() };
        let threads_per_rank = (count / world_size).max(1);
        let of_rank = match cores {
            [] => vec![Vec::new(); world_size],
            _ if count < world_size => (0..world_size).map(|rank| vec![cores[rank % count]]).collect(),
            _ => (0..world_size).map(|rank| cores[count * rank / world_size..count * (rank + 1) / world_size].to_vec()).collect(),
        };
        Self { threads_per_rank, of_rank }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_evenly() {
        let shares = |cores: &[usize], world_size| {
            let CoreShares { threads_per_rank, of_rank } = CoreShares::new(cores, world_size, 8);
            (threads_per_rank, of_rank)
        };
        assert_eq!(shares(&[], 2), (4, vec![vec![], vec![]]));
        assert_eq!(shares(&[], 16).0, 1);
        assert_eq!(shares(&[2, 3, 4, 5], 2), (2, vec![vec![2, 3], vec![4, 5]]));
        assert_eq!(shares(&[2, 3, 4], 2), (1, vec![vec![2], vec![3, 4]]));
        assert_eq!(shares(&[6, 7], 4), (1, vec![vec![6], vec![7], vec![6], vec![7]]));
    }
}
