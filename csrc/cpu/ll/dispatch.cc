// Low-latency dispatch on the host: the protocol of docs/architecture.md as plain loops.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "cpu/common/arrivals.h"
#include "cpu/common/ids.h"
#include "cpu/common/rows.h"
#include "cpu/ll/exchange.h"
#include "cpu/ll/operations.h"
#include "layout/common/routing.h"
#include "layout/common/small_blocks.h"

namespace ep {
namespace {

using Words = std::vector<uint32_t>;

const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

// A row of x and its scales, as it travels.
void load_row(const LlDispatchParams& p, int token, Words& words) {
  std::fill(words.begin(), words.end(), 0);
  auto* body = reinterpret_cast<char*>(words.data());
  const int element = size_of(p.dtype);
  const char* x = at(p.x, static_cast<int64_t>(token) * p.hidden * element);
  if (p.options.quant != Quant::kNone) {
    std::vector<float> row(p.hidden);
    to_floats(p.dtype, x, row.data(), p.hidden);
    auto* scales = reinterpret_cast<uint8_t*>(body + p.row.scales_offset());
    quantize_row(p.options.quant, row.data(), p.hidden, reinterpret_cast<uint8_t*>(body), scales,
                 p.tensor_scale != nullptr ? *p.tensor_scale : 1);
    if (is_nvfp4(p.options.quant)) escape_nvfp4(words.data(), scales, p.row.scale_bytes);
  } else {
    std::memcpy(body, x, p.row.payload_bytes);
    const Scales& s = p.scales;
    for (int g = 0; s.data != nullptr && g < s.count; g++) {
      std::memcpy(body + p.row.scales_offset() + g * s.element_bytes,
                  at(s.data, (token * s.row_stride + g * s.group_stride) * s.element_bytes), s.element_bytes);
    }
  }
  encode_row(p.row, words.data());
}

// Ids and weights of the own tokens: each rank gets the ids of its own experts, and the weights that belong to them, or
// all of them.
void send_routing(const LlDispatchParams& p, Exchange& exchange, int peer) {
  const IdFormat& ids = p.offsets.ids;
  for (int token = 0; token < p.num_tokens; token++) {
    const int32_t* chosen = p.handle.ids + token * p.shape.topk;
    const auto has = [&](int32_t id) { return id >= 0 && p.shape.owner(id) == peer; };
    const bool gets_all = p.options.all_weights && std::any_of(chosen, chosen + p.shape.topk, has);
    uint32_t words[kMaxTopk] = {};
    for (int k = 0; k < ids.words() * ids.per_word(); k++) {
      const int32_t id = k < p.shape.topk ? chosen[k] : -1;
      const bool is_there = has(id);
      const uint32_t code = is_there ? static_cast<uint32_t>(p.shape.local_expert(id)) : ids.none();
      words[k / ids.per_word()] |= code << (k % ids.per_word() * ids.bits);
      if (is_there || (gets_all && k < p.shape.topk)) {
        const float weight = p.topk_weights ? p.topk_weights[token * p.shape.topk + k] : 1.0f;
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        exchange.send_words(peer, exchange.offsets().weight(exchange.bank(), exchange.rank(), token, k), &bits, 1);
      }
    }
    exchange.send_words(peer, exchange.offsets().id_words(exchange.bank(), exchange.rank(), token), words, ids.words());
  }
}

void send(const LlDispatchParams& p, CpuState& state, Exchange& exchange) {
  take_ids(p.shape, p.topk_idx, p.is_idx64, p.num_tokens, p.handle.ids,
           p.options.reports_ids ? &state.invalid_ids : nullptr);
  for (int step = 0; step < exchange.num_ranks(); step++) {
    const int peer = exchange.peer(step);
    exchange.send_header(peer);
    send_routing(p, exchange, peer);
  }
  Words words(p.row.wire_bytes() / 4);
  for (int token = 0; token < p.num_tokens; token++) {
    const int32_t* ids = p.handle.ids + token * p.shape.topk;
    load_row(p, token, words);
    for (int step = 0; step < exchange.num_ranks(); step++) {
      const int peer = exchange.peer(step);
      const bool wants =
          std::any_of(ids, ids + p.shape.topk, [&](int32_t id) { return id >= 0 && p.shape.owner(id) == peer; });
      if (wants) exchange.send_row(peer, token, words.data(), static_cast<int>(words.size()));
    }
  }
  exchange.close_stage();
}

// False: the source is masked.
bool await_routing_of(const LlDispatchParams& p, Exchange& exchange, int source, Routing& routing,
                      std::vector<float>& weights) {
  const IdFormat& ids = p.offsets.ids;
  for (int token = 0; token < routing.tokens[source]; token++) {
    uint32_t words[kMaxTopk];
    const Offset words_at = p.offsets.id_words(exchange.bank(), source, token);
    if (!exchange.await_words(source, words_at, Awaited::kRouting, words, ids.words())) return false;
    const size_t first = p.offsets.slot(source, token) * p.shape.topk;
    bool has_row = false;
    for (int k = 0; k < p.shape.topk; k++) {
      const uint32_t code = ids.get(words[k / ids.per_word()], k % ids.per_word());
      if (code == ids.none()) continue;
      routing.local_ids[first + k] = static_cast<int32_t>(code);
      has_row = true;
    }
    for (int k = 0; k < p.shape.topk; k++) {
      if (routing.local_ids[first + k] < 0 && !(has_row && p.options.all_weights)) continue;
      uint32_t bits;
      const Offset weight_at = p.offsets.weight(exchange.bank(), source, token, k);
      if (!exchange.await_words(source, weight_at, Awaited::kWeights, &bits, 1)) return false;
      std::memcpy(&weights[first + k], &bits, sizeof bits);
    }
  }
  return true;
}

Routing await_routing(const LlDispatchParams& p, Exchange& exchange, std::vector<float>& weights) {
  Routing routing = Routing::empty(p.shape);
  weights.assign(routing.local_ids.size(), 0.0f);
  for (int source = 0; source < exchange.num_ranks(); source++) {
    routing.tokens[source] = exchange.num_tokens(source);
    if (await_routing_of(p, exchange, source, routing, weights)) continue;
    // As if it had no tokens: places follow from the routing of all sources, so a source counts as a whole or not at
    // all.
    routing.tokens[source] = 0;
    const auto first = routing.local_ids.begin() + static_cast<int64_t>(p.offsets.slot(source, 0)) * p.shape.topk;
    std::fill_n(first, p.shape.max_tokens * p.shape.topk, -1);
  }
  return routing;
}

// As words of four, of which the last may have fewer.
void put_swizzled_scales(const LlDispatchParams& p, int64_t row, const char* scales) {
  const bool has_bins = p.output.has_parts();
  const int64_t bin_rows = p.output.rows() / (has_bins ? p.output.bins() : 1),
                bin = row / std::max<int64_t>(bin_rows, 1);
  const int words = ceil_div(p.row.scale_bytes, kScaleTileScales);
  char* out = static_cast<char*>(p.out_scales.data) +
              bin * ceil_div<int64_t>(bin_rows, kScaleTileRows) * words * kScaleTileBytes;
  for (int word = 0; word < words; word++) {
    std::memcpy(out + swizzled_word(row - bin * bin_rows, word, words), scales + word * 4, 4);
  }
}

void put_row(const LlDispatchParams& p, int64_t row, const Words& words) {
  const char* body = reinterpret_cast<const char*>(words.data());
  std::memcpy(static_cast<char*>(p.out_x) + row * p.row.payload_bytes, body, p.row.payload_bytes);
  if (is_swizzled(p.options.quant)) return put_swizzled_scales(p, row, body + p.row.scales_offset());
  const Scales& s = p.out_scales;
  const int64_t bin = s.bin_stride == 0 ? 0 : row / p.output.capacity;
  const int64_t first = bin * s.bin_stride + (row - bin * p.output.capacity) * s.row_stride;
  for (int g = 0; s.data != nullptr && g < s.count; g++) {
    std::memcpy(static_cast<char*>(s.data) + (first + g * s.group_stride) * s.element_bytes,
                body + p.row.scales_offset() + g * s.element_bytes, s.element_bytes);
  }
}

void receive_rows(const LlDispatchParams& p, Exchange& exchange, const Routing& routing, const Placement& placement,
                  const std::vector<float>& weights) {
  const bool expert_rows = has_expert_rows(p.output.layout);
  Words words(p.row.wire_bytes() / 4);
  std::vector<char> is_filled(p.options.zero_padding ? p.output.rows() : 0, 0);
  CpuArrivals arrivals(p.arrivals, p.output, p.info + p.output.demand_at());
  for (int source = 0; source < exchange.num_ranks(); source++) {
    for (int token = 0; token < routing.tokens[source]; token++) {
      const size_t slot = p.offsets.slot(source, token);
      const int32_t* ids = routing.local_ids.data() + slot * p.shape.topk;
      if (std::all_of(ids, ids + p.shape.topk, [](int32_t id) { return id < 0; })) continue;
      exchange.take_row(source, token, Awaited::kRows, words.data(), static_cast<int>(words.size()));
      decode_row(p.row, words.data());
      if (is_nvfp4(p.options.quant)) {
        auto* scales = reinterpret_cast<uint8_t*>(words.data()) + p.row.scales_offset();
        unescape_nvfp4(words.data(), scales, p.row.scale_bytes);
      }
      for (int k = 0; k < p.output.map_k(); k++) {
        const int32_t row = placement.row_map[slot * p.output.map_k() + k];
        if (row < 0) continue;
        put_row(p, row, words);
        if (p.options.zero_padding) is_filled[row] = 1;
        if (expert_rows) {
          p.out_weights[row] = weights[slot * p.shape.topk + k];
          if (p.row_expert != nullptr) p.row_expert[row] = ids[k];
          arrivals.place(row);
          continue;
        }
        for (int j = 0; j < p.shape.topk; j++) {
          set_id(p.out_topk_idx, p.is_idx64, static_cast<int64_t>(row) * p.shape.topk + j, ids[j]);
          p.out_weights[static_cast<int64_t>(row) * p.shape.topk + j] = weights[slot * p.shape.topk + j];
        }
      }
    }
  }
  std::fill(words.begin(), words.end(), 0);
  for (size_t row = 0; row < is_filled.size(); row++) {
    if (!is_filled[row]) put_row(p, static_cast<int64_t>(row), words);
  }
}

// In an expert the sources follow one another, and the tokens of each in their order.
void account_for_rows(const LlDispatchParams& p, const Placement& placement) {
  const OutputShape& output = p.output;
  std::vector<int64_t> counts(static_cast<size_t>(output.local_experts) * output.num_ranks);
  for (size_t entry = 0; entry < placement.row_map.size(); entry++) {
    const int32_t row = placement.row_map[entry];
    if (row < 0) continue;
    const int64_t slot = static_cast<int64_t>(entry) / output.map_k();
    p.src_info[row] = static_cast<int32_t>(slot % output.max_tokens);
    counts[row / output.capacity * output.num_ranks + slot / output.max_tokens]++;
  }
  for (int expert = 0; expert < output.local_experts; expert++) {
    int64_t begin = 0;
    for (int source = 0; source < output.num_ranks; source++) {
      const int64_t count = counts[expert * output.num_ranks + source];
      p.layout_range[expert * output.num_ranks + source] = begin << 32 | count;
      begin += count;
    }
  }
}

void receive(const LlDispatchParams& p, CpuState& state, Exchange& exchange) {
  testing::delay(testing::Point::kBeforeReceive, exchange.rank());
  exchange.count_waits(p.wait_cost);
  exchange.begin_receiving();
  exchange.await_arrivals();
  exchange.await_headers();
  std::vector<float> weights;
  const Routing routing = await_routing(p, exchange, weights);
  const Placement placement = place_rows(p.shape, p.output, routing);
  fill_info(p.output, placement, p.info);
  clear_row_info(p.output, p.is_idx64, p.out_topk_idx, p.out_weights, p.row_expert);
  receive_rows(p, exchange, routing, placement, weights);
  std::copy(routing.tokens.begin(), routing.tokens.end(), p.handle.tokens);
  *p.handle.dispatch = static_cast<int32_t>(exchange.tag());
  std::copy(placement.row_map.begin(), placement.row_map.end(), p.handle.rows);
  if (has_expert_rows(p.output.layout)) std::copy(weights.begin(), weights.end(), p.handle.weights);
  if (p.src_info != nullptr) account_for_rows(p, placement);
  for (int bin = 0; p.recv_stats != nullptr && bin < p.output.bins(); bin++) p.recv_stats[bin] += p.info[bin];
  state.dropped_rows += placement.dropped;
  exchange.complete();
}

}  // namespace

void cpu_dispatch(const LlDispatchParams& p, Transport& transport, CpuState& state) {
  Exchange exchange(transport, state, Kind::kDispatch, p.offsets, p.header, nullptr);
  if (sends(p.phase)) send(p, state, exchange);
  if (!receives(p.phase)) return;
  if (p.phase == Phase::kRecv) exchange.resume_after(1);
  try {
    receive(p, state, exchange);
  } catch (const Error&) {  // the buffer has failed: nothing was received
    CpuArrivals::fail(p.arrivals);
    std::fill(p.info, p.info + p.output.info_size(), 0);
    clear_row_info(p.output, p.is_idx64, p.out_topk_idx, p.out_weights, p.row_expert);
    throw;
  }
}

}  // namespace ep
