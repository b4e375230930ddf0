//! The sweep file: from the TOML as written to what it means. Pure: no files, no clocks, no devices.
//!
//! `read` types every source by the one table in `schema`, `merge` lays profiles and `--set` over the file, `expand` makes rows of it, `collapse` finds
//! switches that cannot matter, `ids` names configurations and trials, and `check` holds
//! rows against themselves, the machine, the model and the data.

pub mod check;
mod collapse;
mod expand;
pub mod ids;
mod merge;
mod mistakes;
pub mod plan;
pub mod presets;
mod read;
mod schema;
pub mod settings;
pub mod slurm;
#[cfg(test)]
mod tests;
mod unbuilt;
mod value;
mod versions;

use std::path::Path;
use std::sync::Arc;

pub use collapse::collapse;
pub use expand::MAX_POINTS;
pub use mistakes::{Place, SpecError, SpecErrors};

use expand::Shared;
use mistakes::{Mistakes, Origin, list, nearest};
use plan::{BlockSizeSearch, ReportSettings, Rows, SweepPlan};
use read::{Document, Layer};
use schema::{EXCLUSIVE, KEYS, Sweep, Target};
use settings::{Dataset, DeviceKind};

/// What the command line lays over the sweep file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlays {
    /// `--profile`
    pub profile: Option<String>,
    /// `--set` arguments in order, as typed.
    pub sets: Vec<String>,
}

/// What `kind = "auto"` depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Whether a CUDA device is there and may be used.
    pub cuda_device_visible: bool,
    /// Whether this `sweep` can train on one.
    pub built_with_cuda: bool,
}

/// Builds `sweep` for NVIDIA GPUs.
pub const CUDA_BUILD_COMMAND: &str = "cargo build --release --features cuda";

/// Reads a sweep file: everything it says and means, or everything that is wrong with it. `file_name` is shown in mistakes, and its stem is the
/// sweep's name where the file gives none.
///
/// # Errors
/// Every mistake of the file and of the overlays that can be found at once.
pub fn load(file_name: &str, text: &str, overlays: &Overlays, surroundings: &Surroundings) -> Result<SweepPlan, SpecErrors> {
    let mut mistakes = Mistakes::new(file_name, text, &overlays.sets);
    match resolve(file_name, text, overlays, surroundings, &mut mistakes) {
        Some(plan) if mistakes.is_empty() => Ok(plan),
        _ => Err(mistakes.finish()),
    }
}

fn resolve(file_name: &str, text: &str, overlays: &Overlays, surroundings: &Surroundings, mistakes: &mut Mistakes<'_>) -> Option<SweepPlan> {
    let document = read::read_file(text, mistakes);
    let arguments: Vec<Layer> = overlays.sets.iter().enumerate().map(|(index, argument)| read::read_argument(index, argument, mistakes)).collect();
    let mut notices = Vec::new();
    let (profiles, kind) = choose_profiles(&document, &arguments, overlays, surroundings, &mut notices, mistakes);
    let mut layer = document.base.clone();
    for (_, profile) in &profiles {
        merge::lay_profile(&mut layer, profile);
    }
    check_axes_against_scalars(&layer, mistakes);
    for argument in &arguments {
        merge::apply_argument(&mut layer, argument, mistakes);
    }
    check_block_size(&layer, mistakes);

    let mut sweep = Sweep::with_defaults();
    for (key, located) in &layer.scalars {
        if let Target::Sweep(set) = KEYS[*key].target {
            set(&mut sweep, &located.value);
        }
    }
    let name = sweep_name(file_name, &layer, &sweep, mistakes);
    check_data(&layer, mistakes);
    if !mistakes.is_empty() {
        // Rows made of half a file would show mistakes that nobody made.
        return None;
    }
    if !layer.scalars.contains_key(&schema::key("model.id")) && !varies_everywhere(&layer, "model.id") {
        mistakes
            .add(&Origin::Whole, "`model.id` is missing")
            .push("say which model is trained: [model] id = \"gpt2-tiny\", another preset, a hub id or a local folder".to_owned());
        return None;
    }
    let search = layer.search.is_some().then(|| BlockSizeSearch { candidates: sweep.candidates.clone(), probe_steps: sweep.probe_steps });
    let smallest_candidate = search.as_ref().and_then(|search| search.candidates.first().copied());
    let shared = Shared { seed: sweep.seed, kind, smallest_candidate, saves: sweep.checkpoint.save_steps.is_some() };
    let (expansion, of_expansion) = expand::expand(&layer, &name, shared, mistakes)?;
    notices.extend(of_expansion);
    let rows = Rows::expanded(Arc::new(expansion));
    check_control(&layer, &sweep, &rows, mistakes);
    Some(SweepPlan {
        name,
        description: sweep.description,
        repeats: sweep.repeats,
        control: sweep.control,
        rows,
        search,
        checkpoint: sweep.checkpoint,
        limits: sweep.limits,
        slurm: sweep.slurm,
        telemetry_interval: sweep.telemetry_interval,
        report: ReportSettings { price_per_device_hour: sweep.price_per_device_hour },
        profiles: profiles.into_iter().map(|(name, _)| name.clone()).collect(),
        notices,
    })
}

