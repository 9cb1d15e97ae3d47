// How the second kernel of a high-throughput dispatch sends rows: workers (warps) take tokens from a counter, load a
// row into their stage of shared memory, and store it from there to its place on every rank that needs it. Bulk copies
// move what is aligned.
#pragma once

#include "cuda/device/copy.cuh"
#include "cuda/device/row_piece.cuh"
#include "cuda/ht/common/signals.cuh"
#include "cuda/ht/common/work.cuh"
#include "cuda/ht/dispatch/send_tables.cuh"

namespace ep {
inline namespace EP_KERNELS {

// ---- A row into the stage

// Below it, the warp's own stores take less time than the engine does for a copy.
constexpr int kLeastBulkBytes = 1024;

static __device__ __noinline__ void gather_part(const HtPart& part, const char* in, char* out, int width, int lane) {
  if (part.elements == 1) return copy_bytes(out, in, part.bytes, width, lane);
  const int words = part.element_bytes / width;
  for (int i = lane; i < part.elements * words; i += 32) {
    const int element = i / words, word = i % words;
    copy_bytes(out + element * part.element_bytes + word * width, in + element * part.element_stride + word * width,
               width, width, 0);
  }
}

// A row on its way to e4m3, in blocks of two steps: part 0, and its scales, part 1. Two blocks at a time, so that what
// one waits for is loaded while the other is converted.
template <DType kType>
struct Conversion {
  using Block = Raw<Encoding::kFp8, 2>;
  static constexpr unsigned kStepBytes = 1024, kBlockBytes = 2 * kStepBytes;  // of x

  const char* row;
  unsigned at, end;  // bytes of x: where the lane's share of the first block begins, of the row
  char *out, *scales;
  int group, groups, block_groups;  // of the lane in the first block, of the row, of a block
  unsigned own_part;                // bits before it
  bool has_scale;
  Quant quant;

  __device__ __forceinline__ Conversion(const SendRole& role, int token)
      : row(static_cast<const char*>(role.p.parts[0].in) + token * role.p.parts[0].row_stride),
        at(32 * role.lane),
        end(2 * role.p.hidden),
        out(role.stage + 16 * role.lane),
        scales(role.stage + role.geometry.stage_offset[1]),
        groups(ceil_div(role.p.hidden, is_mxfp8(role.p.options.quant) ? kMxBlock : kQuantGroup)),
        quant(role.p.options.quant) {
    // Of a group's eight lanes the even ones work out the scale of the first step, the others that of the second; of
    // MXFP8 a group has two lanes.
    const unsigned lane = role.lane, step = lane & 1, lanes = is_mxfp8(quant) ? 2 : 8;
    group = static_cast<int>(32 / lanes * step + lane / lanes);
    block_groups = 64 / lanes;
    own_part = 16 * step;
    has_scale = lane % lanes < 2;
    row = ptx::opaque(row);
  }

  // A lane past the row takes its last numbers once more, which changes no group's maximum.
  __device__ __forceinline__ void load(Block& raw, int block) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const char* from = row + min(at + (block * kBlockBytes + j * kStepBytes), end - 32);
      raw.vector[2 * j] = ptx::ld_nc(from);
      raw.vector[2 * j + 1] = ptx::ld_nc(from + 16);
    }
  }

