#include "transport/host/transport.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/testing.h"

namespace ep {
namespace {

void add_signal(char* window, Offset signal, uint64_t value) {
  auto* word = reinterpret_cast<uint64_t*>(window + signal);
  std::atomic_ref<uint64_t>(*word).fetch_add(value, std::memory_order_release);  // pairs with Transport::signal
}

// Carries puts and signals to peers that cannot be reached by stores. One thread picks, at random, what lands next: any
// put, or a signal with no put to the same peer before it. Sources are read as late as the contract allows, when a put
// lands or at flush(), so that a sender that reuses one without flush() is found out.
class SimulatedNetwork {
 public:
  SimulatedNetwork(const HostWindows& windows, uint64_t seed)
      : windows_(windows), random_(seed), is_shuffled_(seed != 0), queues_(8) {
    thread_ = std::thread([this] { run(); });
  }
  ~SimulatedNetwork() { stop(/*drain=*/true); }

  void put(int peer, Offset destination, const void* source, uint64_t bytes) {
    push(peer, {false, destination, source, bytes, {}});
  }
  void signal_add(int peer, Offset signal, uint64_t value) { push(peer, {true, signal, nullptr, value, {}}); }
  // Takes the sources over; nothing needs to have landed.
  void flush() {
    std::unique_lock lock(mutex_);
    landed_.wait(lock, [this] { return !is_landing_; });
    for (auto& queue : queues_) {
      for (Item& item : queue) {
        if (item.is_signal || item.source == nullptr) continue;
        const char* source = static_cast<const char*>(item.source);
        item.copy.assign(source, source + item.size);
        item.source = nullptr;
      }
    }
  }
  void stop(bool drain) {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
      if (!drain) {
        for (auto& queue : queues_) queue.clear();
        num_queued_ = 0;
      }
    }
    work_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Item {
    bool is_signal;
    Offset offset;
    const void* source;  // null: in `copy`
    uint64_t size;       // bytes of a put, value of a signal
    std::vector<char> copy;
  };

  void push(int peer, Item item) {
    {
      std::lock_guard lock(mutex_);
      if (static_cast<size_t>(peer) >= queues_.size()) queues_.resize(peer + 1);
      queues_[peer].push_back(std::move(item));
      num_queued_++;
    }
    work_.notify_one();
  }

  // Index of an item of the queue that may land now.
  size_t choose(const std::deque<Item>& queue) {
    if (!is_shuffled_) return 0;
    constexpr size_t kReach = 64;  // how far an item may overtake others
    std::vector<size_t> free;
    bool is_behind_put = false;
    for (size_t i = 0; i < std::min(queue.size(), kReach); i++) {
      if (queue[i].is_signal && testing::has_bug(testing::Bug::kSignalBeforeData)) return i;
      if (!queue[i].is_signal || !is_behind_put) free.push_back(i);
      is_behind_put = is_behind_put || !queue[i].is_signal;
    }
    return free[random_() % free.size()];
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return num_queued_ > 0 || is_stopping_; });
      if (num_queued_ == 0) return;
      size_t peer = is_shuffled_ ? random_() % queues_.size() : 0;
      while (queues_[peer].empty()) peer = (peer + 1) % queues_.size();
      auto& queue = queues_[peer];
      const size_t index = choose(queue);
      const Item item = std::move(queue[index]);
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(index));
      num_queued_--;
      is_landing_ = true;
      // A signal that overtakes puts is noticed only if these take their time.
      const bool dawdle = is_shuffled_ && (random_() % 64 == 0 || testing::has_bug(testing::Bug::kSignalBeforeData));
      lock.unlock();
      if (dawdle) std::this_thread::sleep_for(std::chrono::microseconds(50));
      land(static_cast<int>(peer), item);
      lock.lock();
      is_landing_ = false;
      landed_.notify_all();
    }
  }

  void land(int peer, const Item& item) {
    if (item.is_signal) {
      add_signal(windows_.base(peer), item.offset, item.size);
    } else {
      std::memcpy(windows_.base(peer) + item.offset, item.source ? item.source : item.copy.data(), item.size);
    }
  }

  const HostWindows& windows_;
  std::mt19937_64 random_;
  const bool is_shuffled_;
  std::mutex mutex_;
  std::condition_variable work_, landed_;
  std::vector<std::deque<Item>> queues_;
  size_t num_queued_ = 0;
  bool is_landing_ = false;  // one put or signal, outside the lock
  bool is_stopping_ = false;
  std::thread thread_;
};

class HostTransport : public Transport {
 public:
  HostTransport(std::unique_ptr<HostWindows> windows, const Topology& topology, uint64_t network_seed)
      : windows_(std::move(windows)), topology_(topology) {
    if (topology_.num_domains() > 1) network_ = std::make_unique<SimulatedNetwork>(*windows_, network_seed);
  }

  const Topology& topology() const override { return topology_; }
  int rank() const override { return windows_->rank(); }
  char* local_window() const override { return windows_->base(rank()); }
  uint64_t window_bytes() const override { return windows_->bytes(); }
  char* peer_ptr(int peer, Offset offset) const override {
    return topology_.is_lsa(rank(), peer) ? windows_->base(peer) + offset : nullptr;
  }
  void put(int peer, Offset destination, const void* source, uint64_t bytes) override {
    check_target("put", peer, destination, bytes);
    if (bytes == 0) return;
    if (char* target = peer_ptr(peer, destination)) {
      std::memcpy(target, source, bytes);
    } else {
      network_->put(peer, destination, source, bytes);
    }
  }
  void signal_add(int peer, Offset signal, uint64_t value) override {
    check_target("signal", peer, signal, sizeof value);
    if (topology_.is_lsa(rank(), peer)) {
      add_signal(windows_->base(peer), signal, value);
    } else {
      network_->signal_add(peer, signal, value);
    }
  }
  std::shared_ptr<void> window_owner() const override { return windows_; }
  void flush() override {
    if (network_) network_->flush();
  }
  void replace(Bootstrap& bootstrap, int rank) override { windows_->replace(bootstrap, rank); }
  void abort() override {
    if (network_) network_->stop(/*drain=*/false);
  }

 private:
  void check_target(const char* what, int peer, Offset offset, uint64_t bytes) const {
    EP_CHECK(peer >= 0 && peer < topology_.num_ranks, "a ", what, " to rank ", peer, " of ", topology_.num_ranks);
    EP_CHECK(bytes <= window_bytes() && offset <= window_bytes() - bytes, "a ", what, " of ", bytes,
             " bytes to offset ", offset, " of rank ", peer, " leaves its window of ", window_bytes());
  }

  std::shared_ptr<HostWindows> windows_;
  Topology topology_;
  std::unique_ptr<SimulatedNetwork> network_;
};

}  // namespace

std::unique_ptr<Transport> make_host_transport(std::unique_ptr<HostWindows> windows, const Topology& topology,
                                               uint64_t network_seed) {
  return std::make_unique<HostTransport>(std::move(windows), topology, network_seed);
}

}  // namespace ep
