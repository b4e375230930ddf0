//! The counting allocator: how many bytes each rank holds, now and at its peak, and a hard budget per rank.
//!
//! Burn's flex backend takes its buffers from the global allocator, so counting there is exact. Every thread carries a tag that says for which rank
//! it allocates; a block of [`COUNTED_FROM`] bytes or more remembers its owner in a header in front of it, so that it is credited to that rank
//! whichever thread frees it. Smaller blocks are not counted. A rank over its budget does not unwind: it writes the `oom` message and ends the process.
#![expect(unsafe_code, reason = "a global allocator is unsafe by nature")]

mod cache;
mod out_of_memory;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};

/// Blocks of this many bytes and more are counted.
pub const COUNTED_FROM: usize = 1024;

/// Most ranks, over all worlds of a process, that can be counted at a time.
pub const MAX_RANKS: usize = 1024;

/// Room in front of a counted block. 16 is what the system's allocator aligns every block to, so small alignments cost nothing.
const HEADER: usize = 16;

/// Marks the owner of a block as host memory of its rank.
const HOST: u32 = 1 << 31;

/// No rank: the block is not counted.
const NOBODY: u32 = 0;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

static SLOTS: [Slot; MAX_RANKS] = [const { Slot::new() }; MAX_RANKS];

/// Which slots belong to nobody. Never taken inside the allocator.
static IN_USE: Mutex<[bool; MAX_RANKS]> = Mutex::new([false; MAX_RANKS]);

thread_local! {
    /// Owner of what this thread allocates: 0, or a slot's index + 1, perhaps with [`HOST`]. Constant and without a destructor, so that reading it never
    /// allocates and works to the very end of a thread.
    static OWNER: Cell<u32> = const { Cell::new(NOBODY) };
}

/// Counters of one rank. Aligned so that ranks do not share cache lines.
#[repr(align(128))]
struct Slot {
    device: AtomicUsize,
    device_peak: AtomicUsize,
    host: AtomicUsize,
    host_peak: AtomicUsize,
    budget: AtomicUsize,
    rank: AtomicUsize,
    phase: AtomicU8,
}

impl Slot {
    const fn new() -> Self {
        Self {
            device: AtomicUsize::new(0),
            device_peak: AtomicUsize::new(0),
            host: AtomicUsize::new(0),
            host_peak: AtomicUsize::new(0),
            budget: AtomicUsize::new(usize::MAX),
            rank: AtomicUsize::new(0),
            phase: AtomicU8::new(0),
        }
    }
}

/// The counters of a world of ranks. Worlds are counted apart, so that tests in one process do not see each other.
#[derive(Debug)]
pub struct Accounts {
    ranks: Vec<Account>,
}

/// More than [`MAX_RANKS`] ranks at a time.
#[derive(Debug, thiserror::Error)]
#[error("{0} ranks cannot be counted in one process, at most {MAX_RANKS} can")]
pub struct TooManyRanks(usize);

impl Accounts {
    /// Counters for `world_size` ranks, all zero and without a budget.
    ///
    /// # Errors
    /// So many ranks cannot be counted.
    pub fn new(world_size: usize) -> Result<Self, TooManyRanks> {
        let mut in_use = IN_USE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // A slot whose world is gone may still own blocks that other threads hold; it is used again only when the last of them is freed.
        let is_free = |index: &usize| !in_use[*index] && SLOTS[*index].device.load(Relaxed) == 0 && SLOTS[*index].host.load(Relaxed) == 0;
        let free: Vec<usize> = (0..MAX_RANKS).filter(is_free).take(world_size).collect();
        if free.len() < world_size {
            return Err(TooManyRanks(world_size));
        }
        for (rank, index) in free.iter().enumerate() {
            in_use[*index] = true;
            let slot = &SLOTS[*index];
            slot.device_peak.store(0, Relaxed);
            slot.host_peak.store(0, Relaxed);
            slot.budget.store(usize::MAX, Relaxed);
            slot.rank.store(rank, Relaxed);
            slot.phase.store(Phase::Load as u8, Relaxed);
        }
        Ok(Self { ranks: free.into_iter().map(Account).collect() })
    }

    /// The counters of one rank.
    pub fn rank(&self, rank: usize) -> Account {
        self.ranks[rank]
    }

    /// The counters of all ranks, in order.
    pub fn ranks(&self) -> &[Account] {
        &self.ranks
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        let mut in_use = IN_USE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for account in &self.ranks {
            in_use[account.0] = false;
        }
    }
}

/// What a rank holds, in bytes of blocks of [`COUNTED_FROM`] bytes and more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Device bytes in use.
    pub allocated: u64,
    /// Most device bytes ever in use.
    pub peak: u64,
    /// Host bytes in use: offloaded shards, data, what is allocated inside [`host`].
    pub host: u64,
    /// Most host bytes ever in use.
    pub host_peak: u64,
}

/// The counters of one rank. Used only while its [`Accounts`] live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account(usize);

