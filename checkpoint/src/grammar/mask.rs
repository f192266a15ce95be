//! Which tokens may come next.

use proto::TokenId;

/// A set of token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Bit `id % 32` of word `id / 32`.
    words: Vec<u32>,
}

impl Mask {
    /// The set of those ids.
    pub fn of(ids: impl IntoIterator<Item = TokenId>) -> Self {
        let mut mask = Self::default();
        for id in ids {
            let word = id as usize / 32;
            if word >= mask.words.len() {
                mask.words.resize(word + 1, 0);
            }
            mask.words[word] |= 1 << (id % 32);
        }
        mask
    }

    /// The set as bits: `id % 32` of word `id / 32`. Ids beyond are not in it.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Takes the place of what the set was.
    pub(super) fn set(&mut self, words: &[u32]) {
        self.words.clear();
        self.words.extend_from_slice(words);
    }

    /// True for a token that may come.
    pub fn contains(&self, id: TokenId) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// The tokens that may come, ascending.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let set = move |bit: &u32| word >> bit & 1 == 1;
            (0..32).filter(set).map(move |bit| index as u32 * 32 + bit)
        })
    }

    /// How many tokens may come.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// True when no token may come.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_what_was_put_in() {
        let mask = Mask::of([0, 31, 32, 70]);
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 31, 32, 70]);
        assert_eq!((mask.len(), mask.is_empty()), (4, false));
        assert!(mask.contains(70) && !mask.contains(71) && !mask.contains(1_000_000));
        assert!(Mask::default().is_empty());
    }
}
