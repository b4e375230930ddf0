//! Flat parameters: which parameters a unit holds, where they lie in it, and how it is cut into shards.

use std::ops::Range;

use super::Segment;
use crate::spec::settings::FsdpSettings;
use crate::train::model::tree::{ModuleTree, ParameterInfo, join};

/// A parameter's place in a flat parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Which parameter.
    pub info: ParameterInfo,
    /// Where its elements lie.
    pub range: Range<usize>,
    /// Whether it is trained.
    pub requires_grad: bool,
}

/// The flat parameter of one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct FlatLayout {
    /// Path of the unit's module; empty for the root.
    pub unit: String,
    /// PyTorch's class of that module.
    pub class: &'static str,
    /// Its parameters, in registration order.
    pub parameters: Vec<Placed>,
    /// Elements, with the padding between parameters, without what makes the length a multiple of the world size.
    pub numel: usize,
    /// Ranks it is cut for.
    pub world_size: usize,
}

impl FlatLayout {
    /// Elements of each rank's shard.
    pub fn shard_numel(&self) -> usize {
        self.numel.div_ceil(self.world_size)
    }

    /// Elements gathered from all ranks: a multiple of the world size.
    pub fn padded_numel(&self) -> usize {
        self.shard_numel() * self.world_size
    }

    /// The parts of parameters in shard `rank`.
    pub fn segments(&self, rank: usize) -> Vec<Segment> {
        let shard = rank * self.shard_numel()..(rank + 1) * self.shard_numel();
        let part = |placed: &Placed| {
            let start = placed.range.start.max(shard.start);
            let end = placed.range.end.min(shard.end);
            (start < end).then(|| Segment {
                name: placed.info.name.clone(),
                range: start - shard.start..end - shard.start,
                parameter_range: start - placed.range.start..end - placed.range.start,
                decays_by_default: placed.info.decays_by_default(),
                requires_grad: placed.requires_grad,
            })
        };
        self.parameters.iter().filter_map(part).collect()
    }
}

/// The flat parameters of the units at `paths` (parents before children, the root first), for `world_size` ranks. Units without parameters of their own, such
/// as a wrapped tied head, are among them with a length of 0.
///
/// With `use_orig_params` each parameter starts at a multiple of 16 bytes of `param_dtype`; without, they lie end to end.
pub fn flat_layouts(
    tree: &ModuleTree,
    paths: &[String],
    settings: &FsdpSettings,
    world_size: usize,
    trained: impl Fn(&str) -> bool,
) -> Vec<FlatLayout> {
    let alignment = if settings.use_orig_params { 16 / settings.mixed_precision.param_dtype.size() } else { 1 };
    let mut layouts: Vec<FlatLayout> = Vec::new();
    tree.visit(&mut |path, module| {
        if paths.iter().any(|unit| unit == path) {
            layouts.push(FlatLayout { unit: path.to_owned(), class: module.class, parameters: Vec::new(), numel: 0, world_size });
        }
    });
    tree.visit(&mut |path, module| {
        for (name, shape) in &module.parameters {
            let name = join(path, name);
            // A tied parameter has one place, its owner's.
            if tree.owner(&name) != name {
                continue;
            }
            let Some(layout) = layouts.iter_mut().filter(|layout| is_within(path, &layout.unit)).max_by_key(|layout| layout.unit.len()) else {
                continue;
            };
            let start = layout.numel.next_multiple_of(alignment);
            let info = ParameterInfo { name, shape: shape.clone(), module_class: module.class };
            layout.numel = start + info.numel();
            let requires_grad = trained(&info.name);
            layout.parameters.push(Placed { range: start..layout.numel, info, requires_grad });
        }
    });
    layouts
}

/// Whether the module at `path` is the one at `ancestor` or lies below it.
pub(super) fn is_within(path: &str, ancestor: &str) -> bool {
    ancestor.is_empty() || path == ancestor || path.strip_prefix(ancestor).is_some_and(|rest| rest.starts_with('.'))
}
