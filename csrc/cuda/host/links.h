// Operations of GPUs in several domains: what of an operation crosses, and which blocks of its launch serve the links.
#pragma once

#include "cuda/host/memory.h"
#include "cuda/launch/launch.h"
#include "layout/window.h"
#include "runtime/common/arch.h"

namespace ep {

// A launch with blocks for links.
template <class Params>
struct LinkedLaunch {
  Launch<Params> launch;
  LlRail rail;
};

class Links {
 public:
  // `arch`: the share of its GPU that this rank has.
  Links(const Memory& memory, const Window& window, const Topology& topology, const Arch& arch)
      : memory_(memory), window_(window), topology_(topology), arch_(arch) {}

  // Of low latency: for `tokens` tokens, on what of the GPU the operation may have.
  template <class Params>
  LinkedLaunch<Params> launch_of(const Params& params, int tokens, const Arch& arch) const;
  // Of high throughput, whose launch is the same.
  template <class Params>
  HtRail ht_rail_of(const Params& params) const;

 private:
  template <class Params>
  LlRail without_blocks(const Params& params) const;
  template <class Params>
  RailPlan plan(const Params& params, const LlRail& rail, const Arch& arch) const;
  Launch<LlCombineParams> launch_of_added_rows(const LlCombineParams& params, const LlRail& rail, int tokens,
                                               const Arch& arch, int others) const;
  bool ends_early(const LlRail& rail, const Arch& arch) const;

  const Memory& memory_;
  const Window& window_;
  const Topology topology_;
  const Arch arch_;
};

}  // namespace ep
