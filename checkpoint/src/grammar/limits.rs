//! Bounds of what a grammar may cost.
//!
//! llguidance counts part of its work in "fuel" and items, and [`parser_limits`] bounds that. What it does not count
//! grows faster than the text (patterns of patterns, unions of unions, expressions that must all hold), so schemas are
//! counted before they are compiled: see `survey`. The bounds are far above what the schemas of tools and APIs need.
//! With them the worst grammar found takes 0.2 s of one core to be compiled or refused, and the worst token 10 ms; see
//! `docs/benchmarks.md`.

use llguidance::api::ParserLimits;

/// Longest text of a grammar, bytes.
pub const GRAMMAR_BYTES_MAX: usize = 128 * 1024;

/// Longest regular expression, and longest part of a Lark grammar besides the schemas in it, bytes.
pub(super) const EXPRESSION_BYTES_MAX: usize = 32 * 1024;

/// Most `&` and `~` of a Lark grammar: expressions that must hold, or fail, beside others.
pub(super) const COMBINED_MAX: usize = 8;

/// Stack of the thread that compiles: schemas are read by recursion, as deep as their references go on.
pub(super) const COMPILE_STACK_BYTES: usize = 256 << 20;

/// Compiled grammars that are kept for the next request with the same one.
pub(super) const KEPT_MAX: usize = 32;

/// Longest line of the compiler's messages that is passed on whole, characters.
pub(super) const MESSAGE_CHARS_MAX: usize = 200;

pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 250_000,
        step_lexer_fuel: 100_000,
        step_max_items: 25_000,
        max_lexer_states: 50_000,
        max_grammar_size: 40_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}
