//! One output, followed token by token.

use std::sync::Arc;

use proto::TokenId;

use super::env::short;
use super::{GrammarError, Mask};

/// Knows which token may come next. A clone goes its own way from there.
pub struct Matcher {
    inner: llguidance::Matcher,
    eos_ids: Arc<[TokenId]>,
    accepted: usize,
    /// A token came that ends a generation.
    is_ended: bool,
}

impl Matcher {
    pub(super) fn new(inner: llguidance::Matcher, eos_ids: Arc<[TokenId]>) -> Self {
        Self { inner, eos_ids, accepted: 0, is_ended: false }
    }

    /// Puts the tokens that may come next into `mask`; those that end a generation are among them exactly when the
    /// output so far is complete.
    ///
    /// # Errors
    /// [`GrammarError::Failed`] when no token can go on, or finding out takes more than a step may cost. What earlier masks
    /// found out is known, so a matcher that saw none may fail where another goes on; it never allows anything else.
    pub fn allowed(&mut self, mask: &mut Mask) -> Result<(), GrammarError> {
        if self.is_ended {
            return Err(self.failed(&"the output has ended"));
        }
        let allowed = self.inner.compute_mask_or_eos().map_err(|fault| self.failed(&fault))?;
        mask.set(allowed.as_slice());
        Ok(())
    }

    /// Goes on by a token.
    ///
    /// # Errors
    /// [`GrammarError::NotAllowed`] for a token that may not come here; the matcher stays as it was.
    /// [`GrammarError::Failed`] when the limits are reached; nothing works after that.
    pub fn accept(&mut self, token: TokenId) -> Result<(), GrammarError> {
        let is_taken = if self.is_ended {
            false
        } else if self.eos_ids.contains(&token) {
            self.is_ended = self.is_accepting()?;
            self.is_ended
        } else {
            self.inner.try_consume_tokens(&[token]).map_err(|fault| self.failed(&fault))? == 1
        };
        if !is_taken {
            return Err(GrammarError::NotAllowed { token, index: self.accepted });
        }
        self.accepted += 1;
        Ok(())
    }

    /// True when the output is complete, whether or not more may come.
    ///
    /// # Errors
    /// [`GrammarError::Failed`] after an earlier failure.
    pub fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        if self.is_stopped() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|fault| self.failed(&fault))
    }

    /// True when the output is complete and nothing more may come.
    pub fn is_stopped(&self) -> bool {
        self.is_ended || (self.inner.is_stopped() && !self.inner.is_error())
    }

    /// True for a token that ends a generation.
    pub fn is_eos(&self, token: TokenId) -> bool {
        self.eos_ids.contains(&token)
    }

    fn failed(&self, fault: &impl std::fmt::Display) -> GrammarError {
        GrammarError::Failed { tokens: self.accepted, message: short(fault) }
    }
}

impl Clone for Matcher {
    fn clone(&self) -> Self {
        // Deep: what one follows must not use up the limits of the other.
        Self { inner: self.inner.deep_clone(), eos_ids: Arc::clone(&self.eos_ids), ..*self }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("accepted", &self.accepted).finish_non_exhaustive()
    }
}
