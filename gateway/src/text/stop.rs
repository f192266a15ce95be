//! Finds stop strings in text that comes in pieces.
//!
//! The automaton of Aho and Corasick (*Efficient string matching*, 1975): its state is the longest end of the text
//! that begins a stop string, so the depth of the state is exactly what must be held back, and no more.

use std::collections::VecDeque;

/// The node of the empty beginning, which is no child: as a child it means none.
const ROOT: u32 = 0;

/// Cuts a text before (or after) the first stop string in it, wherever the pieces' borders fall. Of several, the
/// one that is complete first wins; of those complete at the same character, the longest.
pub struct StopStrings {
    nodes: Vec<Node>,
    include: bool,
    /// Where the automaton stands after all text so far.
    state: u32,
    /// The end of the text that may yet be part of a stop string; as long as the state is deep.
    held: String,
}

/// A beginning of some stop string. Small, as there is one for each byte that a client sends.
#[derive(Clone, Copy, Default)]
struct Node {
    /// The last byte of this.
    byte: u8,
    /// The first of the beginnings that are one byte longer; [`ROOT`] for none.
    child: u32,
    /// The next that differs from this in the last byte alone; [`ROOT`] for none.
    sibling: u32,
    /// The longest proper end of this that begins a stop string.
    fail: u32,
    /// Bytes of this.
    depth: u32,
    /// Bytes of the longest stop string that this ends with; 0 for none.
    ends: u32,
}

impl StopStrings {
    /// For these strings; empty ones are ignored. With `include` the text ends after the string, not before it.
    /// Takes time and memory in proportion to all strings together.
    ///
    /// # Panics
    /// When they have 4 GiB in all.
    pub fn new(strings: &[String], include: bool) -> Self {
        let mut nodes = vec![Node::default()];
        for string in strings.iter().filter(|string| !string.is_empty()) {
            insert(&mut nodes, string);
        }
        let mut stops = Self { nodes, include, state: ROOT, held: String::new() };
        stops.link();
        stops
    }

    /// True when there is none to be found, and so nothing is ever held back.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Computes `fail` and `ends`, shorter beginnings first.
    fn link(&mut self) {
        let mut queue = VecDeque::from([ROOT]);
        while let Some(parent) = queue.pop_front() {
            let Node { mut child, fail: parent_fail, .. } = self.nodes[parent as usize];
            while child != ROOT {
                let Node { byte, sibling, .. } = self.nodes[child as usize];
                // A single byte has no proper end but the empty one.
                let fail = if parent == ROOT { ROOT } else { self.step(parent_fail, byte) };
                let shorter = self.nodes[fail as usize].ends;
                let node = &mut self.nodes[child as usize];
                node.fail = fail;
                node.ends = node.ends.max(shorter);
                queue.push_back(child);
                child = sibling;
            }
        }
    }

    fn step(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            match next(&self.nodes, state, byte) {
                Some(next) => return next,
                None if state == ROOT => return ROOT,
                None => state = self.nodes[state as usize].fail,
            }
        }
    }

    /// Takes more text and appends to `out` what is now certain. When a stop string was found it is the answer, and
    /// `out` has all there is.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<String> {
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            self.state = self.step(self.state, byte);
            let ends = self.nodes[self.state as usize].ends as usize;
            if ends > 0 {
                let end = before + at + 1;
                // Both are borders of characters: a stop string is whole characters.
                out.push_str(&self.held[..if self.include { end } else { end - ends }]);
                let found = self.held[end - ends..end].to_owned();
                self.held.clear();
                return Some(found);
            }
        }
        let certain = self.held.len() - self.nodes[self.state as usize].depth as usize;
        out.extend(self.held.drain(..certain));
        None
    }

    /// No more text comes: appends what was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
        self.state = ROOT;
    }
}

/// The beginning that is this one and the byte.
fn next(nodes: &[Node], at: u32, byte: u8) -> Option<u32> {
    let mut child = nodes[at as usize].child;
    while child != ROOT && nodes[child as usize].byte != byte {
        child = nodes[child as usize].sibling;
    }
    (child != ROOT).then_some(child)
}

fn insert(nodes: &mut Vec<Node>, string: &str) {
    let mut at = ROOT;
    for byte in string.bytes() {
        at = next(nodes, at, byte).unwrap_or_else(|| {
            let new = u32::try_from(nodes.len()).expect("stop strings of less than 4 GiB");
            let Node { child, depth, .. } = nodes[at as usize];
            nodes[at as usize].child = new;
            nodes.push(Node { byte, sibling: child, depth: depth + 1, ..Node::default() });
            new
        });
    }
    nodes[at as usize].ends = nodes[at as usize].depth;
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
            if finder.push(piece, &mut out).is_some() {
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
        assert_eq!(finder.push("ABCDEF", &mut out), None);
        assert_eq!(out, "ABCD");
        assert_eq!(finder.push("GHX", &mut out), None);
        assert_eq!(out, "ABCDEFGHX");
        assert_eq!(finder.push("EF", &mut out), None);
        finder.finish(&mut out);
        assert_eq!(out, "ABCDEFGHXEF");
    }

    #[test]
    fn without_stop_strings_nothing_is_held() {
        let mut finder = StopStrings::new(&[], false);
        let mut out = String::new();
        assert_eq!(finder.push("abc", &mut out), None);
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
                if found.is_some() {
                    break;
                }
            }
        }
    }
}
