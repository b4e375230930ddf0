//! Writing the tensors of a checkpoint. Every element is written once, by the lowest rank that holds it, whatever the sharding strategy.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::Kind;
use super::tensors::{CHUNK, FileEntry, TensorWriter};
use crate::spec::settings::StateDictType;
use crate::store::StoreError;
use crate::train::error::TrainError;
use crate::train::fsdp::{Buffer, ProcessGroup, Shard};
use crate::train::model::tree::ParameterInfo;
use crate::train::optim::AdamW;

/// Who writes a parameter.
#[derive(Debug)]
struct Placement<'a> {
    parameter: &'a ParameterInfo,
    /// Ranks and the elements that each writes, ascending and without a gap.
    parts: Vec<(usize, Range<usize>)>,
    /// Whether the optimiser has moments of it.
    has_moments: bool,
}

impl Placement<'_> {
    fn kinds(&self) -> &'static [Kind] {
        if self.has_moments { &Kind::ALL } else { &[Kind::Model] }
    }

    /// How the tensor of these elements is called, and its shape.
    fn tensor(&self, kind: Kind, elements: &Range<usize>) -> (String, Vec<usize>) {
        if elements.len() == self.parameter.numel() {
            (kind.tensor_name(&self.parameter.name, None), self.parameter.shape.clone())
        } else {
            (kind.tensor_name(&self.parameter.name, Some(elements)), vec![elements.len()])
        }
    }
}

/// What this rank holds.
struct Held<'a> {
    shards: &'a [Shard],
    optimizer: &'a AdamW,
    /// Shard and number of the segment of each parameter.
    places: HashMap<&'a str, (usize, usize)>,
}

impl<'a> Held<'a> {
    fn new(shards: &'a [Shard], optimizer: &'a AdamW) -> Self {
        let mut places = HashMap::new();
        for (number, shard) in shards.iter().enumerate() {
            for (place, segment) in shard.segments.iter().enumerate() {
                places.insert(segment.name.as_str(), (number, place));
            }
        }
        Self { shards, optimizer, places }
    }

    /// Which elements of a parameter are here, and whether the optimiser has moments of them.
    fn elements(&self, name: &str) -> (Range<usize>, bool) {
        let Some((shard, segment)) = self.places.get(name) else { return (0..0, false) };
        let held = &self.shards[*shard].segments[*segment];
        (held.parameter_range.clone(), self.optimizer.moments(*shard, &held.range).is_some())
    }

    /// The numbers of these elements of a parameter, which must be here.
    fn numbers(&self, kind: Kind, name: &str, elements: &Range<usize>) -> &[f32] {
        let (shard, segment) = self.places[name];
        let segment = &self.shards[shard].segments[segment];
        let start = segment.range.start + elements.start - segment.parameter_range.start;
        let range = start..start + elements.len();
        let moments = |which: usize| self.optimizer.moments(shard, &range).map_or(&[][..], |moments| moments[which]);
        match kind {
            Kind::Model => &self.shards[shard].values[range],
            Kind::ExpAvg => moments(0),
            Kind::ExpAvgSq => moments(1),
        }
    }
}

/// Writes this rank's part of the tensors into `folder` and tells the others; every rank must call it. The same list of files on every rank.
///
/// # Errors
/// A file cannot be written, or another rank failed.
pub(super) fn write_tensors(
    folder: &Path,
    layout: StateDictType,
    group: &dyn ProcessGroup,
    parameters: &[ParameterInfo],
    shards: &[Shard],
    optimizer: &AdamW,
) -> Result<Vec<FileEntry>, TrainError> {
    let held = Held::new(shards, optimizer);
    let placements = agree(group, parameters, &held)?;
    let name = |rank: usize| match layout {
        StateDictType::FullStateDict => "full.safetensors".to_owned(),
        StateDictType::ShardedStateDict => format!("rank-{rank}.safetensors"),
    };
    let path = folder.join(name(group.rank()));
    let mine = match layout {
        StateDictType::FullStateDict => write_full(&path, group, &placements, &held)?,
        StateDictType::ShardedStateDict => write_shard(&path, group.rank(), &placements, &held).map_err(failed)?,
    };
    tell(group, mine, name)
}

fn failed(error: StoreError) -> TrainError {
    TrainError::Failed(error.to_string())
}

