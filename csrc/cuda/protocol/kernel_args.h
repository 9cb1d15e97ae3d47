// The one struct that goes into a kernel.
#pragma once

#include <cstdint>

#include "cuda/protocol/device_state.h"
#include "runtime/ht/plan.h"
#include "runtime/ll/plan.h"
#include "transport/device/lsa_peers.h"

namespace ep {

struct NoGeometry {};
template <class Params>
struct GeometryOf {
  using Type = NoGeometry;
};
template <class Params>
struct PlanOf {
  using Type = LlPlan;
};
template <class Params>
requires requires(Params p) { p.handle.own; }
struct PlanOf<Params> {
  using Type = HtPlan;
};

// In the order of first use: a line of constant memory that is met for the first time costs 30 ns.
template <class Params>
struct alignas(16) KernelArgs {
  DeviceState* state = nullptr;
  const uint64_t* credits = nullptr;  // of every rank, in the own window: LlOffsets::signal
  LsaPeers peers;
  int num_ranks = 1;
  typename PlanOf<Params>::Type plan;
  typename GeometryOf<Params>::Type geometry;
  Params params;

  // Each byte is written once: to clear a struct of this size takes as long as to copy it.
  static KernelArgs of(DeviceState* state, const LsaPeers& peers, int num_ranks, const decltype(plan)& plan,
                       const decltype(geometry)& geometry, const Params& params) {
    const uint64_t* credits = nullptr;
    if constexpr (requires { params.offsets.signal(0); }) {
      credits = peers.template local<uint64_t>(params.offsets.signal(0));
    }
    return {state, credits, peers, num_ranks, plan, geometry, params};
  }
};

}  // namespace ep
