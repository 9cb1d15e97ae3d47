// The floors of the benchmark on the host: the bytes that csrc/cuda/bench/floors.cuh sends, and the same protocol
// around them.
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "cpu/ll/channel.h"
#include "cpu/ll/operations.h"
#include "runtime/group.h"

namespace ep {
namespace {

// Rank `peer` has an expert of the own token (dispatch), or this rank has one of the peer's (combine).
bool sends_row(const LlFloorPushParams& p, int peer, int token) {
  if (p.kind == Kind::kDispatch) {
    const int32_t* ids = p.handle.ids + static_cast<int64_t>(token) * p.shape.topk;
    return token < p.num_tokens &&
           std::any_of(ids, ids + p.shape.topk, [&](int32_t id) { return id >= 0 && p.shape.owner(id) == peer; });
  }
  const int32_t* rows = p.handle.rows + static_cast<int64_t>(p.offsets.slot(peer, token)) * p.map_k;
  return token < p.handle.tokens[peer] && std::any_of(rows, rows + p.map_k, [](int32_t row) { return row != kNoRow; });
}

}  // namespace

void cpu_floor_flags(const LlFloorFlagsParams& p, Transport& transport, CpuState& state) {
  Deadline deadline(state.control);
  const int rank = transport.rank();
  const uint64_t epoch = ++state.flag_epoch;
  for (int peer = 0; peer < p.num_ranks; peer++) {
    if (peer == rank) continue;
    const Offset flag = p.flags + rank * sizeof(uint64_t);
    state.wire.other_bytes[peer] += sizeof(uint64_t);
    if (char* target = transport.peer_ptr(peer, flag)) {
      std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(target)).store(epoch, std::memory_order_release);
    } else {
      transport.signal_add(peer, flag, 1);
    }
  }
  for (int source = 0; source < p.num_ranks; source++) {
    if (source == rank) continue;
    const auto seen = [&] { return transport.signal(p.flags + source * sizeof(uint64_t)); };
    const Deadline::End end = deadline.wait_until([&] { return seen() >= epoch; });
    if (end == Deadline::End::kReady) continue;
    fail(state, {code_of(end), Kind::kDispatch, Awaited::kFlag, source, epoch, epoch, seen(), 0, p.header, {}},
         transport);
  }
}

void cpu_floor_push(const LlFloorPushParams& p, Transport& transport, CpuState& state) {
  Channel channel(transport, state, p.kind, p.offsets, p.header);
  for (int step = 0; step < channel.num_ranks(); step++) channel.send_header(channel.peer(step));
  const std::vector<uint32_t> words(p.row.wire_bytes() / sizeof(uint32_t), kAbsent);
  for (int token = 0; token < p.shape.max_tokens; token++) {
    for (int step = 1; step < channel.num_ranks(); step++) {
      const int peer = channel.peer(step);
      if (sends_row(p, peer, token)) channel.send_row(peer, token, words.data(), static_cast<int>(words.size()));
    }
  }
  channel.close_stage();
  // Here, unlike on a GPU, the op headers show that a bank is empty: docs/memory_model.md.
  channel.await_arrivals();
  channel.await_headers();
  channel.complete();
}

}  // namespace ep
