// Rows that a warp adds up, through shared memory: pieces of rows are copied into a ring while earlier ones are added,
// across rows, pieces and units (a slot's or a token's sum), so that registers hold the sums alone and a unit does not
// begin with an empty pipeline.
#pragma once

#include "cuda/device/block_formats.cuh"
#include "cuda/device/lanes.cuh"

namespace ep {
inline namespace EP_KERNELS {

constexpr int kRingStepBytes = 32 * 16;  // a step of all lanes

// A warp's ring in shared memory. An item is a piece of a row. A lane reads what it has copied itself, so that it waits
// for its own copies and for no other lane.
template <int kNumItems, int kNumSteps>
class CopyRingOf {
 public:
  static constexpr int kItems = kNumItems, kSteps = kNumSteps;
  static constexpr int kStepBytes = kRingStepBytes, kItemBytes = kSteps * kStepBytes;

  __device__ __forceinline__ explicit CopyRingOf(char* ring)
      : own_(ptx::shared_address(ring) + lane_id() * (kStepBytes / 32)) {}
  __device__ __forceinline__ bool has_room() const { return prefetched_ - added_ < kItems; }

  // `from`: the lane's first bytes of the piece; `rest`: lanes' worths from there to the end of the row.
  template <int kLaneBytes>
  __device__ __forceinline__ void prefetch(const char* from, int rest) {
    const ptx::SharedAddress to = own_ + prefetched_ % kItems * kItemBytes;
    from = ptx::opaque(from);  // else an address is worked out for each step
#pragma unroll
    for (int s = 0; s < kSteps; s++) {  // past the row stays what was there, and no lane stores it
      if (32 * s < rest) ptx::copy_async<kLaneBytes>(to + s * kStepBytes, from + s * 32 * kLaneBytes);
    }
    ptx::copy_async_commit();
    prefetched_++;
  }
  // The same of a row in a block format, whose shared words every lane copies for itself behind its own.
  template <DType kFormat>
  __device__ __forceinline__ void prefetch_blocks(const char* row, int hidden, int lane_index, int rest) {
    const ptx::SharedAddress to = own_ + prefetched_ % kItems * kItemBytes;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      if (32 * s >= rest) continue;
      const BlockPlace<kFormat> place{hidden, lane_index + 32 * s};
      const char* from = row + place.lane_index * kEight;
      const ptx::SharedAddress step = to + s * kStepBytes;
      ptx::copy_async<8>(step, from);
      if (kFormat == DType::kLogFmt) ptx::copy_async<4>(step + 8, from + place.halves());
      ptx::copy_async<4>(step + 12, from + place.header());
    }
    ptx::copy_async_commit();
    prefetched_++;
  }
  // Waits for the oldest of the items that are left.
  __device__ __forceinline__ ptx::SharedAddress oldest() const {
    if (has_room()) {
      ptx::copy_async_wait<0>();
    } else {
      ptx::copy_async_wait<kItems - 1>();
    }
    return own_ + added_ % kItems * kItemBytes;
  }
  __device__ __forceinline__ void free_oldest() { added_++; }

 private:
  ptx::SharedAddress own_;  // the lane's part of the first step
  unsigned prefetched_ = 0, added_ = 0;
};

// What a lane has of a piece in the ring.
template <DType kType, int kCount>
__device__ __forceinline__ Numbers<kType, kCount> ringed(ptx::SharedAddress item, int step) {
  Numbers<kType, kCount> numbers;
  if constexpr (kIsBlockFormat<kType>) {
    numbers.load_shared(item + step * kRingStepBytes, {0, lane_id()});
  } else {
    numbers.load_shared(item + step * kRingStepBytes);
  }
  return numbers;
}

// A piece's numbers to a row of a block format, of which `rest` lanes' worths are left from this lane's on. A block may
// end with the row, and what lanes hold past it does not count.
template <DType kFormat, int kSteps>
__device__ __forceinline__ void store_blocks(char* row, int hidden, int piece, int rest,
                                             const float (&sum)[kSteps][kEight]) {
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    float values[kEight];
#pragma unroll
    for (int i = 0; i < kEight; i++) values[i] = 32 * s < rest ? sum[s][i] : 0.0f;
    Numbers<kFormat, kEight> numbers;
    numbers.from(values);
    if (32 * s < rest) store_of_row(numbers, row, hidden, (piece * kSteps + s) * 32 + lane_id());
  }
}

