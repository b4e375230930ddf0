//! Tests of the counting allocator: they run on it, since it is the test binary's too.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::fs::File;
use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::protocol::{Message, MessageKind, OutOfMemory};

fn one_rank() -> (Accounts, Account) {
    let accounts = Accounts::new(1).unwrap();
    let account = accounts.rank(0);
    (accounts, account)
}

#[test]
fn counts_large_blocks_and_their_peak() {
    let (_accounts, account) = one_rank();
    let guard = account.enter();
    let first = vec![1_u8; 10_000];
    let second = vec![2_u8; 5_000];
    drop(first);
    let small = vec![3_u8; COUNTED_FROM - 1];
    drop(guard);
    let not_ours = vec![4_u8; 70_000];
    assert_eq!(account.usage(), MemoryUsage { allocated: 5_000, peak: 15_000, host: 0, host_peak: 0 });
    account.reset_peak();
    assert_eq!(account.usage().peak, 5_000);
    drop((second, small, not_ours));
    assert_eq!(account.usage().allocated, 0);
}

#[test]
fn host_memory_is_counted_apart() {
    let (_accounts, account) = one_rank();
    let _guard = account.enter();
    let offloaded = host(|| vec![0_u8; 4_096]);
    let shard = vec![0_u8; 2_048];
    assert_eq!(account.usage(), MemoryUsage { allocated: 2_048, peak: 2_048, host: 4_096, host_peak: 4_096 });
    drop(offloaded);
    assert_eq!(account.usage(), MemoryUsage { allocated: 2_048, peak: 2_048, host: 0, host_peak: 4_096 });
    drop(shard);
}

#[test]
fn guards_nest_and_restore() {
    let accounts = Accounts::new(2).unwrap();
    let outer = accounts.rank(0).enter();
    let for_the_other = {
        let _inner = accounts.rank(1).enter();
        vec![0_u8; 3_000]
    };
    let for_itself = vec![0_u8; 2_000];
    assert_eq!(current(), Some(accounts.rank(0)));
    drop(outer);
    assert_eq!(current(), None);
    assert_eq!(accounts.ranks().iter().map(|account| account.usage().allocated).collect::<Vec<_>>(), [2_000, 3_000]);
    drop((for_the_other, for_itself));
}

/// A panic inside `host` must not leave the thread counting device memory as host memory.
#[test]
fn host_ends_with_a_panic() {
    let (_accounts, account) = one_rank();
    let _guard = account.enter();
    let caught = std::panic::catch_unwind(|| host(|| std::panic::panic_any(1)));
    assert!(caught.is_err());
    let block = vec![0_u8; 2_048];
    assert_eq!(account.usage().allocated, 2_048);
    drop(block);
}

/// Blocks move between threads and are freed anywhere: every count must come back to zero, and the peak never lies under what was held at once.
#[test]
fn blocks_freed_by_other_threads_are_credited_to_their_owner() {
    const BLOCKS: usize = 200;
    let accounts = Accounts::new(3).unwrap();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| std::sync::mpsc::channel::<Vec<u8>>()).unzip();
    std::thread::scope(|scope| {
        for (rank, receiver) in receivers.into_iter().enumerate() {
            let account = accounts.rank(rank);
            let next = senders[(rank + 1) % 3].clone();
            scope.spawn(move || {
                let _guard = account.enter();
                for index in 0..BLOCKS {
                    next.send(vec![rank as u8; COUNTED_FROM + index * 7]).unwrap();
                }
                for _ in 0..BLOCKS {
                    let block = receiver.recv().unwrap();
                    assert!(block.iter().all(|byte| usize::from(*byte) == (rank + 2) % 3));
                }
            });
        }
    });
    // Channels allocate blocks of their own; they go with the channels.
    drop(senders);
    for account in accounts.ranks() {
        let usage = account.usage();
        assert_eq!(usage.allocated, 0);
        assert!(usage.peak >= (COUNTED_FROM + (BLOCKS - 1) * 7) as u64);
    }
}

