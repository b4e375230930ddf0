//! Before the trials: finds, fetches and tokenises the data once, and keeps the tokens in the cache.

use std::path::{Path, PathBuf};

use super::cache::{Cache, Cached, Tokenized};
use super::error::{DataError, read_file};
use super::hub::Hub;
use super::hub_dataset::HubDataset;
use super::model;
use super::synthetic::{self, Chain};
use super::text::Text;
use super::token_file::{self, Tokens, sha256};
use super::tokenizer::TextTokenizer;
use crate::protocol::PreparedData;
use crate::spec::settings::{DataSettings, Dataset, ModelSettings, Packing, Tokenizer};

/// Raised when the same sources would give other tokens, so that cached ones are not used.
const VERSION: u32 = 2;

/// Data that is ready, and what the user should know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// What a trial's request says.
    pub data: PreparedData,
    /// A sentence each: no evaluation split, taken from the cache without asking the hub.
    pub notices: Vec<String>,
}

/// Prepares the data of a configuration. `model` is asked for its tokenizer where `data.tokenizer` is left out.
///
/// # Errors
/// The data, or its tokenizer, cannot be found, read or used; see [`DataError`].
pub fn prepare(data: &DataSettings, model: &ModelSettings, hub: &Hub, cache: &Cache) -> Result<Prepared, DataError> {
    match &data.dataset {
        Dataset::Synthetic { vocab, train_tokens, eval_tokens } => prepare_synthetic(data, [*vocab, *train_tokens, *eval_tokens], cache),
        Dataset::TokenBlocks { train, eval } => prepare_token_blocks(data, Path::new(train), eval.as_deref().map(Path::new)),
        Dataset::Files { train, eval } => {
            let files = [vec![PathBuf::from(train)], eval.iter().map(PathBuf::from).collect()];
            let notices = if eval.is_none() { vec![format!("{train} comes without an evaluation text: nothing is evaluated")] } else { Vec::new() };
            prepare_text(data, model, hub, cache, Source { name: train.clone(), files, notices })
        }
        Dataset::Hub(name) => {
            let found = HubDataset::parse(name)?.fetch(hub)?;
            prepare_text(data, model, hub, cache, Source { name: name.clone(), files: [found.train, found.eval], notices: found.notices })
        }
    }
}

/// Text files of both splits.
struct Source {
    name: String,
    files: [Vec<PathBuf>; 2],
    notices: Vec<String>,
}

/// What turns the text into tokens, found but not yet used.
enum TokenizerSource {
    Json { path: PathBuf, json: Vec<u8> },
    TrainBpe(usize),
}

impl TokenizerSource {
    fn find(data: &DataSettings, model: &ModelSettings, hub: &Hub) -> Result<Self, DataError> {
        let path = match &data.tokenizer {
            Some(Tokenizer::TrainBpe(entries)) => return Ok(Self::TrainBpe(*entries)),
            Some(Tokenizer::Source(source)) => model::find_tokenizer(source, None, hub)?,
            None => model::own_tokenizer(model, hub)?,
        };
        Ok(Self::Json { json: read_file("the tokenizer", &path)?, path })
    }

    fn key(&self) -> String {
        match self {
            Self::Json { json, .. } => sha256(json),
            Self::TrainBpe(entries) => format!("train_bpe {entries}"),
        }
    }

    fn words(&self, vocab_size: usize) -> String {
        match self {
            Self::Json { path, .. } => format!("tokenizer {} ({vocab_size} entries)", path.display()),
            Self::TrainBpe(_) => format!("byte-level BPE of {vocab_size} entries trained on it"),
        }
    }
}

fn prepare_text(data: &DataSettings, model: &ModelSettings, hub: &Hub, cache: &Cache, source: Source) -> Result<Prepared, DataError> {
    let tokenizer = TokenizerSource::find(data, model, hub)?;
    let mut key = vec![format!("text {VERSION}"), format!("{:?}", data.packing), tokenizer.key()];
    for (split, files) in ["train", "eval"].into_iter().zip(&source.files) {
        for file in files {
            let format = super::text::Format::of(file);
            key.push(format!("{split} {format:?} {}", sha256(&read_file(&format!("the {split} text"), file)?)));
        }
    }
    let cached = cache.get_or_make(&sha256(key.join("\n").as_bytes()), || tokenize(data, &tokenizer, &source.files))?;
    let description = format!("{}, {}", source.name, tokenizer.words(cached.vocab_size));
    Ok(Prepared { data: prepared(data, cached, None, description), notices: source.notices })
}

