//! What compiling a schema will cost, counted beforehand.
//!
//! The compiler takes a time that grows with the square of some counts, and with the power of others. Each has a bound
//! here. The counts follow the compiler's way of reading: subschemas that hold for the same value (`allOf`, references
//! and alternatives with keywords beside them) are merged, and merging is what multiplies.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

type Object = Map<String, Value>;

/// Most subschemas, those within constants included.
const SUBSCHEMAS_MAX: usize = 4_000;
/// Most members of one object that may be left out: the parser follows all that may come next at once.
const OPTIONAL_MAX: usize = 450;
/// Most patterns and formats.
const REGEXES_MAX: usize = 200;
/// Most patterns and formats that hold for one and the same string.
const REGEXES_AT_ONCE_MAX: usize = 6;
/// Most patterns of names. Each is compared with each, again in every merge.
const NAME_PATTERNS_MAX: usize = 32;
const NAME_PATTERN_PAIRS_MAX: usize = 10_000;
/// Most alternatives of `oneOf`, and most constants in them. Each is compared with each.
const ONE_OF_MAX: usize = 500;
const ONE_OF_CONSTANTS_MAX: usize = 2_000;
/// Greatest `multipleOf`, without its decimal point; of several that may meet, their product.
const MULTIPLE_MAX: u64 = 10_000;
/// Most subschemas looked at to see what merges.
const MERGE_VISITS_MAX: usize = 20_000;

/// Keywords that apply schemas to the same value.
const APPLICATORS: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that leave a value as it is, or give its type alone.
const IDLE: [&str; 17] = [
    "type",
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$comment",
    "title",
    "description",
    "default",
    "readOnly",
    "writeOnly",
    "examples",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
];

/// Keywords whose value maps names of any kind to schemas.
pub(super) const MAPS: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Keywords whose value is no schema, however it looks.
pub(super) const PLAIN: [&str; 6] = ["const", "enum", "default", "examples", "required", "type"];

/// The schemas directly within a schema, each with the name of its keyword: everything that a reference can lead to
/// without passing another schema.
fn children(schema: &Object) -> impl Iterator<Item = (&str, &Object)> {
    schema.iter().filter(|(keyword, _)| !PLAIN.contains(&keyword.as_str())).flat_map(|(keyword, value)| {
        let mut within = Vec::new();
        match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                for value in map.values() {
                    objects(value, &mut within);
                }
            }
            other => objects(other, &mut within),
        }
        within.into_iter().map(move |schema| (keyword.as_str(), schema))
    })
}

/// An object, or those in arrays however deep.
fn objects<'a>(value: &'a Value, found: &mut Vec<&'a Object>) {
    match value {
        Value::Object(object) => found.push(object),
        Value::Array(items) => {
            for item in items {
                objects(item, found);
            }
        }
        _ => {}
    }
}

/// Counts over all schemas of a grammar.
#[derive(Debug)]
pub(super) struct Survey {
    subschemas: usize,
    regexes: usize,
    name_patterns: usize,
    merges: usize,
    one_of: usize,
    one_of_constants: usize,
    /// Product of all that are named.
    multiple: u64,
}

impl Default for Survey {
    fn default() -> Self {
        Self {
            subschemas: 0,
            regexes: 0,
            name_patterns: 0,
            merges: 0,
            one_of: 0,
            one_of_constants: 0,
            multiple: 1,
        }
    }
}

fn bound(what: &str, came: usize, most: usize) -> Result<(), String> {
    if came <= most { Ok(()) } else { Err(format!("at most {most} {what} expected, {came} came")) }
}

