//! The cache of tokenised data: a folder per fingerprint of sources, tokenizer and packing, so that the same text is tokenised once.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::token_file::{self, Tokens};
use crate::store::{self, StoreError};

/// Where tokenised data is kept between runs.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// What lies beside the token files of an entry; written last, so that an entry without it is not one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    vocab_size: usize,
    train_sha256: String,
    eval_sha256: Option<String>,
}

/// A cached data set.
#[derive(Debug)]
pub(crate) struct Cached {
    /// Token file of the training split.
    pub(crate) train: PathBuf,
    /// Token file of the evaluation split, if there is one.
    pub(crate) eval: Option<PathBuf>,
    /// Entries of the vocabulary.
    pub(crate) vocab_size: usize,
    /// Digest of the training tokens.
    pub(crate) train_sha256: String,
    /// Digest of the evaluation tokens.
    pub(crate) eval_sha256: Option<String>,
    /// How many training tokens there are.
    pub(crate) train_tokens: u64,
    /// How many evaluation tokens there are.
    pub(crate) eval_tokens: u64,
}

/// Freshly tokenised data on its way into the cache.
#[derive(Debug)]
pub(crate) struct Tokenized {
    /// The training split.
    pub(crate) train: Tokens,
    /// The evaluation split, if there is one.
    pub(crate) eval: Option<Tokens>,
    /// Entries of the vocabulary.
    pub(crate) vocab_size: usize,
    /// The tokenizer that made the tokens, as a `tokenizer.json`.
    pub(crate) tokenizer: Option<String>,
}

impl Cache {
    /// A cache in `folder`, which is made when something is written.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// `SWEEP_CACHE`, or `sweep` in `XDG_CACHE_HOME`, or `~/.cache/sweep`; in the system's temporary folder where there is no home.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let folder = variable("SWEEP_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("sweep")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache/sweep")))
            .unwrap_or_else(|| std::env::temp_dir().join("sweep-cache"));
        Self { folder }
    }

    /// The folder it lies in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Looks an entry up, or makes it. A damaged entry is made again.
    pub(crate) fn get_or_make(&self, key: &str, make: impl FnOnce() -> Result<Tokenized, DataError>) -> Result<Cached, DataError> {
        let folder = self.folder.join("tokens").join(key);
        if let Some(cached) = look_up(&folder) {
            return Ok(cached);
        }
        let made = make()?;
        fs::create_dir_all(&folder).map_err(|error| StoreError::Io { action: "create", path: folder.clone(), error })?;
        let train_sha256 = token_file::write(&folder.join("train.safetensors"), &made.train)?;
        let eval_sha256 = made.eval.as_ref().map(|eval| token_file::write(&folder.join("eval.safetensors"), eval)).transpose()?;
        if let Some(tokenizer) = &made.tokenizer {
            store::write_whole(&folder.join("tokenizer.json"), tokenizer.as_bytes())?;
        }
        let entry = Entry { vocab_size: made.vocab_size, train_sha256, eval_sha256 };
        store::write_json(&folder.join("entry.json"), &entry)?;
        Ok(cached(&folder, entry, made.train.ids.len(), made.eval.map_or(0, |eval| eval.ids.len())))
    }
}

/// The entry in `folder`, if it is whole and undamaged.
fn look_up(folder: &Path) -> Option<Cached> {
    let entry: Entry = store::read_json(&folder.join("entry.json")).ok()?;
    let read = |name: &str, sha256: &str| {
        token_file::read(&folder.join(name)).ok().filter(|tokens| tokens.digest() == sha256).map(|tokens| tokens.ids.len())
    };
    let train = read("train.safetensors", &entry.train_sha256)?;
    let eval = match &entry.eval_sha256 {
        Some(sha256) => read("eval.safetensors", sha256)?,
        None => 0,
    };
    Some(cached(folder, entry, train, eval))
}

fn cached(folder: &Path, entry: Entry, train_tokens: usize, eval_tokens: usize) -> Cached {
    Cached {
        train: folder.join("train.safetensors"),
        eval: entry.eval_sha256.is_some().then(|| folder.join("eval.safetensors")),
        vocab_size: entry.vocab_size,
        train_sha256: entry.train_sha256,
        eval_sha256: entry.eval_sha256,
        train_tokens: train_tokens as u64,
        eval_tokens: eval_tokens as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_taken_in_order() {
        let from = |set: &[(&str, &str)]| {
            let set: Vec<(String, PathBuf)> = set.iter().map(|(name, value)| ((*name).to_owned(), PathBuf::from(value))).collect();
            Cache::from_variables(|name| set.iter().find(|(set, _)| set == name).map(|(_, value)| value.clone())).folder
        };
        assert_eq!(from(&[("SWEEP_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")]), Path::new("/a"));
        assert_eq!(from(&[("XDG_CACHE_HOME", "/b"), ("HOME", "/c")]), Path::new("/b/sweep"));
        assert_eq!(from(&[("HOME", "/c")]), Path::new("/c/.cache/sweep"));
    }

    #[test]
    fn an_entry_is_made_once_and_again_when_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let made = std::cell::Cell::new(0);
        let get = || {
            cache
                .get_or_make("key", || {
                    made.set(made.get() + 1);
                    let tokens = Tokens { ids: vec![1, 2, 3], document_ends: vec![] };
                    Ok(Tokenized { train: tokens.clone(), eval: Some(tokens), vocab_size: 4, tokenizer: None })
                })
                .unwrap()
        };
        let first = get();
        assert_eq!((first.train_tokens, first.eval_tokens, first.vocab_size), (3, 3, 4));
        get();
        assert_eq!(made.get(), 1);
        for damaged in ["train.safetensors", "eval.safetensors", "entry.json"] {
            let path = folder.path().join("tokens/key").join(damaged);
            let good = fs::read(&path).unwrap();
            let mut bad = good.clone();
            bad.truncate(good.len() - 3);
            fs::write(&path, bad).unwrap();
            let before = made.get();
            get();
            assert_eq!(made.get(), before + 1, "{damaged}");
            assert_eq!(fs::read(&path).unwrap(), good);
        }
        // Another entry's whole and healthy file in the place of ours is noticed as well.
        token_file::write(&first.train, &Tokens { ids: vec![9], document_ends: vec![] }).unwrap();
        let before = made.get();
        get();
        assert_eq!(made.get(), before + 1);
    }
}
