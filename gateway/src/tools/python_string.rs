//! A string literal of Python, given as JSON.

use super::found::{Found, Progress};

/// Takes one string, from after its first quote to its last: `'…'`, `"…"`, or either three times.
#[derive(Debug)]
pub(super) struct PythonString {
    quote: char,
    raw: bool,
    state: State,
    /// The first of a surrogate pair, until the other comes.
    high: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// So many quotes have come and nothing else.
    Opening(u8),
    /// Within; the string ends with this many quotes, of which so many have come.
    Within { ends: u8, quotes: u8 },
    /// After a backslash.
    Slash { ends: u8 },
    /// Within the digits of an escape: how many may come, how many must not be missing.
    Digits { ends: u8, digits: Digits },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digits {
    radix: u32,
    left: u8,
    value: u32,
    /// Fewer digits are a fault.
    exact: bool,
}

impl PythonString {
    /// The first quote has come. A raw string knows no escapes.
    pub(super) fn open(quote: char, raw: bool, found: &mut Found) -> Self {
        found.argument('"');
        Self { quote, raw, state: State::Opening(1), high: None }
    }

    /// Takes the next character. Done: it was the last; over: the string ended before it.
    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match self.state {
            State::Opening(count) => match (count, c == self.quote) {
                (1, true) => self.go(State::Opening(2)),
                (1, false) => self.within(1, c, found),
                (_, true) => self.go(State::Within { ends: 3, quotes: 0 }),
                (_, false) => {
                    self.close(found);
                    Progress::Over
                }
            },
            State::Within { ends, quotes } if c == self.quote => {
                if quotes + 1 == ends {
                    self.close(found);
                    return Progress::Done;
                }
                self.go(State::Within { ends, quotes: quotes + 1 })
            }
            State::Within { ends, quotes } => {
                for _ in 0..quotes {
                    self.put(self.quote, found);
                }
                self.within(ends, c, found)
            }
            State::Slash { ends } => self.escape(ends, c, found),
            State::Digits { ends, digits } => self.digit(ends, digits, c, found),
        }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    /// A character that is no quote.
    fn within(&mut self, ends: u8, c: char, found: &mut Found) -> Progress {
        if c == '\\' {
            return self.go(State::Slash { ends });
        }
        self.put(c, found);
        self.go(State::Within { ends, quotes: 0 })
    }

    fn escape(&mut self, ends: u8, c: char, found: &mut Found) -> Progress {
        let within = State::Within { ends, quotes: 0 };
        if self.raw {
            self.put('\\', found);
            self.put(c, found);
            return self.go(within);
        }
        let character = match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'a' => '\u{7}',
            // The slash is JSON's: models mix the two.
            '\\' | '\'' | '"' | '/' => c,
            '\n' => return self.go(within),
            'x' => return self.digits(ends, 16, 2),
            'u' => return self.digits(ends, 16, 4),
            'U' => return self.digits(ends, 16, 8),
            '0'..='7' => {
                let value = c as u32 - '0' as u32;
                let digits = Digits { radix: 8, left: 2, value, exact: false };
                return self.go(State::Digits { ends, digits });
            }
            'N' => return Progress::Fail,
            _ => {
                self.put('\\', found);
                c
            }
        };
        self.put(character, found);
        self.go(within)
    }

    fn digits(&mut self, ends: u8, radix: u32, left: u8) -> Progress {
        self.go(State::Digits { ends, digits: Digits { radix, left, value: 0, exact: true } })
    }

    fn digit(&mut self, ends: u8, digits: Digits, c: char, found: &mut Found) -> Progress {
        let within = State::Within { ends, quotes: 0 };
        let Digits { radix, left, value, exact } = digits;
        let Some(digit) = c.to_digit(radix) else {
            if exact || !self.code(value, found) {
                return Progress::Fail;
            }
            self.state = within;
            return self.push(c, found);
        };
        // Eight hexadecimal digits fit just so.
        let value = value.wrapping_mul(radix).wrapping_add(digit);
        if left > 1 {
            return self.go(State::Digits { ends, digits: Digits { left: left - 1, value, ..digits } });
        }
        self.state = within;
        if self.code(value, found) { Progress::More } else { Progress::Fail }
    }

    /// A character by its number, or half of a surrogate pair. False when there is none.
    fn code(&mut self, value: u32, found: &mut Found) -> bool {
        match (value, self.high) {
            (0xd800..=0xdbff, _) => {
                self.lone(found);
                self.high = Some(value as u16);
                return true;
            }
            (0xdc00..=0xdfff, Some(high)) => {
                self.high = None;
                let pair = [high, value as u16];
                found.arguments(&String::from_utf16_lossy(&pair));
                return true;
            }
            (0xdc00..=0xdfff, None) => self.put(char::REPLACEMENT_CHARACTER, found),
            _ => match char::from_u32(value) {
                Some(c) => self.put(c, found),
                None => return false,
            },
        }
        true
    }

    /// A first half without its second is no character.
    fn lone(&mut self, found: &mut Found) {
        if self.high.take().is_some() {
            found.argument(char::REPLACEMENT_CHARACTER);
        }
    }

    /// A character of the string, as JSON writes it.
    fn put(&mut self, c: char, found: &mut Found) {
        self.lone(found);
        match c {
            '"' => found.arguments("\\\""),
            '\\' => found.arguments("\\\\"),
            '\n' => found.arguments("\\n"),
            '\r' => found.arguments("\\r"),
            '\t' => found.arguments("\\t"),
            _ if c < ' ' => found.arguments(&format!("\\u{:04x}", c as u32)),
            _ => found.argument(c),
        }
    }

    fn close(&mut self, found: &mut Found) {
        self.lone(found);
        found.argument('"');
    }
}
