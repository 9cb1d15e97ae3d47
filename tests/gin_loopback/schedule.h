// The order in which the requests of one source land. Pure: no memory, no clock.
//
// A request has two steps, in this order: its data lands, then it ends (its signal is added, its sender told).
//   in order    no step of a request comes before those of an earlier one of the same context
//   reordering  any order, but a strong signal waits for the end of all earlier requests of its context. A weak signal
//               waits for its own data alone.
#pragma once

#include <cstdint>
#include <vector>

namespace gin_loopback {

// xorshift64*: the same numbers for a seed everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t below(uint64_t bound) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return bound == 0 ? 0 : (state_ * 0x2545F4914F6CDD1Dull >> 11) % bound;
  }

 private:
  uint64_t state_;
};

template <class Request>  // has uint32_t `context`, bool `is_strong`
class Schedule {
 public:
  Schedule(bool reorders, uint64_t delay_ns, uint64_t seed)
      : reorders_(reorders),
        span_ns_(delay_ns != 0 ? delay_ns
                 : reorders    ? kDefaultSpanNs
                               : 0),
        random_(seed) {}

  void add(const Request& request, uint64_t now) {
    const uint64_t data_at = now + random_.below(span_ns_ + 1);
    const uint64_t end_at = data_at + (reorders_ ? random_.below(span_ns_ / 4 + 1) : 0);
    pending_.push_back({request, data_at, end_at, false});
  }
  bool is_empty() const { return pending_.empty(); }
  // Data or ends that came before those of an earlier request of their context.
  uint64_t num_passed() const { return num_passed_; }

  // Takes the steps that are due. `land(request)` and `end(request)` carry them out.
  template <class Land, class End>
  void run(uint64_t now, Land&& land, End&& end) {
    std::vector<uint32_t> open;  // contexts of earlier requests that have not ended
    size_t kept = 0;
    for (size_t i = 0; i < pending_.size(); i++) {
      Pending& each = pending_[i];
      bool is_behind = false;
      for (uint32_t context : open) is_behind |= context == each.request.context;
      bool has_ended = false;
      if (reorders_ || !is_behind) {
        if (!each.has_landed && now >= each.data_at) {
          land(each.request);
          each.has_landed = true;
          num_passed_ += is_behind ? 1 : 0;
        }
        if (each.has_landed && now >= each.end_at && !(is_behind && each.request.is_strong)) {
          end(each.request);
          has_ended = true;
          num_passed_ += is_behind ? 1 : 0;
        }
      }
      if (has_ended) continue;
      open.push_back(each.request.context);
      if (kept != i) pending_[kept] = each;
      kept++;
    }
    pending_.resize(kept);
  }

 private:
  static constexpr uint64_t kDefaultSpanNs = 20000;
  struct Pending {
    Request request;
    uint64_t data_at, end_at;
    bool has_landed;
  };

  bool reorders_;
  uint64_t span_ns_;
  Random random_;
  std::vector<Pending> pending_;
  uint64_t num_passed_ = 0;
};

}  // namespace gin_loopback
