//! One output, written by several threads at once, each its own part.
#![expect(unsafe_code, reason = "threads write interleaved stripes of one slice")]

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice whose parts may be borrowed from several threads, when they promise not to overlap.
pub(super) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out `&mut [T]` parts that do not overlap (see `part`), which may be sent where T may.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for as long as parts of it are written.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No other part that overlaps `range` may be alive.
    ///
    /// # Panics
    /// When the range does not lie in the slice.
    #[expect(clippy::mut_from_ref, reason = "that the caller may is its promise")]
    #[inline(always)]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion; unaliased by the caller's promise and the exclusive borrow in `new`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