/// Four threads of one rank hold their blocks at the same moment: the peak is their sum, to the byte.
#[test]
fn the_peak_is_exact_over_threads() {
    let (_accounts, account) = one_rank();
    let all_hold = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let all_hold = &all_hold;
            scope.spawn(move || {
                account.adopt_thread();
                for _ in 0..50 {
                    let block = vec![0_u8; 10_000 * thread];
                    all_hold.wait();
                    drop(block);
                    all_hold.wait();
                }
            });
        }
    });
    assert_eq!(account.usage(), MemoryUsage { allocated: 0, peak: 100_000, host: 0, host_peak: 0 });
}

/// A slot is not given out again while blocks of its old world live.
#[test]
fn a_slot_waits_for_its_last_block() {
    let accounts = Accounts::new(1).unwrap();
    let account = accounts.rank(0);
    let guard = account.enter();
    let block = vec![0_u8; 9_000];
    drop(guard);
    drop(accounts);
    let others = Accounts::new(64).unwrap();
    assert!(!others.ranks().contains(&account));
    drop(block);
}

#[test]
fn too_many_ranks_are_refused() {
    assert_eq!(Accounts::new(MAX_RANKS + 1).unwrap_err().to_string(), "1025 ranks cannot be counted in one process, at most 1024 can");
}

fn pattern(index: usize) -> u8 {
    (index.wrapping_mul(31) >> 3) as u8
}

proptest! {
    /// Any chain of sizes and any alignment: contents survive every realloc, blocks are aligned, zeroed blocks are zero, and the count is the size whenever
    /// the size is counted.
    #[test]
    fn realloc_keeps_contents_alignment_and_count(
        align_log2 in 0_u32..13,
        zeroed in any::<bool>(),
        sizes in prop::collection::vec(prop_oneof![1_usize..2_000, 900_usize..1_200, 1_usize..300_000], 1..8),
    ) {
        let (_accounts, account) = one_rank();
        let align = 1_usize << align_log2;
        let counted = |size: usize| if size >= COUNTED_FROM { size as u64 } else { 0 };
        let mut layout = Layout::from_size_align(sizes[0], align).unwrap();
        let guard = account.enter();
        // SAFETY: no layout here has size zero; each pointer is freed once, with the layout it was last given.
        let mut block = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
        drop(guard);
        assert!(!block.is_null());
        if zeroed {
            // SAFETY: `layout.size()` bytes, zeroed by the allocator.
            assert!(unsafe { std::slice::from_raw_parts(block, layout.size()) }.iter().all(|byte| *byte == 0));
        }
        // SAFETY: as above; every byte is written before it is read.
        unsafe { (0..layout.size()).for_each(|index| block.add(index).write(pattern(index))) };
        for size in &sizes[1..] {
            prop_assert_eq!(block as usize % align, 0);
            prop_assert_eq!(account.usage().allocated, counted(layout.size()));
            // A small block has no owner to keep: growing it counts for the thread that does so.
            let guard = account.enter();
            // SAFETY: as above.
            unsafe { block = realloc(block, layout, *size) };
            drop(guard);
            assert!(!block.is_null());
            let kept = layout.size().min(*size);
            layout = Layout::from_size_align(*size, align).unwrap();
            // SAFETY: the first `kept` bytes were written before the realloc, the others are written here.
            unsafe {
                prop_assert!((0..kept).all(|index| block.add(index).read() == pattern(index)));
                (kept..*size).for_each(|index| block.add(index).write(pattern(index)));
            }
        }
        prop_assert_eq!(account.usage().allocated, counted(layout.size()));
        // SAFETY: as above.
        unsafe { dealloc(block, layout) };
        prop_assert_eq!(account.usage().allocated, 0);
    }
}