  __device__ __forceinline__ void convert(const Block& raw, int block) const {
    const bool is_mx = is_mxfp8(quant);
    const float amax = unpack2<kType>(group_maxima<kType>(raw.vector, is_mx ? 2 : 8) >> own_part).x;
    float scale, factor;
    uint32_t byte = 0;
    if (is_mx) {
      mx_block_scale(amax, byte, factor);
    } else {
      group_scale(quant, amax, scale, factor);
      byte = __float_as_uint(scale) >> 23;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const unsigned step_at = block * kBlockBytes + j * kStepBytes;
      const float own_factor = __shfl_sync(~0u, factor, (lane_id() & (is_mx ? ~1 : ~7)) + j);
      const uint4 piece = scaled<kType>(raw.vector[2 * j], raw.vector[2 * j + 1], own_factor);
      if (at + step_at < end) ptx::st_shared(reinterpret_cast<uint4*>(out + step_at / 2), piece);
    }
    if (!has_scale) return;
    // Behind the last group the stage has room for a block's; those of exponents are sent, too.
    const int own = group + block * block_groups;
    const bool is_there = own < groups;
    if (is_mx || quant == Quant::kFp8Ue8m0) {
      if (is_there || !is_mx) ptx::st_shared(reinterpret_cast<uint8_t*>(scales) + own, is_there ? byte : 0);
    } else {
      ptx::st_shared(reinterpret_cast<uint32_t*>(scales) + own, is_there ? __float_as_uint(scale) : 0);
    }
  }

  __device__ __forceinline__ void run() {
    Block first, second;
    load(first, 0);
#pragma unroll 1
    for (int blocks = ceil_div(end, kBlockBytes);; blocks -= 2) {
      load(second, 1);
      convert(first, 0);
      if (blocks == 1) break;
      load(first, 2);
      convert(second, 1);
      if (blocks == 2) break;
      at += 2 * kBlockBytes;
      out += kBlockBytes;
      group += 2 * block_groups;
    }
  }
};

// The same to NVFP4, in steps of 1024 elements, of which a lane has two blocks.
template <DType kType>
struct Nvfp4Conversion {
  using Block = Raw<Encoding::kFp4, 1>;
  static constexpr unsigned kStepBytes = 2048;  // of x

  const char* row;
  unsigned at, end;  // bytes of x: where the lane's share of the first step begins, of the row
  char *out, *scales;
  float tensor_scale;

  __device__ __forceinline__ Nvfp4Conversion(const SendRole& role, int token)
      : row(static_cast<const char*>(role.p.parts[0].in) + token * role.p.parts[0].row_stride),
        at(64 * role.lane),
        end(2 * role.p.hidden),
        out(role.stage + 16 * role.lane),
        scales(role.stage + role.geometry.stage_offset[1] + 2 * role.lane),
        tensor_scale(role.p.tensor_scale != nullptr ? __ldg(role.p.tensor_scale) : 1.0f) {}

  __device__ __forceinline__ void load(Block& raw, unsigned step_at) const {
    const char* from = row + min(at + step_at, end - 64);
#pragma unroll
    for (int i = 0; i < 4; i++) raw.vector[i] = ptx::ld_nc(from + 16 * i);
  }
  __device__ __forceinline__ void convert(const Block& raw, unsigned step_at) const {
    uint32_t words[4], scale[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      scale[b] =
          nvfp4_block<kType>(raw.vector[2 * b], raw.vector[2 * b + 1], tensor_scale, words[2 * b], words[2 * b + 1]);
    }
    if (at + step_at >= end) return;
    ptx::st_shared(reinterpret_cast<uint4*>(out + step_at / 4), make_uint4(words[0], words[1], words[2], words[3]));
    auto* own = reinterpret_cast<uint8_t*>(scales) + step_at / 32;
    ptx::st_shared(own, scale[0]);
    ptx::st_shared(own + 1, scale[1]);
  }
  __device__ __forceinline__ void run() {
    Block first, second;
    load(first, 0);
#pragma unroll 1
    for (unsigned step_at = 0;; step_at += 2 * kStepBytes) {
      load(second, step_at + kStepBytes);
      convert(first, step_at);
      if (step_at + kStepBytes >= end) break;
      load(first, step_at + 2 * kStepBytes);
      convert(second, step_at + kStepBytes);
      if (step_at + 2 * kStepBytes >= end) break;
    }
  }
};