/// Which profiles apply, in order, and what ranks compute on.
fn choose_profiles<'d>(
    document: &'d Document,
    arguments: &[Layer],
    overlays: &Overlays,
    surroundings: &Surroundings,
    notices: &mut Vec<String>,
    mistakes: &mut Mistakes<'_>,
) -> (Vec<&'d (String, Layer)>, DeviceKind) {
    let find = |wanted: &str| document.profiles.iter().find(|(name, _)| name == wanted);
    let mut chosen = Vec::new();
    if let Some(wanted) = &overlays.profile {
        match find(wanted) {
            Some(profile) => chosen.push(profile),
            None => {
                let names = || document.profiles.iter().map(|(name, _)| name.as_str());
                let help = mistakes.add(&Origin::Whole, format!("there is no [profile.{wanted}] (--profile {wanted})"));
                if let Some(near) = nearest(wanted, names()) {
                    help.push(format!("did you mean `{near}`?"));
                }
                help.push(if document.profiles.is_empty() { "the file has no profiles".to_owned() } else { format!("profiles: {}", list(names())) });
            }
        }
    }
    let key = schema::key("device.kind");
    let layers = [&document.base].into_iter().chain(chosen.iter().map(|(_, layer)| layer)).chain(arguments);
    let written = layers.filter_map(|layer| layer.scalars.get(&key)).next_back();
    let kind = match written.map(|located| located.value.choice()) {
        Some("cpu") => DeviceKind::Cpu,
        Some("cuda") => {
            if !surroundings.built_with_cuda {
                let origin = written.map_or(Origin::Whole, |located| located.origin.clone());
                mistakes
                    .add(&origin, "this sweep was built without CUDA")
                    .push(format!("build it with `{CUDA_BUILD_COMMAND}`, or say kind = \"cpu\""));
            }
            DeviceKind::Cuda
        }
        _ if surroundings.cuda_device_visible && surroundings.built_with_cuda => DeviceKind::Cuda,
        _ => {
            if surroundings.cuda_device_visible {
                notices.push(format!(
                    "A CUDA device is there, but this sweep was built without CUDA: everything runs on the CPU. Build it with `{CUDA_BUILD_COMMAND}`."
                ));
            }
            if let Some(cpu) = find("cpu")
                && !chosen.iter().any(|(name, _)| name == "cpu")
            {
                notices.push("[profile.cpu] is applied by itself: kind = \"auto\" finds no CUDA device to train on.".to_owned());
                // The one that was asked for has the last word.
                chosen.insert(0, cpu);
            }
            DeviceKind::Cpu
        }
    };
    (chosen, kind)
}

/// A key is an axis or one value, and an exclusive pair is one key.
fn check_axes_against_scalars(layer: &Layer, mistakes: &mut Mistakes<'_>) {
    for (number, axis) in layer.axes.iter().enumerate() {
        let path = KEYS[axis.key].path;
        if let Some(located) = layer.scalars.get(&axis.key) {
            let elsewhere = mistakes.mention(&located.origin);
            mistakes
                .add(&axis.origin, format!("`{path}` is a list here and one value on {elsewhere}"))
                .push("keep one of the two; a value that holds for one case belongs in that [[case]]".to_owned());
        }
        for (one, other) in EXCLUSIVE {
            let partner = if path == one {
                other
            } else if path == other {
                one
            } else {
                continue;
            };
            let partner_key = schema::key(partner);
            let scalar = layer.scalars.get(&partner_key).map(|located| &located.origin);
            let earlier_axis = layer.axes[..number].iter().find(|axis| axis.key == partner_key).map(|axis| &axis.origin);
            if let Some(origin) = scalar.or(earlier_axis) {
                let elsewhere = mistakes.mention(origin);
                mistakes.add(&axis.origin, format!("`{path}` beside `{partner}` ({elsewhere})")).push("keep one of the two".to_owned());
            }
        }
    }
}

/// A block size is given or searched for.
fn check_block_size(layer: &Layer, mistakes: &mut Mistakes<'_>) {
    if layer.search.is_none() {
        return;
    }
    let key = schema::key("train.block_size");
    let scalar = layer.scalars.get(&key).map(|located| &located.origin);
    let axes = layer.axes.iter().filter(|axis| axis.key == key).map(|axis| &axis.origin);
    let cases = layer.cases.iter().flatten();
    let in_cases = cases.flat_map(|case| {
        let fixed = case.fixed.iter().filter(|(fixed, _)| *fixed == key).map(|(_, located)| &located.origin);
        fixed.chain(case.axes.iter().filter(|axis| axis.key == key).map(|axis| &axis.origin))
    });
    for origin in scalar.into_iter().chain(axes).chain(in_cases) {
        mistakes
            .add(origin, "`block_size` beside [search.block_size]")
            .push("the search finds it; remove one of the two, or give --set train.block_size=N, which turns the search off".to_owned());
    }
}

