//! Sequences whose output a grammar bounds.
//!
//! Such a sequence has a *follower*, which knows the tokens that may come next. Its state is a function of the generated
//! tokens alone: a sequence that comes from another engine, or is computed again, has its tokens accepted once more, and
//! preemption leaves the follower as it is. So the masks, and with them the tokens, are the same wherever a sequence is
//! computed.

use checkpoint::grammar::{GrammarEnv, GrammarError, Matcher};
use proto::{Error, FinishReason, Reason, TokenId};

use crate::sequence::{Sequence, SequenceSpec};

/// Begins to follow the output of a sequence, after the tokens that it has. `None` when there is no grammar.
///
/// # Errors
/// INVALID_ARGUMENT when the grammar is not taken, when the generated tokens are no beginning of an output that it
/// allows, or are all of it; INTERNAL when following them takes more than the limits.
pub(crate) fn follow(
    vocabulary: Option<&GrammarEnv>,
    spec: &SequenceSpec,
) -> Result<Option<Box<Matcher>>, Error> {
    let Some(grammar) = &spec.sampling.grammar else { return Ok(None) };
    let Some(vocabulary) = vocabulary else {
        return Err(Error::invalid("grammar", "none expected, as there is no vocabulary for grammars here"));
    };
    let compiled = vocabulary.compile(grammar).map_err(|fault| Error::invalid("grammar", fault))?;
    let mut follower = compiled.matcher();
    for &token in &spec.tokens[spec.tokens.len() - spec.generated..] {
        follower.accept(token).map_err(|fault| match fault {
            GrammarError::Failed { .. } => failed(&fault),
            _ => Error::invalid("tokens", format_args!("generated under the grammar expected, but {fault}")),
        })?;
    }
    if follower.is_stopped() {
        let message = format_args!("the {} tokens are all that the grammar allows", spec.generated);
        return Err(Error::invalid("generated", message));
    }
    Ok(Some(Box::new(follower)))
}

/// A sequence that cannot go on for its grammar's sake.
pub(crate) fn failed(fault: &GrammarError) -> Error {
    Error::new(Reason::Internal, fault.to_string())
}

impl Sequence {
    /// Takes note of the token that is about to be appended, and tells whether the sequence ends with it.
    ///
    /// # Errors
    /// When the grammar does not allow the token, which leaves all as it was, or following it takes more than the limits.
    pub(crate) fn end_with(
        &mut self,
        token: TokenId,
        context_len: usize,
    ) -> Result<Option<FinishReason>, GrammarError> {
        let end = match &mut self.follower {
            Some(follower) => accept(follower, token)?,
            None => None,
        };
        let stop = &self.spec.stop;
        Ok(if stop.eos_ids.contains(&token) {
            Some(FinishReason::Eos)
        } else if stop.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken)
        } else if end.is_some() {
            end
        } else if self.spec.generated + 1 >= stop.max_tokens || self.len() + 1 >= context_len {
            Some(FinishReason::Length)
        } else {
            None
        })
    }
}

/// Accepts a token, and tells how the output ends with it, if it does.
pub(crate) fn accept(follower: &mut Matcher, token: TokenId) -> Result<Option<FinishReason>, GrammarError> {
    follower.accept(token)?;
    let end = if follower.is_eos(token) { FinishReason::Eos } else { FinishReason::Grammar };
    Ok(follower.is_stopped().then_some(end))
}
