// What runs operations: the CPU backend, or CUDA's. A group owns one and has checked every argument before it calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "runtime/arena.h"
#include "runtime/failure.h"
#include "runtime/ht/params.h"
#include "runtime/ll/params.h"
#include "transport/transport.h"

namespace ep {

// Bytes and rows that left for each rank since the group was made (CPU backend; empty otherwise). Puts that crossed
// domains and their bytes, of GPUs over a simulated network.
struct WireBytes {
  std::vector<uint64_t> rows, row_bytes, other_bytes;
  std::vector<uint64_t> network_puts = {}, network_bytes = {};
};

// The last call of each kind.
struct LlEpochs {
  uint64_t of[kNumKinds] = {0, 0};
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;

  // `stream`: a cudaStream_t; ignored by the CPU backend, which is done when the call returns.
  virtual void dispatch(const LlDispatchParams& params, void* stream) = 0;
  virtual void combine(const LlCombineParams& params, void* stream) = 0;
  virtual void combine_weights(const LlCombineWeightsParams& params, void* stream) = 0;

  // High throughput. Scalars go with combine.
  virtual void ht_dispatch(const HtDispatchParams& params, void* stream) = 0;
  virtual void ht_combine(const HtCombineParams& params, void* stream) = 0;
  // Where outputs may lie that others write to; null if there is no such place.
  virtual std::shared_ptr<Arena> arena() const { return nullptr; }

  // Masks of ranks, of a buffer that has them: in the stream's order. `status` [R]: 1 for a masked rank, else 0.
  virtual void mask(int rank, void* stream) = 0;
  // These are masked from here on. A rank that was masked and is none of these counts as active again, and is left out
  // as before, until the next operation masks it again: it does not know how far the others are.
  virtual void update_masks(const RankMask& masked, void* stream) = 0;
  virtual void query_masks(int32_t* status, void* stream) = 0;
  // What Group::clean_masks() is made of. Waits for what is in flight.
  virtual LlEpochs settle() = 0;
  // The window as between calls, the last of which has `epochs` on every rank. All ranks have settled.
  virtual void restart(const LlEpochs& epochs) = 0;
  // None is masked. Those that are not `there` are left out until the next operation masks them, as of update_masks().
  virtual void unmask_all(const RankMask& there) = 0;
  // Hosts that meet (mask_meeting.h). Words for the window of `peer`, of the own domain, each stored as a whole; words
  // of the own window.
  virtual void store_words(int peer, Offset offset, const std::vector<uint64_t>& words) = 0;
  virtual std::vector<uint64_t> load_words(Offset offset, uint64_t count) = 0;
  // Of a buffer whose ranks can be replaced (replace.cc), when all have settled: exchanges the window of `rank`, which
  // is being made, within `seconds`, and cleans the own one. Collective among those who meet.
  virtual void replace(Bootstrap& bootstrap, int rank, double seconds) = 0;
  // Between operations. The next one knows it.
  virtual void set_mask(int rank, bool is_masked) = 0;

  // Whether high throughput's kernels write RecordedWords.
  virtual bool has_own_times() const { return false; }
  // Whether its operations take the entries of a handle for true, so that the group checks them.
  virtual bool trusts_handles() const { return false; }

  // How the buffer failed, if it did. No call of CUDA.
  virtual Failure failure() const = 0;
  // Whether it did: asked at every call, and a Failure is large.
  virtual bool has_failed() const { return failure().code != Failure::kNone; }
  // Whether kernels have found expert ids out of range since they were last taken: asked likewise.
  virtual bool has_invalid_ids() const { return false; }
  // What the device has found so far. `take_invalid_ids` forgets them.
  virtual Report report(bool take_invalid_ids) = 0;
  // A tagged word of the own window as it is now: for telling a failure, so it may be slow.
  virtual uint64_t window_word(Offset) { return 0; }
  virtual void set_timeout(double seconds) = 0;
  // CUDA: programmatic dependent launch, on at first, of all kernels behind any other.
  virtual void set_pdl(bool) {}
  // The same: thread blocks of the last dispatch's and combine's kernels, of either mode; 0: there was none.
  virtual std::array<int, kNumKinds> last_blocks() const { return {}; }
  // The same: their plans in words.
  virtual std::array<std::string, kNumKinds> last_plans() const { return {}; }
  virtual WireBytes wire_bytes() const { return {}; }
  // The buffer is being destroyed, maybe by another thread: a call that waits on the host ends at once.
  virtual void end_waits() {}
  // Gives up: no peer is waited for. Nothing but the destructor may follow.
  virtual void abort() = 0;
};

}  // namespace ep
