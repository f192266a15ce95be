//! A few threads that share the items of a job and sleep between jobs.
//!
//! The thread that calls [`Pool::run`] is member 0 and takes items too, so a job is finished even when no other
//! member gets a core: the caller waits only for members that have taken an item. Which member computes an item
//! changes nothing in its result, hence items are simply taken from a counter.
#![expect(unsafe_code, reason = "a job borrows from the caller's stack")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::disjoint::Disjoint;
use crate::model::ForwardError;

/// Looks at the next job that an idle member takes before it sleeps: some 10 to 50 µs, the time between two jobs
/// of one step.
const SPINS: usize = 400;

/// What a member runs first; the shell sets priorities there.
pub type ThreadStartHook = Arc<dyn Fn() + Send + Sync>;

/// What is done with an item: `task(member, item)`.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The pool. Dropping it ends its threads.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// Counts jobs; changed under the lock, watched without.
    generation: AtomicU64,
    /// The next item of the job to take.
    next: AtomicUsize,
    /// Members other than the caller that are at the job; changed under the lock, watched without.
    active: AtomicUsize,
    state: Mutex<State>,
    /// A job was published, or the pool closes.
    work: Condvar,
    /// The last active member left.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    sleeping: usize,
    closed: bool,
    panic: Option<String>,
}

#[derive(Clone, Copy)]
struct Job {
    /// Borrowed from the caller of `run`, which does not return before every member has left the job.
    task: &'static Task<'static>,
    items: usize,
}