/// Decides who writes what: the same on every rank.
fn agree<'a>(group: &dyn ProcessGroup, parameters: &'a [ParameterInfo], held: &Held<'_>) -> Result<Vec<Placement<'a>>, TrainError> {
    let world_size = group.world_size();
    let mut numbers = vec![0.0; parameters.len() * world_size * 3];
    for (index, parameter) in parameters.iter().enumerate() {
        let (elements, moments) = held.elements(&parameter.name);
        let place = (index * world_size + group.rank()) * 3;
        numbers[place..place + 3].copy_from_slice(&[elements.start as f64, elements.end as f64, f64::from(u8::from(moments))]);
    }
    let numbers = group.all_reduce_numbers(&numbers)?;
    let mut placements = Vec::with_capacity(parameters.len());
    for (parameter, numbers) in parameters.iter().zip(numbers.chunks(world_size * 3)) {
        let mut placement = Placement { parameter, parts: Vec::new(), has_moments: false };
        let mut next = 0;
        while next < parameter.numel() {
            let holds = |numbers: &&[f64]| numbers[0] as usize <= next && next < numbers[1] as usize;
            let Some((rank, held)) = numbers.chunks(3).enumerate().find(|(_, numbers)| holds(numbers)) else {
                return Err(TrainError::Failed(format!("no rank holds element {next} of {}", parameter.name)));
            };
            let end = held[1] as usize;
            placement.parts.push((rank, next..end));
            placement.has_moments |= held[2] > 0.0;
            next = end;
        }
        placements.push(placement);
    }
    Ok(placements)
}

/// Writes what falls to this rank; no file where nothing does.
fn write_shard(path: &Path, rank: usize, placements: &[Placement<'_>], held: &Held<'_>) -> Result<Option<FileEntry>, StoreError> {
    let mut parts = Vec::new();
    for placement in placements {
        for (_, elements) in placement.parts.iter().filter(|(writer, _)| *writer == rank) {
            parts.extend(placement.kinds().iter().map(|kind| (placement, *kind, elements)));
        }
    }
    if parts.is_empty() {
        return Ok(None);
    }
    let tensors: Vec<_> = parts.iter().map(|(placement, kind, elements)| placement.tensor(*kind, elements)).collect();
    let mut writer = TensorWriter::create(path, &tensors)?;
    for (placement, kind, elements) in parts {
        writer.write(held.numbers(kind, &placement.parameter.name, elements))?;
    }
    writer.finish().map(Some)
}

/// Rank 0 writes everything; the others send it what they hold, so little at a time that no rank ever has the whole of anything.
fn write_full(path: &Path, group: &dyn ProcessGroup, placements: &[Placement<'_>], held: &Held<'_>) -> Result<Option<FileEntry>, TrainError> {
    let rank = group.rank();
    let mut writer = None;
    if rank == 0 {
        let tensors: Vec<_> = placements
            .iter()
            .flat_map(|placement| placement.kinds().iter().map(|kind| placement.tensor(*kind, &(0..placement.parameter.numel()))))
            .collect();
        writer = Some(TensorWriter::create(path, &tensors).map_err(failed)?);
    }
    for placement in placements {
        let name = &placement.parameter.name;
        for kind in placement.kinds() {
            for (holder, elements) in &placement.parts {
                for start in elements.clone().step_by(CHUNK) {
                    let chunk = start..(start + CHUNK).min(elements.end);
                    let mine = || held.numbers(*kind, name, &chunk);
                    if *holder == 0 {
                        if let Some(writer) = &mut writer {
                            writer.write(mine()).map_err(failed)?;
                        }
                        continue;
                    }
                    let sent = (*holder == rank).then(|| Arc::new(Buffer::F32(mine().to_vec())));
                    let received = group.broadcast(sent, *holder)?;
                    if let (Some(writer), Buffer::F32(values)) = (&mut writer, &received) {
                        writer.write(values).map_err(failed)?;
                    }
                }
            }
        }
    }
    writer.map(|writer| writer.finish().map_err(failed)).transpose()
}

/// Tells all ranks of the files that each has written: length and checksum, as numbers that a sum over ranks carries exactly.
fn tell(group: &dyn ProcessGroup, mine: Option<FileEntry>, name: impl Fn(usize) -> String) -> Result<Vec<FileEntry>, TrainError> {
    const NUMBERS: usize = 9;
    let mut numbers = vec![0.0; group.world_size() * NUMBERS];
    if let Some(entry) = mine {
        let place = group.rank() * NUMBERS;
        numbers[place] = entry.bytes as f64;
        for (word, number) in numbers[place + 1..place + NUMBERS].iter_mut().enumerate() {
            *number = u32::from_str_radix(&entry.sha256[8 * word..8 * word + 8], 16).map_or(0.0, f64::from);
        }
    }
    let numbers = group.all_reduce_numbers(&numbers)?;
    let entry = |(rank, numbers): (usize, &[f64])| {
        let sha256 = numbers[1..].iter().map(|number| format!("{:08x}", *number as u32)).collect();
        (numbers[0] > 0.0).then(|| FileEntry { name: name(rank), bytes: numbers[0] as u64, sha256 })
    };
    Ok(numbers.chunks(NUMBERS).enumerate().filter_map(entry).collect())
}
