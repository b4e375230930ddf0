//! The embedded data set: a first-order Markov chain over token ids. Its marginals are Zipf-like, its transitions sparse, so that a small model learns
//! it in a few hundred steps; and the perplexity that no model can beat is known exactly.
//!
//! With probability 15/16 the next token is one of at most eight successors of the current one (weighted 1, 1/2, 1/3, ...), otherwise any token with
//! Zipf's weights. Drawn with integers alone from a fixed seed: the same tokens on every machine.

use super::random::Random;

/// Raised when the chain or the drawing changes, so that cached tokens of the old one are not used.
pub(crate) const VERSION: u32 = 1;

/// Seed of the chain and of both splits. No key of the sweep file changes it: all trials of all sweeps share the data.
const SEED: u64 = 20_260_101;

/// Most successors of a token.
const SUCCESSORS: usize = 8;

/// 840 / rank, all of them integers up to rank 8.
const SUCCESSOR_WEIGHTS: [u64; SUCCESSORS] = [840, 420, 280, 210, 168, 140, 120, 105];

/// One token in this many follows Zipf's law alone. A power of two, so that the top bits of a draw decide.
const RESTART: u64 = 16;

/// The chain.
#[derive(Debug)]
pub(crate) struct Chain {
    /// Successors of each token, most likely first.
    successors: Vec<Vec<u32>>,
    /// Sums of Zipf's weights up to and including each token.
    zipf_sums: Vec<u64>,
}

/// Which stream of the seed a split is drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Split {
    /// Training.
    Train = 1,
    /// Evaluation.
    Eval = 2,
}

impl Chain {
    /// The chain over `vocab` tokens, at least 2.
    pub(crate) fn new(vocab: usize) -> Self {
        let zipf_sums: Vec<u64> = (0..vocab as u64)
            .scan(0_u64, |sum, rank| {
                *sum += (1 << 32) / (rank + 1);
                Some(*sum)
            })
            .collect();
        let mut random = Random::new(SEED, 0);
        let count = SUCCESSORS.min(vocab / 2).max(1);
        let successors = (0..vocab)
            .map(|_| {
                let mut chosen = Vec::with_capacity(count);
                while chosen.len() < count {
                    let candidate = draw(&mut random, &zipf_sums);
                    if !chosen.contains(&candidate) {
                        chosen.push(candidate);
                    }
                }
                chosen
            })
            .collect();
        Self { successors, zipf_sums }
    }

    /// `length` tokens of a split.
    pub(crate) fn tokens(&self, split: Split, length: usize) -> Vec<u32> {
        let mut random = Random::new(SEED, split as u64);
        let mut current = draw(&mut random, &self.zipf_sums);
        (0..length)
            .map(|_| {
                let followed = &self.successors[current as usize];
                current = if random.next() < u64::MAX / RESTART {
                    draw(&mut random, &self.zipf_sums)
                } else {
                    let mut left = random.below(weights(followed).sum());
                    let place = weights(followed).position(|weight| left.checked_sub(weight).map(|rest| left = rest).is_none());
                    followed[place.unwrap_or(0)]
                };
                current
            })
            .collect()
    }

    /// exp(H(next | previous)) under the chain's stationary distribution: the perplexity of the chain itself as a model of its tokens.
    pub(crate) fn floor_perplexity(&self) -> f64 {
        let zipf: Vec<f64> = self.zipf();
        let restart = 1.0 / RESTART as f64;
        let term = |probability: f64| if probability > 0.0 { -probability * probability.ln() } else { 0.0 };
        let zipf_alone: f64 = zipf.iter().map(|probability| term(probability * restart)).sum();
        let stationary = self.stationary();
        let entropy: f64 = self
            .successors
            .iter()
            .zip(&stationary)
            .map(|(followed, mass)| {
                let sum = weights(followed).sum::<u64>() as f64;
                let correction: f64 = followed
                    .iter()
                    .zip(weights(followed))
                    .map(|(token, weight)| {
                        let background = zipf[*token as usize] * restart;
                        term(background + (1.0 - restart) * weight as f64 / sum) - term(background)
                    })
                    .sum();
                mass * (zipf_alone + correction)
            })
            .sum();
        entropy.exp()
    }