impl Pool {
    /// A pool of `threads` members (at least one), the caller included; `on_start` runs on each of the others.
    pub(super) fn new(threads: usize, on_start: Option<ThreadStartHook>) -> std::io::Result<Self> {
        let mut pool = Self { shared: Arc::default(), threads: Vec::new() };
        for member in 1..threads {
            let (shared, on_start) = (Arc::clone(&pool.shared), on_start.clone());
            let thread = std::thread::Builder::new().name(format!("engine-{member}")).spawn(move || {
                if let Some(hook) = on_start {
                    hook();
                }
                shared.serve(member);
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Members, the caller included.
    pub(super) fn members(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task(member, item)` once for every item below `items`, on any member in any order. When a call
    /// panics, items not yet taken are skipped and the panic is the error.
    pub(super) fn run(&mut self, items: usize, task: &Task<'_>) -> Result<(), ForwardError> {
        if items <= 1 || self.threads.is_empty() {
            return catch_unwind(AssertUnwindSafe(|| (0..items).for_each(|item| task(0, item))))
                .map_err(|panic| ForwardError::Device(message(&*panic)));
        }
        // SAFETY: only the lifetime changes. Members use the task between taking the job (under the lock, while it
        // is published) and leaving it; `finish` unpublishes it and waits until all have left, and nothing between
        // here and there unwinds.
        let task = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        let job = Job { task, items };
        self.shared.publish(job);
        let panic = self.shared.take_items(job, 0);
        self.shared.finish(panic).map_or(Ok(()), |panic| Err(ForwardError::Device(panic)))
    }

    /// Calls `task(member, i, chunk)` for every chunk of `chunk_len` elements of `data`, each on any member.
    pub(super) fn each_chunk<T: Send>(
        &mut self,
        data: &mut [T],
        chunk_len: usize,
        task: impl Fn(usize, usize, &mut [T]) + Sync,
    ) -> Result<(), ForwardError> {
        let len = data.len();
        let chunks = len.div_ceil(chunk_len);
        let data = Disjoint::new(data);
        self.run(chunks, &|member, i| {
            // SAFETY: every item is another chunk, and chunks do not overlap.
            let chunk = unsafe { data.part(i * chunk_len..len.min((i + 1) * chunk_len)) };
            task(member, i, chunk);
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A member can only have panicked in the start hook; there is nobody to tell while dropping.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// No code that panics runs under the lock, so a poisoned lock holds a sound state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, job: Job) {
        self.next.store(0, Ordering::Relaxed);
        let mut state = self.lock();
        state.job = Some(job);
        self.generation.fetch_add(1, Ordering::Release);
        let sleeping = state.sleeping;
        drop(state);
        if sleeping > 0 {
            self.work.notify_all();
        }
    }

    /// Takes items until none is left; a panic ends the job and comes back as its message.
    fn take_items(&self, job: Job, member: usize) -> Option<String> {
        let items = AssertUnwindSafe(|| {
            loop {
                let item = self.next.fetch_add(1, Ordering::Relaxed);
                if item >= job.items {
                    return;
                }
                (job.task)(member, item);
            }
        });
        let panic = catch_unwind(items).err()?;
        self.next.store(job.items, Ordering::Relaxed);
        Some(message(&*panic))
    }

    /// Unpublishes the job and waits for the members that are at it. The first panic, if any.
    fn finish(&self, panic: Option<String>) -> Option<String> {
        self.lock().job = None;
        for _ in 0..SPINS {
            if self.active.load(Ordering::Acquire) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        while self.active.load(Ordering::Acquire) > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        panic.or(state.panic.take())
    }

    /// A member's life.
    fn serve(&self, member: usize) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            let panic = self.take_items(job, member);
            let mut state = self.lock();
            if panic.is_some() {
                state.panic = panic;
            }
            if self.active.fetch_sub(1, Ordering::Release) == 1 {
                self.idle.notify_all();
            }
        }
    }

    /// Waits for a job later than `seen`; `None` when the pool closes.
    fn next_job(&self, seen: &mut u64) -> Option<Job> {
        loop {
            for _ in 0..SPINS {
                if self.generation.load(Ordering::Acquire) != *seen {
                    break;
                }
                std::hint::spin_loop();
            }
            let mut state = self.lock();
            while !state.closed && self.generation.load(Ordering::Acquire) == *seen {
                state.sleeping += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
            }
            if state.closed {
                return None;
            }
            *seen = self.generation.load(Ordering::Acquire);
            // A job that ended before this member came is not published any more: wait for the next.
            if let Some(job) = state.job {
                self.active.fetch_add(1, Ordering::Release);
                return Some(job);
            }
        }
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("panic in a kernel: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once() {
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(threads, None).unwrap();
            assert_eq!(pool.members(), threads);
            for items in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, &|member, item| {
                    assert!(member < threads);
                    counts[item].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn chunks_cover_the_data() {
        let mut pool = Pool::new(3, None).unwrap();
        let mut data = vec![0; 1003];
        pool.each_chunk(&mut data, 10, |_, i, chunk| chunk.fill(i)).unwrap();
        assert!(data.iter().enumerate().all(|(i, value)| *value == i / 10));
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(threads, None).unwrap();
            for round in 0..20 {
                let error = pool.run(100, &|_, item| assert!(item != round, "item {item}")).unwrap_err();
                assert_eq!(error, ForwardError::Device(format!("panic in a kernel: item {round}")));
                let sum = AtomicUsize::new(0);
                pool.run(100, &|_, item| {
                    sum.fetch_add(item, Ordering::Relaxed);
                })
                .unwrap();
                assert_eq!(sum.into_inner(), 4950);
            }
        }
    }

    #[test]
    fn many_short_jobs_are_each_complete_on_return() {
        let mut pool = Pool::new(3, None).unwrap();
        let mut data = vec![0_usize; 64];
        for round in 1..=20_000 {
            pool.each_chunk(&mut data, 1, |_, _, chunk| chunk[0] += 1).unwrap();
            assert!(data.iter().all(|value| *value == round));
            if round % 5000 == 0 {
                // Long enough for the members to fall asleep.
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn the_hook_runs_on_every_thread_but_the_callers() {
        let started = Arc::new(AtomicUsize::new(0));
        let hook: ThreadStartHook = {
            let started = Arc::clone(&started);
            Arc::new(move || {
                started.fetch_add(1, Ordering::Relaxed);
            })
        };
        drop(Pool::new(3, Some(hook)).unwrap());
        assert_eq!(started.load(Ordering::Relaxed), 2);
    }
}
