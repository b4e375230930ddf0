//! Large blocks that were freed, kept for the next one of the same layout.
//!
//! The C library gives blocks above 32 MiB back to the system as soon as they are freed, and those below whenever it can; every pass would then have the same
//! activations and gathered parameters mapped, and each of their pages zeroed, anew. What lies here is in nobody's use and is not counted as such.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Smaller blocks are the C library's to reuse.
const SMALLEST: usize = 1024 * 1024;

/// Most bytes kept.
const MOST_BYTES: usize = 512 * 1024 * 1024;

/// Most blocks kept.
const MOST_BLOCKS: usize = 128;

static CACHE: Cache = Cache { locked: AtomicBool::new(false), blocks: UnsafeCell::new(Blocks::EMPTY) };

/// Blocks behind a lock that allocates nothing.
struct Cache {
    locked: AtomicBool,
    blocks: UnsafeCell<Blocks>,
}

// SAFETY: `blocks` is reached only through `Cache::with`, which lets one thread in at a time; the pointers in it are owned by the cache.
unsafe impl Sync for Cache {}

/// Kept blocks, the oldest first.
struct Blocks {
    kept: [(*mut u8, usize, usize); MOST_BLOCKS],
    count: usize,
    bytes: usize,
}

impl Blocks {
    const EMPTY: Self = Self { kept: [(ptr::null_mut(), 0, 0); MOST_BLOCKS], count: 0, bytes: 0 };

    fn remove(&mut self, index: usize) -> (*mut u8, Layout) {
        let (base, size, align) = self.kept[index];
        self.kept.copy_within(index + 1..self.count, index);
        self.count -= 1;
        self.bytes -= size;
        // SAFETY: it was a layout when it was kept.
        (base, unsafe { Layout::from_size_align_unchecked(size, align) })
    }
}

impl Cache {
    fn with<R>(&self, work: impl FnOnce(&mut Blocks) -> R) -> R {
        while self.locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // Whoever holds the lock may have lost its processor.
            std::thread::yield_now();
        }
        // SAFETY: the lock is held, so no other reference exists; `work` neither unwinds nor comes back here.
        let result = work(unsafe { &mut *self.blocks.get() });
        self.locked.store(false, Ordering::Release);
        result
    }
}

/// A kept block of this layout, its contents arbitrary; null if there is none.
pub(super) fn take(layout: Layout) -> *mut u8 {
    if layout.size() < SMALLEST {
        return ptr::null_mut();
    }
    CACHE.with(|blocks| {
        let kept = &blocks.kept[..blocks.count];
        // The one freed last is the most likely to be in the processor's caches.
        match kept.iter().rposition(|(_, size, align)| (*size, *align) == (layout.size(), layout.align())) {
            Some(index) => blocks.remove(index).0,
            None => ptr::null_mut(),
        }
    })
}

/// Keeps a block, or gives it, or older ones, back to the system.
///
/// # Safety
/// `base` is a block of this layout that `System` gave, and nobody uses it any more.
pub(super) unsafe fn give(base: *mut u8, layout: Layout) {
    if layout.size() < SMALLEST || layout.size() > MOST_BYTES {
        // SAFETY: the caller's promise.
        return unsafe { System.dealloc(base, layout) };
    }
    let mut surplus = [(ptr::null_mut(), layout); MOST_BLOCKS];
    let count = CACHE.with(|blocks| {
        let mut count = 0;
        while blocks.count == MOST_BLOCKS || blocks.bytes + layout.size() > MOST_BYTES {
            surplus[count] = blocks.remove(0);
            count += 1;
        }
        blocks.kept[blocks.count] = (base, layout.size(), layout.align());
        blocks.count += 1;
        blocks.bytes += layout.size();
        count
    });
    for (base, layout) in &surplus[..count] {
        // SAFETY: kept blocks are the cache's own, from `System`, and these were taken out of it.
        unsafe { System.dealloc(*base, *layout) };
    }
}
