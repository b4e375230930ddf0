//! Matrix products between slices: what flex's tensors cannot do without copies, such as adding a product to a part of a flat gradient.

use gemm::Parallelism;

use super::number::{Number, change};

/// Multiplications below this number are not worth a second thread.
const PARALLEL_THRESHOLD: usize = 192 * 192 * 192;

/// A matrix that lies in a slice with any strides.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// `data` row by row.
    pub(crate) fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// `data` row by row, rows `row_stride` apart.
    pub(crate) fn strided(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(rows == 0 || columns == 0 || (rows - 1) * row_stride + columns <= data.len(), "the matrix lies outside its data");
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The same numbers, rows and columns swapped.
    pub(crate) fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// Rows `rows` and columns `columns` of it.
    fn part(self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Self {
        let start = rows.start * self.row_stride + columns.start * self.column_stride;
        Self { data: &self.data[start..], rows: rows.len(), columns: columns.len(), ..self }
    }
}

impl<'a, T: Number> Matrix<'a, T> {
    /// Itself, if its numbers are f32.
    fn as_f32(self) -> Option<Matrix<'a, f32>> {
        let data = T::as_f32(self.data)?;
        Some(Matrix { data, rows: self.rows, columns: self.columns, row_stride: self.row_stride, column_stride: self.column_stride })
    }
}

/// `to = scale * a * b`, or `to += scale * a * b` with `accumulate`; rows of `to` are `row_stride` apart.
pub(crate) fn multiply_f32(to: &mut [f32], row_stride: usize, accumulate: bool, scale: f32, a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, n) = (a.rows, b.columns);
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * row_stride + n <= to.len(), "the product lies outside its slice");
    #[expect(unsafe_code, reason = "gemm has no safe interface")]
    // SAFETY: the assertion above; `to` is borrowed mutably, so it overlaps neither matrix.
    unsafe {
        multiply_to(to.as_mut_ptr(), row_stride, accumulate, scale, a, b);
    }
}

/// `a * b` in memory of its own.
pub(crate) fn product<T: Number>(a: Matrix<'_, T>, b: Matrix<'_, T>) -> Vec<T> {
    let length = a.rows * b.columns;
    let mut to = Vec::with_capacity(length);
    if let Some((a, b)) = a.as_f32().zip(b.as_f32())
        && let Some(room) = T::spare_as_f32(&mut to)
        && length > 0
        && a.columns > 0
    {
        assert!(room.len() >= length, "the vector has room for the product");
        #[expect(unsafe_code, reason = "zeros that are overwritten at once cost as much as a pass over the product")]
        // SAFETY: `room` holds at least `a.rows` rows of `b.columns` numbers, and nothing else refers to it; without `accumulate` every one of them is
        // written and none read, so all of `to` up to `length` is initialised.
        unsafe {
            multiply_to(room.as_mut_ptr().cast::<f32>(), b.columns, false, 1.0, a, b);
            to.set_len(length);
        }
        return to;
    }
    to.resize(length, T::zeroed());
    multiply(&mut to, false, a, b);
    to
}

