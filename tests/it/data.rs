//! Data as the parent prepares it and the child loads it: hub, text files, cache, blocks. Each test has folders, and where need be a hub, of its own.

mod gold;
mod server;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use server::{Answer, HubServer};
use sweep::data::{self, Cache, DataError, Hub, Prepared, Split};
use sweep::spec::settings::{AttnImplementation, DataSettings, Dataset, Init, ModelConfigOverrides, ModelSettings, Packing, Tokenizer};
use tempfile::TempDir;

const TRAIN: [&str; 5] =
    ["", " = Robert Boulter = \n", "", " Robert Boulter is an English film , television and theatre actor . \n", " He had a role . \n"];
const VALIDATION: [&str; 2] = ["", " = Homarus = \n"];

/// A world of its own: a hub cache, a token cache, files.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, contents).unwrap();
        path.display().to_string()
    }

    fn hub(&self, endpoint: &str) -> Hub {
        Hub::new(self.path("hf"), endpoint, None, false)
    }

    fn offline(&self) -> Hub {
        Hub::new(self.path("hf"), "http://127.0.0.1:1", None, true)
    }

    fn prepare(&self, dataset: Dataset, hub: &Hub) -> Result<Prepared, DataError> {
        self.prepare_as(dataset, Some(Tokenizer::TrainBpe(300)), Packing::Concatenate, hub)
    }

    fn prepare_as(&self, dataset: Dataset, tokenizer: Option<Tokenizer>, packing: Packing, hub: &Hub) -> Result<Prepared, DataError> {
        let settings = DataSettings { dataset, tokenizer, shuffle: true, packing };
        data::prepare(&settings, &model("gpt2-tiny"), hub, &Cache::at(self.path("cache")))
    }

    /// A message without the folder's name.
    fn plain(&self, text: impl ToString) -> String {
        text.to_string().replace(&self.folder.path().display().to_string(), "")
    }
}

fn model(id: &str) -> ModelSettings {
    ModelSettings {
        id: id.to_owned(),
        init: Init::Random,
        revision: None,
        trainable: None,
        attn_implementation: AttnImplementation::Auto,
        config: ModelConfigOverrides::default(),
    }
}

fn wikitext() -> Dataset {
    Dataset::Hub("wikitext-2-raw-v1".to_owned())
}

fn files(train: String, eval: Option<String>) -> Dataset {
    Dataset::Files { train, eval }
}

/// Token ids of a split, all of them.
fn ids(prepared: &Prepared, split: Split) -> Vec<u32> {
    let blocks = data::load(&prepared.data, split, 1, Packing::Concatenate).unwrap();
    (0..blocks.count()).map(|row| blocks.row(row)[0]).collect()
}

/// A parquet table with one column of text.
fn parquet(column: &str, rows: &[&str]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(&format!("message schema {{ optional binary {column} (UTF8); }}")).unwrap());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(WriterProperties::builder().build())).unwrap();
    // Two row groups, as large tables have many.
    for rows in [&rows[..rows.len() / 2], &rows[rows.len() / 2..]] {
        let mut group = writer.next_row_group().unwrap();
        let mut writer = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(*row)).collect();
        writer.typed::<ByteArrayType>().write_batch(&values, Some(&vec![1; rows.len()]), None).unwrap();
        writer.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

fn wikitext_files() -> Vec<(String, Vec<u8>)> {
    let file = |name: &str, rows: &[&str]| (format!("wikitext-2-raw-v1/{name}-00000-of-00001.parquet"), parquet("text", rows));
    vec![("README.md".to_owned(), b"hello".to_vec()), file("test", &["x"]), file("train", &TRAIN), file("validation", &VALIDATION)]
}

