// GPUs of one host thread, for tests of the kernels in csrc/cuda where there is no GPU.
//
// Every thread of a launch is a fiber. They take turns in an order that is drawn (NCCL_EP_EMULATOR_SEED) at the points
// where they can learn of one another: loads, barriers, operations of a warp. Launches of several host threads run at
// the same time. What the memory model leaves open is drawn too:
//   * A store for others (st.relaxed) reaches memory at any time up to a fence of its block or the end of the kernel,
//     in any order, words of a vector by themselves.
//   * A bulk copy reads and writes at any time up to the wait for it, and so does a copy of a thread (cp.async).
//   * Shared and device memory begin as garbage.
// Weak stores and those to shared memory arrive at once; a fence is taken to cover all that its block has stored. With
// NCCL_EP_EMULATOR_LATE_WEAK=1 in the environment of a launch, weak stores of ptx.cuh are as late as the others.
// What never runs is noticed: a launch in which every thread waits for another one ends the process with a list. So
// does a load or store of a vector by ptx.cuh at an address that is no multiple of its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace ep::emulator {

unsigned thread_index();
unsigned block_index();
unsigned block_dim();
unsigned grid_dim();

// Returns when the launch has ended.
void launch(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

// ---- Called by the threads of a launch

// Others may run.
void pause();
[[noreturn]] void die(const char* what);

// Operations of a whole warp, each with a name that all lanes must agree on.
enum class WarpOp : int { kSync, kShuffle, kBallot, kReduce };
// Every lane's value, until the next operation.
const uint64_t* gather(WarpOp op, uint64_t value, unsigned mask);
int lane();

// `threads` < 0: all of the block. Returns whether `value` was true for any of them.
bool barrier(int id, int threads, bool value = false);
void barrier_arrive(int id, int threads);

// Shared memory of the block.
char* dynamic_shared();
int new_static_shared(size_t bytes);  // a number for a variable
void* static_shared(int number);

// Stores for other blocks, kept back until fence(); loads see those of their own block.
void store(void* target, const void* source, int bytes);
void store_weak(void* target, const void* source, int bytes);
void load(void* target, const void* source, int bytes);
void fence();

// Copies of the bulk engine. `barrier`: an mbarrier in shared memory.
void mbarrier_init(uint64_t* barrier, int arrivals);
void mbarrier_expect(uint64_t* barrier, int bytes);
bool mbarrier_has_passed(uint64_t* barrier, uint32_t parity);
void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier);
void bulk_store(void* global, const void* shared, int bytes);
void bulk_commit();
void bulk_wait(int pending, bool only_read);

// Copies of a thread into shared memory (cp.async).
void copy_async(void* shared, const void* global, int bytes);
void copy_async_commit();
void copy_async_wait(int pending);

}  // namespace ep::emulator
