//! Where parameters lie: in the whole buffer of a unit, and in the shards that it is cut into.

use std::ops::Range;

use super::Segment;
use crate::spec::settings::FsdpSettings;
use crate::train::model::tree::{ModuleTree, ParameterInfo, join};

/// A parameter's place in its unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Which parameter.
    pub info: ParameterInfo,
    /// Where its elements lie in the unit's whole buffer.
    pub range: Range<usize>,
    /// Where its gradient lies in the unit's whole gradient; `None` if it is frozen.
    pub gradient: Option<Range<usize>>,
}

/// Elements of a shard, and which of the whole buffer's they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they lie in the shard.
    pub shard: Range<usize>,
    /// Where they lie in the whole buffer.
    pub full: Range<usize>,
}

/// How a whole buffer is cut into a shard for each rank of a group. What no piece covers is padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Elements of the whole buffer.
    pub full_numel: usize,
    /// Elements of a shard, equal on all ranks but for compact gradients (see [`flat_layouts`]).
    pub shard_numel: Vec<usize>,
    /// Pieces of each rank's shard, in order.
    pub pieces: Vec<Vec<Piece>>,
}

impl Piece {
    /// What of it lies within `range` of the whole buffer.
    pub(super) fn within(&self, range: &Range<usize>) -> Self {
        let (start, end) = (self.full.start.max(range.start), self.full.end.min(range.end));
        if start >= end {
            return Self { shard: self.shard.start..self.shard.start, full: range.start..range.start };
        }
        let first = self.shard.start + start - self.full.start;
        Self { shard: first..first + (end - start), full: start..end }
    }
}

impl Cut {
    /// Equal consecutive parts, as FSDP1 cuts a flat parameter. The whole buffer is as long as all shards together.
    pub fn even(numel: usize, world_size: usize) -> Self {
        let shard = numel.div_ceil(world_size);
        let piece = |rank: usize| Piece { shard: 0..shard, full: rank * shard..(rank + 1) * shard };
        Self { full_numel: shard * world_size, shard_numel: vec![shard; world_size], pieces: (0..world_size).map(|rank| vec![piece(rank)]).collect() }
    }

    /// Each of `shapes`, which lie end to end, cut along its first dimension as `torch.chunk` does, as FSDP2 cuts parameters: later ranks may get less, or
    /// nothing, and shards are padded to the first rank's.
    pub fn by_rows(shapes: &[&[usize]], world_size: usize) -> Self {
        let mut cut = Self { full_numel: 0, shard_numel: vec![0; world_size], pieces: vec![Vec::new(); world_size] };
        let mut in_shard = 0;
        for shape in shapes {
            let rows = shape.first().copied().unwrap_or(1);
            let width = shape.iter().skip(1).product::<usize>();
            let chunk = rows.div_ceil(world_size);
            for (rank, pieces) in cut.pieces.iter_mut().enumerate() {
                let (from, until) = ((rank * chunk).min(rows) * width, ((rank + 1) * chunk).min(rows) * width);
                if from < until {
                    let full = cut.full_numel + from..cut.full_numel + until;
                    pieces.push(Piece { shard: in_shard..in_shard + full.len(), full });
                }
            }
            cut.full_numel += rows * width;
            in_shard += chunk * width;
        }
        cut.shard_numel = vec![in_shard; world_size];
        cut
    }

    /// Ranks it is cut for.
    pub fn world_size(&self) -> usize {
        self.pieces.len()
    }

    /// Elements of all shards together, each padded to the largest: what a collective moves.
    pub fn padded_numel(&self) -> usize {
        self.shard_numel.iter().max().map_or(0, |largest| largest * self.world_size())
    }

    /// The same for the part `range` of the whole buffer alone, without padding.
    pub(super) fn within(&self, range: &Range<usize>) -> Self {
        let mut cut = Self { full_numel: range.len(), shard_numel: Vec::new(), pieces: Vec::new() };
        for pieces in &self.pieces {
            let mut end = 0;
            let mut place = |piece: Piece| {
                let start = end;
                end += piece.full.len();
                Piece { shard: start..end, full: piece.full.start - range.start..piece.full.end - range.start }
            };
            let within = pieces.iter().map(|piece| piece.within(range)).filter(|piece| !piece.full.is_empty());
            cut.pieces.push(within.map(&mut place).collect());
            cut.shard_numel.push(end);
        }
        cut
    }

    /// The pieces of all shards in the order of the whole buffer, with their ranks.
    pub(super) fn in_full_order(&self) -> Vec<(usize, &Piece)> {
        let mut pieces: Vec<_> = self.pieces.iter().enumerate().flat_map(|(rank, pieces)| pieces.iter().map(move |piece| (rank, piece))).collect();
        pieces.sort_by_key(|(_, piece)| piece.full.start);
        pieces
    }
}

/// The parameters of one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct FlatLayout {
    /// Path of the unit's module; empty for the root.
    pub unit: String,
    /// PyTorch's class of that module.
    pub class: &'static str,
    /// Its parameters, in registration order.
    pub parameters: Vec<Placed>,
    /// Elements, with the padding between parameters, without what makes shards equal.
    pub numel: usize,
    /// How its values are cut.
    pub cut: Cut,
    /// How its gradient is cut.
    pub gradient_cut: Cut,
}

