//! From merged layers to rows: the grid's cartesian product, the cases' sub-grids, what is excluded, and labels. Rows are built when they are asked
//! for, so that a grid of a million points costs no more memory than its axes.

use std::collections::HashSet;

use super::collapse::{collapse, collapse_state_dicts};
use super::mistakes::{Mistakes, Origin};
use super::plan::Row;
use super::presets::preset;
use super::read::{Axis, Exclude, Layer};
use super::schema::{self, EXCLUSIVE, KEYS, KeyIndex, Point, Target};
use super::settings::{DeviceKind, Init};
use super::value::{Kind, Value};
use super::versions;
use crate::format::count as count_of;

/// Most points of a sweep. More are no plan any more, but a mistake in the axes.
pub const MAX_POINTS: usize = 1_000_000;

/// Longest label in characters; longer ones are cut and numbered.
const MAX_LABEL: usize = 200;
/// Above this, values that speak for themselves lose their key's name.
const LONG_LABEL: usize = 120;
/// Longest value in a label, in characters.
const MAX_LABEL_VALUE: usize = 48;
/// Block size where none is given and none is searched for, as in the HF examples, unless the model has fewer positions.
const DEFAULT_BLOCK_SIZE: usize = 1024;

/// What every point of a sweep shares and its own keys do not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shared {
    pub(crate) seed: u64,
    pub(crate) kind: DeviceKind,
    /// The smallest candidate, where block sizes are searched for.
    pub(crate) smallest_candidate: Option<usize>,
    /// Whether checkpoints are saved.
    pub(crate) saves: bool,
}

/// All points of a sweep, as axes.
#[derive(Clone, Debug)]
pub(crate) struct Expansion {
    groups: Vec<Group>,
    shared: Shared,
    /// Block size of the common evaluation where the file gives none.
    eval_block_size: usize,
}

/// The grid, a case, or the one configuration of a sweep that has neither.
#[derive(Clone, Debug)]
struct Group {
    template: Point,
    /// Label, or the beginning of one.
    label: Option<String>,
    axes: Vec<GroupAxis>,
    /// Points before anything is dropped.
    points: usize,
    /// Points that stay, where some were dropped.
    kept: Option<Vec<u32>>,
    /// Rows of the groups before this one.
    first_row: usize,
    origin: Origin,
    is_grid: bool,
    /// Keys of the group and the sweep that are no axes.
    fixed: Vec<(KeyIndex, Value)>,
}

#[derive(Clone, Debug)]
struct GroupAxis {
    key: KeyIndex,
    values: Vec<Value>,
    /// What each value adds to a label; empty where the axis has one value only.
    fragments: Vec<String>,
    /// Points between two values of this axis.
    stride: usize,
}

impl Expansion {
    /// Rows of the sweep.
    pub(crate) fn len(&self) -> usize {
        self.groups.last().map_or(0, |group| group.first_row + group.len())
    }

    /// Builds one row.
    pub(crate) fn row(&self, index: usize) -> Option<Row> {
        let group = &self.groups[self.groups.partition_point(|group| group.first_row <= index).checked_sub(1)?];
        let within = index - group.first_row;
        (within < group.len()).then(|| self.build(group, within))
    }

    /// Builds all rows, one after another.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.groups.iter().flat_map(move |group| (0..group.len()).map(move |within| self.build(group, within)))
    }

    fn build(&self, group: &Group, within: usize) -> Row {
        let position = group.position(within);
        let point = self.finish(group.point(position));
        let (mut effective, mut collapsed) = collapse(&point.settings);
        if !self.shared.saves {
            collapse_state_dicts(&mut effective, &mut collapsed);
        }
        Row { label: group.label(position), settings: point.settings, effective, block_size: point.block_size, collapsed }
    }

    /// Settles what follows from other keys.
    fn finish(&self, mut point: Point) -> Point {
        let settings = &mut point.settings;
        settings.train.seed = point.seed.unwrap_or(self.shared.seed);
        let has_weights = preset(&settings.model.id).is_none_or(|preset| preset.hub.is_some());
        settings.model.init = point.init.unwrap_or(if has_weights { Init::Pretrained } else { Init::Random });
        settings.device.kind = self.shared.kind;
        settings.train.eval_block_size = point.eval_block_size.unwrap_or(self.eval_block_size);
        point.block_size = match self.shared.smallest_candidate {
            Some(_) => None,
            None => Some(point.block_size.unwrap_or(default_block_size(&point))),
        };
        point
    }
}