// A sum to a row of what travels, in whichever of the two ways its type has.
template <DType kWire, int kSteps, int kCount>
__device__ __forceinline__ void store_sum(char* row, int hidden, int piece, int rest,
                                          const float (&sum)[kSteps][kCount]) {
  if constexpr (kIsBlockFormat<kWire>) {
    store_blocks<kWire>(row, hidden, piece, rest, sum);
  } else {
    store_steps<kWire>(row, piece * kSteps * 32 + lane_id(), rest, sum);
  }
}

// A number of each of the last 32 units that are turned to, one a lane.
template <class T>
struct OfUnits {
  T mine = T{};

  __device__ __forceinline__ void put(unsigned unit, T value) {
    if (lane_id() == static_cast<int>(unit % 32)) mine = value;
  }
  __device__ __forceinline__ T get(unsigned unit) const { return __shfl_sync(~0u, mine, static_cast<int>(unit % 32)); }
};

// Pieces of rows that make up a unit.
struct PieceRange {
  int first = 0, end = 0;
};

// Adds up units until there are none. All copies that were issued are complete when run() returns.
//
// Units are numbered as they are turned to. Work says what they are:
//   OfUnits<unsigned> rows                                  of a unit, bits in the order in which they are added
//   PieceRange pieces                                       of the unit turned to last
//   bool turn(unsigned unit)                                the next one; false: none whose rows may be read now
//   bool await()                                            until there is one; false: there will be none
//   void prefetch(Ring&, unsigned unit, int row,           of the unit turned to last
//                 int piece)
//   void take_over()                                        it is the one whose rows are added
//   void begin(unsigned unit, int piece, sum), void add(unsigned unit, int row, SharedAddress item, sum)
//   void store(unsigned unit, int piece, sum)
//   void finish(unsigned unit)                              all its pieces are stored
template <class Ring, class Work>
struct RowStreamOf {
  Work& work;
  Ring ring;
  unsigned num_turned = 0, num_begun = 0;  // units; at most one more is turned to
  int prefetched_piece = work.pieces.end;  // of the unit turned to last; there is none yet
  unsigned to_prefetch = 0;                // of that piece

  // Issues the copies of what comes next until the ring is full.
  __device__ __forceinline__ void prefetch_ahead() {
#pragma unroll 1
    while (ring.has_room()) {
      if (to_prefetch == 0) {
        if (prefetched_piece < work.pieces.end) prefetched_piece++;
        if (prefetched_piece == work.pieces.end) {
          if (num_turned != num_begun || !work.turn(num_turned)) return;
          num_turned++;
          prefetched_piece = work.pieces.first;
        }
        to_prefetch = work.rows.get(num_turned - 1);
        if (to_prefetch == 0) {
          prefetched_piece = work.pieces.end;
          return;
        }
      }
      work.prefetch(ring, num_turned - 1, __ffs(static_cast<int>(to_prefetch)) - 1, prefetched_piece);
      to_prefetch &= to_prefetch - 1;
    }
  }

  __device__ __forceinline__ void run() {
    float sum[Ring::kSteps][Work::kCount];
    fill(sum, 0.0f);
    int piece = 0, end = 0;
    unsigned to_add = 0;
#pragma unroll 1
    while (true) {
      prefetch_ahead();
      if (piece == end) {
        if (num_turned == num_begun) {
          if (!work.await()) return;
          fill(sum, 0.0f);  // so that they need not be kept over the wait
          continue;
        }
        work.take_over();
        num_begun++;
        piece = work.pieces.first;
        end = work.pieces.end;
        to_add = 0;
      }
      const unsigned unit = num_begun - 1;
      if (to_add == 0) {
        to_add = work.rows.get(unit);
        work.begin(unit, piece, sum);
      }
      if (to_add != 0) {
        const int row = __ffs(static_cast<int>(to_add)) - 1;
        to_add &= to_add - 1;
        work.add(unit, row, ring.oldest(), sum);
        ring.free_oldest();
      }
      if (to_add != 0) continue;
      work.store(unit, piece, sum);
      if (++piece == end) work.finish(unit);
    }
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