#[test]
fn a_hub_data_set_is_fetched_once() {
    let world = World::new();
    let server = HubServer::start(vec![("datasets/Salesforce/wikitext", Answer::Files(wikitext_files()))]);
    let hub = world.hub(&server.endpoint());
    let first = world.prepare(wikitext(), &hub).unwrap();
    assert_eq!(first.notices, Vec::<String>::new());
    assert!((257..=300).contains(&first.data.vocab_size) && first.data.train_tokens > 0 && first.data.eval_tokens > 0);
    let fetched = server.requests().len();
    let again = world.prepare(wikitext(), &hub).unwrap();
    assert_eq!(again, first);
    assert_eq!(server.requests().len(), fetched + 1, "the second time the hub is asked for the listing alone");
    assert!(!server.requests().iter().any(|request| request.path.contains("test-")), "the test split is not used");
    drop(server);
    let cached = world.prepare(wikitext(), &hub).unwrap();
    assert_eq!(cached.data, first.data);
    assert!(
        cached.notices[0].starts_with("data set Salesforce/wikitext (wikitext-2-raw-v1) is taken from the cache: http://127.0.0.1:"),
        "{:?}",
        cached.notices
    );
    assert_eq!(world.prepare(wikitext(), &world.offline()).unwrap().data, first.data);
    // Rows are one run: the same text as one JSON-lines file of rows.
    let rows: String = TRAIN.iter().map(|row| format!("{}\n", serde_json::json!({"text": row}))).collect();
    let same = world.prepare(files(world.write("train.jsonl", rows), None), &world.offline()).unwrap();
    assert_eq!(ids(&same, Split::Train), ids(&first, Split::Train));
}

#[test]
fn files_put_into_the_cache_by_hand_are_read() {
    let world = World::new();
    let error = world.prepare(wikitext(), &world.offline()).unwrap_err();
    assert_eq!(error.to_string(), "data set Salesforce/wikitext is not in the cache and cannot be fetched: HF_HUB_OFFLINE is set");
    assert_eq!(
        error.hints().into_iter().map(|hint| world.plain(hint)).collect::<Vec<_>>(),
        [
            "put its parquet files (train-00000-of-00001.parquet, validation-00000-of-00001.parquet) into \
             /hf/hub/datasets--Salesforce--wikitext/snapshots/main/wikitext-2-raw-v1",
            "or use text files: --set 'data.dataset={ train = \"train.txt\", eval = \"eval.txt\" }'",
        ]
    );
    assert!(error.is_infrastructure());
    let folder = "hf/hub/datasets--Salesforce--wikitext/snapshots/main/wikitext-2-raw-v1";
    world.write(&format!("{folder}/train-00000-of-00001.parquet"), parquet("text", &TRAIN));
    let error = world.prepare(wikitext(), &world.offline()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "wikitext-2-raw-v1/validation-00000-of-00001.parquet of data set Salesforce/wikitext is not in the cache and cannot be fetched: HF_HUB_OFFLINE is set"
    );
    world.write(&format!("{folder}/validation-00000-of-00001.parquet"), parquet("text", &VALIDATION));
    let by_hand = world.prepare(wikitext(), &world.offline()).unwrap();
    assert!(by_hand.data.eval.is_some());
}

#[test]
fn missing_forbidden_and_unreachable_are_told_apart() {
    let world = World::new();
    let repositories = [("datasets/some/gated", 401), ("datasets/some/private", 403), ("datasets/some/broken", 500)];
    let server = HubServer::start(repositories.map(|(name, status)| (name, Answer::Status(status))).to_vec());
    let endpoint = server.endpoint();
    let outcome = |name: &str, hub: &Hub| {
        let error = world.prepare(Dataset::Hub(name.to_owned()), hub).unwrap_err();
        (error.to_string().replace(&endpoint, "HUB"), error.is_infrastructure())
    };
    let hub = world.hub(&endpoint);
    assert_eq!(outcome("some/missing", &hub), ("data set some/missing is not there: HUB does not have it".to_owned(), false));
    assert_eq!(outcome("some/gated", &hub), ("HUB does not give access to data set some/gated (HTTP status 401)".to_owned(), false));
    assert_eq!(
        outcome("some/broken", &hub),
        ("data set some/broken is not in the cache and cannot be fetched: HUB answered with HTTP status 500".to_owned(), true)
    );
    let hints = |hub: &Hub| world.prepare(Dataset::Hub("some/private".to_owned()), hub).unwrap_err().hints().join(" ");
    assert!(hints(&hub).contains("set HF_TOKEN"));
    let with_token = Hub::new(world.path("hf"), &endpoint, Some("hf_secret".to_owned()), false);
    assert!(hints(&with_token).contains("the account of the token"));
    drop(server);
    let (message, infrastructure) = outcome("some/missing", &hub);
    assert!(message.starts_with("data set some/missing is not in the cache and cannot be fetched: HUB cannot be reached ("), "{message}");
    assert!(infrastructure);
}