    /// How often each token comes in the long run: iterated until it moves no more. Every step shrinks the distance by 15/16 at least.
    fn stationary(&self) -> Vec<f64> {
        let zipf = self.zipf();
        let restart = 1.0 / RESTART as f64;
        let mut mass = zipf.clone();
        for _ in 0..1_000 {
            let mut next: Vec<f64> = zipf.iter().map(|probability| probability * restart).collect();
            for (followed, mass) in self.successors.iter().zip(&mass) {
                let sum = weights(followed).sum::<u64>() as f64;
                for (token, weight) in followed.iter().zip(weights(followed)) {
                    next[*token as usize] += mass * (1.0 - restart) * weight as f64 / sum;
                }
            }
            let moved: f64 = next.iter().zip(&mass).map(|(next, mass)| (next - mass).abs()).sum();
            mass = next;
            if moved < 1e-15 {
                break;
            }
        }
        mass
    }

    fn zipf(&self) -> Vec<f64> {
        let total = self.zipf_sums.last().copied().unwrap_or(1) as f64;
        let mut before = 0;
        self.zipf_sums
            .iter()
            .map(|sum| {
                let weight = sum - before;
                before = *sum;
                weight as f64 / total
            })
            .collect()
    }
}

fn weights(successors: &[u32]) -> impl Iterator<Item = u64> {
    SUCCESSOR_WEIGHTS.into_iter().take(successors.len())
}

fn draw(random: &mut Random, sums: &[u64]) -> u32 {
    let drawn = random.below(sums.last().copied().unwrap_or(1));
    sums.partition_point(|sum| *sum <= drawn) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All transition probabilities in full.
    fn transitions(chain: &Chain) -> Vec<Vec<f64>> {
        let zipf = chain.zipf();
        chain
            .successors
            .iter()
            .map(|followed| {
                let mut row: Vec<f64> = zipf.iter().map(|probability| probability / 16.0).collect();
                let sum: u64 = weights(followed).sum();
                for (token, weight) in followed.iter().zip(weights(followed)) {
                    row[*token as usize] += 15.0 / 16.0 * weight as f64 / sum as f64;
                }
                row
            })
            .collect()
    }

    #[test]
    fn the_floor_is_the_entropy_of_the_full_matrix() {
        for vocab in [2, 3, 5, 40] {
            let chain = Chain::new(vocab);
            let matrix = transitions(&chain);
            let mut mass = vec![1.0 / vocab as f64; vocab];
            for _ in 0..2_000 {
                mass = (0..vocab).map(|next| (0..vocab).map(|token| mass[token] * matrix[token][next]).sum()).collect();
            }
            let entropy: f64 = (0..vocab).map(|token| mass[token] * matrix[token].iter().map(|p| -p * p.ln()).sum::<f64>()).sum();
            assert!((chain.floor_perplexity() - entropy.exp()).abs() < 1e-10, "{vocab}");
        }
    }

    /// The tokens that are drawn follow the chain: its own perplexity on them is the floor, give or take the draw, and a unigram model's is far above.
    #[test]
    fn tokens_follow_the_chain() {
        let chain = Chain::new(1024);
        let matrix = transitions(&chain);
        let tokens = chain.tokens(Split::Train, 262_144);
        let loss: f64 = tokens.windows(2).map(|pair| -matrix[pair[0] as usize][pair[1] as usize].ln()).sum::<f64>() / (tokens.len() - 1) as f64;
        let floor = chain.floor_perplexity();
        assert!((loss.exp() / floor - 1.0).abs() < 0.01, "{} {floor}", loss.exp());
        let mut counts = vec![0_u32; 1024];
        tokens.iter().for_each(|token| counts[*token as usize] += 1);
        let unigram: f64 = counts.iter().filter(|count| **count > 0).map(|count| f64::from(*count) / tokens.len() as f64).map(|p| -p * p.ln()).sum();
        assert!(unigram.exp() > 10.0 * floor, "{} {floor}", unigram.exp());
    }

    #[test]
    fn splits_differ_and_are_prefixes_of_longer_ones() {
        let chain = Chain::new(64);
        let train = chain.tokens(Split::Train, 100);
        assert_eq!(train, Chain::new(64).tokens(Split::Train, 200)[..100]);
        assert_ne!(train, chain.tokens(Split::Eval, 100));
        assert!(train.iter().all(|token| *token < 64));
    }
}