impl Survey {
    /// Counts a schema, after those before it.
    ///
    /// # Errors
    /// When they would take too long: the count that is over its bound.
    pub(super) fn check(&mut self, root: &Object) -> Result<(), String> {
        self.add(root, false)?;
        bound("subschemas", self.subschemas, SUBSCHEMAS_MAX)?;
        bound("patterns and formats", self.regexes, REGEXES_MAX)?;
        bound("patternProperties", self.name_patterns, NAME_PATTERNS_MAX)?;
        let pairs = self.name_patterns.pow(2).saturating_mul(1 + self.merges);
        bound("pairs of patternProperties that meet", pairs, NAME_PATTERN_PAIRS_MAX)?;
        bound("alternatives of oneOf", self.one_of, ONE_OF_MAX)?;
        bound("constants within oneOf", self.one_of_constants, ONE_OF_CONSTANTS_MAX)?;
        if self.merges > 0 {
            if self.multiple > MULTIPLE_MAX {
                return Err(format!("multipleOf: at most {MULTIPLE_MAX} in all expected, more came"));
            }
            if self.regexes > REGEXES_AT_ONCE_MAX {
                Merging { root, visits: 0 }.check(root)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, schema: &Object, in_one_of: bool) -> Result<(), String> {
        self.subschemas += 1;
        // Early, so that what follows goes through a bounded number of them.
        bound("subschemas", self.subschemas, SUBSCHEMAS_MAX)?;
        self.regexes += regexes(schema);
        self.merges += merges(schema);
        self.name_patterns += schema.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
        self.one_of += schema.get("oneOf").and_then(Value::as_array).map_or(0, Vec::len);
        check_optional(schema)?;
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            check_reference(reference)?;
        }
        if let Some(multiple) = schema.get("multipleOf") {
            let multiple = digits(multiple);
            if multiple > MULTIPLE_MAX {
                return Err(format!(
                    "multipleOf: at most {MULTIPLE_MAX} (without its decimal point) expected"
                ));
            }
            self.multiple = self.multiple.saturating_mul(multiple.max(1));
        }
        for value in ["const", "enum"].into_iter().filter_map(|keyword| schema.get(keyword)) {
            self.add_constant(value, in_one_of);
        }
        for (keyword, child) in children(schema) {
            self.add(child, in_one_of || keyword == "oneOf")?;
        }
        Ok(())
    }

    /// Arrays and objects among the constants are compiled like schemas.
    fn add_constant(&mut self, value: &Value, in_one_of: bool) {
        match value {
            Value::Array(items) => {
                self.subschemas += 1;
                for item in items {
                    self.add_constant(item, in_one_of);
                }
            }
            Value::Object(map) => {
                self.subschemas += 1;
                for item in map.values() {
                    self.add_constant(item, in_one_of);
                }
            }
            _ => self.one_of_constants += usize::from(in_one_of),
        }
    }
}

fn regexes(schema: &Object) -> usize {
    usize::from(schema.contains_key("pattern")) + usize::from(schema.contains_key("format"))
}

fn check_optional(schema: &Object) -> Result<(), String> {
    let properties = schema.get("properties").and_then(Value::as_object).map_or(0, Map::len);
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    bound("optional members of an object", properties.saturating_sub(required), OPTIONAL_MAX)
}

/// The steps of a reference within its document: what the pointer after `#` names. Source: RFC 6901, section 6.
fn steps(reference: &str) -> impl Iterator<Item = String> {
    let pointer = reference.split_once('#').map_or("", |(_, pointer)| pointer);
    pointer.split('/').skip(1).map(|step| percent_decoded(step).replace("~1", "/").replace("~0", "~"))
}

fn percent_decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, after @ ..] = rest {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = &after[if byte.is_some() { 2 } else { 0 }..];
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Refuses a reference into a value that is no schema: what is there was not counted.
fn check_reference(reference: &str) -> Result<(), String> {
    let mut is_name = false;
    for step in steps(reference) {
        if !is_name && PLAIN.contains(&step.as_str()) {
            return Err(format!("$ref: a schema expected, {reference:?} leads into {step}"));
        }
        is_name = !is_name && MAPS.contains(&step.as_str());
    }
    Ok(())
}

/// How many times two schemas are merged for the value of this one.
fn merges(schema: &Object) -> usize {
    let own = schema.keys().any(|key| !IDLE.contains(&key.as_str()) && !APPLICATORS.contains(&key.as_str()));
    let many = |keyword| schema.get(keyword).and_then(Value::as_array).map_or(0, Vec::len);
    let (all, any, one) = (many("allOf"), many("anyOf"), many("oneOf"));
    let reference = usize::from(schema.contains_key("$ref"));
    let parts = usize::from(own) + all + usize::from(any > 0) + usize::from(one > 0) + reference;
    if parts < 2 { 0 } else { usize::from(own) + all + any + one + reference - 1 }
}

/// The digits of a number without its decimal point and the zeros after it: 0.25 has 25.
fn digits(number: &Value) -> u64 {
    let text = number.to_string();
    let plain = text.trim_start_matches('-').split(['e', 'E']).next().unwrap_or_default().replace('.', "");
    let is_whole = number.is_u64() || number.is_i64();
    let plain = if is_whole { plain.as_str() } else { plain.trim_end_matches('0') };
    let plain = plain.trim_start_matches('0');
    if plain.is_empty() { 0 } else { plain.parse().unwrap_or(u64::MAX) }
}

/// Finds how many patterns and formats may come to hold for the same string.
struct Merging<'a> {
    root: &'a Object,
    visits: usize,
}

impl<'a> Merging<'a> {
    /// Checks a schema and all within it.
    fn check(&mut self, schema: &'a Object) -> Result<(), String> {
        if merges(schema) > 0 {
            let mut at = HashMap::new();
            self.gather(schema, "", &mut HashSet::new(), &mut at)?;
            let most = at.values().copied().max().unwrap_or_default();
            bound("patterns and formats that hold at once", most, REGEXES_AT_ONCE_MAX)?;
        }
        for (_, child) in children(schema) {
            self.check(child)?;
        }
        Ok(())
    }

