//! The search for the largest block size that fits: a pure function of what the probes and trainings have shown so far.

use std::collections::BTreeMap;

use crate::event::LimitedBy;
use crate::protocol::{PreparedData, ResolvedModel};
use crate::spec::settings::{Dataset, Packing, Settings};

/// What keeps candidates out before any probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Positions of the model, in tokens.
    pub positions: usize,
    /// Largest block size that still yields one global batch of training blocks; `None` where no block size is too large for the data.
    pub data: Option<usize>,
}

impl Bounds {
    /// The bounds of a configuration.
    pub fn of(settings: &Settings, model: &ResolvedModel, data: &PreparedData) -> Self {
        let blocks_are_cut = settings.data.packing == Packing::Concatenate && !matches!(settings.data.dataset, Dataset::TokenBlocks { .. });
        let train = &settings.train;
        let global_batch = train.per_device_train_batch_size * train.gradient_accumulation_steps * settings.device.world_size;
        let largest = usize::try_from(data.train_tokens).unwrap_or(usize::MAX) / global_batch.max(1);
        Self { positions: model.architecture.positions(), data: blocks_are_cut.then_some(largest) }
    }

    /// What keeps `block_size` out, if anything does. The model goes first: no amount of data helps against it.
    fn refuse(&self, block_size: usize) -> Option<LimitedBy> {
        if block_size > self.positions {
            Some(LimitedBy::Model)
        } else if self.data.is_some_and(|largest| block_size > largest) {
            Some(LimitedBy::Data)
        } else {
            None
        }
    }
}

/// What is known about a block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// A probe or a training ran to its end.
    Fits,
    /// A probe ran out of device memory.
    TooLarge,
}

/// What the search does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// This block size must be probed.
    Probe(usize),
    /// The search is over.
    Found {
        /// The largest block size that fits; `None` when not even the smallest candidate does.
        block_size: Option<usize>,
        /// What stands in the way of a larger one.
        limited_by: LimitedBy,
    },
}