#[test]
fn the_token_is_sent_and_written_nowhere() {
    let world = World::new();
    let server = HubServer::start(vec![("datasets/Salesforce/wikitext", Answer::Files(wikitext_files()))]);
    let hub = Hub::new(world.path("hf"), server.endpoint(), Some("hf_secret".to_owned()), false);
    let prepared = world.prepare(wikitext(), &hub).unwrap();
    assert!(server.requests().iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")));
    assert!(!format!("{prepared:?}{hub:?}").contains("hf_secret"));
    let mut folders = vec![world.folder.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                assert!(!std::fs::read(&path).unwrap().windows(9).any(|window| window == b"hf_secret"), "{}", path.display());
            }
        }
    }
}

#[test]
fn a_data_set_without_a_validation_split_is_not_evaluated() {
    let world = World::new();
    let files = vec![("train.txt".to_owned(), b"One two.\n".to_vec()), ("test.txt".to_owned(), b"Three.\n".to_vec())];
    let server = HubServer::start(vec![("datasets/some/stories", Answer::Files(files))]);
    let prepared = world.prepare(Dataset::Hub("some/stories".to_owned()), &world.hub(&server.endpoint())).unwrap();
    assert_eq!(prepared.notices, ["data set some/stories has no validation split: nothing is evaluated"]);
    assert_eq!((prepared.data.eval.as_deref(), prepared.data.eval_tokens), (None, 0));
    assert_eq!(data::load(&prepared.data, Split::Eval, 4, Packing::Concatenate).unwrap().count(), 0);
}

#[test]
fn bad_tables_are_named() {
    let world = World::new();
    let message = |name: &str, contents: Vec<u8>| {
        let train = world.write(name, contents);
        world.plain(world.prepare(files(train, None), &world.offline()).unwrap_err())
    };
    assert_eq!(message("a.parquet", parquet("body", &["x", "y"])), "/a.parquet has no column `text`; its columns are body (BYTE_ARRAY)");
    assert_eq!(message("b.parquet", parquet("text", &["", ""])), "the training text /b.parquet is empty");
    let whole = parquet("text", &TRAIN);
    assert!(message("c.parquet", whole[..whole.len() / 2].to_vec()).starts_with("/c.parquet is not a parquet file: "));
    for index in (4..whole.len() - 8).step_by(7) {
        let mut damaged = whole.clone();
        damaged[index] ^= 0x55;
        // Whatever is damaged, reading ends, in an error or in text; never in a panic.
        let train = world.write("d.parquet", damaged);
        let _ = world.prepare(files(train, None), &world.offline());
    }
}

#[test]
fn text_files_are_tokenised_once_and_a_damaged_cache_is_mended() {
    let world = World::new();
    let text = "The cat sat on the mat.\n\n\nThe dog sat on the cat.\n".repeat(20);
    let dataset = files(world.write("train.txt", &text), Some(world.write("eval.txt", "The cat sat.\n")));
    let first = world.prepare(dataset.clone(), &world.offline()).unwrap();
    assert_eq!(first.notices, Vec::<String>::new());
    let written = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let before = written(&first.data.train);
    assert_eq!(world.prepare(dataset.clone(), &world.offline()).unwrap(), first);
    assert_eq!(written(&first.data.train), before, "nothing was written again");
    let good = std::fs::read(&first.data.train).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&first.data.train, &bad).unwrap();
    assert!(data::load(&first.data, Split::Train, 8, Packing::Concatenate).unwrap_err().to_string().contains("its contents are damaged"));
    assert_eq!(world.prepare(dataset.clone(), &world.offline()).unwrap(), first);
    assert_eq!(std::fs::read(&first.data.train).unwrap(), good);
    // Other text, other tokens, another fingerprint; the same text elsewhere has the same one.
    world.write("eval.txt", "The cat ran.\n");
    assert_ne!(world.prepare(dataset, &world.offline()).unwrap().data.fingerprint, first.data.fingerprint);
    let other = World::new();
    let elsewhere = files(other.write("a", &text), Some(other.write("b", "The cat sat.\n")));
    assert_eq!(other.prepare(elsewhere, &other.offline()).unwrap().data.fingerprint, first.data.fingerprint);
}

