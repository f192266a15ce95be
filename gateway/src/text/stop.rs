//! Finds stop strings in text that comes in pieces.
//!
//! The automaton of Aho and Corasick (*Efficient string matching*, 1975): its state is the longest end of the text
//! that begins a stop string, so the depth of the state is exactly what must be held back, and no more.

use std::collections::BTreeMap;
use std::collections::VecDeque;

/// Cuts a text before (or after) the first stop string in it, wherever the pieces' borders fall. Of several, the
/// one that is complete first wins; of those complete at the same character, the longest.
pub struct StopStrings {
    nodes: Vec<Node>,
    include: bool,
    /// Where the automaton stands after all text so far.
    state: usize,
    /// The end of the text that may yet be part of a stop string; as long as the state is deep.
    held: String,
}

/// A beginning of some stop string.
#[derive(Default)]
struct Node {
    next: BTreeMap<u8, usize>,
    /// The longest proper end of this that begins a stop string.
    fail: usize,
    /// Bytes of this.
    depth: usize,
    /// Bytes of the longest stop string that this ends with; 0 for none.
    ends: usize,
}

impl StopStrings {
    /// For these strings; empty ones are ignored. With `include` the text ends after the string, not before it.
    pub fn new(strings: &[String], include: bool) -> Self {
        let mut nodes = vec![Node::default()];
        for string in strings.iter().filter(|string| !string.is_empty()) {
            insert(&mut nodes, string);
        }
        let mut stops = Self { nodes, include, state: 0, held: String::new() };
        stops.link();
        stops
    }

    /// Computes `fail` and `ends`, shorter beginnings first.
    fn link(&mut self) {
        let mut queue: VecDeque<usize> = self.nodes[0].next.values().copied().collect();
        while let Some(parent) = queue.pop_front() {
            let children: Vec<(u8, usize)> = self.nodes[parent].next.iter().map(|(b, n)| (*b, *n)).collect();
            for (byte, child) in children {
                let fail = self.step(self.nodes[parent].fail, byte);
                self.nodes[child].fail = fail;
                self.nodes[child].ends = self.nodes[child].ends.max(self.nodes[fail].ends);
                queue.push_back(child);
            }
        }
    }

    fn step(&self, mut state: usize, byte: u8) -> usize {
        loop {
            match self.nodes[state].next.get(&byte) {
                Some(next) => return *next,
                None if state == 0 => return 0,
                None => state = self.nodes[state].fail,
            }
        }
    }

    /// Takes more text and appends to `out` what is now certain. True when a stop string was found: then `out` has
    /// all there is.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            self.state = self.step(self.state, byte);
            let Node { ends, .. } = self.nodes[self.state];
            if ends > 0 {
                let end = before + at + 1;
                // Both are borders of characters: a stop string is whole characters.
                out.push_str(&self.held[..if self.include { end } else { end - ends }]);
                self.held.clear();
                return true;
            }
        }
        let certain = self.held.len() - self.nodes[self.state].depth;
        out.extend(self.held.drain(..certain));
        false
    }

    /// No more text comes: appends what was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
        self.state = 0;
    }
}

fn insert(nodes: &mut Vec<Node>, string: &str) {
    let mut at = 0;
    for (depth, byte) in string.bytes().enumerate() {
        at = match nodes[at].next.get(&byte) {
            Some(next) => *next,
            None => {
                let new = nodes.len();
                nodes[at].next.insert(byte, new);
                nodes.push(Node { depth: depth + 1, ..Node::default() });
                new
            }
        };
    }
    nodes[at].ends = string.len();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The text that comes out when `pieces` go in, and whether it was stopped.
    fn run(stops: &[String], include: bool, pieces: &[&str]) -> (String, bool) {
        let mut finder = StopStrings::new(stops, include);
        let mut out = String::new();
        for piece in pieces {
            if finder.push(piece, &mut out) {
                return (out, true);
            }
        }
        finder.finish(&mut out);
        (out, false)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    /// The definition: the smallest end at which some stop string ends, and the longest of those.
    fn by_definition(stops: &[String], include: bool, text: &str) -> (String, bool) {
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let found = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
            if let Some(longest) = found.map(String::len).max() {
                return (text[..if include { end } else { end - longest }].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn the_first_in_text_order_wins_whatever_the_order_of_the_list() {
        let stops = strings(&["three", "two"]);
        assert_eq!(run(&stops, false, &["one two three"]), ("one ".into(), true));
        assert_eq!(run(&stops, true, &["one t", "wo three"]), ("one two".into(), true));
    }

    #[test]
    fn a_beginning_is_held_and_given_back_when_it_comes_to_nothing() {
        let stops = strings(&["EFGHI"]);
        let mut finder = StopStrings::new(&stops, false);
        let mut out = String::new();
        assert!(!finder.push("ABCDEF", &mut out));
        assert_eq!(out, "ABCD");
        assert!(!finder.push("GHX", &mut out));
        assert_eq!(out, "ABCDEFGHX");
        assert!(!finder.push("EF", &mut out));
        finder.finish(&mut out);
        assert_eq!(out, "ABCDEFGHXEF");
    }

    #[test]
    fn without_stop_strings_nothing_is_held() {
        let mut finder = StopStrings::new(&[], false);
        let mut out = String::new();
        assert!(!finder.push("abc", &mut out));
        assert_eq!(out, "abc");
    }

    proptest! {
        #[test]
        fn any_split_gives_what_the_definition_gives(
            stops in prop::collection::vec("[abé🦜]{1,4}", 0..4),
            text in "[abé🦜]{0,24}",
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            include: bool,
        ) {
            let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            borders.push(text.len());
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(run(&stops, include, &pieces), by_definition(&stops, include, &text));
        }

        #[test]
        fn nothing_of_a_stop_string_is_ever_given_out(text in "[ab]{0,20}", stop in "[ab]{2,4}") {
            let mut finder = StopStrings::new(std::slice::from_ref(&stop), false);
            let mut out = String::new();
            for (at, _) in text.char_indices() {
                let found = finder.push(&text[at..=at], &mut out);
                prop_assert!(!out.contains(&stop));
                prop_assert!(text.starts_with(&out));
                if found {
                    break;
                }
            }
        }
    }
}