    /// Counts patterns and formats by their path within the value. Alternatives count as if all held, and names that
    /// are open as if they were one.
    fn gather(
        &mut self,
        schema: &'a Object,
        path: &str,
        above: &mut HashSet<*const Object>,
        at: &mut HashMap<String, usize>,
    ) -> Result<(), String> {
        self.visits += 1;
        bound("combined subschemas", self.visits, MERGE_VISITS_MAX)?;
        let address = std::ptr::from_ref(schema);
        if !above.insert(address) {
            return Ok(());
        }
        *at.entry(path.to_owned()).or_default() += regexes(schema);
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|target| self.find(target));
        if let Some(target) = target {
            self.gather(target, path, above, at)?;
        }
        for (keyword, child) in children(schema).filter(|(keyword, _)| !keyword.contains("def")) {
            match keyword {
                "allOf" | "anyOf" | "oneOf" => self.gather(child, path, above, at)?,
                "properties" => {}
                other => self.gather(child, &format!("{path}/{other}"), above, at)?,
            }
        }
        for (name, child) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            if let Some(child) = child.as_object() {
                self.gather(child, &format!("{path}/properties/{name}"), above, at)?;
            }
        }
        above.remove(&address);
        Ok(())
    }

    /// What a reference within the document points at.
    fn find(&self, reference: &str) -> Option<&'a Object> {
        let mut steps = steps(reference);
        let Some(first) = steps.next() else { return Some(self.root) };
        let mut value = self.root.get(&first)?;
        for step in steps {
            value = match value {
                Value::Array(items) => items.get(step.parse::<usize>().ok()?)?,
                other => other.get(&step)?,
            };
        }
        value.as_object()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: &Value, expected: Result<(), &str>) {
        let checked = Survey::default().check(schema.as_object().expect("an object"));
        assert_eq!(checked.as_ref().err().map(String::as_str), expected.err());
    }

    fn string(index: usize) -> Value {
        json!({ "type": "string", "pattern": format!("w{index}") })
    }

    #[test]
    fn patterns_count_where_they_meet() {
        let schemas: Vec<Value> = (0..9).map(string).collect();
        let refused = Err("at most 6 patterns and formats that hold at once expected, 9 came");
        check(&json!({ "allOf": schemas }), refused);
        let at_a: Vec<Value> =
            schemas.iter().map(|schema| json!({ "properties": { "a": schema } })).collect();
        check(&json!({ "allOf": at_a }), refused);
        let chain: Map<String, Value> = (0..9)
            .map(|i| {
                let next = json!({ "$ref": format!("#/$defs/{}", (i + 1) % 10), "pattern": format!("w{i}") });
                (i.to_string(), next)
            })
            .collect();
        check(&json!({ "$ref": "#/$defs/0", "$defs": chain }), refused);
        // Side by side they do not meet.
        let apart: Map<String, Value> = (0..9).map(|i| (format!("p{i}"), string(i))).collect();
        check(&json!({ "properties": apart, "anyOf": [{ "required": ["p1"] }, {}] }), Ok(()));
        check(&json!({ "anyOf": schemas }), Ok(()));
    }

    #[test]
    fn nothing_hides_where_references_lead() {
        let hidden: Vec<Value> = (0..9).map(string).collect();
        for (reference, within) in [
            ("#/default", "default"),
            ("#/%64efault", "default"),
            ("#/allOf/0/enum/0", "enum"),
            ("x#/const", "const"),
        ] {
            let text = format!("$ref: a schema expected, {reference:?} leads into {within}");
            check(&json!({ "$ref": reference }), Err(&text));
        }
        for reference in ["#", "#/properties/default", "#/$defs/type/items", "#/$defs/a~1b", "other"] {
            check(&json!({ "$ref": reference }), Ok(()));
        }
        // However deep in arrays of a keyword that nobody knows.
        check(
            &json!({ "$ref": "#/x/0/0", "x": [[{ "allOf": hidden }]] }),
            Err("at most 6 patterns and formats that hold at once expected, 9 came"),
        );
        assert_eq!(percent_decoded("a%2fb%zz%2"), "a/b%zz%2");
    }

    #[test]
    fn numbers_count_by_their_digits() {
        for (number, expected) in [("0.25", 25), ("100", 100), ("1.0", 1), ("0.0001", 1), ("12.5", 125)] {
            let value: Value = serde_json::from_str(number).expect("a number");
            assert_eq!(digits(&value), expected, "{number}");
        }
    }

    #[test]
    fn merges_count_what_is_more_than_one() {
        for (schema, expected) in [
            (json!({ "type": "object", "allOf": [{ "$ref": "#" }], "description": "x" }), 0),
            (json!({ "oneOf": [{}, {}, {}], "discriminator": {} }), 0),
            (json!({ "allOf": [{}, {}, {}] }), 2),
            (json!({ "properties": {}, "anyOf": [{}, {}] }), 2),
            (json!({ "$ref": "#", "maxLength": 3 }), 1),
        ] {
            assert_eq!(merges(schema.as_object().expect("an object")), expected, "{schema}");
        }
    }
}
