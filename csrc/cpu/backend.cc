#include "cpu/backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/interruption.h"
#include "cpu/ht/operations.h"
#include "cpu/ll/operations.h"
#include "runtime/group.h"
#include "transport/host/transport.h"

namespace ep {
namespace {

void rest_rows(char* base, const LlWindow& window) {
  for (const LlWindow::PerKind& kind : window.kind) {
    // Atomic, as a rank that does not know that it is left out may store, too.
    auto* words = reinterpret_cast<uint32_t*>(base + kind.rows.offset);
    for (uint64_t i = 0; i < kind.rows.count; i++) {
      std::atomic_ref<uint32_t>(words[i]).store(kAbsent, std::memory_order_relaxed);
    }
  }
}

// The first touch of a large window takes seconds.
void clear_window(char* base, uint64_t bytes) {
  constexpr uint64_t kPiece = 16 << 20;
  for (uint64_t begin = 0; begin < bytes; begin += kPiece) {
    std::memset(base + begin, 0, std::min(kPiece, bytes - begin));
    if (has_interruption()) throw Interrupted(concat("to clear a window of ", bytes, " bytes"));
  }
}

class CpuBackend : public Backend {
 public:
  CpuBackend(std::unique_ptr<Transport> transport, const Window& window, const GroupConfig& config)
      : transport_(std::move(transport)), window_(window) {
    const Region<char>& arena = window.ht.arena;
    if (arena.count > 0) {
      arena_ = std::make_shared<Arena>(transport_->local_window() + arena.offset, arena.offset, arena.count,
                                       transport_->window_owner());
    }
    state_.control.timeout_seconds = config.timeout_seconds;
    state_.masks_late = config.masks_late_ranks;
    state_.heartbeats_at = window.heartbeats.offset;
    const size_t num_ranks = transport_->topology().num_ranks;
    state_.next_calls = NextCalls(window, static_cast<int>(num_ranks));
    state_.wire = {std::vector<uint64_t>(num_ranks), std::vector<uint64_t>(num_ranks),
                   std::vector<uint64_t>(num_ranks)};
  }

  const char* name() const override { return "cpu"; }
  void dispatch(const LlDispatchParams& params, void*) override { cpu_dispatch(params, *transport_, state_); }
  void combine(const LlCombineParams& params, void*) override { cpu_combine(params, *transport_, state_); }
  void combine_weights(const LlCombineWeightsParams& params, void*) override {
    cpu_combine_weights(params, *transport_, state_);
  }
  void ht_dispatch(const HtDispatchParams& params, void*) override { cpu_ht_dispatch(params, *transport_, state_); }
  void ht_combine(const HtCombineParams& params, void*) override { cpu_ht_combine(params, *transport_, state_); }
  std::shared_ptr<Arena> arena() const override { return arena_; }
  void mask(int rank, void*) override { set_mask(rank, true); }
  void update_masks(const RankMask& masked, void*) override {
    state_.recalled = state_.masked.without(masked);
    state_.masked = state_.masked | masked;
  }
  void query_masks(int32_t* status, void*) override {
    const RankMask masked = state_.masked.without(state_.recalled);
    for (int r = 0; r < transport_->topology().num_ranks; r++) {
      status[r] = masked.has(r) ? 1 : 0;
    }
  }
  LlEpochs settle() override { return {state_.epoch[0], state_.epoch[1]}; }
  void restart(const LlEpochs& epochs) override {
    rest_rows(transport_->local_window(), window_);
    std::copy_n(epochs.of, kNumKinds, state_.epoch);
    for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
      state_.next_calls.begin(false, kind, epochs.of[static_cast<int>(kind)]);
    }
  }
  void unmask_all(const RankMask& there) override {
    state_.masked = state_.recalled = there.complement(transport_->topology().num_ranks);
  }
  void store_words(int peer, Offset offset, const std::vector<uint64_t>& words) override {
    char* target = transport_->peer_ptr(peer, offset);
    for (const uint64_t word : words) {
      atomic_tagged(target).store(word, std::memory_order_release);
      target += sizeof word;
    }
  }
  std::vector<uint64_t> load_words(Offset offset, uint64_t count) override {
    std::vector<uint64_t> words(count);
    for (uint64_t i = 0; i < count; i++) words[i] = window_word(offset + i * sizeof(uint64_t));
    return words;
  }
  void replace(Bootstrap& bootstrap, int rank, double) override {
    try {
      clear_window(transport_->local_window(), transport_->window_bytes());
    } catch (...) {  // interrupted: a row of zeros would be taken for one that has come
      rest_rows(transport_->local_window(), window_);
      throw;
    }
    rest_rows(transport_->local_window(), window_);
    transport_->replace(bootstrap, rank);
  }
  void set_mask(int rank, bool is_masked) override {
    state_.recalled.remove(rank);
    if (is_masked) {
      state_.masked.add(rank);
    } else {
      state_.masked.remove(rank);
    }
  }
  bool trusts_handles() const override { return true; }
  Failure failure() const override { return state_.failure.get(); }
  bool has_failed() const override { return state_.failure.is_set(); }
  Report report(bool take_invalid_ids) override {
    Report report{state_.failure.get(),
                  state_.invalid_ids,
                  state_.dropped_rows,
                  {},
                  {},
                  {},
                  state_.masked.without(state_.recalled),
                  state_.masked};
    for (int kind = 0; kind < kNumKinds; kind++) {
      report.epochs[kind] = state_.epoch[kind];
      report.ht_epochs[kind] = state_.ht_epoch[kind];
      report.ht_staged[kind] = state_.ht_staged[kind];
    }
    if (take_invalid_ids) state_.invalid_ids = {};
    return report;
  }
  uint64_t window_word(Offset offset) override {
    return atomic_tagged(transport_->local_window() + offset).load(std::memory_order_acquire);
  }
  void set_timeout(double seconds) override { state_.control.timeout_seconds = seconds; }
  WireBytes wire_bytes() const override { return state_.wire; }
  void end_waits() override { state_.control.is_destroyed = true; }
  void abort() override {
    // A peer that made another call, or that gave another handle, still needs our op header. Only if a peer is gone,
    // what is in flight is useless.
    if (kind_of(failure()) != ErrorKind::kMismatch) transport_->abort();
  }

 private:
  std::unique_ptr<Transport> transport_;
  const LlWindow window_;
  CpuState state_;
  std::shared_ptr<Arena> arena_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                                          const GroupConfig& config) {
  auto windows = config.is_elastic ? HostWindows::create_elastic(bootstrap, topology.num_ranks, window.bytes)
                                   : HostWindows::create(bootstrap, window.bytes);
  char* base = windows->base(windows->rank());
  clear_window(base, window.bytes);
  rest_rows(base, window);
  // No rank writes into a window before its owner has cleaned it. Of one that joins, other ranks wait later.
  if (config.joins_world_of == 0) bootstrap.allgather("window ready");
  const uint64_t seed = config.network_seed == 0 ? 0 : config.network_seed + windows->rank();
  return std::make_unique<CpuBackend>(make_host_transport(std::move(windows), topology, seed), window, config);
}

}  // namespace ep