/// Names the messages file of [`over_its_budget`], which does nothing without it.
const CHILD: &str = "SWEEP_TEST_OUT_OF_MEMORY_MESSAGES";

/// Not a test: the process that [`a_rank_over_its_budget_ends_the_process`] starts.
#[test]
#[ignore = "ends its process; started by another test"]
fn over_its_budget() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    arm(File::options().append(true).create(true).open(path).unwrap().into());
    let accounts = Accounts::new(3).unwrap();
    let account = accounts.rank(2);
    account.set_budget(Some(1_000_000));
    let _guard = account.enter();
    set_phase(Phase::Backward);
    let within = vec![0_u8; 600_000];
    let offloaded = host(|| vec![0_u8; 5_000_000]);
    // Four threads run over at once: still one message.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                account.adopt_thread();
                std::hint::black_box(vec![0_u8; 400_001]);
            });
        }
    });
    drop((within, offloaded));
}

#[test]
fn a_rank_over_its_budget_ends_the_process() {
    let folder = tempfile::TempDir::new().unwrap();
    let messages = folder.path().join("messages.jsonl");
    let earlier = "{\"at\":\"2026-11-30T00:00:00.000Z\",\"kind\":\"phase\",\"phase\":\"train\"}\n";
    std::fs::write(&messages, earlier).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["train::memory::tests::over_its_budget", "--exact", "--ignored", "--nocapture"])
        .env(CHILD, &messages)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&messages).unwrap();
    let last: Message = serde_json::from_str(text.strip_prefix(earlier).unwrap()).unwrap();
    let MessageKind::Oom(OutOfMemory { rank, requested_bytes, in_use_bytes, budget_bytes, phase }) = last.kind else { panic!("{text}") };
    assert_eq!((rank, requested_bytes, budget_bytes, phase.as_str()), (2, 400_001, 1_000_000, "backward"));
    // The four threads raced: the one that speaks saw at least what was there before them, and each of the others may have added its request.
    assert!((600_000..=600_000 + 3 * 400_001).contains(&in_use_bytes), "{in_use_bytes}");
}

/// Large blocks are used again: whoever gets one owns it alone, finds zeros where it asked for them, and the counts stay exact, also where more blocks are
/// freed than are kept.
#[test]
fn large_blocks_are_used_again() {
    const LARGE: usize = 1024 * 1024;
    let accounts = Accounts::new(4).unwrap();
    std::thread::scope(|scope| {
        for (number, account) in accounts.ranks().iter().enumerate() {
            scope.spawn(move || {
                let _guard = account.enter();
                for round in 0..50 {
                    let sizes = [LARGE, LARGE + 1, 2 * LARGE, LARGE];
                    let mark = (number * 50 + round) as u8 | 1;
                    let blocks: Vec<Vec<u8>> = sizes
                        .iter()
                        .map(|size| {
                            let mut block = vec![0_u8; *size];
                            assert!(block.iter().all(|byte| *byte == 0));
                            block.fill(mark);
                            block
                        })
                        .collect();
                    std::thread::yield_now();
                    assert!(blocks.iter().flatten().all(|byte| *byte == mark));
                }
                assert_eq!(account.usage().allocated, 0);
                drop((0..40).map(|_| vec![1_u8; LARGE]).collect::<Vec<_>>());
                assert_eq!(account.usage().allocated, 0);
            });
        }
    });
}

/// A block that grows or shrinks keeps its contents, whether it came from the system or was used before.
#[test]
fn a_block_that_was_used_before_can_grow() {
    const LARGE: usize = 1_500_000;
    for _ in 0..3 {
        let mut block: Vec<u8> = Vec::with_capacity(LARGE);
        block.extend((0..LARGE).map(|index| index as u8));
        block.reserve_exact(LARGE);
        block.shrink_to(LARGE + 5);
        assert!(block.iter().enumerate().all(|(index, byte)| *byte == index as u8));
    }
}
