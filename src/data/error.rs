//! What can be wrong with data and models, each with the place and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::store::StoreError;

/// Data or a model that cannot be used. `Display` says what and where; [`DataError::hints`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused to read or write.
    #[error("cannot read {what} {}: {error}", path.display())]
    Unreadable {
        /// `the training text`, `the tokenizer` ...
        what: String,
        /// Which file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A folder stands where a file belongs.
    #[error("{what} {} is a folder, not a file", path.display())]
    Folder {
        /// What was looked for.
        what: String,
        /// Which folder.
        path: PathBuf,
    },
    /// There is nothing in it.
    #[error("{what} {place} is empty")]
    Empty {
        /// What was read.
        what: String,
        /// Its file or data set.
        place: String,
    },
    /// Text that is not UTF-8.
    #[error("{} is not UTF-8 text: invalid byte 0x{byte:02x} at offset {offset}", path.display())]
    NotUtf8 {
        /// Which file.
        path: PathBuf,
        /// Offset of the first invalid byte, from 0.
        offset: usize,
        /// That byte.
        byte: u8,
    },
    /// A file that is not what its name says.
    #[error("{} is not {expected}: {reason}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// `a parquet file`, `a tokenizer` ...
        expected: &'static str,
        /// What is wrong, with its line where there is one.
        reason: String,
    },
    /// A table without a column of text.
    #[error("{} has no column `text`; its columns are {}", path.display(), list(columns))]
    NoTextColumn {
        /// Which file.
        path: PathBuf,
        /// Name and type of each column.
        columns: Vec<String>,
    },
    /// The setting itself makes no sense.
    #[error("{setting}: {reason}")]
    BadSetting {
        /// Dotted key.
        setting: &'static str,
        /// What is wrong with its value.
        reason: String,
        /// What to write instead.
        hint: Option<String>,
    },
    /// A data set, model or file that is neither on disk nor on the hub.
    #[error("{what} is not there: {reason}")]
    NotFound {
        /// What was looked for.
        what: String,
        /// Where it was looked for.
        reason: String,
        /// What to do.
        hints: Vec<String>,
    },
    /// The hub wants a token, or another one.
    #[error("{endpoint} does not give access to {what} (HTTP status {status})")]
    NoAccess {
        /// What was asked for.
        what: String,
        /// The hub.
        endpoint: String,
        /// 401 or 403.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The hub cannot be reached, or must not be asked.
    #[error("{what} is not in the cache and cannot be fetched: {reason}")]
    NoNetwork {
        /// What was wanted.
        what: String,
        /// Why there is no network.
        reason: String,
        /// What to put where, and what to use instead.
        hints: Vec<String>,
    },
    /// The model lacks entries for some of the data's tokens.
    #[error("the data has token ids up to {}, but model {model} has a vocabulary of {model_vocab}", data_vocab - 1)]
    VocabularyMismatch {
        /// Entries of the data's vocabulary.
        data_vocab: usize,
        /// Entries of the model's vocabulary.
        model_vocab: usize,
        /// The model as the sweep file names it.
        model: String,
    },
    /// Cut tokens have a fixed block size.
    #[error("{} holds blocks of {found} tokens, block size {asked} was asked for", path.display())]
    BlockSize {
        /// Which file.
        path: PathBuf,
        /// Its block size.
        found: usize,
        /// What was asked for.
        asked: usize,
    },
    /// Less training data than one optimiser step takes.
    #[error("{tokens} training tokens make {blocks} blocks of {block_size}, one global batch needs {global_batch}")]
    TooShort {
        /// Tokens of the training split.
        tokens: u64,
        /// Blocks they make.
        blocks: u64,
        /// Tokens per block.
        block_size: usize,
        /// Blocks per optimiser step.
        global_batch: u64,
    },
    /// Something in the cache cannot be used or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl DataError {
    /// What the reader can do, a sentence each.
    pub fn hints(&self) -> Vec<String> {
        match self {
            Self::Unreadable { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                vec!["paths are relative to the folder that sweep is started in".to_owned()]
            }
            Self::Folder { .. } => vec!["name a file in it".to_owned()],
            Self::NotUtf8 { path, .. } => vec![format!("convert it first, for example: iconv -f latin1 -t utf-8 {}", path.display())],
            Self::NoTextColumn { .. } => vec!["rename the column that holds the text to `text`".to_owned()],
            Self::BadSetting { hint, .. } => hint.iter().cloned().collect(),
            Self::NotFound { hints, .. } | Self::NoNetwork { hints, .. } => hints.clone(),
            Self::NoAccess { with_token: false, .. } => {
                vec!["check the spelling; if it is gated or private, ask for access on its page and set HF_TOKEN".to_owned()]
            }
            Self::NoAccess { with_token: true, .. } => {
                vec!["check the spelling, and that the account of the token was given access on its page".to_owned()]
            }
            Self::VocabularyMismatch { data_vocab, .. } => vec![format!(
                "use the model's own tokenizer (leave data.tokenizer out), or init = \"random\" with config.vocab_size = {data_vocab} or more"
            )],
            Self::TooShort { .. } => vec!["use more text, a smaller block size or a smaller batch".to_owned()],
            _ => Vec::new(),
        }
    }

    /// Whether the machine or the network failed rather than the input: trying again may help.
    pub fn is_infrastructure(&self) -> bool {
        match self {
            Self::NoNetwork { .. } => true,
            Self::Store(error) => matches!(error, StoreError::Io { .. }),
            _ => false,
        }
    }
}

/// Reads a file whole; a folder and a missing file are told apart.
pub(crate) fn read_file(what: &str, path: &Path) -> Result<Vec<u8>, DataError> {
    if path.is_dir() {
        return Err(DataError::Folder { what: what.to_owned(), path: path.to_owned() });
    }
    std::fs::read(path).map_err(|error| DataError::Unreadable { what: what.to_owned(), path: path.to_owned(), error })
}

/// Checks that `bytes` of `path` are UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>, path: &Path) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        DataError::NotUtf8 { path: path.to_owned(), offset, byte: error.as_bytes()[offset] }
    })
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
