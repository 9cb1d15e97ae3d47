// What ranks share: every rank has a mailbox, with a ring of requests for each source. The source writes requests, the
// owner of the mailbox writes which are done.
#pragma once

#include <atomic>
#include <cstdint>

namespace gin_loopback {

constexpr uint32_t kRingSize = 4096;
constexpr int kMaxRanks = 64;
constexpr uint32_t kNoRegion = ~0u;
constexpr uint32_t kInlineBytes = 8;  // so few bytes of host memory travel in the request

struct Request {
  uint64_t bytes = 0, source_offset = 0, destination_offset = 0, signal_offset = 0, add = 0;
  uint64_t inline_data = 0;
  uint32_t source_region = kNoRegion, destination_region = kNoRegion, signal_region = kNoRegion;
  uint32_t context = 0;  // what is in order: a context of one of the device communicators
  bool is_strong = false, is_inline = false;
};

struct alignas(128) Slot {
  std::atomic<uint64_t> number{0};  // of the request in it, from 1; written last
  Request request;
};

struct Ring {
  Slot slots[kRingSize];
  std::atomic<uint64_t> done[kRingSize];  // number of the last request of the slot that is done
};

struct Mailbox {
  std::atomic<uint32_t> is_closing{0}, has_failed{0};
  alignas(128) Ring rings[];  // by source

  static size_t bytes(int num_ranks) { return sizeof(Mailbox) + static_cast<size_t>(num_ranks) * sizeof(Ring); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The source's end of a ring. One thread at a time.
class Sender {
 public:
  explicit Sender(Ring* ring = nullptr) : ring_(ring) {}
  bool has_room() const {
    const uint64_t next = last_ + 1;
    return next <= kRingSize || is_done(next - kRingSize);
  }
  // The request's number. There must be room.
  uint64_t post(const Request& request) {
    Slot& slot = ring_->slots[++last_ % kRingSize];
    slot.request = request;
    slot.number.store(last_, std::memory_order_release);
    return last_;
  }
  // Numbers in a slot only grow, so a later one tells of an earlier one, too.
  bool is_done(uint64_t number) const {
    return ring_->done[number % kRingSize].load(std::memory_order_acquire) >= number;
  }

 private:
  Ring* ring_;
  uint64_t last_ = 0;
};

// The owner's end.
class Receiver {
 public:
  explicit Receiver(Ring* ring = nullptr) : ring_(ring) {}
  bool take(Request& request, uint64_t& number) {
    const Slot& slot = ring_->slots[next_ % kRingSize];
    if (slot.number.load(std::memory_order_acquire) != next_) return false;
    request = slot.request;
    number = next_++;
    return true;
  }
  void finish(uint64_t number) { ring_->done[number % kRingSize].store(number, std::memory_order_release); }

 private:
  Ring* ring_;
  uint64_t next_ = 1;
};

}  // namespace gin_loopback
