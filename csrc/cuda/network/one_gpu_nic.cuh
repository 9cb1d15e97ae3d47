// The NIC block of a launch that holds all ranks of several domains (nic.h). What it does, network.h allows: puts land
// in pieces, in any order; a piece is read when it lands; a signal lands after its own put and knows no other.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/network/one_gpu_nic.h"
#include "cuda/network/simulated.cuh"

namespace ep {

// The network as a kernel sees it.
class OneGpuNetwork : public SimulatedNetwork {
 public:
  using Args = OneGpuNetworkArgs;
  __device__ explicit OneGpuNetwork(const Args& args) : SimulatedNetwork(args) {}
};

static_assert(Network<OneGpuNetwork>);

// What the NIC block has in hand; thread 0 writes it.
struct NicDesk {
  OneGpuNic::Item items[OneGpuNic::kMaxItems];
  int count, item;  // item: that a piece of lands now; -1: none
  uint64_t begin, bytes;
  bool is_over;

  __device__ void remove(int which) {
    count--;
    for (int i = which; i < count; i++) items[i] = items[i + 1];
  }
};

namespace nic_block {

// xorshift64*
__device__ inline uint64_t below(OneGpuNic& nic, uint64_t n) {
  uint64_t& x = nic.random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return (x * 0x2545F4914F6CDD1Dull >> 32) % n;
}

__device__ inline OneGpuNic::Problem problem_of(const OneGpuNic& nic, int rank, const NicDescriptor& what) {
  const uint64_t end = what.bytes + (what.target > what.source ? what.target : what.source);
  if (what.peer < 0 || what.peer >= nic.num_ranks || what.peer / nic.domain_size == rank / nic.domain_size) {
    return OneGpuNic::kNoSuchPeer;
  }
  if ((rank - what.peer) % nic.link_size != 0) return OneGpuNic::kOffTheLinks;
  if ((what.target | what.source | what.bytes) % 16 != 0) return OneGpuNic::kNotAligned;
  if (end > nic.window_bytes) return OneGpuNic::kOutside;
  const bool has_word = what.context >= 0 && what.context < nic.num_contexts && what.signal < nic.num_signals;
  return has_word ? OneGpuNic::kNone : OneGpuNic::kNoSuchSignal;
}

// All that was posted, as long as there is room.
__device__ inline void take(OneGpuNic& nic, NicDesk& desk) {
  for (int rank = 0; rank < nic.num_ranks; rank++) {
    NicQueue& queue = nic.queues[rank];
    if (ptx::ld_relaxed_gpu(&queue.has_overflown) != 0 && nic.problem == 0) nic.problem = OneGpuNic::kOverflow;
    while (desk.count < OneGpuNic::kMaxItems) {
      NicDescriptor& place = queue.descriptors[nic.taken[rank] % NicQueue::kDepth];
      if (ptx::ld_acquire_sys(&place.is_posted) != nic.taken[rank] + 1) break;
      const NicDescriptor what = place;
      __threadfence();
      ptx::st_relaxed_sys(&place.is_posted, uint64_t{0});
      nic.taken[rank]++;
      if (const auto problem = problem_of(nic, rank, what); problem != OneGpuNic::kNone) {
        if (nic.problem == 0) nic.problem = problem;
        continue;
      }
      if (what.bytes > 0) nic.puts[rank][what.peer]++;
      nic.bytes[rank][what.peer] += what.bytes;
      desk.items[desk.count++] = {rank, what, 0};
    }
  }
}

// What the block does next. blocks: of the launch, but for this one.
__device__ inline void choose(OneGpuNic& nic, NicDesk& desk, uint32_t blocks) {
  const bool has_ended = ptx::ld_acquire_gpu(&nic.ended) == blocks;  // then nothing more is posted
  take(nic, desk);
  desk.is_over = has_ended && desk.count == 0;
  desk.item = -1;
  desk.bytes = 0;
  if (desk.count == 0) return;
  if (nic.random != 0 && below(nic, 4) == 0) return;
  desk.item = nic.random == 0 ? 0 : static_cast<int>(below(nic, desk.count));
  const OneGpuNic::Item& item = desk.items[desk.item];
  desk.bytes = item.what.bytes - item.landed;
  if (nic.random != 0 && desk.bytes > 16 && below(nic, 2) == 0) desk.bytes = 16 * (1 + below(nic, desk.bytes / 16));
  desk.begin = item.what.bytes - item.landed - desk.bytes;
}

// All threads.
__device__ inline void land(const OneGpuNic& nic, const NicDesk& desk) {
  const OneGpuNic::Item& item = desk.items[desk.item];
  const auto window = [&](int rank) { return nic.first_window + rank * nic.window_stride + desk.begin; };
  const auto* from = reinterpret_cast<const uint4*>(window(item.rank) + item.what.source);
  auto* to = reinterpret_cast<uint4*>(window(item.what.peer) + item.what.target);
  for (uint64_t i = threadIdx.x; i < desk.bytes / 16; i += blockDim.x) {
    ptx::st_relaxed_sys(to + i, ptx::ld_relaxed_sys(from + i));
  }
}

__device__ inline void finish(OneGpuNic& nic, NicDesk& desk) {
  OneGpuNic::Item& item = desk.items[desk.item];
  item.landed += desk.bytes;
  const NicDescriptor& what = item.what;
  if (item.landed < what.bytes) return;
  if (what.signal != kNoSignal) {
    const uint64_t words = static_cast<uint64_t>(nic.num_contexts) * nic.num_signals;
    uint64_t* word =
        nic.signals + what.peer * words + static_cast<uint64_t>(what.context) * nic.num_signals + what.signal;
    __threadfence_system();  // what all threads have moved, behind a barrier
    atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(what.add));
  }
  desk.remove(desk.item);
}

}  // namespace nic_block

// The block itself. Ends when the others have, and all that they sent has landed.
__device__ inline void run_nic_block(OneGpuNic& nic, uint32_t blocks) {
  EP_SHARED(NicDesk, desk);
  if (threadIdx.x == 0) desk.count = 0;
  while (true) {
    if (threadIdx.x == 0) nic_block::choose(nic, desk, blocks);
    __syncthreads();
    if (desk.is_over) break;
    const bool lands = desk.item >= 0;  // behind the next barrier thread 0 changes it
    if (lands) nic_block::land(nic, desk);
    __syncthreads();
    if (threadIdx.x == 0 && lands) nic_block::finish(nic, desk);
  }
  if (threadIdx.x == 0) nic.ended = 0;
}

// A block of a rank ends. All its threads.
__device__ inline void end_before_nic(OneGpuNic& nic) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(&nic.ended, 1u);
}

// A kernel of all ranks: `body(args, block, shared)` is one block of a rank's.
template <class Args, class Body>
__device__ __forceinline__ void run_in_one_gpu(const Args* all, int num_ranks, int blocks, Body body) {
  const int block = static_cast<int>(blockIdx.x), others = num_ranks * blocks;
  OneGpuNic& nic = *all->network.nic;
  if (block == others) return run_nic_block(nic, others);
  body(all[block / blocks], block % blocks);
  end_before_nic(nic);
}

}  // namespace ep