/// Decides what to do next.
///
/// Memory grows with the block size, so a size that fits settles every smaller one and a size that does not settles every larger one; between the two the
/// middle candidate is probed. `training_too_large` is the smallest block size at which a *training* ran out of memory although its probe had fitted: the
/// answer is then the next smaller candidate, which the probe above it has settled already.
pub fn decide(candidates: &[usize], bounds: Bounds, known: &BTreeMap<usize, Fit>, training_too_large: Option<usize>) -> Decision {
    let mut candidates = candidates.to_vec();
    candidates.sort_unstable();
    candidates.dedup();
    let allowed = candidates.iter().take_while(|candidate| bounds.refuse(**candidate).is_none()).count();
    let beyond = candidates.get(allowed).and_then(|candidate| bounds.refuse(*candidate));
    let candidates = &candidates[..allowed];

    let too_large = known.iter().filter(|(_, fit)| **fit == Fit::TooLarge).map(|(size, _)| *size).min();
    // Where two probes contradict each other (memory that another process held), the smaller size that failed is believed: it is the safe one.
    let fits = known.iter().filter(|(size, fit)| **fit == Fit::Fits && too_large.is_none_or(|limit| **size < limit)).map(|(size, _)| *size).max();
    let open: Vec<usize> = candidates
        .iter()
        .copied()
        .filter(|size| fits.is_none_or(|fits| *size > fits) && too_large.is_none_or(|limit| *size < limit))
        .filter(|size| training_too_large.is_none_or(|limit| *size < limit))
        .collect();
    if !open.is_empty() {
        return Decision::Probe(open[open.len() / 2]);
    }
    let smallest_too_large = [too_large, training_too_large].into_iter().flatten().min();
    let block_size = candidates
        .iter()
        .copied()
        .filter(|size| fits.is_some_and(|fits| *size <= fits) && smallest_too_large.is_none_or(|limit| *size < limit))
        .max();
    let memory_is_in_the_way = smallest_too_large.is_some_and(|limit| candidates.contains(&limit));
    let limited_by = if memory_is_in_the_way { LimitedBy::Memory } else { beyond.unwrap_or(LimitedBy::Candidates) };
    Decision::Found { block_size, limited_by }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FREE: Bounds = Bounds { positions: 1 << 20, data: None };

    /// Probes a world where `largest` is the largest block size that fits, and returns the answer and the sizes probed.
    fn search(candidates: &[usize], bounds: Bounds, largest: usize) -> (Decision, Vec<usize>) {
        let mut known = BTreeMap::new();
        loop {
            match decide(candidates, bounds, &known, None) {
                Decision::Probe(size) => {
                    let fit = if size <= largest { Fit::Fits } else { Fit::TooLarge };
                    assert_eq!(known.insert(size, fit), None, "{size} was probed twice");
                }
                found => return (found, known.into_keys().collect()),
            }
        }
    }

    fn found(block_size: Option<usize>, limited_by: LimitedBy) -> Decision {
        Decision::Found { block_size, limited_by }
    }

    #[test]
    fn every_limit_is_told_apart() {
        let candidates = [64, 128, 256, 512, 1024];
        for (name, bounds, largest, expected) in [
            ("memory", FREE, 300, found(Some(256), LimitedBy::Memory)),
            ("everything fits", FREE, 9999, found(Some(1024), LimitedBy::Candidates)),
            ("nothing fits", FREE, 63, found(None, LimitedBy::Memory)),
            ("the model", Bounds { positions: 512, data: None }, 9999, found(Some(512), LimitedBy::Model)),
            ("memory below the model", Bounds { positions: 512, data: None }, 256, found(Some(256), LimitedBy::Memory)),
            ("the model takes none", Bounds { positions: 63, data: None }, 9999, found(None, LimitedBy::Model)),
            ("data", Bounds { positions: 1024, data: Some(200) }, 9999, found(Some(128), LimitedBy::Data)),
            ("no data", Bounds { positions: 1024, data: Some(0) }, 9999, found(None, LimitedBy::Data)),
            ("model and data", Bounds { positions: 100, data: Some(100) }, 9999, found(Some(64), LimitedBy::Model)),
        ] {
            assert_eq!(search(&candidates, bounds, largest).0, expected, "{name}");
        }
    }

    /// Case 36: what the model or the data refuse is never probed.
    #[test]
    fn refused_candidates_are_not_probed() {
        let (_, probed) = search(&[64, 128, 256], Bounds { positions: 128, data: None }, 9999);
        assert!(probed.iter().all(|size| *size <= 128), "{probed:?}");
        assert!(search(&[64], Bounds { positions: 32, data: None }, 9999).1.is_empty());
    }

    /// Case 37: a training that runs out of memory makes the next smaller candidate the answer, and needs no other probe.
    #[test]
    fn training_out_of_memory_takes_the_next_smaller() {
        let candidates = [64, 128, 256, 512];
        let known = BTreeMap::from([(256, Fit::Fits), (512, Fit::TooLarge)]);
        assert_eq!(decide(&candidates, FREE, &known, None), found(Some(256), LimitedBy::Memory));
        assert_eq!(decide(&candidates, FREE, &known, Some(256)), found(Some(128), LimitedBy::Memory));
        assert_eq!(decide(&candidates, FREE, &known, Some(64)), found(None, LimitedBy::Memory));
        let all_fit = BTreeMap::from([(512, Fit::Fits)]);
        assert_eq!(decide(&candidates, FREE, &all_fit, Some(512)), found(Some(256), LimitedBy::Memory));
    }

    #[test]
    fn contradicting_probes_are_read_on_the_safe_side() {
        let known = BTreeMap::from([(64, Fit::Fits), (128, Fit::TooLarge), (256, Fit::Fits)]);
        assert_eq!(decide(&[64, 128, 256], FREE, &known, None), found(Some(64), LimitedBy::Memory));
    }

    proptest! {
        #[test]
        fn bisecting_finds_what_a_walk_finds_in_logarithmic_probes(
            candidates in prop::collection::vec(1_usize..5000, 1..40),
            largest in 0_usize..5500,
            positions in 1_usize..5500,
            data in prop::option::of(0_usize..5500),
        ) {
            let bounds = Bounds { positions, data };
            let (decision, probed) = search(&candidates, bounds, largest);
            let walked = candidates.iter().copied().filter(|size| *size <= largest && bounds.refuse(*size).is_none()).max();
            let Decision::Found { block_size, limited_by } = decision else { unreachable!() };
            prop_assert_eq!(block_size, walked);
            let next = candidates.iter().copied().filter(|size| walked.is_none_or(|found| *size > found)).min();
            let expected = next.map_or(LimitedBy::Candidates, |next| bounds.refuse(next).unwrap_or(LimitedBy::Memory));
            prop_assert_eq!(limited_by, expected);
            prop_assert!(probed.len() <= candidates.len().ilog2() as usize + 1, "{} probes for {} candidates", probed.len(), candidates.len());
        }
    }
}
