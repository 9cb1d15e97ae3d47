// The regions of low latency between domains, where only a network leads. docs/network_protocol.md says how they are
// used.
#pragma once

#include <cstdint>
#include <string>

#include "base/check.h"
#include "layout/common/region.h"
#include "layout/common/topology.h"
#include "layout/common/wire.h"

namespace ep {

// A call sends each link all channels of its kind once, each with one signal that grows by 1, however little there is
// to send. Channel 0 has the record: op header, ids and weights of all tokens. Each of the others has the rows of a
// share of the tokens.
constexpr int kRowChannels = 8, kMeshRowChannels = 2;

// What a rank sends to: the domains, through its rail peers, or every rank of them. Automatically: ll_link_size(). As
// in nccl_ep.h.
enum class LlNetwork : int { kAuto = 0, kRail = 1, kMesh = 2 };
inline const char* name_of(LlNetwork network) {
  constexpr const char* kNames[] = {"auto", "rail", "mesh"};
  return kNames[static_cast<int>(network)];
}
inline LlNetwork ll_network_of(const std::string& name) {
  for (LlNetwork network : {LlNetwork::kAuto, LlNetwork::kRail, LlNetwork::kMesh}) {
    if (name == name_of(network)) return network;
  }
  raise(ErrorKind::kInvalidArgument, "ll_network is '", name, "', must be auto, rail or mesh");
}

// Up to here the mesh takes less time than the rail, by the model of `python -m bench model`: the step over
// NVLink that it saves is longer than what it sends beyond the rail.
constexpr uint64_t kMostMeshBytes = 64 << 10;  // rows that a rank sends, if each went to one place: 4 of 7168 in bf16
constexpr int kMostMeshPeers = 8;              // ranks of other domains

// Ranks that a link serves, those of a domain or one. Masks want one: a rank that is gone takes no other's way with it.
// `bytes`: of the rows that a rank sends at most.
inline int ll_link_size(LlNetwork asked, bool masks, const Topology& topology, uint64_t bytes) {
  const bool is_small =
      bytes > 0 && bytes <= kMostMeshBytes && topology.num_ranks - topology.domain_size <= kMostMeshPeers;
  return asked == LlNetwork::kMesh || (asked == LlNetwork::kAuto && (masks || is_small)) ? 1 : topology.domain_size;
}

// The regions of a kind; all have two banks. One row region of a link has room for a row of every token.
struct RailRegions {
  int link_size = 1;
  int record_copies = 1;    // of the own record: one for all links or, with masks, one for each
  Region<char> record_out;  // [bank][copy]
  Region<char> record_in;   // [bank][link]
  Region<char> rows_out;    // [bank][link]
  Region<char> rows_in;     // [bank][link]
  Region<uint64_t> posted;  // [parity][link][channel]: with masks, what the link's peer has been signalled

  // Nothing for one domain. `tagged_bytes` and `row_bytes`: of a bank, LlSizes'. `masks`: ranks may be masked.
  static RailRegions take(Carver& carver, const Topology& topology, int link_size, bool masks, uint64_t tagged_bytes,
                          uint64_t row_bytes) {
    RailRegions regions;
    regions.link_size = link_size;
    if (topology.num_domains() == 1) return regions;
    const auto ranks = static_cast<uint64_t>(topology.num_ranks), links = ranks / static_cast<uint64_t>(link_size);
    if (masks) regions.record_copies = static_cast<int>(links);
    // A source's tagged words have 8 bytes for each choice, and some more.
    const uint64_t record = align_up<uint64_t>(ceil_div<uint64_t>(tagged_bytes, ranks) + 128, 128);
    const uint64_t rows = align_up<uint64_t>(ceil_div<uint64_t>(row_bytes, ranks), 128);
    regions.record_out = carver.take<char>(kNumBanks * static_cast<uint64_t>(regions.record_copies) * record);
    regions.record_in = carver.take<char>(kNumBanks * links * record);
    regions.rows_out = carver.take<char>(kNumBanks * links * rows);
    regions.rows_in = carver.take<char>(kNumBanks * links * rows);
    if (masks) regions.posted = carver.take<uint64_t>(kNumBanks * links * (1 + kRowChannels));
    return regions;
  }
};

}  // namespace ep
