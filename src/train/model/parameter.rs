//! Handles of parameters: operations fetch a value when they need it, in forward and again in backward, and hand its gradient back.

use std::ops::Range;
use std::sync::Arc;

use crate::spec::settings::DType;
use crate::train::fsdp::buffer::{Buffer, Numbers};

/// Whoever keeps the values of parameters, by number.
pub trait ParameterStore: Send + Sync {
    /// The buffer that holds parameter `index` whole, and where in it. Fetches it first if it is not here.
    fn value(&self, index: usize) -> (Arc<Buffer>, Range<usize>);

    /// Whether parameter `index` is trained.
    fn requires_grad(&self, index: usize) -> bool;

    /// Backward will bring a gradient of parameter `index`, once for every call.
    fn expect_gradient(&self, index: usize);

    /// Takes a gradient of parameter `index`. `write` gets the buffer and the place to write it to, and whether to add to what is there already.
    fn add_gradient(&self, index: usize, write: &mut dyn FnMut(&mut Buffer, Range<usize>, bool));
}

/// A handle of one parameter.
#[derive(Clone)]
pub struct Parameter {
    store: Arc<dyn ParameterStore>,
    index: usize,
    shape: Arc<[usize]>,
    dtype: DType,
}

impl Parameter {
    /// Parameter `index` of `store`, which computes in `dtype`.
    pub fn new(store: Arc<dyn ParameterStore>, index: usize, shape: Arc<[usize]>, dtype: DType) -> Self {
        Self { store, index, shape, dtype }
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Data type of its value and gradient.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its value. Do not keep it: whoever does keeps all that was fetched with it.
    pub fn value(&self) -> ParameterValue {
        let (buffer, range) = self.store.value(self.index);
        ParameterValue { buffer, range }
    }

    /// To be called in forward, once for every later [`Self::add_gradient`].
    pub fn expect_gradient(&self) {
        if self.store.requires_grad(self.index) {
            self.store.expect_gradient(self.index);
        }
    }

    /// Hands over a gradient; does nothing if the parameter is frozen. `write` gets the place to write it to and whether to add to what is there already,
    /// which is zero otherwise.
    pub fn add_gradient<T: Numbers>(&self, write: impl FnOnce(&mut [T], bool)) {
        if !self.store.requires_grad(self.index) {
            return;
        }
        let mut write = Some(write);
        self.store.add_gradient(self.index, &mut |buffer, range, accumulate| {
            if let (Some(numbers), Some(write)) = (T::of_mut(buffer), write.take()) {
                write(&mut numbers[range], accumulate);
            }
        });
    }
}

/// A parameter's value, fetched.
pub struct ParameterValue {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl ParameterValue {
    /// Its numbers, row by row.
    pub fn numbers<T: Numbers>(&self) -> &[T] {
        &T::of(&self.buffer).expect("a parameter has the data type it says")[self.range.clone()]
    }
}
