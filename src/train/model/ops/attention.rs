//! Causal self-attention of many heads.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::math::{dropout_factor, exp};
use super::matmul::{Matrix, multiply_f32};
use super::{Array, Number, Parent, dtype, new_array, numbers, record, take, vectorised, with_number};
use crate::train::model::Sequences;

/// What attention keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// The probabilities, `[rows, heads, block, block]`, as PyTorch's eager attention does.
    Eager,
    /// A number per row of probabilities, from which they are computed again: memory grows with the block size, not with its square.
    Flash,
}

/// Query heads, the key-value heads that groups of them share, and the numbers of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries; a multiple of `key_value`.
    pub query: usize,
    /// Heads of keys and values.
    pub key_value: usize,
    /// Numbers of a head.
    pub size: usize,
}

impl Heads {
    /// Query heads that share a key-value head.
    fn group(&self) -> usize {
        self.query / self.key_value
    }
}

/// Shape and dropout of one attention.
#[derive(Clone, Copy)]
struct Shape {
    heads: Heads,
    block: usize,
    dropout: Option<(f32, u64)>,
    /// Where queries, keys and values lie: side by side in one array, or in one each.
    side_by_side: bool,
}

impl Shape {
    /// Length of a row, and where in it head `head` of queries (0), keys (1) or values (2) begins.
    fn place(&self, which: usize, head: usize) -> (usize, usize) {
        let Heads { query, key_value, size } = self.heads;
        let widths = [query * size, key_value * size, key_value * size];
        if self.side_by_side { (widths.iter().sum(), widths[..which].iter().sum::<usize>() + head * size) } else { (widths[which], head * size) }
    }

    /// Length of a row of each array.
    fn widths(&self, arrays: usize) -> Vec<usize> {
        (0..arrays).map(|which| self.place(which, 0).0).collect()
    }

    /// Length of an output row.
    fn width(&self) -> usize {
        self.heads.query * self.heads.size
    }
}

/// Rows of scores that are worked on at a time.
const QUERIES: usize = 64;

/// Attention of the queries, keys and values side by side in `qkv` `[tokens, 3 * width]`: `[tokens, width]`. `dropout` is a probability and a seed. Keeps
/// `qkv`, its output, and what `kind` says.
pub fn causal_attention(qkv: Tensor<2>, heads: usize, sequences: Sequences, kind: AttentionKind, dropout: Option<(f32, u64)>) -> Tensor<2> {
    let size = qkv.dims()[1] / 3 / heads;
    let heads = Heads { query: heads, key_value: heads, size };
    attention([qkv], Shape { heads, block: sequences.block_size, dropout, side_by_side: true }, kind)
}

/// Attention of queries `[tokens, query * size]`, keys and values `[tokens, key_value * size]`, in which each key-value head serves a group of query heads:
/// `[tokens, query * size]`. Keeps its inputs and output, and what `kind` says.
pub fn grouped_query_attention(
    qkv: [Tensor<2>; 3],
    heads: Heads,
    sequences: Sequences,
    kind: AttentionKind,
    dropout: Option<(f32, u64)>,
) -> Tensor<2> {
    attention(qkv, Shape { heads, block: sequences.block_size, dropout, side_by_side: false }, kind)
}

