//! Which blocks each rank takes at each step. Pure: the same for every world size as far as the blocks of a global batch go.
//!
//! An epoch visits every block once. Blocks, shuffled or in order, are dealt in passes (the forward and backward of all ranks at once) of
//! `world_size * per_device_batch_size`; an optimiser step is `gradient_accumulation_steps` passes. Like the HF Trainer, the last, incomplete pass is kept
//! and the last step may have fewer passes. Unlike it, nothing is repeated to fill up: the ranks share what is left as evenly as can be, and the
//! trainer weighs by tokens. A rank gets no rows only where fewer rows are left than there are ranks.

use super::blocks::Blocks;
use super::error::DataError;
use super::random::Random;

/// How blocks are dealt to ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dealing {
    /// Ranks.
    pub world_size: usize,
    /// Blocks per rank and pass.
    pub per_device_batch_size: usize,
    /// Passes per optimiser step.
    pub gradient_accumulation_steps: usize,
    /// Seed of the order of every epoch; `None` keeps the order of the data.
    pub shuffle: Option<u64>,
}

impl Dealing {
    /// For evaluation: one pass a step, in the order of the data.
    pub fn evaluation(world_size: usize, per_device_batch_size: usize) -> Self {
        Self { world_size, per_device_batch_size, gradient_accumulation_steps: 1, shuffle: None }
    }

    /// Blocks of a full optimiser step over all ranks.
    pub fn global_batch_size(&self) -> usize {
        self.world_size * self.per_device_batch_size * self.gradient_accumulation_steps
    }

    /// Optimiser steps of one epoch over `blocks` blocks, the incomplete last one included.
    pub fn steps_per_epoch(&self, blocks: usize) -> usize {
        blocks.div_ceil(self.global_batch_size())
    }

    /// The order of one epoch over `blocks`, from 0. Tokens that were cut beforehand are taken as they stand.
    ///
    /// # Errors
    /// The blocks were cut beforehand for another global batch.
    pub fn epoch(&self, blocks: &Blocks, epoch: u64) -> Result<Epoch, DataError> {
        let fixed = blocks.global_batch_size();
        if let Some(found) = fixed
            && found != self.global_batch_size()
        {
            return Err(DataError::BadSetting {
                setting: "data.dataset",
                reason: format!(
                    "the steps of token_blocks hold {found} rows, but device.world_size {} x per_device_train_batch_size {} x gradient_accumulation_steps {} = {}",
                    self.world_size,
                    self.per_device_batch_size,
                    self.gradient_accumulation_steps,
                    self.global_batch_size()
                ),
                hint: Some("set train.per_device_train_batch_size so that both are equal".to_owned()),
            });
        }
        let mut rows: Vec<usize> = (0..blocks.count()).collect();
        if let (Some(seed), None) = (self.shuffle, fixed) {
            Random::new(seed, epoch).shuffle(&mut rows);
        }
        Ok(Epoch { dealing: self.clone(), rows, whole_shares: fixed.is_some() })
    }
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct Epoch {
    dealing: Dealing,
    rows: Vec<usize>,
    /// Whether a rank's rows of a step lie together, as `token_blocks` has them; otherwise its rows of a pass do.
    whole_shares: bool,
}

impl Epoch {
    /// Optimiser steps.
    pub fn steps(&self) -> usize {
        self.dealing.steps_per_epoch(self.rows.len())
    }

    /// Passes of optimiser step `step` that have any rows: `gradient_accumulation_steps` but for the last step.
    pub fn passes(&self, step: usize) -> usize {
        self.step(step).len().div_ceil(self.dealing.world_size * self.dealing.per_device_batch_size)
    }

    /// Blocks of optimiser step `step` over all ranks and passes.
    pub fn step(&self, step: usize) -> &[usize] {
        part(&self.rows, step, self.dealing.global_batch_size())
    }

    /// Blocks of all steps up to `step` and of it.
    pub fn steps_up_to(&self, step: usize) -> &[usize] {
        &self.rows[..step.saturating_add(1).saturating_mul(self.dealing.global_batch_size()).min(self.rows.len())]
    }