fn default_block_size(point: &Point) -> usize {
    point.settings.model.config.positions().map_or(DEFAULT_BLOCK_SIZE, |positions| positions.min(DEFAULT_BLOCK_SIZE))
}

impl Group {
    fn new(template: Point, axes: &[Axis], label: Option<String>, origin: Origin, is_grid: bool) -> Self {
        let several = axes.iter().any(|axis| axis.values.len() > 1);
        let mut stride = 1;
        let mut group_axes: Vec<GroupAxis> = axes
            .iter()
            .rev()
            .map(|axis| {
                let shown = axis.values.len() > 1 || !several;
                let fragments = if shown { axis.values.iter().map(|value| fragment(axis.key, value)).collect() } else { Vec::new() };
                let group_axis = GroupAxis { key: axis.key, values: axis.values.clone(), fragments, stride };
                stride = stride.saturating_mul(axis.values.len());
                group_axis
            })
            .collect();
        group_axes.reverse();
        let prefix = label.as_ref().map_or(0, |label| label.chars().count());
        let longest =
            |axes: &[GroupAxis]| axes.iter().map(|axis| axis.fragments.iter().map(|f| f.chars().count() + 2).max().unwrap_or(0)).sum::<usize>();
        if prefix + longest(&group_axes) > LONG_LABEL {
            for axis in &mut group_axes {
                if matches!(KEYS[axis.key].kind, Kind::Choice(_)) && !axis.fragments.is_empty() {
                    axis.fragments = axis.values.iter().map(Value::to_string).collect();
                }
            }
        }
        for axis in &mut group_axes {
            make_unique(&mut axis.fragments);
        }
        Self { template, label, axes: group_axes, points: stride, kept: None, first_row: 0, origin, is_grid, fixed: Vec::new() }
    }

    fn len(&self) -> usize {
        self.kept.as_ref().map_or(self.points, Vec::len)
    }

    fn position(&self, within: usize) -> usize {
        self.kept.as_ref().map_or(within, |kept| kept[within] as usize)
    }

    fn point(&self, position: usize) -> Point {
        let mut point = self.template.clone();
        for axis in &self.axes {
            apply(&mut point, axis.key, &axis.values[axis.digit(position)]);
        }
        point
    }

    fn label(&self, position: usize) -> String {
        let mut label = String::with_capacity(96);
        label.push_str(self.label.as_deref().unwrap_or_default());
        for axis in &self.axes {
            if !axis.fragments.is_empty() {
                if !label.is_empty() {
                    label.push_str(", ");
                }
                label.push_str(&axis.fragments[axis.digit(position)]);
            }
        }
        if label.len() > MAX_LABEL && label.chars().count() > MAX_LABEL {
            let number = format!(" ... #{}", self.first_row + position + 1);
            let kept: String = label.chars().take(MAX_LABEL - number.len()).collect();
            label = kept + &number;
        }
        label
    }

    /// The value of a key at a point, where it has one.
    fn value(&self, key: KeyIndex, position: usize) -> Option<&Value> {
        let on_axis = self.axes.iter().find(|axis| axis.key == key).map(|axis| &axis.values[axis.digit(position)]);
        on_axis.or_else(|| self.fixed_value(key))
    }

    /// Every value of `fsdp_version` in this group.
    fn fsdp_versions(&self) -> Vec<u64> {
        let key = schema::key("fsdp.fsdp_version");
        let on_axis = self.axes.iter().filter(|axis| axis.key == key).flat_map(|axis| &axis.values);
        let values: Vec<u64> = on_axis.map(Value::integer).collect();
        if values.is_empty() { self.fixed_value(key).map(Value::integer).into_iter().collect() } else { values }
    }