fn attention<const N: usize>(qkv: [Tensor<2>; N], shape: Shape, kind: AttentionKind) -> Tensor<2> {
    let taken = qkv.map(take);
    let tracked = taken.iter().any(|(_, parent)| parent.is_tracked());
    let mut parents = Vec::with_capacity(N);
    let inputs = taken.map(|(input, parent)| {
        parents.push(parent);
        input
    });
    let parents: [Parent; N] = parents.try_into().unwrap_or_else(|_| unreachable!("a parent for each input"));
    let (output, kept) = with_number!(dtype(&inputs[0]), T => forward::<T>(&inputs, shape, kind, tracked));
    let kept_output = output.clone();
    record(parents, output, move |gradient| {
        with_number!(dtype(&inputs[0]), T => backward::<T, N>(&inputs, &kept_output, &gradient, &kept, shape)).map(Some)
    })
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

fn forward<T: Number>(inputs: &[Array], shape: Shape, kind: AttentionKind, keep: bool) -> (Array, Vec<Kept>) {
    let inputs: Vec<&[T]> = inputs.iter().map(numbers::<T>).collect();
    let widths = shape.widths(inputs.len());
    let tokens = inputs[0].len() / widths[0];
    let mut output = vec![T::zeroed(); tokens * shape.width()];
    let each = |(sequence, output): (usize, &mut [T])| {
        let tokens = sequence * shape.block..(sequence + 1) * shape.block;
        let qkv: Vec<&[T]> = inputs.iter().zip(&widths).map(|(input, width)| &input[tokens.start * width..tokens.end * width]).collect();
        forward_sequence(sequence, &qkv, output, shape, kind, keep)
    };
    let length = shape.block * shape.width();
    let kept = if rayon::current_num_threads() == 1 {
        output.chunks_mut(length).enumerate().map(each).collect()
    } else {
        output.par_chunks_mut(length).enumerate().map(each).collect()
    };
    (new_array(output, [tokens, shape.width()]), kept)
}

fn forward_sequence<T: Number>(sequence: usize, qkv: &[&[T]], output: &mut [T], shape: Shape, kind: AttentionKind, keep: bool) -> Kept {
    let Shape { heads, block, dropout, .. } = shape;
    let size = heads.size;
    let scale = 1.0 / (size as f32).sqrt();
    let keep_all = keep && kind == AttentionKind::Eager;
    let mut probabilities = vec![T::zeroed(); if keep_all { heads.query * block * block } else { 0 }];
    let mut log_sums = vec![0.0f32; if keep && !keep_all { heads.query * block } else { 0 }];
    let mut scores = vec![0.0f32; QUERIES.min(block) * block];
    let mut out = vec![0.0f32; block * size];
    for group in 0..heads.key_value {
        let [k, v] = [1, 2].map(|which| column(qkv, shape, which, group));
        for head in group * heads.group()..(group + 1) * heads.group() {
            let q = column(qkv, shape, 0, head);
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
                    drop_out(scores, dropout, ((sequence * heads.query + head) * block + query) * block);
                }
                let weights = Matrix::new(&scores[..(end - start) * end], end - start, end);
                multiply_f32(&mut out[start * size..end * size], size, false, 1.0, weights, Matrix::new(&v[..end * size], end, size));
            }
            put_rows(&out, output, shape.width(), head * size, size);
        }
    }
    match (keep, keep_all) {
        (false, _) => Kept::Nothing,
        (true, true) => Kept::Probabilities(new_array(probabilities, [heads.query * block * block])),
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

fn backward<T: Number, const N: usize>(inputs: &[Array; N], output: &Array, gradient: &Array, kept: &[Kept], shape: Shape) -> [Array; N] {
    let (output, gradient) = (numbers::<T>(output), numbers::<T>(gradient));
    let inputs: Vec<&[T]> = inputs.iter().map(numbers::<T>).collect();
    let widths = shape.widths(N);
    let mut results: [Vec<T>; N] = std::array::from_fn(|which| vec![T::zeroed(); inputs[which].len()]);
    // The results of each sequence.
    let mut parts: Vec<Vec<&mut [T]>> = kept.iter().map(|_| Vec::with_capacity(N)).collect();
    for (result, width) in results.iter_mut().zip(&widths) {
        parts.iter_mut().zip(result.chunks_mut(shape.block * width)).for_each(|(parts, part)| parts.push(part));
    }
    let each = |(sequence, results): (usize, &mut Vec<&mut [T]>)| {
        let tokens = sequence * shape.block..(sequence + 1) * shape.block;
        let qkv: Vec<&[T]> = inputs.iter().zip(&widths).map(|(input, width)| &input[tokens.start * width..tokens.end * width]).collect();
        let out = tokens.start * shape.width()..tokens.end * shape.width();
        backward_sequence(sequence, &qkv, &output[out.clone()], &gradient[out], &kept[sequence], results, shape);
    };
    if rayon::current_num_threads() == 1 || kept.len() == 1 {
        parts.iter_mut().enumerate().for_each(each);
    } else {
        parts.par_iter_mut().enumerate().for_each(each);
    }
    drop(parts);
    let tokens = output.len() / shape.width();
    let mut widths = widths.into_iter();
    results.map(|result| new_array(result, [tokens, widths.next().unwrap_or(0)]))
}

fn backward_sequence<T: Number>(sequence: usize, qkv: &[&[T]], output: &[T], gradient: &[T], kept: &Kept, results: &mut [&mut [T]], shape: Shape) {
    let Shape { heads, block, .. } = shape;
    let size = heads.size;
    let mut scores = vec![0.0f32; QUERIES.min(block) * block];
    let mut slopes = scores.clone();
    for group in 0..heads.key_value {
        let [k, v] = [1, 2].map(|which| column(qkv, shape, which, group));
        let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0f32; block * size]);
        for head in group * heads.group()..(group + 1) * heads.group() {
            let q = column(qkv, shape, 0, head);
            let [out, dout] = [output, gradient].map(|from| rows(from, shape.width(), head * size, size));
            let mut dq = vec![0.0f32; block * size];
            for start in (0..block).step_by(QUERIES) {
                let end = (start + QUERIES).min(block);
                let part = start * size..end * size;
                let (douts, outs) = (&dout[part.clone()], &out[part.clone()]);
                let (queries, douts_matrix) = (Matrix::new(&q[part], end - start, size), Matrix::new(douts, end - start, size));
                let (keys, values) = (Matrix::new(&k[..end * size], end, size), Matrix::new(&v[..end * size], end, size));
                let scale = 1.0 / (size as f32).sqrt();
                if let Kept::LogSums(_) = kept {
                    multiply_f32(&mut scores, end, false, scale, queries, keys.transposed());
                }
                multiply_f32(&mut slopes, end, false, 1.0, douts_matrix, values.transposed());
                let along = |row: usize| outs[row * size..(row + 1) * size].iter().zip(&douts[row * size..]).map(|(out, dout)| out * dout).sum();
                let first = (sequence * heads.query + head) * block;
                for (row, (scores, slopes)) in scores.chunks_mut(end).zip(slopes.chunks_mut(end)).take(end - start).enumerate() {
                    let query = start + row;
                    probabilities_again::<T>(kept, head * block + query, query, block, scores);
                    backward_row(scores, slopes, along(row), shape.dropout, (first + query) * block);
                }
                let slopes = Matrix::new(&slopes[..(end - start) * end], end - start, end);
                let weights = Matrix::new(&scores[..(end - start) * end], end - start, end);
                multiply_f32(&mut dq[start * size..end * size], size, false, scale, slopes, keys);
                multiply_f32(&mut dk[..end * size], size, true, scale, slopes.transposed(), queries);
                multiply_f32(&mut dv[..end * size], size, true, 1.0, weights.transposed(), douts_matrix);
            }
            put_column(&dq, results, shape, 0, head);
        }
        put_column(&dk, results, shape, 1, group);
        put_column(&dv, results, shape, 2, group);
    }
}

