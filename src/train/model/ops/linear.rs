//! Linear layers, and the activations in front of them.

use burn::tensor::Tensor;

use super::activation::Activated;
use super::matmul::{Matrix, multiply, product};
use super::number::{change, wide};
use super::{Array, Number, for_rows, new_array, numbers, record, take, vectorised, with_number};
use crate::protocol::Activation;
use crate::train::model::Parameter;

/// How a weight lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[in, out]`: GPT-2's `Conv1D`.
    InOut,
    /// `[out, in]`: `nn.Linear`.
    OutIn,
}

/// What a linear layer multiplies. Whatever an activation makes is computed again in backward rather than kept.
#[expect(clippy::large_enum_variant, reason = "it is taken apart as soon as it is made")]
pub enum LinearInput {
    /// `x`. Keeps it.
    Plain(Tensor<2>),
    /// `activation(x)`. Keeps `x`.
    Activated(Activation, Tensor<2>),
    /// `activation(gate) * up`: gated linear units. Keeps `gate` and `up`.
    Gated(Activation, [Tensor<2>; 2]),
}

impl From<Tensor<2>> for LinearInput {
    fn from(x: Tensor<2>) -> Self {
        Self::Plain(x)
    }
}

/// The input times `weight`, plus `bias` if there is one. Keeps what [`LinearInput`] says.
pub fn linear(input: impl Into<LinearInput>, weight: &Parameter, bias: Option<&Parameter>, layout: WeightLayout) -> Tensor<2> {
    let layer = Layer { weight: weight.clone(), bias: bias.cloned(), transposed: layout == WeightLayout::OutIn };
    match input.into() {
        LinearInput::Plain(x) => {
            let (input, parent) = take(x);
            let output = with_number!(weight.dtype(), T => layer.forward::<T>(numbers(&input)));
            layer.expect_gradients();
            let input_tracked = parent.is_tracked();
            record([parent], output, move |gradient| {
                [with_number!(layer.weight.dtype(), T => {
                    let dx = input_tracked.then(|| layer.input_gradient::<T>(numbers(&gradient)));
                    layer.parameter_gradients::<T>(numbers(&input), numbers(&gradient));
                    dx
                })]
            })
        }
        LinearInput::Activated(activation, x) => {
            let (input, parent) = take(x);
            let mut activated = Activated { activation, inputs: [input] };
            let output = with_number!(weight.dtype(), T => activated.with_value(parent.is_tracked(), |x| layer.forward::<T>(x)));
            layer.expect_gradients();
            record([parent], output, move |gradient| with_number!(layer.weight.dtype(), T => layer.backward_through::<T, 1>(activated, &gradient)))
        }
        LinearInput::Gated(activation, [gate, up]) => {
            let ((gate, gate_parent), (up, up_parent)) = (take(gate), take(up));
            let tracked = gate_parent.is_tracked() || up_parent.is_tracked();
            let mut activated = Activated { activation, inputs: [gate, up] };
            let output = with_number!(weight.dtype(), T => activated.with_value(tracked, |x| layer.forward::<T>(x)));
            layer.expect_gradients();
            record(
                [gate_parent, up_parent],
                output,
                move |gradient| with_number!(layer.weight.dtype(), T => layer.backward_through::<T, 2>(activated, &gradient)),
            )
        }
    }
}

/// A layer's parameters.
struct Layer {
    weight: Parameter,
    bias: Option<Parameter>,
    /// Whether the weight is `[out, in]`.
    transposed: bool,
}

impl Layer {
    fn expect_gradients(&self) {
        self.weight.expect_gradient();
        if let Some(bias) = &self.bias {
            bias.expect_gradient();
        }
    }

    /// Numbers that go in and come out per row.
    fn sizes(&self) -> (usize, usize) {
        let shape = self.weight.shape();
        if self.transposed { (shape[1], shape[0]) } else { (shape[0], shape[1]) }
    }

    fn forward<T: Number>(&self, x: &[T]) -> Array {
        let (inputs, outputs) = self.sizes();
        let rows = x.len() / inputs;
        let value = self.weight.value();
        let weights = Matrix::new(value.numbers::<T>(), self.weight.shape()[0], self.weight.shape()[1]);
        let weights = if self.transposed { weights.transposed() } else { weights };
        let x = Matrix::new(x, rows, inputs);
        let bias = self.bias.as_ref().map(Parameter::value);
        let y = match bias.as_ref().map(|bias| bias.numbers::<T>()) {
            None => product(x, weights),
            Some(bias) if T::as_f32(bias).is_some() => {
                // The product is added to the bias, which saves a pass over the output.
                let mut y = Vec::with_capacity(rows * outputs);
                (0..rows).for_each(|_| y.extend_from_slice(bias));
                multiply(&mut y, true, x, weights);
                y
            }
            Some(bias) => {
                let mut y = product(x, weights);
                let mut room = Vec::new();
                let bias = wide(bias, &mut room);
                for_rows(&mut y, outputs, |_, row| change(row, |row| vectorised(|| row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias))));
                y
            }
        };
        new_array(y, [rows, outputs])
    }

    /// Backward where the layer multiplied what an activation made: the gradients of the activation's inputs.
    fn backward_through<T: Number, const N: usize>(&self, mut activated: Activated<N>, gradient: &Array) -> [Option<Array>; N] {
        let dy = numbers::<T>(gradient);
        // In the place of the gradients of the activation's value comes that value, and in the place of its inputs their gradients: nothing more is allocated.
        let mut value = self.input_gradient::<T>(dy);
        activated.exchange::<T>(&mut value);
        self.parameter_gradients::<T>(numbers(&value), dy);
        activated.inputs.map(Some)
    }

    fn input_gradient<T: Number>(&self, dy: &[T]) -> Array {
        let (inputs, outputs) = self.sizes();
        let rows = dy.len() / outputs;
        let value = self.weight.value();
        let weights = Matrix::new(value.numbers::<T>(), self.weight.shape()[0], self.weight.shape()[1]);
        new_array(product(Matrix::new(dy, rows, outputs), if self.transposed { weights } else { weights.transposed() }), [rows, inputs])
    }

    fn parameter_gradients<T: Number>(&self, x: &[T], dy: &[T]) {
        let (inputs, outputs) = self.sizes();
        let rows = x.len() / inputs;
        if let Some(bias) = &self.bias {
            bias.add_gradient::<T>(|to, accumulate| {
                let mut sums = vec![0.0f32; outputs];
                let mut room = Vec::new();
                for row in dy.chunks(outputs) {
                    let row = wide(row, &mut room);
                    vectorised(|| sums.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy));
                }
                to.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::store(if accumulate { to.load() + sum } else { sum }));
            });
        }
        self.weight.add_gradient::<T>(|to, accumulate| {
            let (x, dy) = (Matrix::new(x, rows, inputs), Matrix::new(dy, rows, outputs));
            if self.transposed {
                multiply(to, accumulate, dy.transposed(), x);
            } else {
                multiply(to, accumulate, x.transposed(), dy);
            }
        });
    }
}