/// [`multiply_f32`] of matrices that are not empty.
///
/// # Safety
/// `to` points to `a.rows` rows of `b.columns` numbers, `row_stride` apart, which may be written and overlap neither matrix; with `accumulate` they are
/// initialised.
#[expect(unsafe_code, reason = "gemm has no safe interface")]
unsafe fn multiply_to(to: *mut f32, row_stride: usize, accumulate: bool, scale: f32, a: Matrix<'_, f32>, b: Matrix<'_, f32>) {
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_eq!(k, b.rows, "inner dimensions of a product differ");
    let parallel = m.saturating_mul(n).saturating_mul(k) >= PARALLEL_THRESHOLD && rayon::current_num_threads() > 1;
    let parallelism = if parallel { Parallelism::Rayon(0) } else { Parallelism::None };
    // SAFETY: `Matrix` checks on construction that its last element lies inside its data, and `part` narrows it; the caller vouches for `to`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to,
            1,
            row_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// `to = a * b`, or `to += a * b` with `accumulate`; `to` is contiguous. Half-precision operands are multiplied and summed in f32 and rounded once at the end.
pub(crate) fn multiply<T: Number>(to: &mut [T], accumulate: bool, a: Matrix<'_, T>, b: Matrix<'_, T>) {
    if let Some((a, b)) = a.as_f32().zip(b.as_f32())
        && let Some(to) = T::as_f32_mut(to)
    {
        return multiply_f32(to, b.columns, accumulate, 1.0, a, b);
    }
    multiply_halves(to, accumulate, a, b);
}

/// Tiles small enough that their f32 copies stay in the cache and cost next to no memory.
fn multiply_halves<T: Number>(to: &mut [T], accumulate: bool, a: Matrix<'_, T>, b: Matrix<'_, T>) {
    const ROWS: usize = 256;
    const INNER: usize = 256;
    const COLUMNS: usize = 512;
    let (m, k, n) = (a.rows, a.columns, b.columns);
    let mut a_tile = vec![0.0; ROWS.min(m) * INNER.min(k)];
    let mut b_tile = vec![0.0; INNER.min(k) * COLUMNS.min(n)];
    let mut sum = vec![0.0; ROWS.min(m) * COLUMNS.min(n)];
    for column in (0..n).step_by(COLUMNS) {
        let columns = column..(column + COLUMNS).min(n);
        for row in (0..m).step_by(ROWS) {
            let rows = row..(row + ROWS).min(m);
            for inner in (0..k).step_by(INNER) {
                let inners = inner..(inner + INNER).min(k);
                let a = widen(a.part(rows.clone(), inners.clone()), &mut a_tile);
                let b = widen(b.part(inners, columns.clone()), &mut b_tile);
                multiply_f32(&mut sum, columns.len(), inner > 0, 1.0, a, b);
            }
            for (index, row) in rows.enumerate() {
                let to = &mut to[row * n + columns.start..row * n + columns.end];
                let sum = &sum[index * columns.len()..(index + 1) * columns.len()];
                if accumulate {
                    change(to, |to| to.iter_mut().zip(sum).for_each(|(to, sum)| *to += sum));
                } else {
                    T::store_all(sum, to);
                }
            }
        }
    }
}

/// `matrix` as f32 in `tile`, laid out along its contiguous dimension.
fn widen<'a, T: Number>(matrix: Matrix<'_, T>, tile: &'a mut [f32]) -> Matrix<'a, f32> {
    let by_rows = matrix.column_stride == 1;
    let (lines, length, stride) =
        if by_rows { (matrix.rows, matrix.columns, matrix.row_stride) } else { (matrix.columns, matrix.rows, matrix.column_stride) };
    for line in 0..lines {
        T::load_all(&matrix.data[line * stride..line * stride + length], &mut tile[line * length..(line + 1) * length]);
    }
    let wide = Matrix::new(&*tile, lines, length);
    if by_rows { wide } else { wide.transposed() }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn numbers(length: usize, seed: u64) -> Vec<f32> {
        (0..length).map(|index| (super::super::math::hash(seed, index as u64) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
    }

    fn naive(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f32> {
        let cell = |i: usize, j: usize| (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum::<f64>() as f32;
        (0..m * n).map(|index| cell(index / n, index % n)).collect()
    }

    /// Odd sizes on both sides of the tiles, transposed operands, accumulation.
    #[test]
    fn products_are_right_in_every_layout() {
        for (m, k, n) in [(1, 1, 1), (3, 5, 7), (257, 300, 513), (30, 259, 20)] {
            let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            let a_transposed: Vec<f32> = (0..k * m).map(|index| a[index % m * k + index / m]).collect();
            let want = naive(&a, &b, m, k, n);
            let mut to = vec![1.0; m * n];
            multiply(&mut to, true, Matrix::new(&a_transposed, k, m).transposed(), Matrix::new(&b, k, n));
            assert!(to.iter().zip(&want).all(|(to, want)| (to - 1.0 - want).abs() < 1e-4));

            // In memory that held something else before, every number is written.
            drop(vec![f32::NAN; m * n]);
            let mut again = vec![f32::NAN; m * n];
            multiply(&mut again, false, Matrix::new(&a, m, k), Matrix::new(&b, k, n));
            assert_eq!(product(Matrix::new(&a, m, k), Matrix::new(&b, k, n)), again);

            let halves = |values: &[f32]| values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>();
            let exact = |values: &[bf16]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
            let (a, a_transposed, b) = (halves(&a), halves(&a_transposed), halves(&b));
            let want = naive(&exact(&a), &exact(&b), m, k, n);
            for a in [Matrix::new(&a, m, k), Matrix::new(&a_transposed, k, m).transposed()] {
                let mut to = vec![bf16::from_f32(3.0); m * n];
                multiply(&mut to, false, a, Matrix::new(&b, k, n));
                assert_eq!(product(a, Matrix::new(&b, k, n)), to);
                assert!(to.iter().zip(&want).all(|(to, want)| (to.to_f32() - want).abs() < 1e-3 + want.abs() / 200.0));
            }
        }
    }

    /// A sum over nothing is zero.
    #[test]
    fn a_product_without_inner_dimension_is_zero() {
        assert_eq!(product::<f32>(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 3)), [0.0; 6]);
        assert!(product::<f32>(Matrix::new(&[], 0, 4), Matrix::new(&[1.0; 8], 4, 2)).is_empty());
    }
}