    /// Blocks that `rank` takes in pass `pass` of optimiser step `step`, all from 0; empty beyond the end, and where fewer rows are left than ranks.
    pub fn batch(&self, step: usize, pass: usize, rank: usize) -> &[usize] {
        let Dealing { world_size, per_device_batch_size, .. } = self.dealing;
        let rows = self.step(step);
        if self.whole_shares {
            return part(share(rows, rank, world_size), pass, per_device_batch_size);
        }
        share(part(rows, pass, world_size * per_device_batch_size), rank, world_size)
    }
}

/// The `index`th run of `size` items; shorter, or empty, at the end.
fn part(items: &[usize], index: usize, size: usize) -> &[usize] {
    let start = index.saturating_mul(size).min(items.len());
    &items[start..(start + size).min(items.len())]
}

/// One of `shares` runs whose lengths differ by one at most.
fn share(items: &[usize], index: usize, shares: usize) -> &[usize] {
    &items[items.len() * index / shares..items.len() * (index + 1) / shares]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks(count: usize) -> Blocks {
        Blocks::cut(vec![0; count * 2], 2)
    }

    proptest! {
        /// Every block exactly once, whatever the numbers; ranks differ by one row at most; the rows of a step do not depend on the world size.
        #[test]
        fn an_epoch_takes_every_block_once(
            count in 0_usize..200, world_size in 1_usize..6, batch in 1_usize..7, passes in 1_usize..4, shuffle in prop::option::of(any::<u64>()), epoch in 0_u64..3,
        ) {
            let dealing = Dealing { world_size, per_device_batch_size: batch, gradient_accumulation_steps: passes, shuffle };
            let order = dealing.epoch(&blocks(count), epoch).unwrap();
            let alone = Dealing { world_size: 1, per_device_batch_size: batch * world_size, ..dealing.clone() }.epoch(&blocks(count), epoch).unwrap();
            let mut seen = vec![0; count];
            prop_assert_eq!(order.steps(), alone.steps());
            for step in 0..order.steps() {
                prop_assert!(order.passes(step) <= passes);
                prop_assert!(order.passes(step) == passes || step + 1 == order.steps());
                for pass in 0..order.passes(step) {
                    let lengths: Vec<usize> = (0..world_size).map(|rank| order.batch(step, pass, rank).len()).collect();
                    prop_assert!(lengths.iter().all(|length| *length <= batch));
                    prop_assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
                    let together: Vec<usize> = (0..world_size).flat_map(|rank| order.batch(step, pass, rank).to_vec()).collect();
                    prop_assert_eq!(&together[..], alone.batch(step, pass, 0));
                    together.iter().for_each(|row| seen[*row] += 1);
                }
                prop_assert!((0..world_size).all(|rank| order.batch(step, order.passes(step), rank).is_empty()));
            }
            prop_assert!((0..world_size).all(|rank| order.batch(order.steps(), 0, rank).is_empty()));
            prop_assert!(seen.iter().all(|times| *times == 1), "{:?}", seen);
        }

        #[test]
        fn epochs_and_seeds_differ(seed in any::<u64>()) {
            let dealing = |seed| Dealing { world_size: 1, per_device_batch_size: 64, gradient_accumulation_steps: 1, shuffle: Some(seed) };
            let order = |seed, epoch| dealing(seed).epoch(&blocks(64), epoch).unwrap().batch(0, 0, 0).to_vec();
            prop_assert_eq!(order(seed, 0), order(seed, 0));
            prop_assert_ne!(order(seed, 0), order(seed, 1));
            prop_assert_ne!(order(seed, 0), order(seed.wrapping_add(1), 0));
        }
    }

    #[test]
    fn cut_tokens_are_taken_as_they_stand() {
        let blocks = Blocks::cut_beforehand(vec![0; 16 * 2], 2, 8);
        let dealing = Dealing { world_size: 2, per_device_batch_size: 2, gradient_accumulation_steps: 2, shuffle: Some(1) };
        let order = dealing.epoch(&blocks, 0).unwrap();
        assert_eq!(order.steps(), 2);
        assert_eq!(order.passes(1), 2);
        assert_eq!((order.batch(1, 0, 0), order.batch(1, 1, 0)), (&[8, 9][..], &[10, 11][..]), "rank 0 has rows 0 to 4 of the step");
        assert_eq!((order.batch(1, 0, 1), order.batch(1, 1, 1)), (&[12, 13][..], &[14, 15][..]), "rank 1 has rows 4 to 8 of the step");
        let error = Dealing { per_device_batch_size: 3, ..dealing }.epoch(&blocks, 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "data.dataset: the steps of token_blocks hold 8 rows, but device.world_size 2 x per_device_train_batch_size 3 x gradient_accumulation_steps 2 = 12"
        );
    }
}