fn tokenize(data: &DataSettings, tokenizer: &TokenizerSource, [train_files, eval_files]: &[Vec<PathBuf>; 2]) -> Result<Tokenized, DataError> {
    let train = Text::read("the training text", train_files)?;
    let eval = if eval_files.is_empty() { None } else { Some(Text::read("the evaluation text", eval_files)?) };
    let (text_tokenizer, trained) = match tokenizer {
        TokenizerSource::Json { path, json } => (TextTokenizer::parse(json, path)?, String::from_utf8(json.clone()).ok()),
        TokenizerSource::TrainBpe(entries) => {
            // Line by line, as transformers' trainer reads files: the same text gives the same merges.
            let tokenizer = TextTokenizer::train(train.lines().into_iter(), *entries)?;
            let json = tokenizer.to_json()?;
            (tokenizer, Some(json))
        }
    };
    let encode = |text: &Text, what: &str| {
        let tokens = match (data.packing, text.rows()) {
            (Packing::PerDocument, _) => text_tokenizer.encode_rows(&text.documents())?,
            // Each row on its own, as HF's run_clm does, then one run.
            (Packing::Concatenate, Some(rows)) => Tokens { document_ends: Vec::new(), ..text_tokenizer.encode_rows(&rows)? },
            (Packing::Concatenate, None) => Tokens { ids: text_tokenizer.encode_whole(text.whole())?, document_ends: Vec::new() },
        };
        if tokens.ids.is_empty() {
            return Err(DataError::Empty { what: what.to_owned(), place: "in tokens of its tokenizer".to_owned() });
        }
        Ok(tokens)
    };
    Ok(Tokenized {
        train: encode(&train, "the training text")?,
        eval: eval.map(|eval| encode(&eval, "the evaluation text")).transpose()?,
        vocab_size: text_tokenizer.vocab_size(),
        tokenizer: trained,
    })
}

fn prepare_synthetic(data: &DataSettings, [vocab, train_tokens, eval_tokens]: [usize; 3], cache: &Cache) -> Result<Prepared, DataError> {
    no_documents(data, "synthetic")?;
    let bad = |reason: &str| DataError::BadSetting { setting: "data.dataset.synthetic", reason: reason.to_owned(), hint: None };
    if !(2..=1 << 24).contains(&vocab) {
        return Err(bad("vocab must be between 2 and 16777216"));
    }
    if train_tokens == 0 {
        return Err(bad("train_tokens must be 1 or more"));
    }
    let chain = Chain::new(vocab);
    let key = format!("synthetic {} {vocab} {train_tokens} {eval_tokens}", synthetic::VERSION);
    let cached = cache.get_or_make(&sha256(key.as_bytes()), || {
        let draw = |split, length| Tokens { ids: chain.tokens(split, length), document_ends: Vec::new() };
        Ok(Tokenized {
            train: draw(synthetic::Split::Train, train_tokens),
            eval: (eval_tokens > 0).then(|| draw(synthetic::Split::Eval, eval_tokens)),
            vocab_size: vocab,
            tokenizer: None,
        })
    })?;
    let notices = if eval_tokens == 0 { vec!["eval_tokens is 0: nothing is evaluated".to_owned()] } else { Vec::new() };
    let description = format!("synthetic first-order Markov chain over {vocab} tokens");
    Ok(Prepared { data: prepared(data, cached, Some(chain.floor_perplexity()), description), notices })
}

/// Tokens that were cut beforehand stay where they are.
fn prepare_token_blocks(data: &DataSettings, train: &Path, eval: Option<&Path>) -> Result<Prepared, DataError> {
    no_documents(data, "token_blocks")?;
    let train_tokens = token_file::read_cut(train, 3)?;
    let eval_tokens = eval.map(|eval| token_file::read_cut(eval, 2)).transpose()?;
    let largest = train_tokens.ids.iter().chain(eval_tokens.iter().flat_map(|eval| &eval.ids)).max().copied().unwrap_or(0);
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|error| DataError::Unreadable { what: "the token blocks".to_owned(), path: path.to_owned(), error })
    };
    let bytes = |ids: &[u32]| sha256(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    let eval_digest = eval_tokens.as_ref().map(|eval| format!("{} {:?}", bytes(&eval.ids), eval.shape));
    let fingerprint = sha256(format!("token blocks {} {:?} {eval_digest:?}", bytes(&train_tokens.ids), train_tokens.shape).as_bytes());
    let (steps, global_batch, block_size) = (train_tokens.shape[0], train_tokens.shape[1], train_tokens.block_size());
    let notices = if eval.is_none() { vec![format!("{} comes without eval_blocks: nothing is evaluated", train.display())] } else { Vec::new() };
    let data = PreparedData {
        train: absolute(train)?,
        eval: eval.map(absolute).transpose()?,
        fingerprint,
        vocab_size: largest as usize + 1,
        train_tokens: train_tokens.ids.len() as u64,
        eval_tokens: eval_tokens.map_or(0, |eval| eval.ids.len() as u64),
        floor_perplexity: None,
        description: format!("{}, {steps} steps of {global_batch} blocks of {block_size} tokens", train.display()),
    };
    Ok(Prepared { data, notices })
}

fn no_documents(data: &DataSettings, dataset: &str) -> Result<(), DataError> {
    match data.packing {
        Packing::Concatenate => Ok(()),
        Packing::PerDocument => Err(DataError::BadSetting {
            setting: "data.packing",
            reason: format!("{dataset} data has no documents, so per_document cannot be meant"),
            hint: Some("write packing = \"concatenate\"".to_owned()),
        }),
    }
}

fn prepared(data: &DataSettings, cached: Cached, floor_perplexity: Option<f64>, description: String) -> PreparedData {
    let identity = format!("tokens {:?} {} {} {:?}", data.packing, cached.vocab_size, cached.train_sha256, cached.eval_sha256);
    PreparedData {
        train: cached.train,
        eval: cached.eval,
        fingerprint: sha256(identity.as_bytes()),
        vocab_size: cached.vocab_size,
        train_tokens: cached.train_tokens,
        eval_tokens: cached.eval_tokens,
        floor_perplexity,
        description,
    }
}
