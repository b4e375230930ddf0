//! Laying profiles and `--set` arguments over the sweep file, key by key.

use super::mistakes::{Mistakes, Origin};
use super::read::{Axis, Layer, Located};
use super::schema::{self, EXCLUSIVE, KEYS, KeyIndex};

/// Lays a profile over what is below it. Keys replace keys, axes replace axes of the same key, lists of cases and excludes replace the whole list.
pub(crate) fn lay_profile(below: &mut Layer, profile: &Layer) {
    for (key, located) in &profile.scalars {
        set_scalar(below, *key, located, profile);
    }
    for axis in &profile.axes {
        drop_exclusive(below, axis.key);
        replace_axis(&mut below.axes, axis);
    }
    if profile.cases.is_some() {
        below.cases.clone_from(&profile.cases);
    }
    if profile.excludes.is_some() {
        below.excludes.clone_from(&profile.excludes);
    }
    if profile.search.is_some() {
        below.search.clone_from(&profile.search);
    }
}

/// Applies one `--set`: it replaces the key wherever it stands, as an axis too.
pub(crate) fn apply_argument(below: &mut Layer, argument: &Layer, mistakes: &mut Mistakes<'_>) {
    let block_size = schema::key("train.block_size");
    for (key, located) in &argument.scalars {
        below.axes.retain(|axis| axis.key != *key);
        for case in below.cases.iter_mut().flatten() {
            case.fixed.retain(|(fixed, _)| fixed != key);
            case.axes.retain(|axis| axis.key != *key);
        }
        set_scalar(below, *key, located, argument);
        if *key == block_size {
            below.search = None;
            below.scalars.retain(|key, _| !KEYS[*key].path.starts_with("search."));
        }
    }
    for axis in &argument.axes {
        drop_exclusive(below, axis.key);
        below.scalars.remove(&axis.key);
        replace_axis(&mut below.axes, axis);
        if axis.key == block_size {
            below.search = None;
        }
    }
    for list in &argument.lists {
        replace_where_it_stands(below, list, mistakes);
    }
    if argument.search.is_some() {
        below.search.clone_from(&argument.search);
    }
}

fn set_scalar(below: &mut Layer, key: KeyIndex, located: &Located, overlay: &Layer) {
    drop_exclusive(below, key);
    let tokenizer = schema::key("data.tokenizer");
    // A tokenizer belongs to its data; the evaluation text is part of the data set's own value. What one `--set` says another does not take back.
    let stays = overlay.scalars.contains_key(&tokenizer)
        || below.scalars.get(&tokenizer).is_some_and(|located| matches!(located.origin, Origin::Argument(_)));
    if key == schema::key("data.dataset") && !stays {
        below.scalars.remove(&tokenizer);
    }
    below.scalars.insert(key, located.clone());
}

/// Setting one of an exclusive pair removes the other wherever it stands.
fn drop_exclusive(below: &mut Layer, key: KeyIndex) {
    for (one, other) in EXCLUSIVE {
        let partner = match KEYS[key].path {
            path if path == one => schema::key(other),
            path if path == other => schema::key(one),
            _ => continue,
        };
        below.scalars.remove(&partner);
        below.axes.retain(|axis| axis.key != partner);
        for case in below.cases.iter_mut().flatten() {
            case.fixed.retain(|(fixed, _)| *fixed != partner);
            case.axes.retain(|axis| axis.key != partner);
        }
    }
}

fn replace_axis(axes: &mut Vec<Axis>, axis: &Axis) {
    match axes.iter_mut().find(|present| present.key == axis.key) {
        Some(present) => present.clone_from(axis),
        None => axes.push(axis.clone()),
    }
}

/// `--set key=[..]` gives an axis new values; a key that is no axis anywhere takes one value.
fn replace_where_it_stands(below: &mut Layer, list: &Axis, mistakes: &mut Mistakes<'_>) {
    let mut replaced = false;
    if let Some(axis) = below.axes.iter_mut().find(|axis| axis.key == list.key) {
        axis.clone_from(list);
        replaced = true;
    }
    for case in below.cases.iter_mut().flatten() {
        if let Some(axis) = case.axes.iter_mut().find(|axis| axis.key == list.key) {
            axis.clone_from(list);
            replaced = true;
        } else if let Some(place) = case.fixed.iter().position(|(key, _)| *key == list.key) {
            case.fixed.remove(place);
            case.axes.push(list.clone());
            replaced = true;
        }
    }
    if !replaced {
        let path = KEYS[list.key].path;
        mistakes
            .add(&list.origin, format!("`{path}` is no axis of this sweep, so it takes one value"))
            .push(format!("to make it one: --set 'grid.{path}=[...]'"));
    }
}