/// The name of a sweep is the name of its results folder.
fn sweep_name(file_name: &str, layer: &Layer, sweep: &Sweep, mistakes: &mut Mistakes<'_>) -> String {
    let fits = |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    if let Some(name) = &sweep.name {
        if !name.chars().all(fits) || name.starts_with(['.', '-']) || name.len() > 64 {
            let origin = layer.scalars.get(&schema::key("sweep.name")).map_or(Origin::Whole, |located| located.origin.clone());
            mistakes
                .add(&origin, "this name cannot be a folder's")
                .push("expected at most 64 letters, digits, `.`, `_` or `-`, the first a letter, a digit or `_`".to_owned());
        }
        return name.clone();
    }
    let stem = Path::new(file_name).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let safe: String = stem.chars().take(64).map(|character| if fits(character) { character } else { '-' }).collect();
    let safe = safe.trim_start_matches(['.', '-']).to_owned();
    if safe.is_empty() { "sweep".to_owned() } else { safe }
}

/// What the keys of `[data]` say together.
fn check_data(layer: &Layer, mistakes: &mut Mistakes<'_>) {
    let dataset = layer.scalars.get(&schema::key("data.dataset"));
    let tokenizer = layer.scalars.get(&schema::key("data.tokenizer"));
    let is_tokens = match dataset.map(|located| located.value.dataset()) {
        None | Some(Dataset::Synthetic { .. }) => Some("synthetic data"),
        Some(Dataset::TokenBlocks { .. }) => Some("token_blocks"),
        Some(Dataset::Hub(_) | Dataset::Files { .. }) => None,
    };
    if let (Some(what), Some(tokenizer)) = (is_tokens, tokenizer) {
        mistakes
            .add(&tokenizer.origin, format!("{what} are tokens already, a tokenizer has nothing to do"))
            .push("remove it, or give a data set of text".to_owned());
    }
    if let Some(located) = dataset
        && matches!(located.value.dataset(), Dataset::TokenBlocks { .. })
    {
        if layer.search.is_some() {
            mistakes
                .add(&located.origin, "token_blocks are cut already, there is no block size to search for")
                .push("remove [search.block_size]".to_owned());
        } else if !layer.scalars.contains_key(&schema::key("train.block_size")) {
            mistakes.add(&located.origin, "token_blocks need `train.block_size`").push("give the last dimension of the file's tensor".to_owned());
        }
    }
    let per_document = layer.scalars.get(&schema::key("data.packing")).filter(|located| located.value.choice() == "per_document");
    if let (Some(what), Some(located)) = (is_tokens, per_document) {
        mistakes.add(&located.origin, format!("{what} have no documents")).push("remove packing, or give a data set of text".to_owned());
    }
}

/// Whether every row gets this key from an axis or a case.
fn varies_everywhere(layer: &Layer, path: &'static str) -> bool {
    let key = schema::key(path);
    let has = |axes: &[read::Axis]| axes.iter().any(|axis| axis.key == key);
    let cases = layer.cases.as_deref().unwrap_or_default();
    let grid = layer.axes.is_empty() || has(&layer.axes);
    let in_case = |case: &read::Case| has(&case.axes) || case.fixed.iter().any(|(fixed, _)| *fixed == key);
    grid && cases.iter().all(in_case) && !(layer.axes.is_empty() && cases.is_empty())
}

/// The row that others are compared with must be there.
fn check_control(layer: &Layer, sweep: &Sweep, rows: &Rows, mistakes: &mut Mistakes<'_>) {
    let places = ["sweep.control", "report.control"].map(|path| layer.scalars.get(&schema::key(path)));
    if let [Some(first), Some(second)] = places
        && first.value != second.value
    {
        let elsewhere = mistakes.mention(&first.origin);
        mistakes.add(&second.origin, format!("report.control differs from sweep.control ({elsewhere})")).push("give one of them".to_owned());
    }
    if let Some(control) = &sweep.control
        && !rows.iter().any(|row| row.label == *control)
    {
        let origin = places.into_iter().flatten().last().map_or(Origin::Whole, |located| located.origin.clone());
        let labels: Vec<String> = rows.iter().take(20).map(|row| row.label).collect();
        let help = mistakes.add(&origin, format!("no row has the label \"{control}\""));
        if let Some(near) = nearest(control, labels.iter().map(String::as_str)) {
            help.push(format!("did you mean \"{near}\"?"));
        }
        help.push(format!("labels: {}", list(labels.iter().map(String::as_str))));
    }
}
