//! From text to token ids: a `tokenizer.json`, or byte-level BPE trained on the training text, through the `tokenizers` crate.

use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer, TokenizerBuilder, TokenizerImpl};

use super::error::DataError;
use super::token_file::Tokens;

/// Entries that byte-level BPE cannot do without: all bytes and the end of text.
const SMALLEST_BPE: usize = 257;

/// The special token of a trained tokenizer, id 0.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Text is encoded in pieces of about this many bytes, in parallel.
const PIECE_BYTES: usize = 1 << 15;

/// Pieces encoded at a time, which bounds the memory that encodings take on top of their ids.
const PIECES_AT_A_TIME: usize = 256;

/// A tokenizer that is ready to encode. No special tokens are added to the text, but those that stand in it are recognised.
#[derive(Debug)]
pub(crate) struct TextTokenizer {
    inner: Tokenizer,
    /// Whether text may be cut before any white space that follows something else without changing a single id.
    cuts_at_spaces: bool,
}

impl TextTokenizer {
    /// Parses the contents of a `tokenizer.json`.
    pub(crate) fn parse(json: &[u8], path: &Path) -> Result<Self, DataError> {
        let malformed = |reason: String| DataError::Malformed { path: path.to_owned(), expected: "a tokenizer (tokenizer.json)", reason };
        let mut inner = Tokenizer::from_bytes(json).map_err(|error| malformed(error.to_string()))?;
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some_and(|dropout| dropout > 0.0)
        {
            return Err(malformed("its BPE dropout makes the same text different tokens every time".to_owned()));
        }
        // Blocks are cut by us: a length that the file happens to prescribe would silently lose text.
        inner.with_truncation(None).map_err(|error| malformed(error.to_string()))?;
        inner.with_padding(None);
        Ok(Self { cuts_at_spaces: cuts_at_spaces(&inner), inner })
    }

    /// Trains byte-level BPE with at most `entries` entries: id 0 is the end of text, then come all bytes, then merges of pairs seen at least twice. As
    /// transformers' `ByteLevelBPETokenizer`, and the same for the same text.
    pub(crate) fn train<'a>(rows: impl Iterator<Item = &'a str> + Send, entries: usize) -> Result<Self, DataError> {
        let bad = |reason: String, hint: Option<String>| DataError::BadSetting { setting: "data.tokenizer.train_bpe", reason, hint };
        if entries < SMALLEST_BPE {
            return Err(bad(
                format!("{entries} entries are too few: byte-level BPE has {SMALLEST_BPE} before the first merge"),
                Some("use 1024, for example".to_owned()),
            ));
        }
        let failed = |error: tokenizers::Error| bad(error.to_string(), None);
        let byte_level = ByteLevel::new(false, true, true);
        let mut tokenizer: TokenizerImpl<BPE, tokenizers::NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel> = TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(byte_level))
            .with_post_processor(Some(ByteLevel::new(true, false, true)))
            .with_decoder(Some(ByteLevel::default()))
            .build()
            .map_err(failed)?;
        let mut trainer = BpeTrainer::builder()
            .vocab_size(entries)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        tokenizer.train(&mut trainer, rows).map_err(failed)?;
        let json = tokenizer.to_string(false).map_err(failed)?;
        Self::parse(json.as_bytes(), Path::new("the trained tokenizer"))
    }

    /// As a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Result<String, DataError> {
        self.inner.to_string(false).map_err(|error| DataError::BadSetting { setting: "data.tokenizer", reason: error.to_string(), hint: None })
    }

    /// One more than the largest id.
    pub(crate) fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |largest| *largest as usize + 1)
    }

    /// Encodes each row on its own, with the tokens that the tokenizer puts around a text (Llama's begin with one); `document_ends` says where the ids of each
    /// row end.
    pub(crate) fn encode_rows(&self, rows: &[&str]) -> Result<Tokens, DataError> {
        let mut tokens = Tokens::default();
        let mut rest = rows;
        while !rest.is_empty() {
            // As many rows as make a batch of pieces, one at least.
            let mut bytes = 0;
            let count = rest
                .iter()
                .take_while(|row| {
                    let first = bytes == 0;
                    bytes += row.len().max(1);
                    first || bytes <= PIECE_BYTES * PIECES_AT_A_TIME
                })
                .count();
            let (batch, later) = rest.split_at(count);
            self.encode(batch.to_vec(), true, |ids| {
                tokens.ids.extend_from_slice(ids);
                tokens.document_ends.push(tokens.ids.len());
            })?;
            rest = later;
        }
        Ok(tokens)
    }

    /// Encodes one text as a whole: the ids are those of a single call, however large it is.
    pub(crate) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut around = 0;
        self.encode(vec![""], true, |ids| around = ids.len())?;
        // What the tokenizer puts around a text belongs around the whole, not around pieces.
        let pieces = if self.cuts_at_spaces && around == 0 { pieces(text, PIECE_BYTES) } else { vec![text] };
        let mut all = Vec::new();
        for batch in pieces.chunks(PIECES_AT_A_TIME) {
            self.encode(batch.to_vec(), true, |ids| all.extend_from_slice(ids))?;
        }
        Ok(all)
    }

    fn encode(&self, texts: Vec<&str>, special: bool, mut take: impl FnMut(&[u32])) -> Result<(), DataError> {
        let encodings = self.inner.encode_batch_fast(texts, special).map_err(|error| DataError::BadSetting {
            setting: "data.tokenizer",
            reason: format!("it cannot encode the text: {error}"),
            hint: None,
        })?;
        encodings.iter().for_each(|encoding| take(encoding.get_ids()));
        Ok(())
    }
}