impl Account {
    /// Counts what this thread allocates as device memory of the rank until the guard goes. Guards nest: a thread that runs a collective for
    /// other ranks enters each of them to allocate its output.
    pub fn enter(self) -> RankGuard {
        RankGuard { before: OWNER.replace(self.tag()), not_send: PhantomData }
    }

    /// Counts what this thread allocates as device memory of the rank until the thread ends: for the workers of a rank's thread pool.
    pub fn adopt_thread(self) {
        OWNER.set(self.tag());
    }

    /// What the rank holds now.
    pub fn usage(self) -> MemoryUsage {
        let slot = &SLOTS[self.0];
        let read = |counter: &AtomicUsize| counter.load(Relaxed) as u64;
        MemoryUsage { allocated: read(&slot.device), peak: read(&slot.device_peak), host: read(&slot.host), host_peak: read(&slot.host_peak) }
    }

    /// Sets the most device bytes the rank may hold; `None` is all there is. An allocation that would exceed it ends the process (exit code 4).
    pub fn set_budget(self, bytes: Option<u64>) {
        let bytes = bytes.map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        SLOTS[self.0].budget.store(bytes, Relaxed);
    }

    /// Names what the rank is doing, for the `oom` message.
    pub fn set_phase(self, phase: Phase) {
        SLOTS[self.0].phase.store(phase as u8, Relaxed);
    }

    /// Forgets the peaks: they become what is in use now.
    pub fn reset_peak(self) {
        let slot = &SLOTS[self.0];
        slot.device_peak.store(slot.device.load(Relaxed), Relaxed);
        slot.host_peak.store(slot.host.load(Relaxed), Relaxed);
    }

    fn tag(self) -> u32 {
        self.0 as u32 + 1
    }
}

/// What a rank is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Building the model and reading weights.
    Load,
    /// A forward pass of training.
    Forward,
    /// A backward pass.
    Backward,
    /// The optimiser's step.
    Optimizer,
    /// A forward pass of an evaluation.
    Evaluate,
    /// Saving state.
    Checkpoint,
}

impl Phase {
    const ALL: [Self; 6] = [Self::Load, Self::Forward, Self::Backward, Self::Optimizer, Self::Evaluate, Self::Checkpoint];

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Evaluate => "evaluate",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// While it lives, its thread allocates for a rank.
#[derive(Debug)]
#[must_use = "the thread allocates for the rank only while the guard lives"]
pub struct RankGuard {
    before: u32,
    /// The guard restores the tag of the thread it was made on.
    not_send: PhantomData<*const ()>,
}

impl Drop for RankGuard {
    fn drop(&mut self) {
        OWNER.set(self.before);
    }
}

/// Runs `work` with this thread's allocations counted as host memory of its rank, outside the budget: data, tokens, messages, offloaded shards.
pub fn host<R>(work: impl FnOnce() -> R) -> R {
    let before = OWNER.get();
    let _guard = RankGuard { before, not_send: PhantomData };
    if before != NOBODY {
        OWNER.set(before | HOST);
    }
    work()
}

/// The account this thread allocates for, if any.
pub fn current() -> Option<Account> {
    match OWNER.get() & !HOST {
        NOBODY => None,
        tag => Some(Account(tag as usize - 1)),
    }
}

/// Names what this thread's rank is doing, for the `oom` message.
pub fn set_phase(phase: Phase) {
    if let Some(account) = current() {
        account.set_phase(phase);
    }
}

/// Gives the allocator the open messages file that the `oom` message is appended to. Without it the message goes to standard error.
pub fn arm(messages: OwnedFd) {
    out_of_memory::MESSAGES.store(messages.into_raw_fd(), Relaxed);
}

/// The system's allocator, counted. A block of [`COUNTED_FROM`] bytes or more lies behind a header of `max(alignment, 16)` bytes whose last 16 begin
/// with the owner. Its caller names the layout again when it frees, so the size alone says whether there is a header.
struct CountingAllocator;

/// The block that is really asked from the system, and where in it the caller's begins.
fn with_header(layout: Layout) -> Option<(Layout, usize)> {
    let align = layout.align().max(HEADER);
    let size = layout.size().checked_add(align)?;
    Some((Layout::from_size_align(size, align).ok()?, align))
}

/// Counts `bytes` more for `owner`; ends the process if that exceeds its budget.
fn charge(owner: u32, bytes: usize) {
    if owner == NOBODY {
        return;
    }
    let slot = &SLOTS[(owner & !HOST) as usize - 1];
    if owner & HOST != 0 {
        let now = slot.host.fetch_add(bytes, Relaxed) + bytes;
        slot.host_peak.fetch_max(now, Relaxed);
        return;
    }
    let before = slot.device.fetch_add(bytes, Relaxed);
    let budget = slot.budget.load(Relaxed);
    if before.saturating_add(bytes) > budget {
        let phase = Phase::ALL.get(usize::from(slot.phase.load(Relaxed))).map_or("", |phase| phase.name());
        out_of_memory::end_process(out_of_memory::LastWords { rank: slot.rank.load(Relaxed), requested: bytes, in_use: before, budget, phase });
    }
    // The sum is a value the counter really had, so the maximum over all of them is the exact peak whatever other threads do.
    slot.device_peak.fetch_max(before + bytes, Relaxed);
}

/// Counts `bytes` less for `owner`.
fn credit(owner: u32, bytes: usize) {
    if owner == NOBODY {
        return;
    }
    let slot = &SLOTS[(owner & !HOST) as usize - 1];
    let counter = if owner & HOST != 0 { &slot.host } else { &slot.device };
    counter.fetch_sub(bytes, Relaxed);
}

impl CountingAllocator {
    /// Allocates a counted block, `zeroed` or not.
    ///
    /// # Safety
    /// `layout` has a size of at least [`COUNTED_FROM`].
    unsafe fn allocate_counted(layout: Layout, zeroed: bool) -> *mut u8 {
        let Some((outer, offset)) = with_header(layout) else { return ptr::null_mut() };
        let owner = OWNER.try_with(Cell::get).unwrap_or(NOBODY);
        charge(owner, layout.size());
        let kept = cache::take(outer);
        let base = if kept.is_null() {
            // SAFETY: `outer` is larger than `layout`, whose size is not zero.
            unsafe { if zeroed { System.alloc_zeroed(outer) } else { System.alloc(outer) } }
        } else {
            if zeroed {
                // SAFETY: the block is as long as `outer` and nobody else's.
                unsafe { kept.write_bytes(0, outer.size()) };
            }
            kept
        };
        if base.is_null() {
            credit(owner, layout.size());
            return base;
        }
        // SAFETY: the block is `offset + layout.size()` long and `offset >= HEADER`, so both pointers lie inside it; `base` and `offset` are multiples
        // of 16, so the owner's place is aligned; nobody else knows the block yet.
        unsafe {
            let block = base.add(offset);
            block.sub(HEADER).cast::<u32>().write(owner);
            block
        }
    }

