#include "nic.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "layout/ll/rail.h"

#if defined(EP_LAB)
#include "base/testing.h"
#include "cuda/testing/testing.h"
#endif

namespace ep::emulator {
namespace {

#if defined(EP_LAB)
std::atomic<bool> signals_come_first = false;
[[maybe_unused]] const bool has_setter = add_gpu_testing_setter([](const GpuTesting& testing) {
  signals_come_first = (testing.bugs >> static_cast<int>(testing::Bug::kSignalBeforeData) & 1) != 0;
});
#else
constexpr bool signals_come_first = false;
#endif

constexpr std::chrono::seconds kMaxCountSeconds{60};

[[noreturn]] void die(const char* what, int rank) {
  std::fprintf(stderr, "simulated network: %s (rank %d)\n", what, rank);
  std::abort();
}

}  // namespace

Nics::Nics(char* first_window, const NetworkConfig& config)
    : first_window_(first_window), config_(config), num_ranks_(config.topology.num_ranks), random_(config.seed) {
  for (int rank = 0; rank < num_ranks_; rank++) {
    queues_.push_back(std::make_unique<NicQueue>());
    signals_.emplace_back(static_cast<size_t>(config.shape.num_contexts) * config.shape.num_signals);
    Counts counts;
    WireBytes& bytes = counts.bytes;
    for (auto* each : {&bytes.rows, &bytes.row_bytes, &bytes.other_bytes, &bytes.network_puts, &bytes.network_bytes}) {
      each->assign(num_ranks_, 0);
    }
    counts_.push_back(std::move(counts));
  }
  num_taken_.assign(num_ranks_, 0);
  leaves_some_ = std::vector<std::atomic<bool>>(num_ranks_);
  thread_ = std::thread([this] { run(); });
}

Nics::~Nics() {
  is_stopping_ = true;
  thread_.join();
}

SimulatedNetworkArgs Nics::args(int rank) {
  return {queues_[rank].get(), signals_[rank].data(), config_.shape.num_signals};
}

WireBytes Nics::wire_bytes(int rank) const {
  const uint64_t posted = std::atomic_ref(queues_[rank]->num_posted).load(std::memory_order_acquire);
  std::unique_lock lock(mutex_);
  const bool has_all = has_counted_.wait_for(lock, kMaxCountSeconds, [&] { return counts_[rank].num_taken >= posted; });
  if (!has_all) {
    raise(ErrorKind::kTimeout, "the simulated NIC of rank ", rank, " has taken ", counts_[rank].num_taken, " of ",
          posted, " puts and signals within ", kMaxCountSeconds.count(), " s");
  }
  if (leaves_some_[rank]) {
    raise(ErrorKind::kSystem, "a call of low latency has ended while what rank ", rank, " had sent was under way");
  }
  return counts_[rank].bytes;
}

void Nics::run() {
  while (!is_stopping_) {
    bool has_work = false;
    for (int rank = 0; rank < num_ranks_; rank++) has_work = take(rank) || has_work;
    if (!items_.empty()) {
      land_any();
    } else if (!has_work) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

// All that the rank's kernels have posted. False: nothing.
bool Nics::take(int rank) {
  NicQueue& queue = *queues_[rank];
  if (std::atomic_ref(queue.has_overflown).load(std::memory_order_relaxed) != 0) {
    die("more puts than the protocol promises", rank);
  }
  bool has_any = false;
  while (true) {
    NicDescriptor& place = queue.descriptors[num_taken_[rank] % NicQueue::kDepth];
    std::atomic_ref is_posted(place.is_posted);
    if (is_posted.load(std::memory_order_acquire) != num_taken_[rank] + 1) return has_any;
    has_any = true;
    Item item{rank, place, {}, {}};
    is_posted.store(0, std::memory_order_release);
    num_taken_[rank]++;
    const NicDescriptor& what = item.what;
    const Topology& topology = config_.topology;
    if (what.peer < 0 || what.peer >= num_ranks_ || topology.is_lsa(rank, what.peer)) die("no such peer", rank);
    if ((rank - what.peer) % config_.link_size != 0) die("a put that leaves the rail", rank);
    if (what.target % 16 != 0 || what.source % 16 != 0 || what.bytes % 16 != 0) die("a put is not aligned", rank);
    if (what.target + what.bytes > config_.window_bytes || what.source + what.bytes > config_.window_bytes) {
      die("a put leaves the window", rank);
    }
    if (what.context < 0 || what.context >= config_.shape.num_contexts || what.signal >= config_.shape.num_signals) {
      die("no such context or signal", rank);
    }
    const auto same = [&](const Item& other) {
      return other.rank == rank && other.what.peer == what.peer && other.what.context == what.context;
    };
    if (std::count_if(items_.begin(), items_.end(), same) >= config_.shape.max_outstanding) {
      die("more puts under way than the protocol promises", rank);
    }
    // Low latency uses a word in every other call. Its receiver waits for all that a call sends there, so the sender's
    // call after the next one finds nothing under way.
    const auto same_word = [&](const Item& other) { return same(other) && other.what.signal == what.signal; };
    const bool is_ll = what.signal != kNoSignal && what.signal < LlRail::num_signals(topology);
    if (is_ll && !config_.masks_ranks && std::any_of(items_.begin(), items_.end(), same_word)) {
      leaves_some_[rank] = true;
    }
    count(rank, what);
    cut(item);
    item.not_before = Clock::now() + lateness(rank);
    items_.push_back(std::move(item));
  }
}

void Nics::count(int rank, const NicDescriptor& what) {
  {
    std::lock_guard lock(mutex_);
    Counts& counts = counts_[rank];
    counts.num_taken = num_taken_[rank];
    if (what.bytes > 0) counts.bytes.network_puts[what.peer]++;
    counts.bytes.network_bytes[what.peer] += what.bytes;
  }
  has_counted_.notify_all();
}

void Nics::cut(Item& item) {
  uint64_t begin = 0;
  while (begin < item.what.bytes) {
    uint64_t bytes = item.what.bytes - begin;
    if (config_.seed != 0 && bytes > 16 && below(2) == 0) bytes = 16 * (1 + random_() % (bytes / 16));
    item.pieces.push_back({begin, bytes});
    begin += bytes;
  }
}

// A network is mostly quick, here and there slow; now and then a rank's links are. The thousands of the seed say how
// many times as slow: an emulated call takes long, and with tens of them its sender may end the next one before it
// lands.
Nics::Clock::duration Nics::lateness(int rank) {
  if (config_.seed == 0) return {};
  const unsigned times = 1 + static_cast<unsigned>(std::min<uint64_t>(config_.seed / 1000, 1000));
  const uint64_t links = config_.seed * 31 + static_cast<uint64_t>(rank) * 7 + num_taken_[rank] / 64;
  const bool is_slow = links % 3 == 0;
  if (below(is_slow && times > 1 ? 3 : 24) == 0) return std::chrono::microseconds(below(3000 * times));
  return std::chrono::microseconds(is_slow ? below(400) : below(40));
}

void Nics::land_any() {
  size_t i = 0;
  if (config_.seed != 0) {
    i = below(items_.size());
    if (Clock::now() < items_[i].not_before) {
      if (below(8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(5));
      return;
    }
  }
  Item& item = items_[i];
  NicDescriptor& what = item.what;
  if (signals_come_first && what.signal != kNoSignal && what.bytes > 0) {
    land_signal(what);
    what.signal = kNoSignal;
    item.not_before = Clock::now() + std::chrono::microseconds(500);
    return;
  }
  if (!item.pieces.empty()) {
    const size_t p = config_.seed == 0 ? 0 : below(item.pieces.size());
    const Piece piece = item.pieces[p];
    item.pieces.erase(item.pieces.begin() + static_cast<std::ptrdiff_t>(p));
    std::memcpy(first_window_ + what.peer * config_.window_stride + what.target + piece.offset,
                first_window_ + item.rank * config_.window_stride + what.source + piece.offset, piece.bytes);
    if (config_.seed != 0) return;
  }
  if (!item.pieces.empty()) return;
  if (what.signal != kNoSignal) land_signal(what);
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(i));
}

void Nics::land_signal(const NicDescriptor& what) {
  uint64_t& word = signals_[what.peer][static_cast<size_t>(what.context) * config_.shape.num_signals + what.signal];
  std::atomic_ref(word).fetch_add(what.add, std::memory_order_release);
}

}  // namespace ep::emulator