#[test]
fn a_trained_tokenizer_can_be_used_again_and_covers_the_model() {
    let world = World::new();
    let dataset = files(world.write("train.txt", "The cat sat on the mat. The cat sat.\n"), None);
    let trained = world.prepare(dataset.clone(), &world.offline()).unwrap();
    let folder = trained.data.train.parent().unwrap().display().to_string();
    let again = world.prepare_as(dataset.clone(), Some(Tokenizer::Source(folder)), Packing::Concatenate, &world.offline()).unwrap();
    assert_eq!(again.data.fingerprint, trained.data.fingerprint);
    let error = world.prepare_as(dataset, None, Packing::Concatenate, &world.offline()).unwrap_err();
    assert_eq!(error.to_string(), "tokenizer (data.tokenizer is not set) is not there: model gpt2-tiny has none of its own");
    let mut small = model("gpt2-tiny");
    small.config.vocab_size = Some(256);
    let error = data::model::resolve(&small, trained.data.vocab_size, &world.offline()).unwrap_err();
    let largest = trained.data.vocab_size - 1;
    assert_eq!(error.to_string(), format!("the data has token ids up to {largest}, but model gpt2-tiny has a vocabulary of 256"));
}

#[test]
fn models_come_from_the_hub_with_their_tokenizer() {
    let world = World::new();
    let trained = world.prepare(files(world.write("train.txt", "The cat sat on the mat.\n"), None), &world.offline()).unwrap();
    let tokenizer = std::fs::read(trained.data.train.with_file_name("tokenizer.json")).unwrap();
    let vocab = trained.data.vocab_size;
    let config = format!(r#"{{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": {vocab}}}"#);
    let bytes = [0_u8; 32];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![8], &bytes).unwrap();
    let weights = safetensors::serialize([("ln_f.weight", view)], None).unwrap();
    let contents = [("config.json", config.into_bytes()), ("tokenizer.json", tokenizer), ("model.safetensors", weights)];
    let contents = contents.map(|(name, contents)| (name.to_owned(), contents)).to_vec();
    let server = HubServer::start(vec![("models/some/gpt", Answer::Files(contents))]);
    let hub = world.hub(&server.endpoint());
    let settings = ModelSettings { init: Init::Pretrained, ..model("some/gpt") };
    let resolved = data::model::resolve(&settings, vocab, &hub).unwrap();
    assert!(resolved.weights.as_ref().unwrap().ends_with("model.safetensors"));
    assert_eq!(resolved.architecture.positions(), 16);
    let text = DataSettings {
        dataset: files(world.path("train.txt").display().to_string(), None),
        tokenizer: None,
        shuffle: true,
        packing: Packing::Concatenate,
    };
    let prepared = data::prepare(&text, &settings, &hub, &Cache::at(world.path("cache"))).unwrap();
    assert_eq!(prepared.data.fingerprint, trained.data.fingerprint);
    drop(server);
    assert_eq!(data::model::resolve(&settings, vocab, &world.offline()).unwrap(), resolved, "found again without the hub");
}

