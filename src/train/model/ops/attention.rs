//! Causal self-attention of many heads.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::math::{dropout_factor, exp};
use super::matmul::{Matrix, multiply_f32};
use super::{Array, Number, dtype, new_array, numbers, record, take, vectorised, with_number};
use crate::train::model::Sequences;

/// What attention keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// The probabilities, `[rows, heads, block, block]`, as PyTorch's eager attention does.
    Eager,
    /// A number per row of probabilities, from which they are computed again: memory grows with the block size, not with its square.
    Flash,
}

/// Shape and dropout of one attention.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    width: usize,
    block: usize,
    dropout: Option<(f32, u64)>,
}

/// Rows of scores that are worked on at a time.
const QUERIES: usize = 64;

/// Attention of the queries, keys and values side by side in `qkv` `[tokens, 3 * width]`: `[tokens, width]`. `dropout` is a probability and a seed. Keeps
/// `qkv`, its output, and what `kind` says.
pub fn causal_attention(qkv: Tensor<2>, heads: usize, sequences: Sequences, kind: AttentionKind, dropout: Option<(f32, u64)>) -> Tensor<2> {
    let (input, parent) = take(qkv);
    let width = input.layout().shape()[1] / 3;
    let shape = Shape { heads, width, block: sequences.block_size, dropout };
    let (output, kept) = with_number!(dtype(&input), T => forward::<T>(&input, shape, kind, parent.is_tracked()));
    let kept_output = output.clone();
    record([parent], output, move |gradient| [Some(with_number!(dtype(&input), T => backward::<T>(&input, &kept_output, &gradient, &kept, shape)))])
}

/// What is kept of the probabilities, a sequence each.
enum Kept {
    /// Nothing: there is no backward.
    Nothing,
    /// All of them, `[heads, block, block]`, before dropout.
    Probabilities(Array),
    /// The logarithm of each row's sum of exponentials, `[heads, block]`.
    LogSums(Vec<f32>),
}

fn forward<T: Number>(input: &Array, shape: Shape, kind: AttentionKind, keep: bool) -> (Array, Vec<Kept>) {
    let qkv = numbers::<T>(input);
    let mut output = vec![T::zeroed(); qkv.len() / 3];
    let each = |(sequence, (output, qkv)): (usize, (&mut [T], &[T]))| forward_sequence(sequence, qkv, output, shape, kind, keep);
    let (long, short) = (shape.block * 3 * shape.width, shape.block * shape.width);
    let kept = if rayon::current_num_threads() == 1 {
        output.chunks_mut(short).zip(qkv.chunks(long)).enumerate().map(each).collect()
    } else {
        output.par_chunks_mut(short).zip(qkv.par_chunks(long)).enumerate().map(each).collect()
    };
    (new_array(output, [qkv.len() / 3 / shape.width, shape.width]), kept)
}

fn forward_sequence<T: Number>(sequence: usize, qkv: &[T], output: &mut [T], shape: Shape, kind: AttentionKind, keep: bool) -> Kept {
    let Shape { heads, width, block, dropout } = shape;
    let size = width / heads;
    let scale = 1.0 / (size as f32).sqrt();
    let keep_all = keep && kind == AttentionKind::Eager;
    let mut probabilities = vec![T::zeroed(); if keep_all { heads * block * block } else { 0 }];
    let mut log_sums = vec![0.0f32; if keep && !keep_all { heads * block } else { 0 }];
    let mut scores = vec![0.0f32; QUERIES.min(block) * block];
    let mut out = vec![0.0f32; block * size];
    for head in 0..heads {
        let [q, k, v] = [0, 1, 2].map(|which| column(qkv, 3 * width, which * width + head * size, size, block));
        for start in (0..block).step_by(QUERIES) {
            let end = (start + QUERIES).min(block);
            let keys = Matrix::new(&k[..end * size], end, size);
            multiply_f32(&mut scores, end, false, scale, Matrix::new(&q[start * size..end * size], end - start, size), keys.transposed());
            for (query, scores) in (start..end).zip(scores.chunks_mut(end)) {
                let log_sum = vectorised(|| softmax(scores, query));
                if keep_all {
                    let at = (head * block + query) * block;
                    T::store_all(scores, &mut probabilities[at..at + end]);
                } else if keep {
                    log_sums[head * block + query] = log_sum;
                }
                drop_out(scores, dropout, ((sequence * heads + head) * block + query) * block);
            }
            let weights = Matrix::new(&scores[..(end - start) * end], end - start, end);
            multiply_f32(&mut out[start * size..end * size], size, false, 1.0, weights, Matrix::new(&v[..end * size], end, size));
        }
        put_column(&out, output, width, head * size, size);
    }
    match (keep, keep_all) {
        (false, _) => Kept::Nothing,
        (true, true) => Kept::Probabilities(new_array(probabilities, [heads * block * block])),
        (true, false) => Kept::LogSums(log_sums),
    }
}

/// Turns the scores of `query` into probabilities over itself and what precedes it; gives the logarithm of their sum of exponentials.
#[inline(always)]
fn softmax(scores: &mut [f32], query: usize) -> f32 {
    let (seen, unseen) = scores.split_at_mut(query + 1);
    let maximum = seen.iter().fold(f32::NEG_INFINITY, |maximum, &score| if maximum >= score { maximum } else { score });
    let mut strands = [0.0f32; 16];
    for chunk in seen.chunks_mut(16) {
        for (strand, score) in strands.iter_mut().zip(chunk) {
            *score = exp(*score - maximum);
            *strand += *score;
        }
    }
    let sum: f32 = strands.iter().sum();
    let factor = 1.0 / sum;
    seen.iter_mut().for_each(|score| *score *= factor);
    unseen.fill(0.0);
    maximum + sum.ln()
}

