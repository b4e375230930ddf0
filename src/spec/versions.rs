//! Keys that only one of FSDP's two versions knows: refused where they are written for the other alone, rather than ignored as accelerate does.

use super::mistakes::{Mistakes, Origin};
use super::read::Layer;
use super::schema::{KEYS, KeyIndex};

/// Switches that FSDP2 has not, and what to say instead.
const OF_VERSION_1: [(&str, &str); 6] = [
    ("fsdp.sharding_strategy", "reshard_after_forward = true is FULL_SHARD's meaning, false SHARD_GRAD_OP's; hybrid_shard_size makes shard groups"),
    ("fsdp.backward_prefetch", "FSDP2 always gathers the next unit before it computes, as BACKWARD_PRE does"),
    ("fsdp.forward_prefetch", "FSDP2 has no such switch"),
    ("fsdp.limit_all_gathers", "FSDP2 needs no limit"),
    ("fsdp.use_orig_params", "FSDP2 always has original parameters"),
    ("fsdp.sync_module_states", "FSDP2 has no such switch"),
];

/// Switches that FSDP1 has not.
const OF_VERSION_2: [(&str, &str); 1] =
    [("fsdp.reshard_after_forward", "FSDP1 says it by sharding_strategy: FULL_SHARD reshards, SHARD_GRAD_OP does not")];

/// Refuses keys that no point they apply to can mean. `versions` has the values of `fsdp_version` in the grid, if there is one, and in each case.
pub(super) fn check(layer: &Layer, versions: &[Vec<u64>], mistakes: &mut Mistakes<'_>) {
    let everywhere = versions.concat();
    for (key, located) in &layer.scalars {
        refuse(*key, &located.origin, &everywhere, mistakes);
    }
    let grids = usize::from(!layer.axes.is_empty());
    for axis in &layer.axes {
        refuse(axis.key, &axis.origin, &versions[0], mistakes);
    }
    for (case, versions) in layer.cases.iter().flatten().zip(versions.iter().skip(grids)) {
        for (key, located) in &case.fixed {
            refuse(*key, &located.origin, versions, mistakes);
        }
        for axis in &case.axes {
            refuse(axis.key, &axis.origin, versions, mistakes);
        }
    }
}

fn refuse(key: KeyIndex, origin: &Origin, versions: &[u64], mistakes: &mut Mistakes<'_>) {
    let path = KEYS[key].path;
    for (version, keys) in [(1, &OF_VERSION_1[..]), (2, &OF_VERSION_2[..])] {
        if let Some((_, instead)) = keys.iter().find(|(known, _)| *known == path)
            && !versions.contains(&version)
        {
            let other = 3 - version;
            mistakes
                .add(origin, format!("`{path}` is a switch of FSDP{version}: it means nothing with fsdp_version = {other}"))
                .extend([(*instead).to_owned(), format!("remove it, or say fsdp_version = {version}")]);
        }
    }
}