    /// Who owns a counted block.
    ///
    /// # Safety
    /// `block` was answered by this allocator for a size of at least [`COUNTED_FROM`] and is not freed.
    unsafe fn owner_of(block: *mut u8) -> u32 {
        // SAFETY: such a block has its owner written `HEADER` bytes in front of it.
        unsafe { block.sub(HEADER).cast::<u32>().read() }
    }
}

// SAFETY: blocks come from `System` with a layout that contains the caller's at an offset that keeps its alignment; size alone, which the caller names
// truthfully by `GlobalAlloc`'s contract, decides between the two forms, so a block is always freed the way it was made. Nothing here unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < COUNTED_FROM {
            // SAFETY: the caller's promises are passed on.
            return unsafe { System.alloc(layout) };
        }
        // SAFETY: the size was checked.
        unsafe { Self::allocate_counted(layout, false) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() < COUNTED_FROM {
            // SAFETY: the caller's promises are passed on.
            return unsafe { System.alloc_zeroed(layout) };
        }
        // SAFETY: the size was checked; the header is outside the caller's part.
        unsafe { Self::allocate_counted(layout, true) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() < COUNTED_FROM {
            // SAFETY: so small a block came from `System` as it is.
            return unsafe { System.dealloc(block, layout) };
        }
        // A block of this layout exists, so its outer layout was computed before.
        let Some((outer, offset)) = with_header(layout) else { return };
        // SAFETY: the caller owns `block`, which was made by `allocate_counted` with the same layout, or grown to it by `realloc`.
        unsafe {
            credit(Self::owner_of(block), layout.size());
            cache::give(block.sub(offset), outer);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        match (layout.size() < COUNTED_FROM, new_size < COUNTED_FROM) {
            // SAFETY: small blocks are `System`'s as they are.
            (true, true) => unsafe { System.realloc(block, layout, new_size) },
            (false, false) => {
                // SAFETY: the caller promises that `new_size` with this alignment is a valid layout.
                let Some((outer, offset)) = with_header(layout) else { return ptr::null_mut() };
                let Some(new_outer) = new_size.checked_add(offset) else { return ptr::null_mut() };
                // SAFETY: the block is a counted one of the caller's. The owner stays the one who made it.
                let owner = unsafe { Self::owner_of(block) };
                let (more, less) = (new_size.saturating_sub(layout.size()), layout.size().saturating_sub(new_size));
                if more > 0 {
                    charge(owner, more);
                }
                // SAFETY: `block - offset` is what `System` answered for `outer`; the header, being the block's beginning, moves with it.
                let base = unsafe { System.realloc(block.sub(offset), outer, new_outer) };
                if base.is_null() {
                    credit(owner, more);
                    return base;
                }
                credit(owner, less);
                // SAFETY: the new block is longer than `offset`.
                unsafe { base.add(offset) }
            }
            _ => {
                // SAFETY: the caller promises that `new_size` is not zero and, rounded up to the alignment, does not overflow.
                let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
                // SAFETY: two different blocks of at least the smaller size; the old one is the caller's to free.
                unsafe {
                    let new_block = self.alloc(new_layout);
                    if !new_block.is_null() {
                        ptr::copy_nonoverlapping(block, new_block, layout.size().min(new_size));
                        self.dealloc(block, layout);
                    }
                    new_block
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