fn drop_out(values: &mut [f32], dropout: Option<(f32, u64)>, first: usize) {
    if let Some((p, seed)) = dropout {
        values.iter_mut().enumerate().for_each(|(index, value)| *value *= dropout_factor(seed, (first + index) as u64, p));
    }
}

fn backward<T: Number>(input: &Array, output: &Array, gradient: &Array, kept: &[Kept], shape: Shape) -> Array {
    let (qkv, output, gradient) = (numbers::<T>(input), numbers::<T>(output), numbers::<T>(gradient));
    let mut result = vec![T::zeroed(); qkv.len()];
    let (long, short) = (shape.block * 3 * shape.width, shape.block * shape.width);
    let sequences = kept.len();
    let each = |(sequence, result): (usize, &mut [T])| {
        let (long, short) = (sequence * long..(sequence + 1) * long, sequence * short..(sequence + 1) * short);
        backward_sequence(sequence, &qkv[long], &output[short.clone()], &gradient[short], &kept[sequence], result, shape);
    };
    if rayon::current_num_threads() == 1 || sequences == 1 {
        result.chunks_mut(long).enumerate().for_each(each);
    } else {
        result.par_chunks_mut(long).enumerate().for_each(each);
    }
    new_array(result, [qkv.len() / 3 / shape.width, 3 * shape.width])
}

fn backward_sequence<T: Number>(sequence: usize, qkv: &[T], output: &[T], gradient: &[T], kept: &Kept, result: &mut [T], shape: Shape) {
    let Shape { heads, width, block, dropout } = shape;
    let size = width / heads;
    let scale = 1.0 / (size as f32).sqrt();
    let mut scores = vec![0.0f32; QUERIES.min(block) * block];
    let mut slopes = scores.clone();
    for head in 0..heads {
        let [q, k, v] = [0, 1, 2].map(|which| column(qkv, 3 * width, which * width + head * size, size, block));
        let [out, dout] = [output, gradient].map(|from| column(from, width, head * size, size, block));
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0f32; block * size]);
        for start in (0..block).step_by(QUERIES) {
            let end = (start + QUERIES).min(block);
            let part = start * size..end * size;
            let (douts, outs) = (&dout[part.clone()], &out[part.clone()]);
            let (queries, douts_matrix) = (Matrix::new(&q[part], end - start, size), Matrix::new(douts, end - start, size));
            let (keys, values) = (Matrix::new(&k[..end * size], end, size), Matrix::new(&v[..end * size], end, size));
            if let Kept::LogSums(_) = kept {
                multiply_f32(&mut scores, end, false, scale, queries, keys.transposed());
            }
            multiply_f32(&mut slopes, end, false, 1.0, douts_matrix, values.transposed());
            for (row, (scores, slopes)) in scores.chunks_mut(end).zip(slopes.chunks_mut(end)).take(end - start).enumerate() {
                let query = start + row;
                match kept {
                    Kept::Probabilities(all) => {
                        let at = (head * block + query) * block;
                        T::load_all(&numbers::<T>(all)[at..at + end], scores);
                    }
                    Kept::LogSums(log_sums) => {
                        let log_sum = log_sums[head * block + query];
                        vectorised(|| scores[..=query].iter_mut().for_each(|score| *score = exp(*score - log_sum)));
                        scores[query + 1..].fill(0.0);
                    }
                    Kept::Nothing => {}
                }
                let first = ((sequence * heads + head) * block + query) * block;
                drop_out(slopes, dropout, first);
                let along: f32 = outs[row * size..(row + 1) * size].iter().zip(&douts[row * size..]).map(|(out, dout)| out * dout).sum();
                vectorised(|| slopes.iter_mut().zip(scores.iter()).for_each(|(slope, p)| *slope = p * (*slope - along)));
                drop_out(scores, dropout, first);
            }
            let slopes = Matrix::new(&slopes[..(end - start) * end], end - start, end);
            let weights = Matrix::new(&scores[..(end - start) * end], end - start, end);
            multiply_f32(&mut dq[start * size..end * size], size, false, scale, slopes, keys);
            multiply_f32(&mut dk[..end * size], size, true, scale, slopes.transposed(), queries);
            multiply_f32(&mut dv[..end * size], size, true, 1.0, weights.transposed(), douts_matrix);
        }
        for (which, from) in [dq, dk, dv].iter().enumerate() {
            put_column(from, result, 3 * width, which * width + head * size, size);
        }
    }
}

/// Columns `start..start + size` of `rows` rows that are `stride` long, as contiguous f32.
fn column<T: Number>(from: &[T], stride: usize, start: usize, size: usize, rows: usize) -> Vec<f32> {
    let mut to = vec![0.0; rows * size];
    for (row, to) in to.chunks_mut(size).enumerate() {
        T::load_all(&from[row * stride + start..row * stride + start + size], to);
    }
    to
}

/// Writes such columns back.
fn put_column<T: Number>(from: &[f32], to: &mut [T], stride: usize, start: usize, size: usize) {
    for (row, from) in from.chunks(size).enumerate() {
        T::store_all(from, &mut to[row * stride + start..row * stride + start + size]);
    }
}