    /// The value of a key that is no axis of this group.
    fn fixed_value(&self, key: KeyIndex) -> Option<&Value> {
        let fixed = self.fixed.iter().rev().find(|(fixed, _)| *fixed == key).map(|(_, value)| value);
        fixed.or_else(|| {
            // The default does not hold where the other key of an exclusive pair is set.
            let partner = EXCLUSIVE.iter().find_map(|(one, other)| match KEYS[key].path {
                path if path == *one => Some(schema::key(other)),
                path if path == *other => Some(schema::key(one)),
                _ => None,
            });
            let overruled = partner
                .is_some_and(|partner| self.fixed.iter().any(|(fixed, _)| *fixed == partner) || self.axes.iter().any(|axis| axis.key == partner));
            if overruled { None } else { schema::default_of(key) }
        })
    }
}

impl GroupAxis {
    fn digit(&self, position: usize) -> usize {
        position / self.stride % self.values.len()
    }
}

fn apply(point: &mut Point, key: KeyIndex, value: &Value) {
    if let Target::Point(set) = KEYS[key].target {
        set(point, value);
    }
}

/// `key=value`, the value cut where it is long.
fn fragment(key: KeyIndex, value: &Value) -> String {
    let written = value.to_string();
    let shown = if written.chars().count() > MAX_LABEL_VALUE {
        // The end of a path says more than its beginning.
        let tail: String = written.chars().skip(written.chars().count() - (MAX_LABEL_VALUE - 3)).collect();
        format!("...{tail}")
    } else {
        written
    };
    format!("{}={shown}", KEYS[key].name())
}

fn make_unique(fragments: &mut [String]) {
    let mut seen = HashSet::new();
    for (number, fragment) in fragments.iter_mut().enumerate() {
        if !seen.insert(fragment.clone()) {
            fragment.push_str(&format!(" (#{})", number + 1));
        }
    }
}

/// Expands merged layers. Returns the points and what the user should know about them.
pub(crate) fn expand(layer: &Layer, name: &str, shared: Shared, mistakes: &mut Mistakes<'_>) -> Option<(Expansion, Vec<String>)> {
    let mut base = Point::with_defaults();
    for (key, located) in &layer.scalars {
        apply(&mut base, *key, &located.value);
    }
    let scalars: Vec<(KeyIndex, Value)> = layer.scalars.iter().map(|(key, located)| (*key, located.value.clone())).collect();
    let cases = layer.cases.as_deref().unwrap_or_default();
    count(layer, mistakes)?;

    let mut groups = Vec::new();
    if !layer.axes.is_empty() {
        groups.push(Group::new(base.clone(), &layer.axes, None, layer.axes[0].origin.clone(), true));
    }
    for case in cases {
        let mut template = base.clone();
        for (key, located) in &case.fixed {
            apply(&mut template, *key, &located.value);
        }
        let label = case.label.as_ref().map(|(label, _)| label.clone()).or_else(|| {
            let fragments: Vec<String> = case.fixed.iter().map(|(key, located)| fragment(*key, &located.value)).collect();
            (!fragments.is_empty()).then(|| fragments.join(", "))
        });
        let mut group = Group::new(template, &case.axes, label, case.origin.clone(), false);
        group.fixed = case.fixed.iter().map(|(key, located)| (*key, located.value.clone())).collect();
        groups.push(group);
    }
    if groups.is_empty() {
        groups.push(Group::new(base, &[], Some(name.to_owned()), Origin::Whole, true));
    }
    for group in &mut groups {
        // A case overrules the sweep, and one key of an exclusive pair overrules the other.
        let overruled: Vec<KeyIndex> =
            group.fixed.iter().map(|(key, _)| *key).chain(group.axes.iter().map(|axis| axis.key)).flat_map(with_partner).collect();
        let inherited = scalars.iter().filter(|(key, _)| !overruled.contains(key)).cloned();
        group.fixed.extend(inherited);
    }

    versions::check(layer, &groups.iter().map(Group::fsdp_versions).collect::<Vec<_>>(), mistakes);
    let mut notices = Vec::new();
    exclude(&mut groups, layer.excludes.as_deref().unwrap_or_default(), &mut notices, mistakes);
    let mut expansion = Expansion { eval_block_size: smallest_block_size(&groups, shared), groups, shared };
    merge_duplicates(&mut expansion, &mut notices);
    let mut first_row = 0;
    for group in &mut expansion.groups {
        group.first_row = first_row;
        first_row += group.len();
    }
    check_labels(&expansion, cases, mistakes);
    mistakes.is_empty().then_some((expansion, notices))
}

