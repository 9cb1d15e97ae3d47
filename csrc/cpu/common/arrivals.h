// How a dispatch of the host tells of rows that lie at their place (runtime/common/arrivals.h). Its consumer is another
// thread.
#pragma once

#include <algorithm>
#include <atomic>

#include "runtime/common/arrivals.h"

namespace ep {

class CpuArrivals {
 public:
  // `demand`: of each local expert, also what does not fit. Nothing is told where nobody asks.
  CpuArrivals(const Arrivals& arrivals, const OutputShape& output, const int32_t* demand)
      : arrivals_(arrivals), output_(output) {
    if (arrivals_.state == nullptr) return;
    expected_ = *arrivals_.header(Arrivals::kExpected);
    back_ = arrivals_.blocks_of(output);
    int64_t start = 0;  // of packed rows
    for (int e = 0; e < output.local_experts; e++) {
      const int wanted = std::max(demand[e], 0);
      const int64_t next = start + output.span(wanted);
      plan(e, start, next, static_cast<int>(output.kept(start, wanted)));
      start = next;
    }
    if (output.layout == OutputLayout::kPacked) plan(-1, start, output.capacity, 0);
    store(arrivals_.plan(), Arrivals::told(expected_, back_));
  }
  // All of a row lies at its place.
  void place(int32_t row) {
    if (arrivals_.state == nullptr || row < 0) return;
    const int block = arrivals_.block_of(output_, row);
    if (++*arrivals_.entry(Arrivals::kMissing, block) == 0) announce(block, front_++);
  }
  static void fail(const Arrivals& arrivals) {
    if (arrivals.state != nullptr) store(arrivals.header(Arrivals::kFailed), *arrivals.header(Arrivals::kExpected));
  }

 private:
  template <class T>
  static void store(T* word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_release);
  }
  void plan(int expert, int64_t start, int64_t next, int kept) {
    arrivals_.for_blocks_of(output_, expert, start, next, kept,
                            [&](const Arrivals::Block& block) { take(expert, block); });
  }
  void take(int expert, const Arrivals::Block& block) {
    *arrivals_.entry(Arrivals::kRows, block.number) = block.rows;
    *arrivals_.entry(Arrivals::kFirst, block.number) = block.first;
    *arrivals_.entry(Arrivals::kExperts, block.number) = block.rows > 0 ? expert : -1;
    *arrivals_.entry(Arrivals::kMissing, block.number) = -block.rows;
    if (block.rows == 0) announce(block.number, --back_);
  }
  void announce(int block, int place) {
    store(arrivals_.entry(Arrivals::kWords, block), expected_);
    store(arrivals_.order(place), Arrivals::told(expected_, block));
  }

  const Arrivals arrivals_;
  const OutputShape& output_;
  int32_t expected_ = 0;
  int front_ = 0, back_ = 0;  // places of the order that are taken, from either end
};

}  // namespace ep
