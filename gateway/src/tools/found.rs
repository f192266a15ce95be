//! What recognisers find.

use super::Event;

/// What a recogniser makes of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It may go on.
    More,
    /// It may go on, and what was found so far stands whatever comes.
    Stands,
    /// It is complete with this character.
    Done,
    /// It was complete before the text since it last stood, which is not part of it.
    Over,
    /// It is none.
    Fail,
}

/// Calls that a recogniser has found and that may yet come to nothing.
#[derive(Debug, Default)]
pub(super) struct Found {
    events: Vec<Event>,
    /// The number of the next call.
    next: usize,
    /// The number of the next call once all of `events` is dropped.
    stands: usize,
}

impl Found {
    /// A call of this function; what arguments come next are its.
    pub(super) fn call(&mut self, name: &str) {
        self.events.push(Event::Call { index: self.next, name: name.to_owned() });
        self.next += 1;
    }

    /// More of the last call's arguments.
    pub(super) fn arguments(&mut self, text: &str) {
        let index = self.next.checked_sub(1).expect("arguments follow their call");
        add_arguments(&mut self.events, index, text);
    }

    /// More of the last call's arguments.
    pub(super) fn argument(&mut self, c: char) {
        self.arguments(c.encode_utf8(&mut [0; 4]));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// What was found stands: it goes out.
    pub(super) fn give(&mut self, out: &mut Vec<Event>) {
        self.stands = self.next;
        for event in self.events.drain(..) {
            match event {
                Event::Arguments { index, fragment } => add_arguments(out, index, &fragment),
                other => out.push(other),
            }
        }
    }

    /// What was found came to nothing.
    pub(super) fn forget(&mut self) {
        self.next = self.stands;
        self.events.clear();
    }
}

/// Appends to the last event, if that has arguments of the same call.
fn add_arguments(events: &mut Vec<Event>, call: usize, text: &str) {
    match events.last_mut() {
        _ if text.is_empty() => {}
        Some(Event::Arguments { index, fragment }) if *index == call => fragment.push_str(text),
        _ => events.push(Event::Arguments { index: call, fragment: text.to_owned() }),
    }
}

/// Takes the next character of a word in ASCII, of which `at` have come.
pub(super) fn literal(word: &str, at: &mut usize, c: char) -> Progress {
    if word.as_bytes().get(*at).map(|byte| char::from(*byte)) != Some(c) {
        return Progress::Fail;
    }
    *at += 1;
    if *at == word.len() { Progress::Done } else { Progress::More }
}
