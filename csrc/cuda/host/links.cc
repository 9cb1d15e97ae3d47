#include "cuda/host/links.h"

#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "cuda/launch/launch_util.h"
#include "layout/common/block_formats.h"

namespace ep {
namespace {

template <class Params>
int link_row_bytes(const Params& params) {
  if constexpr (std::is_same_v<Params, LlDispatchParams>) {
    return params.row.wire_bytes();
  } else if constexpr (std::is_same_v<Params, LlCombineParams>) {
    return wire_row_bytes(params.options.wire_dtype, params.hidden);  // sums cross, whatever params.row is
  } else {
    return scalar_row_bytes(params.shape.topk);
  }
}

}  // namespace

template <class Params>
LlRail Links::without_blocks(const Params& params) const {
  constexpr Kind kind = std::is_same_v<Params, LlDispatchParams> ? Kind::kDispatch : Kind::kCombine;
  const int row_bytes = link_row_bytes(params);
  const RailRegions& regions = window_.rail[static_cast<int>(kind)];
  LlRail rail = LlRail::make(regions, kind, topology_, memory_.peers.rank, row_bytes);
  const bool is_for_one = rail.link_size == 1 && !memory_.peers.can_be_masked;
  if constexpr (std::is_same_v<Params, LlDispatchParams>) rail.places_rows = is_for_one;
  if constexpr (std::is_same_v<Params, LlCombineParams>) {
    rail.adds_rows = is_for_one && params.phase == Phase::kFused;
  }
  const auto need = static_cast<uint64_t>(params.shape.max_tokens) * row_bytes;
  EP_CHECK(need <= rail.rows_bytes, params.shape.max_tokens, " rows of ", row_bytes,
           " bytes do not fit the network's part of the window, ", rail.rows_bytes,
           " bytes; make the buffer for as many");
  const int most = std::min(kMaxRailShare, kMaxShareWords / RankMask::words_of(rail.link_size));
  EP_CHECK(rail.share(params.shape.max_tokens) <= most, "max_tokens is ", params.shape.max_tokens,
           ", low latency over several NVLink domains of ", topology_.domain_size, " ranks serves ",
           most * rail.row_channels,
           rail.has_domain_sums() || memory_.peers.can_be_masked
               ? ""
               : " in the mesh: make the buffer for the rail (ll_network)");
  return rail;
}

template <class Params>
RailPlan Links::plan(const Params& params, const LlRail& rail, const Arch& arch) const {
  RailSizes sizes{rail.others(), rail.row_channels, params.shape.max_tokens, rail.row_bytes};
  if constexpr (std::is_same_v<Params, LlDispatchParams>) {
    sizes.sends_rows = sends(params.phase);
    sizes.forwards_routing = receives(params.phase);
    sizes.forwards_rows = receives(params.phase) && !rail.places_rows;
  } else if constexpr (std::is_same_v<Params, LlCombineParams>) {
    sizes.adds_up = receives(params.phase);
    sizes.ends_early = ends_early(rail, arch);
  }
  const RailPlan plan = plan_rail(sizes, arch);
  return sizes.shares_work() ? tuned("EP_PLAN_R", plan) : plan;
}

// Receivers begin where blocks of the rail have ended: the launch has more blocks than SMs. Where the caller has named
// the SMs, or all ranks share the GPU, it must not.
bool Links::ends_early(const LlRail& rail, const Arch& arch) const {
  return rail.adds_rows && memory_.world == nullptr && arch.num_sms == arch_.num_sms;
}

// What crosses is added up where the rows lie: senders serve the own domain alone. `others`: blocks that are not for
// links.
Launch<LlCombineParams> Links::launch_of_added_rows(const LlCombineParams& params, const LlRail& rail, int tokens,
                                                    const Arch& arch, int others) const {
  check_served(params, arch);
  LlPlan plan = plan_of(params, tokens, arch.with_sms(std::max(ends_early(rail, arch) ? arch.num_sms : others, 2)));
  plan.sender_blocks = plan.receiver_block0 =
      std::max(plan.sender_blocks * (topology_.domain_size - 1) / (topology_.num_ranks - 1), 1);
  Launch<LlCombineParams> how{plan, geometry_of(params, plan)};
  how.geometry.send_inside(plan, topology_.domain_size);
  return how;
}

template <class Params>
LinkedLaunch<Params> Links::launch_of(const Params& params, int tokens, const Arch& arch) const {
  LinkedLaunch<Params> linked{{}, without_blocks(params)};
  Launch<Params>& launch = linked.launch;
  LlRail& rail = linked.rail;
  const RailPlan blocks = plan(params, rail, arch);
  rail.send_blocks = blocks.send_blocks;
  rail.forward_blocks = blocks.forward_blocks;
  rail.sum_blocks = blocks.sum_blocks;
  rail.share_channels(blocks.slices);

  const int others = arch.num_sms - blocks.blocks();
  bool is_made = false;
  if constexpr (std::is_same_v<Params, LlCombineParams>) {
    is_made = rail.adds_rows;
    if (is_made) launch = launch_of_added_rows(params, rail, tokens, arch, others);
  }
  if (!is_made) launch = ep::launch_of(params, tokens, arch.with_sms(std::max(others, 2)));
  if constexpr (std::is_same_v<Params, LlDispatchParams>) {  // a rank alone in its domain sends no row inside
    if (topology_.domain_size == 1 && params.phase == Phase::kFused) launch.geometry.send_units = 0;
  }
  if constexpr (requires { params.phase; }) {
    rail.sums_at = params.phase == Phase::kFused ? launch.plan.sender_blocks : 0;
  }
  return linked;
}

template <class Params>
HtRail Links::ht_rail_of(const Params& params) const {
  constexpr Kind kind = std::is_same_v<Params, HtCombineParams> ? Kind::kCombine : Kind::kDispatch;
  const int route_bytes = kind == Kind::kDispatch ? params.offsets.route.bytes_with_token() : 0;
  return HtRail::make(window_.ht, kind, topology_, memory_.peers.rank, params.shape, params.offsets.row, route_bytes,
                      LlRail::num_signals(topology_));
}

template LinkedLaunch<LlDispatchParams> Links::launch_of(const LlDispatchParams&, int, const Arch&) const;
template LinkedLaunch<LlCombineParams> Links::launch_of(const LlCombineParams&, int, const Arch&) const;
template LinkedLaunch<LlCombineWeightsParams> Links::launch_of(const LlCombineWeightsParams&, int, const Arch&) const;
template HtRail Links::ht_rail_of(const HtRouteParams&) const;
template HtRail Links::ht_rail_of(const HtDispatchParams&) const;
template HtRail Links::ht_rail_of(const HtCombineParams&) const;

}  // namespace ep
