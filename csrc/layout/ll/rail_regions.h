// The regions of low latency between domains, where only a network leads. docs/network_protocol.md says how they are
// used.
#pragma once

#include <cstdint>

#include "layout/common/region.h"
#include "layout/common/topology.h"
#include "layout/common/wire.h"

namespace ep {

// The regions of a kind; all have two banks. One row region of a domain has room for a row of every token.
struct RailRegions {
  Region<char> record_out;  // [bank]: the own record, for all rail peers
  Region<char> record_in;   // [bank][domain]
  Region<char> rows_out;    // [bank][domain]
  Region<char> rows_in;     // [bank][domain]

  // Nothing for one domain. `tagged_bytes` and `row_bytes`: of a bank, LlSizes'.
  static RailRegions take(Carver& carver, const Topology& topology, uint64_t tagged_bytes, uint64_t row_bytes) {
    RailRegions regions;
    if (topology.num_domains() == 1) return regions;
    const auto ranks = static_cast<uint64_t>(topology.num_ranks),
               domains = static_cast<uint64_t>(topology.num_domains());
    // A source's tagged words have 8 bytes for each choice, and some more.
    const uint64_t record = align_up<uint64_t>(ceil_div<uint64_t>(tagged_bytes, ranks) + 128, 128);
    const uint64_t rows = align_up<uint64_t>(ceil_div<uint64_t>(row_bytes, ranks), 128);
    regions.record_out = carver.take<char>(kNumBanks * record);
    regions.record_in = carver.take<char>(kNumBanks * domains * record);
    regions.rows_out = carver.take<char>(kNumBanks * domains * rows);
    regions.rows_in = carver.take<char>(kNumBanks * domains * rows);
    return regions;
  }
};

}  // namespace ep