// Begins to load a pass of a token's parts. Returns the bytes that the barrier will announce.
__device__ __forceinline__ int begin_load(const SendRole& role, int token, int pass) {
  const HtDispatchParams& p = role.p;
  const HtSendGeometry& g = role.geometry;
  ptx::fence_proxy_async_shared();  // the last users of the stage may have been threads
  __syncwarp();
  int bulk = 0;
  for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
    if (p.options.quant != Quant::kNone && i < 2) continue;
    if (g.in_width[i] == 0) bulk += p.parts[i].bytes;
  }
  if (bulk > 0 && role.lane == 0) {
    ptx::mbarrier_expect(role.barrier(), bulk);
    for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
      if (g.in_width[i] != 0 || (p.options.quant != Quant::kNone && i < 2)) continue;
      const char* in = static_cast<const char*>(p.parts[i].in) + token * p.parts[i].row_stride;
      ptx::bulk_load(role.stage + g.stage_offset[i], in, p.parts[i].bytes, role.barrier());
    }
  }
  return bulk;
}

static __device__ __noinline__ void convert_to_nvfp4(const SendRole& role, int token) {
  if (role.p.dtype == DType::kBF16) {
    Nvfp4Conversion<DType::kBF16>(role, token).run();
  } else {
    Nvfp4Conversion<DType::kF16>(role, token).run();
  }
}

__device__ __forceinline__ void await_load(const SendRole& role, uint32_t& parity) {
  while (!ptx::mbarrier_try_wait(role.barrier(), parity)) {
  }
  parity ^= 1;
}

template <bool kQuant>
__device__ __forceinline__ void finish_load(const SendRole& role, int token, int pass, int bulk, uint32_t& parity) {
  const HtDispatchParams& p = role.p;
  const HtSendGeometry& g = role.geometry;
  bool by_threads = false;
  if constexpr (kQuant) {
    if (pass == 0) {
      by_threads = true;
      if (is_nvfp4(p.options.quant)) {
        convert_to_nvfp4(role, token);
      } else if (p.dtype == DType::kBF16) {
        Conversion<DType::kBF16>(role, token).run();
      } else {
        Conversion<DType::kF16>(role, token).run();
      }
    }
  }
  for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
    if (g.in_width[i] == 0 || (kQuant && i < 2)) continue;
    by_threads = true;
    const char* in = static_cast<const char*>(p.parts[i].in) + token * p.parts[i].row_stride;
    gather_part(p.parts[i], in, role.stage + g.stage_offset[i], g.in_width[i], role.lane);
  }
  if (by_threads) ptx::fence_proxy_async_shared();  // the bulk stores must see it
  if (bulk > 0) await_load(role, parity);
  __syncwarp();
}

// ---- From the stage to its places

// A token's choice `lane`; the leading lane of a group acts for its rank.
struct SendRoute {
  OwnChoice choice;
  SameOwner group;
  int32_t first_row = kNoRow;  // of the group: where the row goes

  // Loads the token's entries of the handle; resolve() uses them.
  __device__ __forceinline__ static SendRoute load(const SendRole& role, int unit) {
    SendRoute route;
    if (unit >= role.geometry.units) return route;
    const int token = role.geometry.by_tokens.remainder(unit, role.geometry.by_tokens.divide(unit));
    route.choice = OwnChoice::load(role.p.handle.own, role.p.shape.topk, token);
    return route;
  }
  __device__ __forceinline__ void resolve(const SendRole& role) {
    group = SameOwner::of(role, choice);
    first_row = group.first_fitting(choice.row);
  }
};

// Where a rank wants a row of another.
__device__ __forceinline__ char* target_at(const SendRole& role, int peer, int32_t slot, int32_t row, int part) {
  const Offset out = role.tables.offsets[peer * kHtMaxParts + part];
  const Offset target = out == kNoOffset ? role.p.offsets.staged_row(slot) + role.p.offsets.row.offset[part]
                                         : out + static_cast<Offset>(row) * role.p.parts[part].bytes;
  return role.peers.at<char>(peer, target);
}

