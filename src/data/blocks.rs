//! Token blocks: what the trainer reads. Cut from a split as DESIGN's data rules say: the whole split is one run of tokens, or each document has blocks
//! of its own.

/// How many whole blocks of `block_size` a run of `tokens` gives; the incomplete tail is dropped.
pub fn blocks_at(tokens: u64, block_size: usize) -> u64 {
    if block_size == 0 { 0 } else { tokens / block_size as u64 }
}

/// Blocks of equal size, row after row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    block_size: usize,
    /// `count * block_size` token ids.
    ids: Vec<u32>,
    /// Real tokens at the head of each row, the rest being padding; `None` where there is no padding.
    lengths: Option<Vec<usize>>,
    dropped_tokens: u64,
    global_batch_size: Option<usize>,
}

impl Blocks {
    /// Cuts one run of tokens; the incomplete tail is dropped and counted.
    pub fn cut(mut tokens: Vec<u32>, block_size: usize) -> Self {
        let whole = blocks_at(tokens.len() as u64, block_size) as usize * block_size;
        let dropped_tokens = (tokens.len() - whole) as u64;
        tokens.truncate(whole);
        Self { block_size, ids: tokens, lengths: None, dropped_tokens, global_batch_size: None }
    }

    /// Gives each document blocks of its own, the last one padded. Documents end at `ends`. A block of one token has nothing to predict: it is
    /// dropped and counted.
    pub fn per_document(tokens: &[u32], ends: &[usize], block_size: usize) -> Self {
        let mut blocks = Self { block_size, ids: Vec::new(), lengths: Some(Vec::new()), dropped_tokens: 0, global_batch_size: None };
        if block_size < 2 {
            blocks.dropped_tokens = tokens.len() as u64;
            return blocks;
        }
        let mut lengths = Vec::new();
        let mut start = 0;
        for end in ends {
            for piece in tokens[start..*end].chunks(block_size) {
                if piece.len() < 2 {
                    blocks.dropped_tokens += 1;
                    continue;
                }
                blocks.ids.extend_from_slice(piece);
                blocks.ids.resize(blocks.ids.len() + block_size - piece.len(), 0);
                lengths.push(piece.len());
            }
            start = *end;
        }
        blocks.lengths = Some(lengths);
        blocks
    }

    /// Blocks that were cut beforehand, `global_batch_size` of them to a step.
    pub(crate) fn cut_beforehand(ids: Vec<u32>, block_size: usize, global_batch_size: usize) -> Self {
        Self { block_size, ids, lengths: None, dropped_tokens: 0, global_batch_size: Some(global_batch_size) }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.ids.len().checked_div(self.block_size).unwrap_or(0)
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens of the split that are in no block.
    pub fn dropped_tokens(&self) -> u64 {
        self.dropped_tokens
    }

    /// Token ids of block `row`, `block_size` of them; beyond [`Self::length`] they are padding (id 0, which may be a real token elsewhere).
    pub fn row(&self, row: usize) -> &[u32] {
        &self.ids[row * self.block_size..(row + 1) * self.block_size]
    }

    /// Real tokens of block `row`, at its head. The target at position `i` (token `i + 1`) is scored exactly where `i + 1 < length`.
    pub fn length(&self, row: usize) -> usize {
        self.lengths.as_ref().map_or(self.block_size, |lengths| lengths[row])
    }

    /// Scored targets of block `row`.
    pub fn targets(&self, row: usize) -> usize {
        self.length(row).saturating_sub(1)
    }

    /// Whether any block is padded.
    pub fn is_padded(&self) -> bool {
        self.lengths.as_ref().is_some_and(|lengths| lengths.iter().any(|length| *length < self.block_size))
    }

    /// Rows of a step, where the tokens were cut into steps beforehand.
    pub fn global_batch_size(&self) -> Option<usize> {
        self.global_batch_size
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Nothing is lost or made up: blocks and dropped tokens together are the split.
        #[test]
        fn cutting_keeps_order_and_counts(tokens in prop::collection::vec(0_u32..50, 0..200), block_size in 1_usize..40) {
            let blocks = Blocks::cut(tokens.clone(), block_size);
            prop_assert_eq!(blocks.count() as u64, blocks_at(tokens.len() as u64, block_size));
            let mut together: Vec<u32> = (0..blocks.count()).flat_map(|row| blocks.row(row).to_vec()).collect();
            together.extend_from_slice(&tokens[tokens.len() - blocks.dropped_tokens() as usize..]);
            prop_assert_eq!(together, tokens);
            prop_assert!(!blocks.is_padded());
        }

        /// CASES 35: every token of every document is in exactly one block, and real zeros are told from padding.
        #[test]
        fn documents_keep_their_tokens(documents in prop::collection::vec(prop::collection::vec(0_u32..3, 0..60), 0..12), block_size in 2_usize..40) {
            let tokens = documents.concat();
            let ends: Vec<usize> = documents.iter().scan(0, |end, document| { *end += document.len(); Some(*end) }).collect();
            let blocks = Blocks::per_document(&tokens, &ends, block_size);
            let kept: Vec<u32> = (0..blocks.count()).flat_map(|row| blocks.row(row)[..blocks.length(row)].to_vec()).collect();
            let expected: Vec<u32> = documents.iter().flat_map(|document| document.chunks(block_size)).filter(|piece| piece.len() > 1).flatten().copied().collect();
            prop_assert_eq!(&kept, &expected);
            prop_assert_eq!(kept.len() as u64 + blocks.dropped_tokens(), tokens.len() as u64);
            prop_assert!((0..blocks.count()).all(|row| blocks.targets(row) >= 1 && blocks.row(row).len() == block_size));
        }
    }

    #[test]
    fn a_block_longer_than_the_data_gives_none() {
        let blocks = Blocks::cut(vec![1, 2, 3], 4);
        assert_eq!((blocks.count(), blocks.dropped_tokens()), (0, 3));
        assert_eq!(blocks_at(3, 0), 0);
    }

    #[test]
    fn a_real_zero_is_not_padding() {
        let blocks = Blocks::per_document(&[0, 0, 5, 7], &[2, 4], 4);
        assert_eq!((blocks.row(0), blocks.length(0), blocks.targets(0)), (&[0, 0, 0, 0][..], 2, 1));
        assert_eq!((blocks.row(1), blocks.length(1)), (&[5, 7, 0, 0][..], 2));
        assert!(blocks.is_padded());
    }
}
