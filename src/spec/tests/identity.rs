//! Ids: the same for the same measurement, different for a different one.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::spec::ids::{ContentHashes, TrialKey, configuration_id, trial_id};
use crate::trial::Purpose;

/// Keys and values to choose from.
const CHOICES: [(&str, &[&str]); 9] = [
    ("train.learning_rate", &["1e-5", "0.001", "1"]),
    ("train.seed", &["1", "2"]),
    ("train.max_steps", &["10", "20"]),
    ("fsdp.sharding_strategy", &["\"FULL_SHARD\"", "\"NO_SHARD\""]),
    ("fsdp.mixed_precision", &["\"no\"", "\"bf16\"", "{ param_dtype = \"fp16\" }"]),
    ("fsdp.use_orig_params", &["true", "false"]),
    ("model.config.n_layer", &["2", "3"]),
    ("device.world_size", &["1", "2"]),
    ("train.block_size", &["64", "128"]),
];

fn ids(plan: &SweepPlan) -> BTreeSet<String> {
    plan.rows
        .iter()
        .map(|row| {
            let trial = TrialKey { block_size: row.block_size.unwrap_or(0), purpose: Purpose::Train, probe_steps: None, repeat: 0 };
            trial_id(&row.effective, &ContentHashes::default(), trial).0
        })
        .collect()
}

fn chosen() -> impl Strategy<Value = Vec<(usize, usize)>> {
    prop::collection::btree_map(0..CHOICES.len(), 0_usize..6, 1..5).prop_map(|map| map.into_iter().collect::<Vec<_>>()).prop_shuffle()
}

fn value((key, choice): (usize, usize)) -> (&'static str, &'static str) {
    let (path, values) = CHOICES[key];
    (path, values[choice % values.len()])
}

proptest! {
    #[test]
    fn the_order_of_keys_changes_no_id(keys in chosen(), seed in any::<u64>()) {
        let write = |keys: &[(usize, usize)]| {
            let lines: Vec<String> = keys.iter().map(|key| value(*key)).map(|(path, value)| format!("{path} = {value}\n")).collect();
            format!("model.id = \"gpt2-tiny\"\n{}", lines.concat())
        };
        let mut turned = keys.clone();
        turned.rotate_left((seed % keys.len() as u64) as usize);
        turned.reverse();
        prop_assert_eq!(ids(&plan(&write(&keys))), ids(&plan(&write(&turned))));
    }

    #[test]
    fn the_order_of_axes_and_of_their_values_changes_no_id(keys in chosen()) {
        let write = |keys: &mut dyn Iterator<Item = &(usize, usize)>, backwards: bool| {
            let mut text = format!("{BASE}[grid]\n");
            for (key, _) in keys {
                let (path, values) = CHOICES[*key];
                let mut values = values.to_vec();
                if backwards {
                    values.reverse();
                }
                text.push_str(&format!("{path} = [{}]\n", values.join(", ")));
            }
            text
        };
        let forwards = plan(&write(&mut keys.iter(), false));
        let backwards = plan(&write(&mut keys.iter().rev(), true));
        prop_assert_eq!(ids(&forwards), ids(&backwards));
    }

    #[test]
    fn setting_a_key_equals_writing_it_in_the_file(key in (0..CHOICES.len(), 0_usize..6), bare in any::<bool>()) {
        let (path, value) = value(key);
        let edited = plan(&format!("model.id = \"gpt2-tiny\"\n{path} = {value}\n"));
        // `seed` is the one name here that two tables have.
        let name = if bare && path != "train.seed" { path.rsplit('.').next().unwrap_or(path) } else { path };
        let set = plan_with("model.id = \"gpt2-tiny\"\n", &[&format!("{name}={value}")]);
        prop_assert_eq!(set, edited);
    }
}

#[test]
fn ids_are_pinned() {
    // Ids name folders of results that people keep: a change here orphans them all.
    let row = only_row(&plan("[model]\nid = \"gpt2-tiny\"\n"));
    let contents = ContentHashes { model: Some("m".to_owned()), data: Some("d".to_owned()) };
    let train = TrialKey { block_size: 64, purpose: Purpose::Train, probe_steps: None, repeat: 0 };
    assert_eq!(configuration_id(&row.effective, &contents).0, "f1eb17335a6c2778");
    assert_eq!(trial_id(&row.effective, &contents, train).0, "df0aaad181147c29");
}

#[test]
fn what_a_trial_is_for_is_part_of_its_id() {
    let row = only_row(&plan(BASE));
    let contents = ContentHashes::default();
    let train = TrialKey { block_size: 64, purpose: Purpose::Train, probe_steps: None, repeat: 0 };
    let variants = [
        train,
        TrialKey { block_size: 128, ..train },
        TrialKey { repeat: 1, ..train },
        TrialKey { purpose: Purpose::Probe, probe_steps: Some(3), ..train },
        TrialKey { purpose: Purpose::Probe, probe_steps: Some(4), ..train },
    ];
    let ids: BTreeSet<_> = variants.iter().map(|trial| trial_id(&row.effective, &contents, *trial)).collect();
    assert_eq!(ids.len(), variants.len());
}

#[test]
fn names_and_paths_are_no_part_of_an_id_once_contents_are_known() {
    let contents = ContentHashes { model: Some("a".to_owned()), data: Some("b".to_owned()) };
    let id = |data: &str, contents: &ContentHashes| configuration_id(&only_row(&plan(&format!("{BASE}[data]\n{data}\n"))).effective, contents);
    let here = "dataset = { train = \"/home/a/x.txt\" }\ntokenizer = { train_bpe = 512 }";
    let there = "dataset = { train = \"/data/x.txt\" }\ntokenizer = \"t.json\"";
    assert_eq!(id(here, &contents), id(there, &contents));
    assert_ne!(id(here, &ContentHashes::default()), id(there, &ContentHashes::default()));
    assert_ne!(id(here, &contents), id(here, &ContentHashes { data: Some("c".to_owned()), ..contents.clone() }));
    assert!(!contents.provisional() && ContentHashes::default().provisional());
}

#[test]
fn labels_limits_and_names_are_no_part_of_an_id() {
    let bare = plan(&format!("{BASE}[[case]]\nlabel = \"a\"\n"));
    let dressed = plan(&format!("[sweep]\nname = \"x\"\n{BASE}[limits]\nretries = 5\n[[case]]\nlabel = \"b\"\n"));
    assert_eq!(ids(&bare), ids(&dressed));
}