__device__ __forceinline__ char* target_of(const SendRole& role, const SendRoute& route, int part) {
  const int peer = route.group.rank;
  if (peer == role.peers.rank) return role.out_row(part, route.first_row);
  return target_at(role, peer, route.choice.slot, route.first_row, part);
}

// Lanes that send store to their targets, all at once; a row that bulk copies cannot move goes word by word.
// target_of(part): of this lane, asked of those that send.
template <class TargetOf>
__device__ __forceinline__ void store_parts(const SendRole& role, int pass, bool sends, const TargetOf& target_of) {
  const HtSendGeometry& g = role.geometry;
#pragma unroll 1
  for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
    const int bytes = role.p.parts[i].bytes;
    char* target = sends ? target_of(i) : nullptr;
    const auto bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(target)) | static_cast<unsigned>(bytes);
    const bool is_bulk = sends && bits % 16 == 0 && bytes >= kLeastBulkBytes;
    if (is_bulk) ptx::bulk_store(target, role.stage + g.stage_offset[i], bytes);
    unsigned rest = __ballot_sync(~0u, sends && !is_bulk);
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int lane = __ffs(static_cast<int>(rest)) - 1;
      auto* out = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(target), lane));
      const unsigned low = __shfl_sync(~0u, bits, lane);
      copy_bytes(out, role.stage + g.stage_offset[i], bytes, word_bytes(low, 16), role.lane);
    }
  }
  ptx::bulk_commit();
}

// To the ranks of leading lanes.
__device__ __forceinline__ void store_parts(const SendRole& role, const SendRoute& route, int pass) {
  // A handle that was changed must not reach beyond the receiver's output.
  const bool sends = route.group.leads && route.first_row >= 0 && route.first_row < role.tables.rows[route.group.rank];
  store_parts(role, pass, sends, [&](int part) { return target_of(role, route, part); });
}

// ---- Announcements

// Rows of some tokens, for ranks that want them announced in chunks. Lanes count them when they lie in place, and the
// lane that counts the last of a chunk signals it. Several tokens at once, as an SM takes half a microsecond for each
// fence, one after the other. Counts: of a route, the lane's counter (-1: none), and what counting one does.
template <class Counts>
struct AnnouncementsOf {
  static constexpr int kBatchSize = 4;
  int size = 0;
  int counter[kBatchSize] = {-1, -1, -1, -1};  // of this lane, newest first; -1: none

  __device__ __forceinline__ bool is_full() const { return size == kBatchSize; }
  template <class Route>
  __device__ __forceinline__ void add(const SendRole& role, const Route& route) {
#pragma unroll
    for (int q = kBatchSize - 1; q > 0; q--) counter[q] = counter[q - 1];
    size++;
    counter[0] = Counts::counter_of(role, route);
  }
  // What was added lies in place.
  __device__ __forceinline__ void send(const SendRole& role) {
    __syncwarp();  // other lanes wrote parts of the rows
    ptx::fence_proxy_async();
    __threadfence();
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      if (counter[q] >= 0) Counts::count(role, counter[q]);
      counter[q] = -1;
    }
    if constexpr (kCrossesDomains) __syncwarp();  // some lanes may have called post()
    size = 0;
  }
};

// Of own rows in a world of one domain, for ranks that have copies to make.
struct CountsOfChunks {
  __device__ __forceinline__ static int counter_of(const SendRole& role, const SendRoute& route) {
    const int peer = route.group.rank;
    if (!route.group.leads || role.tables.chunks[peer] == 1) return -1;
    const int index = route.choice.slot - role.tables.flows.to_first[peer];
    return peer * kHtChunks + chunk_of(index, role.tables.flows.to[peer], role.tables.chunks[peer]);
  }
  __device__ __forceinline__ static void count(const SendRole& role, int counter) {
    const int peer = counter / kHtChunks, chunk = counter % kHtChunks;
    const int rows = chunk_size(chunk, role.tables.flows.to[peer], role.tables.chunks[peer]);
    const uint32_t before = atomicAdd(&counters_of(role.op).ready[peer * kHtChunks + chunk], 1u);
    const bool is_early = has_bug(Bug::kEarlyRows, Kind::kDispatch);
    if (before + 1 != (is_early ? 1u : static_cast<uint32_t>(rows * role.geometry.passes))) return;
    if (has_bug(Bug::kUnannouncedRows, Kind::kDispatch)) return;
    send_signal(role.op, role.p.offsets, role.peers, peer, HtSignal::kDispatchRows, chunk);
  }
};

