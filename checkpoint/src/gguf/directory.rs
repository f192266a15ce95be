//! The tensor directory: names, shapes, element types and places, each checked against the file's size.

use std::collections::BTreeMap;

use super::{Cursor, Part};
use crate::Error;
use crate::tensor::{TensorType, type_name};

/// Where a tensor is and how it is to be read.
#[derive(Clone, Debug)]
pub(crate) struct TensorEntry {
    /// The element type, or the name of one that cannot be read.
    pub(crate) dtype: Result<TensorType, String>,
    /// The product of all dimensions but the contiguous one.
    pub(crate) rows: usize,
    /// The contiguous dimension.
    pub(crate) cols: usize,
    /// Offset into the file, once placed.
    pub(crate) start: usize,
    /// Bytes; for a type that cannot be read, 0.
    pub(crate) len: usize,
}

/// An entry as the directory has it, its offset still relative to the data.
pub(super) struct Unplaced {
    name: String,
    entry: TensorEntry,
    offset: u64,
}

/// Reads `count` entries. Each is at least 32 bytes long, so a false count runs out of bytes, not of memory.
pub(super) fn parse(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Unplaced>, Error> {
    let mut entries = Vec::new();
    for index in 0..count {
        let name = cursor.text(Part::TensorName(index))?;
        let part = Part::Tensor(name);
        let (rows, cols) = shape(cursor, part)?;
        let code = cursor.u32(part)?;
        let offset = cursor.u64(part)?;
        let dtype = TensorType::of(code).ok_or_else(|| type_name(code));
        let len = match &dtype {
            Ok(dtype) => byte_len(*dtype, rows, cols, part)?,
            Err(_) => 0,
        };
        let entry = TensorEntry { dtype, rows, cols, start: 0, len };
        entries.push(Unplaced { name: name.to_owned(), entry, offset });
    }
    Ok(entries)
}

/// Rows and columns from one to four dimensions, the contiguous one first.
fn shape(cursor: &mut Cursor<'_>, part: Part<'_>) -> Result<(usize, usize), Error> {
    let dims = cursor.u32(part)?;
    if !(1..=4).contains(&dims) {
        return Err(part.malformed("1 to 4 dimensions", dims));
    }
    let mut sizes = [1_u64; 4];
    for size in &mut sizes[..dims as usize] {
        *size = cursor.u64(part)?;
    }
    let [cols, rest @ ..] = sizes;
    let rows = rest.iter().try_fold(1_u64, |rows, size| rows.checked_mul(*size));
    let elements = rows.and_then(|rows| rows.checked_mul(cols));
    match (elements, rows.map(usize::try_from), usize::try_from(cols)) {
        (Some(1..=MAX_ELEMENTS), Some(Ok(rows)), Ok(cols)) => Ok((rows, cols)),
        _ => Err(part.malformed("from 1 to 2^48 elements", format_args!("dimensions {sizes:?}"))),
    }
}

const MAX_ELEMENTS: u64 = 1 << 48;

fn byte_len(dtype: TensorType, rows: usize, cols: usize, part: Part<'_>) -> Result<usize, Error> {
    if !cols.is_multiple_of(dtype.block_len()) {
        let expected =
            format_args!("a multiple of {} columns for {}", dtype.block_len(), dtype.name()).to_string();
        return Err(part.malformed(expected, cols));
    }
    (cols / dtype.block_len())
        .checked_mul(dtype.block_bytes())
        .and_then(|row| row.checked_mul(rows))
        .ok_or_else(|| part.malformed("a size this machine can address", format_args!("{rows} x {cols}")))
}

/// Turns offsets into places in the file and checks that each is aligned, inside, and apart from the others.
pub(super) fn place(
    entries: Vec<Unplaced>,
    header_end: usize,
    alignment: u64,
    file_len: usize,
) -> Result<BTreeMap<String, TensorEntry>, Error> {
    // Lossless: a file's length fits u64, and header_end is inside the file.
    let data_start = (header_end as u64).next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    let mut places = Vec::with_capacity(entries.len());
    for Unplaced { name, mut entry, offset } in entries {
        let part = Part::Tensor(&name);
        if !offset.is_multiple_of(alignment) {
            return Err(part.malformed(format_args!("an offset that is a multiple of {alignment}"), offset));
        }
        let start = data_start.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(entry.len as u64));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file_len as u64)) else {
            let place = format_args!("{} bytes at data offset {offset}", entry.len).to_string();
            return Err(part.malformed(format_args!("to end inside the file's {file_len} bytes"), place));
        };
        entry.start = start as usize;
        places.push((start, end, name.clone()));
        if tensors.insert(name.clone(), entry).is_some() {
            return Err(Part::Tensor(&name).malformed("each name once", "the name a second time"));
        }
    }
    places.sort_unstable();
    for pair in places.windows(2) {
        let [(_, end, before), (start, _, after)] = pair else { unreachable!("windows of two") };
        if end > start {
            let found = format_args!("an overlap with tensor {before}").to_string();
            return Err(Part::Tensor(after).malformed("a place of its own", found));
        }
    }
    Ok(tensors)
}