impl FlatLayout {
    /// The parts of parameters in shard `rank`.
    pub fn segments(&self, rank: usize) -> Vec<Segment> {
        let mut segments = Vec::new();
        for piece in &self.cut.pieces[rank] {
            for placed in &self.parameters {
                let (start, end) = (placed.range.start.max(piece.full.start), placed.range.end.min(piece.full.end));
                if start >= end {
                    continue;
                }
                let parameter_range = start - placed.range.start..end - placed.range.start;
                segments.push(Segment {
                    name: placed.info.name.clone(),
                    shape: placed.info.shape.clone(),
                    range: start - piece.full.start + piece.shard.start..end - piece.full.start + piece.shard.start,
                    gradient: placed.gradient.as_ref().and_then(|gradient| self.gradient_start(rank, gradient.start + parameter_range.start)),
                    parameter_range,
                    decays_by_default: placed.info.decays_by_default(),
                });
            }
        }
        segments
    }

    /// Where in shard `rank` of the gradient the element at `full` of the whole gradient lies.
    fn gradient_start(&self, rank: usize, full: usize) -> Option<usize> {
        let piece = self.gradient_cut.pieces[rank].iter().find(|piece| piece.full.contains(&full))?;
        Some(piece.shard.start + full - piece.full.start)
    }

    /// Whether any of it is trained.
    pub fn is_trained(&self) -> bool {
        self.parameters.iter().any(|placed| placed.gradient.is_some())
    }

    /// Decides how values and gradients are cut among `world_size` ranks, now that all parameters have their places.
    fn cut_up(&mut self, fsdp_version: u8, world_size: usize, trained: impl Fn(&str) -> bool) {
        let shapes = |parameters: &[Placed], which: &dyn Fn(&Placed) -> bool| -> Vec<Vec<usize>> {
            parameters.iter().filter(|placed| which(placed)).map(|placed| placed.info.shape.clone()).collect()
        };
        let by_rows = |shapes: &[Vec<usize>]| Cut::by_rows(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>(), world_size);
        let is_trained = |placed: &Placed| trained(&placed.info.name);
        self.cut = if fsdp_version == 1 { Cut::even(self.numel, world_size) } else { by_rows(&shapes(&self.parameters, &|_| true)) };
        if self.parameters.iter().all(is_trained) {
            self.gradient_cut = self.cut.clone();
            self.parameters.iter_mut().for_each(|placed| placed.gradient = Some(placed.range.clone()));
            return;
        }
        // Gradients of what is trained lie end to end, so that what is frozen takes no memory.
        let mut numel = 0;
        for placed in self.parameters.iter_mut().filter(|placed| trained(&placed.info.name)) {
            placed.gradient = Some(numel..numel + placed.range.len());
            numel += placed.range.len();
        }
        self.gradient_cut = if fsdp_version == 1 { self.compact_cut(numel) } else { by_rows(&shapes(&self.parameters, &is_trained)) };
    }

    /// Cuts a gradient of trained parameters alone so that each rank gets the part that belongs to its values.
    fn compact_cut(&self, full_numel: usize) -> Cut {
        let pieces: Vec<Vec<Piece>> = self
            .cut
            .pieces
            .iter()
            .map(|pieces| {
                let mut end = 0;
                let mut of_rank = Vec::new();
                for piece in pieces {
                    for placed in &self.parameters {
                        let (start, stop) = (placed.range.start.max(piece.full.start), placed.range.end.min(piece.full.end));
                        if let Some(gradient) = placed.gradient.as_ref().filter(|_| start < stop) {
                            let full = gradient.start + start - placed.range.start..gradient.start + stop - placed.range.start;
                            of_rank.push(Piece { shard: end..end + full.len(), full: full.clone() });
                            end += full.len();
                        }
                    }
                }
                of_rank
            })
            .collect();
        let shard_numel = pieces.iter().map(|pieces| pieces.last().map_or(0, |piece| piece.shard.end)).collect();
        Cut { full_numel, shard_numel, pieces }
    }
}

/// The parameters of the units at `paths` (parents before children, the root first), cut for `world_size` ranks. Units without parameters of their own, such
/// as a wrapped tied head, are among them with a length of 0.
///
/// FSDP1: with `use_orig_params` each parameter starts at a multiple of 16 bytes of `param_dtype`; without, they lie end to end; the flat parameter is cut
/// evenly. FSDP2: they lie end to end and each is cut by its rows. Where a unit is trained in part its gradients are compact: frozen parameters have none.
pub fn flat_layouts(
    tree: &ModuleTree,
    paths: &[String],
    settings: &FsdpSettings,
    world_size: usize,
    trained: impl Fn(&str) -> bool,
) -> Vec<FlatLayout> {
    let aligned = settings.fsdp_version == 1 && settings.use_orig_params;
    let alignment = if aligned { 16 / settings.mixed_precision.param_dtype.size() } else { 1 };
    let mut layouts: Vec<FlatLayout> = Vec::new();
    tree.visit(&mut |path, module| {
        if paths.iter().any(|unit| unit == path) {
            let cut = Cut::even(0, world_size);
            let layout = FlatLayout { unit: path.to_owned(), class: module.class, parameters: Vec::new(), numel: 0, gradient_cut: cut.clone(), cut };
            layouts.push(layout);
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
            layout.parameters.push(Placed { range: start..layout.numel, info, gradient: None });
        }
    });
    for layout in &mut layouts {
        layout.cut_up(settings.fsdp_version, world_size, &trained);
    }
    layouts
}

/// Whether the module at `path` is the one at `ancestor` or lies below it.
pub(super) fn is_within(path: &str, ancestor: &str) -> bool {
    ancestor.is_empty() || path == ancestor || path.strip_prefix(ancestor).is_some_and(|rest| rest.starts_with('.'))
}
