//! WikiText-2 and GPT-2's tokenizer, which are not part of this repository: `SWEEP_GOLD` names a folder with `text/` and `tokenizer/`. Numbers are those
//! that transformers' tokenizers and tiktoken agree on.

use std::path::PathBuf;

use sha2::{Digest, Sha256};
use sweep::data::Split;
use sweep::spec::settings::{Packing, Tokenizer};

use super::{World, files, ids};

#[expect(clippy::print_stderr, reason = "says why a test did nothing")]
fn gold() -> Option<PathBuf> {
    let folder = std::env::var_os("SWEEP_GOLD").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: SWEEP_GOLD names no folder with WikiText-2 and GPT-2's tokenizer");
    }
    folder
}

fn digest(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tokenizer(gold: &std::path::Path) -> Option<Tokenizer> {
    Some(Tokenizer::Source(gold.join("tokenizer").display().to_string()))
}

/// The whole file, encoded in pieces and in parallel, has the very ids of one call of the reference.
#[test]
fn whole_files_have_the_reference_ids() {
    let Some(gold) = gold() else { return };
    let world = World::new();
    let file = |name: &str| gold.join("text").join(name).display().to_string();
    let prepare =
        |train, eval| world.prepare_as(files(file(train), Some(file(eval))), tokenizer(&gold), Packing::Concatenate, &world.offline()).unwrap();
    let raw = prepare("wiki.valid.raw", "wiki.test.raw");
    assert_eq!((raw.data.train_tokens, raw.data.eval_tokens, raw.data.vocab_size), (249_887, 286_221, 50_257));
    assert_eq!(digest(&ids(&raw, Split::Train)), "9d686772d5e1c25ffb7c3325dc8146939712030d4aa91e4083f729d74dad5670");
    assert_eq!(digest(&ids(&raw, Split::Eval)), "91b9603eafb80ba78f417de40b17c20cf87f84ea64dd5ee5ea9e2e49cb748188");
    let tokens = prepare("wiki.valid.tokens", "wiki.test.tokens");
    assert_eq!(digest(&ids(&tokens, Split::Train)), "9c87f1a0a64b3a69ad7f2f71b97326a29db8035b6a1ffb4147dabde3709ef775");
    assert_eq!(digest(&ids(&tokens, Split::Eval)), "b707897cad36e76a01d81962b984f94ba225c85ada8d207f1f0ff3faedb56381");
}

/// Rows as the hub has them: lines with their newline, blank lines as empty rows.
#[test]
fn rows_have_the_reference_ids() {
    let Some(gold) = gold() else { return };
    let world = World::new();
    let rows = |name: &str| {
        let text = std::fs::read_to_string(gold.join("text").join(name)).unwrap();
        let rows: String = text
            .split_inclusive('\n')
            .map(|line| format!("{}\n", serde_json::json!({"text": if line.trim().is_empty() { "" } else { line }})))
            .collect();
        world.write(&format!("{name}.jsonl"), rows)
    };
    let dataset = files(rows("wiki.valid.raw"), Some(rows("wiki.test.raw")));
    let prepared = world.prepare_as(dataset, tokenizer(&gold), Packing::Concatenate, &world.offline()).unwrap();
    assert_eq!((prepared.data.train_tokens, prepared.data.eval_tokens), (247_289, 283_287));
    assert_eq!(digest(&ids(&prepared, Split::Train)), "515cfc58841885355d5bd959e06e1585a1d9149cd580afff23a1f1235107f40f");
    assert_eq!(digest(&ids(&prepared, Split::Eval)), "c6d7081b9fb304af660d3044ffa7aa9165f8ffe3cf175d1e0776f16b08b5b325");
}

#[test]
fn odd_strings_have_the_reference_ids() {
    let Some(gold) = gold() else { return };
    let world = World::new();
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(gold.join("tokenizer/golden_pairs.json")).unwrap()).unwrap();
    let pairs = golden["pairs"].as_array().unwrap();
    let rows: String = pairs.iter().map(|pair| format!("{}\n", serde_json::json!({"text": pair["text"]}))).collect();
    let prepared = world.prepare_as(files(world.write("pairs.jsonl", rows), None), tokenizer(&gold), Packing::Concatenate, &world.offline()).unwrap();
    let expected: Vec<u32> =
        pairs.iter().flat_map(|pair| pair["ids"].as_array().unwrap()).map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    assert!(pairs.len() >= 45);
    assert_eq!(ids(&prepared, Split::Train), expected);
}

/// A tokenizer trained here is the one that transformers' `ByteLevelBPETokenizer` trains on the same text.
#[test]
fn a_trained_tokenizer_is_the_reference_one() {
    let Some(gold) = gold() else { return };
    let world = World::new();
    let file = |name: &str| gold.join("text").join(name).display().to_string();
    let dataset = files(file("wiki.valid.raw"), Some(file("wiki.test.raw")));
    let prepared = world.prepare_as(dataset, Some(Tokenizer::TrainBpe(1024)), Packing::Concatenate, &world.offline()).unwrap();
    let read = |path: PathBuf| serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap();
    let (ours, theirs) = (read(prepared.data.train.with_file_name("tokenizer.json")), read(gold.join("tokenizer/tiny1024/tokenizer.json")));
    assert_eq!(ours["model"]["vocab"], theirs["model"]["vocab"]);
    assert_eq!(ours["model"]["merges"], theirs["model"]["merges"]);
    assert_eq!((prepared.data.train_tokens, prepared.data.eval_tokens), (438_439, 507_407));
    assert_eq!(ids(&prepared, Split::Train)[..8], [297, 306, 345, 323, 281, 360, 344, 317]);
}
