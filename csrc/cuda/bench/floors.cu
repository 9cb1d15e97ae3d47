#include "base/check.h"
#include "cuda/bench/floors.cuh"
#include "cuda/bench/floors.h"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace {

constexpr int kMaxRanks = 64;  // bits of a mask, threads of the block that exchanges flags
constexpr int kMaxThreads = 640;

__global__ void __launch_bounds__(kMaxRanks)
    ll_floor_flags(const __grid_constant__ KernelArgs<LlFloorFlagsParams> args) {
  exchange_flags(args.params, args.peers, args.state);
}

__global__ void __launch_bounds__(kMaxRanks) ll_floor_flags_world(const KernelArgs<LlFloorFlagsParams>* all) {
  const KernelArgs<LlFloorFlagsParams>& args = all[blockIdx.x];
  exchange_flags(args.params, args.peers, args.state);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    ll_floor_push(const __grid_constant__ KernelArgs<LlFloorPushParams> args) {
  EP_DYNAMIC_SHARED(uint64_t, targets);
  push_floor(args, BlockPosition::own(), targets);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    ll_floor_push_world(const KernelArgs<LlFloorPushParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(uint64_t, targets);
  const KernelArgs<LlFloorPushParams>& args = all[blockIdx.x / blocks];
  push_floor(args, BlockPosition::in_world(blocks), targets);
}

int shared_bytes(const LlFloorPushParams& p) { return p.shape.max_tokens * static_cast<int>(sizeof(uint64_t)); }

void check_num_ranks(int num_ranks) {
  EP_CHECK(num_ranks <= kMaxRanks, num_ranks, " ranks, the floors on CUDA serve ", kMaxRanks);
}

}  // namespace

LlPlan plan_of(const LlFloorPushParams& p, int tokens, int num_sms) {
  LlPlan plan = plan_dispatch({tokens, p.row.wire_bytes(), false}, num_sms);
  plan.blocks = plan.sender_blocks;
  plan.warps = plan.sender_warps + 1;  // the last one's is control
  plan.receiver_block0 = plan.blocks;
  plan.receiver_warps = 0;
  return plan;
}

LlPlan plan_of(const LlFloorFlagsParams&) { return {}; }

void check_served(const LlFloorPushParams& p) {
  check_num_ranks(p.shape.num_ranks);
  EP_CHECK(p.shape.max_tokens <= kMaxSharedBytes / 8, "max_tokens is ", p.shape.max_tokens,
           ", the pushes of the benchmark's floor serve ", kMaxSharedBytes / 8);
}

void check_served(const LlFloorFlagsParams& p) { check_num_ranks(p.num_ranks); }

void load_floor_kernels() {
  load_kernel(&ll_floor_flags, 0);
  load_kernel(&ll_floor_flags_world, 0);
  load_kernel(&ll_floor_push, kMaxSharedBytes);
  load_kernel(&ll_floor_push_world, kMaxSharedBytes);
}

void launch(const KernelArgs<LlFloorFlagsParams>& args, void* stream) {
  launch_kernel(&ll_floor_flags, 1, kMaxRanks, 0, args.plan.pdl, stream, args);
}

void launch(const KernelArgs<LlFloorPushParams>& args, void* stream) {
  launch_kernel(&ll_floor_push, args.plan.blocks, args.plan.threads(), shared_bytes(args.params), args.plan.pdl, stream,
                args);
}

template <>
void launch_world(const KernelArgs<LlFloorFlagsParams>*, const KernelArgs<LlFloorFlagsParams>* args, int num_ranks,
                  void* stream) {
  launch_kernel(&ll_floor_flags_world, num_ranks, kMaxRanks, 0, false, stream, args);
}

template <>
void launch_world(const KernelArgs<LlFloorPushParams>* host_args, const KernelArgs<LlFloorPushParams>* args,
                  int num_ranks, void* stream) {
  const LlPlan& plan = host_args->plan;
  launch_kernel(&ll_floor_push_world, plan.blocks * num_ranks, plan.threads(), shared_bytes(host_args->params), false,
                stream, args, plan.blocks);
}

}  // namespace ep