fn with_partner(key: KeyIndex) -> Vec<KeyIndex> {
    let mut keys = vec![key];
    for (one, other) in EXCLUSIVE {
        match KEYS[key].path {
            path if path == one => keys.push(schema::key(other)),
            path if path == other => keys.push(schema::key(one)),
            _ => {}
        }
    }
    keys
}

/// Counts the points before any is built, and says how to have fewer where there are too many.
fn count(layer: &Layer, mistakes: &mut Mistakes<'_>) -> Option<()> {
    let product = |axes: &[Axis]| axes.iter().fold(1_u128, |product, axis| product.saturating_mul(axis.values.len() as u128));
    let grid = if layer.axes.is_empty() { 0 } else { product(&layer.axes) };
    let mut total = grid;
    let mut largest = (grid, layer.axes.as_slice(), "[grid]");
    for case in layer.cases.iter().flatten() {
        let points = product(&case.axes);
        total = total.saturating_add(points);
        if points > largest.0 {
            largest = (points, &case.axes, "this case");
        }
    }
    if total <= MAX_POINTS as u128 {
        return Some(());
    }
    let (points, axes, what) = largest;
    let mut longest: Vec<&Axis> = axes.iter().collect();
    longest.sort_by_key(|axis| std::cmp::Reverse(axis.values.len()));
    let lengths: Vec<String> = longest.iter().map(|axis| format!("{} ({})", KEYS[axis.key].name(), axis.values.len())).collect();
    let origin = longest.first().map_or(Origin::Whole, |axis| axis.origin.clone());
    let help = mistakes.add(
        &origin,
        format!(
            "{what} makes {} points, at most {} can be planned",
            count_of(u64::try_from(points).unwrap_or(u64::MAX)),
            count_of(MAX_POINTS as u64)
        ),
    );
    help.push(format!("values of each axis: {}", lengths.join(" x ")));
    help.push("shorten the longest axes, drop those that matter least, or write the combinations of interest as [[case]]".to_owned());
    None
}

/// Drops the points that an exclude matches. One that empties a case contradicts it; one that matches nothing is worth a notice.
fn exclude(groups: &mut [Group], excludes: &[Exclude], notices: &mut Vec<String>, mistakes: &mut Mistakes<'_>) {
    if excludes.is_empty() {
        return;
    }
    let total: usize = groups.iter().map(|group| group.points).sum();
    let mut hits = vec![0_usize; excludes.len()];
    let mut dropped = 0;
    for group in groups.iter_mut() {
        // For each exclude that can match in this group: the axes it names and the value it wants.
        let rules: Vec<(usize, Vec<(usize, usize)>)> =
            excludes.iter().enumerate().filter_map(|(number, exclude)| Some((number, rule(group, exclude)?))).collect();
        if rules.is_empty() {
            continue;
        }
        let mut kept = Vec::with_capacity(group.points);
        let mut last = 0;
        for position in 0..group.points {
            let mut matched = false;
            for (number, wanted) in &rules {
                if wanted.iter().all(|(axis, digit)| group.axes[*axis].digit(position) == *digit) {
                    hits[*number] += 1;
                    last = *number;
                    matched = true;
                }
            }
            if matched {
                dropped += 1;
            } else {
                kept.push(position as u32);
            }
        }
        if kept.is_empty() {
            let place = mistakes.mention(&excludes[last].origin);
            let what = if group.is_grid { "every point of [grid]" } else { "this whole case" };
            mistakes
                .add(&group.origin, format!("[[exclude]] ({place}) drops {what}"))
                .push("an exclude takes points out of a product; remove one of the two".to_owned());
        }
        if kept.len() < group.points {
            group.kept = Some(kept);
        }
    }
    if dropped > 0 {
        notices.push(format!("Excluded: {} of {} points.", count_of(dropped as u64), count_of(total as u64)));
    }
    for (exclude, hits) in excludes.iter().zip(hits) {
        if hits == 0 {
            notices.push(format!("The [[exclude]] on {} matches no point.", mistakes.mention(&exclude.origin)));
        }
    }
}