/// Whether cutting before white space that follows something else keeps every id. True of GPT-2's pre-tokenizer: each of its words has white space at
/// its head alone, so such a place is always between two words, and no word's end depends on what follows but for runs of white space, which are not
/// cut. Anything that looks further (normalizers, added tokens that strip, other models) rules it out.
fn cuts_at_spaces(tokenizer: &Tokenizer) -> bool {
    let words = matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::ByteLevel(words)) if words.use_regex && !words.add_prefix_space);
    let added_are_plain = tokenizer
        .get_added_tokens_decoder()
        .values()
        .all(|token| !token.lstrip && !token.rstrip && !token.single_word && !token.content.contains(char::is_whitespace));
    let post_processor_is_plain =
        matches!(tokenizer.get_post_processor(), None | Some(PostProcessorWrapper::ByteLevel(_) | PostProcessorWrapper::Template(_)));
    words
        && added_are_plain
        && post_processor_is_plain
        && tokenizer.get_normalizer().is_none()
        && matches!(tokenizer.get_model(), ModelWrapper::BPE(_))
}

/// Cuts text into pieces of `size` bytes or a little more, before white space that follows something else.
fn pieces(text: &str, size: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > size {
        let start = rest.ceil_char_boundary(size);
        let mut before = rest[..start].chars().next_back();
        let cut = rest[start..].char_indices().find_map(|(offset, character)| {
            let between = character.is_ascii_whitespace() && before.is_some_and(|before| !before.is_whitespace());
            before = Some(character);
            between.then_some(start + offset)
        });
        let Some(cut) = cut else { break };
        let (piece, later) = rest.split_at(cut);
        pieces.push(piece);
        rest = later;
    }
    pieces.push(rest);
    pieces
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trained() -> TextTokenizer {
        let text = "the cat sat on the mat , and the dog ran to the cat .\n the end . 12 12 34\n";
        TextTokenizer::train(std::iter::repeat_n(text, 5), 280).unwrap()
    }

    #[test]
    fn a_trained_tokenizer_has_the_bytes_and_the_end_of_text() {
        let tokenizer = trained();
        assert_eq!(tokenizer.vocab_size(), 280);
        assert_eq!(tokenizer.encode_whole("<|endoftext|>").unwrap(), [0]);
        assert_eq!(tokenizer.encode_whole("!").unwrap(), [1]);
        assert!(tokenizer.encode_whole(" the").unwrap().len() == 1);
        assert_eq!(tokenizer.to_json().unwrap(), trained().to_json().unwrap(), "the same text gives the same tokenizer");
        let error = TextTokenizer::train(["a"].into_iter(), 256).unwrap_err();
        assert_eq!(error.to_string(), "data.tokenizer.train_bpe: 256 entries are too few: byte-level BPE has 257 before the first merge");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let json = trained().to_json().unwrap();
        let json =
            json.replacen(r#""truncation":null"#, r#""truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}"#, 1);
        let tokenizer = TextTokenizer::parse(json.as_bytes(), Path::new("tokenizer.json")).unwrap();
        assert_eq!(tokenizer.encode_whole("!!!!").unwrap().len(), 4);
    }

    #[test]
    fn a_broken_file_is_named() {
        let error = TextTokenizer::parse(b"{\"version\":\"1.0\"", Path::new("tokenizer.json")).unwrap_err();
        assert!(error.to_string().starts_with("tokenizer.json is not a tokenizer (tokenizer.json): "), "{error}");
    }

    proptest! {
        /// Cutting text into pieces changes no id, whatever stands around the cuts.
        #[test]
        fn pieces_encode_as_the_whole(text in r"([a-zé猫'0-9.,!<|>]{0,4}|[ \t\n\u{a0}\u{2028}\r]{1,3}|'s|<\|endoftext\|>){0,60}", size in 1_usize..12) {
            let tokenizer = trained();
            let cut = pieces(&text, size);
            prop_assert_eq!(cut.concat(), text.clone());
            let whole = tokenizer.inner.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            let mut apart = Vec::new();
            tokenizer.encode(cut, false, |ids| apart.extend_from_slice(ids)).unwrap();
            prop_assert_eq!(apart, whole);
        }
    }

    /// A tokenizer that may look across white space is never cut.
    #[test]
    fn only_plain_byte_level_tokenizers_are_cut() {
        assert!(trained().cuts_at_spaces);
        let json = trained().to_json().unwrap();
        for (from, to) in [
            (r#""add_prefix_space":false"#, r#""add_prefix_space":true"#),
            (r#""normalizer":null"#, r#""normalizer":{"type":"NFC"}"#),
            (r#""rstrip":false"#, r#""rstrip":true"#),
        ] {
            let changed = json.replacen(from, to, 1);
            assert_ne!(changed, json);
            assert!(!TextTokenizer::parse(changed.as_bytes(), Path::new("tokenizer.json")).unwrap().cuts_at_spaces, "{to}");
        }
    }

    /// As Llama's: every text begins with a token of its own.
    #[test]
    fn tokens_around_a_text_are_put_there() {
        let mut json: serde_json::Value = serde_json::from_str(&trained().to_json().unwrap()).unwrap();
        json["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
        });
        let tokenizer = TextTokenizer::parse(json.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap();
        let tokens = tokenizer.encode_rows(&["!", "", "!!"]).unwrap();
        assert_eq!((tokens.ids, tokens.document_ends), (vec![0, 1, 0, 0, 1, 1], vec![2, 3, 6]));
        let long = "! ".repeat(PIECE_BYTES);
        let ids = tokenizer.encode_whole(&long).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == 0).count(), 1);
        assert_eq!(ids[1..], trained().encode_whole(&long).unwrap());
    }

    #[test]
    fn rows_are_encoded_each_on_its_own() {
        let tokenizer = trained();
        let tokens = tokenizer.encode_rows(&["the cat", "", " dog"]).unwrap();
        assert_eq!(tokens.document_ends.len(), 3);
        assert_eq!(tokens.document_ends[0], tokens.document_ends[1]);
        assert_eq!(&tokens.ids[tokens.document_ends[1]..], tokenizer.encode_whole(" dog").unwrap());
    }
}