// Other ranks get one signal for all rows: the worker that finishes the last unit sends it.
__device__ __forceinline__ void announce_all(const SendRole& role, int units) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (units == 0) return;
  const uint32_t before = count_finished(counters_of(role.op).finished, units);
  const bool is_early = has_bug(Bug::kEarlyRows, Kind::kDispatch);
  if (!is_early && before + units != static_cast<uint32_t>(role.geometry.units)) return;
  if (has_bug(Bug::kUnannouncedRows, Kind::kDispatch)) return;
#pragma unroll 1
  for (int peer = role.lane; peer < role.num_ranks(); peer += 32) {
    if (role.tables.flows.to[peer] > 0 && role.tables.chunks[peer] == 1) {
      send_signal(role.op, role.p.offsets, role.peers, peer, HtSignal::kDispatchRows, 0);
    }
  }
}

// ---- A worker

// Takes tokens, and sends their rows.
struct RowSender {
  const SendRole& role;
  Tickets tickets;
  int unit = 0, bulk = 0;  // bytes of its row that the barrier will announce
  uint32_t parity = 0;
  SendRoute route;

  __device__ __forceinline__ explicit RowSender(const SendRole& a_role) : role(a_role) {}

  __device__ __forceinline__ uint32_t& counter() const { return counters_of(role.op).taken; }
  __device__ __forceinline__ int pass() const { return role.geometry.by_tokens.divide(unit); }
  __device__ __forceinline__ int token() const { return role.geometry.by_tokens.remainder(unit, pass()); }
  __device__ __forceinline__ void load() {
    if (unit < role.geometry.units) bulk = begin_load(role, token(), pass());
  }

  // Loads the first row, before anything of the other ranks is known.
  __device__ __forceinline__ void begin() {
    tickets.prefetch(counter());
    if (role.lane == 0) ptx::mbarrier_init(role.barrier(), 1);
    unit = tickets.next();
    tickets.prefetch(counter());
    load();
  }
  __device__ __forceinline__ void prefetch_route() { route = SendRoute::load(role, unit); }
  // Instead of run(): no copy may land in the stage when the block is over.
  __device__ __forceinline__ void drop() {
    if (bulk > 0) await_load(role, parity);
  }

  template <bool kQuant>
  __device__ __forceinline__ void run() {
    bool in_chunks = false;
    for (int r = 0; r < role.num_ranks(); r++) in_chunks = in_chunks || role.tables.chunks[r] > 1;
    AnnouncementsOf<CountsOfChunks> announcements;
    int done = 0;
    // Threads acquired the peers' op messages, bulk copies write to the peers' memory.
    ptx::fence_proxy_async();
    testing_point(Point::kBeforeRows, role.op);
#pragma unroll 1
    while (unit < role.geometry.units) {
      testing_point(Point::kBetweenRows, role.op, unit);
      const int next_unit = tickets.next();
      tickets.prefetch(counter());
      const SendRoute next = SendRoute::load(role, next_unit);
      route.resolve(role);
      finish_load<kQuant>(role, token(), pass(), bulk, parity);
      store_parts(role, route, pass());
      if (announcements.is_full()) {
        ptx::bulk_wait<1>();
        announcements.send(role);
      }
      ptx::bulk_wait_read<0>();
      if (in_chunks) announcements.add(role, route);
      route = next;
      unit = next_unit;
      load();
      done++;
    }
    ptx::bulk_wait<0>();
    if (announcements.size > 0) announcements.send(role);
    announce_all(role, done);
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