/// CASES 35: documents of 10 and 100 tokens, each padded to a block of its own; every token is scored whatever the block size.
#[test]
fn documents_are_padded_and_counted() {
    let world = World::new();
    let dataset = files(world.write("train.txt", "One two three.\nFour.\n \nFive six seven eight nine ten.\n"), None);
    let tokenizer = Some(Tokenizer::TrainBpe(257));
    let prepared = world.prepare_as(dataset, tokenizer, Packing::PerDocument, &world.offline()).unwrap();
    let blocks = data::load(&prepared.data, Split::Train, 64, Packing::PerDocument).unwrap();
    assert_eq!((blocks.count(), blocks.length(0), blocks.length(1)), (2, 21, 31), "with 257 entries every byte is a token");
    assert!(blocks.row(0)[21..].iter().all(|id| *id == 0));
    assert_eq!(data::counts(&prepared.data, 64, Packing::PerDocument).unwrap().train_blocks, 2);
    let error =
        world.prepare_as(Dataset::Synthetic { vocab: 8, train_tokens: 8, eval_tokens: 0 }, None, Packing::PerDocument, &world.offline()).unwrap_err();
    assert_eq!(error.to_string(), "data.packing: synthetic data has no documents, so per_document cannot be meant");
}

#[test]
fn the_embedded_data_is_the_same_everywhere() {
    let world = World::new();
    let prepared = world
        .prepare_as(Dataset::Synthetic { vocab: 1024, train_tokens: 4096, eval_tokens: 512 }, None, Packing::Concatenate, &world.offline())
        .unwrap();
    assert_eq!((prepared.data.vocab_size, prepared.data.train_tokens, prepared.data.eval_tokens), (1024, 4096, 512));
    assert_eq!(prepared.data.fingerprint, "f561f6f718c003b8254b99fb1bd38c7f35c320fa798a2cd0d04481be7e758c11");
    let floor = prepared.data.floor_perplexity.unwrap();
    assert!((floor - 9.169_214_462).abs() < 1e-6, "{floor}");
    let counts = data::check_enough(&prepared.data, 64, Packing::Concatenate, 64).unwrap();
    assert_eq!((counts.train_blocks, counts.eval_blocks), (64, 8));
    let error = data::check_enough(&prepared.data, 64, Packing::Concatenate, 65).unwrap_err();
    assert_eq!(error.to_string(), "4096 training tokens make 64 blocks of 64, one global batch needs 65");
    // CASES 36: an evaluation split shorter than a block gives none.
    assert_eq!(data::load(&prepared.data, Split::Eval, 1024, Packing::Concatenate).unwrap().count(), 0);
}

#[test]
fn tokens_cut_beforehand_are_used_as_they_stand() {
    let world = World::new();
    let file = |name: &str, shape: Vec<usize>, ids: &[i32]| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::I32, shape, &bytes).unwrap();
        world.write(name, safetensors::serialize([("blocks", view)], None).unwrap())
    };
    let train = file("train.safetensors", vec![2, 2, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    let eval = file("eval.safetensors", vec![1, 3], &[0, 20, 0]);
    let dataset = Dataset::TokenBlocks { train: train.clone(), eval: Some(eval) };
    let prepared = world.prepare_as(dataset, None, Packing::Concatenate, &world.offline()).unwrap();
    assert_eq!((prepared.data.vocab_size, prepared.data.train_tokens, prepared.data.eval_tokens), (21, 12, 3));
    let blocks = data::load(&prepared.data, Split::Train, 3, Packing::Concatenate).unwrap();
    assert_eq!((blocks.count(), blocks.row(3), blocks.global_batch_size()), (4, &[10, 11, 12][..], Some(2)));
    assert_eq!(data::load(&prepared.data, Split::Eval, 3, Packing::Concatenate).unwrap().row(0), [0, 20, 0]);
    let error = data::load(&prepared.data, Split::Train, 4, Packing::Concatenate).unwrap_err();
    assert_eq!(world.plain(error), "/train.safetensors holds blocks of 3 tokens, block size 4 was asked for");
    file("train.safetensors", vec![1, 2, 3], &[1, 2, 3, 4, 5, 6]);
    let error = data::load(&prepared.data, Split::Train, 3, Packing::Concatenate).unwrap_err();
    assert_eq!(world.plain(error), "/train.safetensors is not the data that was prepared: it holds 6 tokens, 12 were prepared");
}