/// Which axis values an exclude wants in a group, or `None` where it cannot match there.
fn rule(group: &Group, exclude: &Exclude) -> Option<Vec<(usize, usize)>> {
    let mut wanted = Vec::new();
    for (key, located) in &exclude.entries {
        match group.axes.iter().position(|axis| axis.key == *key) {
            Some(axis) => wanted.push((axis, group.axes[axis].values.iter().position(|value| *value == located.value)?)),
            None if group.fixed_value(*key) == Some(&located.value) => {}
            None => return None,
        }
    }
    Some(wanted)
}

/// A point that both the grid and a case make is one point: it keeps the case's row.
fn merge_duplicates(expansion: &mut Expansion, notices: &mut Vec<String>) {
    let [grid, cases @ ..] = expansion.groups.as_slice() else { return };
    if !grid.is_grid || cases.is_empty() {
        return;
    }
    let mut doubled = HashSet::new();
    for case in cases {
        for within in 0..case.len() {
            let position = case.position(within);
            let place = grid.axes.iter().try_fold(0, |place, axis| {
                let value = case.value(axis.key, position)?;
                let digit = axis.values.iter().position(|candidate| candidate == value)?;
                Some(place + digit * axis.stride)
            });
            if let Some(place) = place
                && expansion.finish(grid.point(place)) == expansion.finish(case.point(position))
            {
                doubled.insert(place);
            }
        }
    }
    if doubled.is_empty() {
        return;
    }
    let kept: Vec<u32> =
        (0..grid.len()).map(|within| grid.position(within)).filter(|place| !doubled.contains(place)).map(|place| place as u32).collect();
    let merged = grid.len() - kept.len();
    expansion.groups[0].kept = Some(kept);
    if merged > 0 {
        notices.push(format!("Points of [grid] that are also cases, and keep the case's row: {}.", count_of(merged as u64)));
    }
}

/// What evaluations are made comparable by where the file does not say: the smallest block size of the sweep.
fn smallest_block_size(groups: &[Group], shared: Shared) -> usize {
    let block_size = schema::key("train.block_size");
    let of_group = |group: &Group| match group.axes.iter().find(|axis| axis.key == block_size) {
        Some(axis) => axis.values.iter().map(Value::count).min(),
        None => Some(group.template.block_size.unwrap_or_else(|| default_block_size(&group.template))),
    };
    shared.smallest_candidate.or_else(|| groups.iter().filter_map(of_group).min()).unwrap_or(DEFAULT_BLOCK_SIZE)
}

/// Labels name rows in tables and on the command line, so no two rows may share one.
fn check_labels(expansion: &Expansion, cases: &[super::read::Case], mistakes: &mut Mistakes<'_>) {
    for (number, case) in cases.iter().enumerate() {
        let Some((label, origin)) = &case.label else { continue };
        if label.chars().count() > MAX_LABEL {
            mistakes.add(origin, format!("a label has at most {MAX_LABEL} characters"));
        }
        if label.chars().any(char::is_control) {
            mistakes.add(origin, "a label is one line of text");
        }
        let earlier = cases[..number].iter().filter_map(|case| case.label.as_ref()).find(|(earlier, _)| earlier == label);
        if let Some((_, earlier)) = earlier {
            let elsewhere = mistakes.mention(earlier);
            mistakes
                .add(origin, format!("the label \"{label}\" is taken by the case on {elsewhere}"))
                .push("give each case a label of its own".to_owned());
        }
    }
    if !mistakes.is_empty() || expansion.groups.len() < 2 {
        return;
    }
    let mut seen = HashSet::new();
    for group in &expansion.groups {
        for within in 0..group.len() {
            let label = group.label(group.position(within));
            if seen.contains(&label) {
                mistakes
                    .add(&group.origin, format!("two rows would have the label \"{label}\""))
                    .push("give this case a label of its own".to_owned());
                break;
            }
            seen.insert(label);
        }
    }
}