/// The probabilities of a query, `row` of all heads' queries, out of what was kept; `scores` may hold its scores.
fn probabilities_again<T: Number>(kept: &Kept, row: usize, query: usize, block: usize, scores: &mut [f32]) {
    match kept {
        Kept::Probabilities(all) => T::load_all(&numbers::<T>(all)[row * block..row * block + scores.len()], scores),
        Kept::LogSums(log_sums) => {
            let log_sum = log_sums[row];
            vectorised(|| scores[..=query].iter_mut().for_each(|score| *score = exp(*score - log_sum)));
            scores[query + 1..].fill(0.0);
        }
        Kept::Nothing => {}
    }
}

/// Turns the gradients of a query's weights into those of its scores, and its probabilities into weights. `along` is the sum of both's products.
fn backward_row(probabilities: &mut [f32], slopes: &mut [f32], along: f32, dropout: Option<(f32, u64)>, first: usize) {
    drop_out(slopes, dropout, first);
    vectorised(|| slopes.iter_mut().zip(probabilities.iter()).for_each(|(slope, p)| *slope = p * (*slope - along)));
    drop_out(probabilities, dropout, first);
}

/// A head of queries (0), keys (1) or values (2) of one sequence, as contiguous f32.
fn column<T: Number>(qkv: &[&[T]], shape: Shape, which: usize, head: usize) -> Vec<f32> {
    let (stride, start) = shape.place(which, head);
    rows(qkv[which.min(qkv.len() - 1)], stride, start, shape.heads.size)
}

/// Writes such a head.
fn put_column<T: Number>(from: &[f32], qkv: &mut [&mut [T]], shape: Shape, which: usize, head: usize) {
    let (stride, start) = shape.place(which, head);
    let last = qkv.len() - 1;
    put_rows(from, qkv[which.min(last)], stride, start, shape.heads.size);
}

/// Columns `start..start + size` of rows that are `stride` long, as contiguous f32.
fn rows<T: Number>(from: &[T], stride: usize, start: usize, size: usize) -> Vec<f32> {
    let mut to = vec![0.0; from.len() / stride * size];
    for (from, to) in from.chunks(stride).zip(to.chunks_mut(size)) {
        T::load_all(&from[start..start + size], to);
    }
    to
}

/// Writes such columns back.
fn put_rows<T: Number>(from: &[f32], to: &mut [T], stride: usize, start: usize, size: usize) {
    for (from, to) in from.chunks(size).zip(to.chunks_mut(stride)) {
        T::store_all(from, &mut to[start..start + size]);
    }
}
