// A group: one rank's part of a buffer. It agrees with the others when it is made, checks every call with the values in
// the text, and remembers which split call is open.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "layout/window.h"
#include "runtime/agreement.h"
#include "runtime/backend.h"
#include "transport/process.h"
#include "transport/transport.h"

struct ncclComm;

namespace ep {

struct GroupConfig {
  std::string name = "nccl_ep";  // for profilers
  int domain_size = 0;           // 0: the whole world
  LlSizes sizes;
  HtSizes ht_sizes;
  double timeout_seconds = 100;  // at first
  uint64_t network_seed = 0;
  bool masks_late_ranks = false;    // a rank that is late in low latency is masked, and does not fail the buffer
  bool raises_invalid_ids = false;  // expert ids out of range are refused: on the host at once, else by the next call
  int max_experts = 0;              // that a call may have; 0: as many as there is room for
  std::string made_with;            // for errors: the sizes that the caller gave, as "name=value, name=value"
  bool is_elastic = false;          // a rank that has gone can be replaced; has masks, and low latency alone
  bool uses_cumem = false;          // GPUs: windows that stand on no communicator, as those of elastic buffers do
  int joins_world_of = 0;           // > 0: this rank takes the place of such a one, in a world of so many ranks
  int device_index = -1;            // CUDA device; -1: the CPU
  bool has_rail = false;            // several domains are GPUs, whose kernels cross them
  LlNetwork ll_network = LlNetwork::kAuto;
  ncclComm* nccl_comm = nullptr;  // the caller's, on which windows are made; null: one of our own

  bool has_ll() const { return sizes.tagged_bytes > 0; }
  bool has_ht() const { return ht_sizes.any(); }
  const char* device_kind() const { return device_index < 0 ? "cpu" : "cuda"; }
};

// Operations that the host has asked for; replays of graphs are not among them. `split`:
// dispatches and combines of which the caller asked for the two phases one by one.
struct Calls {
  uint64_t dispatch = 0, combine = 0, combine_weights = 0, split = 0;  // low latency
  uint64_t ht[kNumKinds] = {0, 0};
};

// Bytes of a bank for operations up to these sizes.
LlSizes sizes_for(const Shape& shape, int dispatch_row_bytes, int combine_row_bytes);
// Bytes for high throughput up to these sizes, the parts of a row together.
HtSizes ht_sizes_for(const Topology& topology, const Shape& shape, int dispatch_row_bytes, int combine_row_bytes,
                     uint64_t arena_bytes);
// Splits `window_bytes` for shapes that are not known yet.
LlSizes sizes_for_window(int num_ranks, uint64_t window_bytes);
// A window whose split has room for `sizes`; a multiple of 128 bytes.
uint64_t window_for(int num_ranks, const LlSizes& sizes);

class Group {
 public:
  using BackendFactory = std::unique_ptr<Backend> (*)(Bootstrap&, const Topology&, const Window&, const GroupConfig&);

  // Collective. Throws kMismatch with both ranks' values when the ranks disagree.
  Group(Bootstrap& bootstrap, const GroupConfig& config, BackendFactory make_backend);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return topology_.num_ranks; }
  const Topology& topology() const { return topology_; }
  const Window& window() const { return window_; }
  const GroupConfig& config() const { return config_; }
  // Throws kInvalidUsage after destroy(). Whoever holds it may be in a call while another thread destroys the group.
  std::shared_ptr<Backend> backend() const;

  // `prepare` checks, and fills in what follows from the rest: layout, row format, op header. `run` runs what was
  // prepared, once outputs are there; the others do both.
  void prepare(LlDispatchParams& params);
  void run(LlDispatchParams& params, void* stream);
  // Refuses rows of so many bytes, which no operation reads as numbers, if a dispatch could not send them.
  void check_opaque_rows(const Shape& shape, int64_t row_bytes) const;
  void dispatch(LlDispatchParams& params, void* stream);
  void combine(LlCombineParams& params, void* stream);
  void combine_weights(LlCombineWeightsParams& params, void* stream);
  // `row_bytes`: of a row on the wire.

  // Masks (masks.cc). Low latency goes on without a masked rank until masks are cleaned.
  void mask(int rank, void* stream);
  void update_masks(const RankMask& masked, void* stream);  // as Backend's
  void query_masks(int32_t* status, void* stream);
  // Who comes is active again. Collective among the ranks of one domain that come: those that are not masked are waited
  // for, those that are for one deadline, and who stays away is masked by the next operation (mask_meeting.h). Between
  // domains all ranks must come, which meet by `bootstrap`.
  void clean_masks(Bootstrap& bootstrap);

  // A new process has taken the number of `rank`, whose process has ended (replace.cc). Collective among those who
  // meet: ranks of this world that hear one another, and the new one, whose group is made meanwhile. The others keep
  // their places and masks. `seconds`: for the end of the old process, and for the new one's window.
  void replace(Bootstrap& bootstrap, int rank, double seconds);

  // The same for high throughput. `out_offset` of parts and `rows_offset` are filled in here.
  void prepare(HtDispatchParams& params);
  void run(HtDispatchParams& params, void* stream);
  void dispatch(HtDispatchParams& params, void* stream);
  void combine(HtCombineParams& params, void* stream);
  bool has_ht() const { return config_.has_ht(); }
  std::shared_ptr<Arena> arena() const;

  // Throws what the device has found: a failure of the buffer (again at every call), ids out of range (once).
  void check();
  // Throws if the buffer has failed or was destroyed.
  void require_usable();
  const Calls& calls() const { return calls_; }
  Report report();
  // Also while another thread waits in a call, which obeys the change.
  void set_timeout(double seconds);
  double timeout_seconds() const { return timeout_seconds_.load(std::memory_order_relaxed); }
  void set_pdl(bool enabled);
  bool is_destroyed() const { return held() == nullptr; }
  // Also while another thread is in a call: if it waits on the host, it throws kInvalidUsage at once.
  void destroy();

 private:
  Offset offset_of(const void* data, uint64_t bytes) const;
  // What all ranks of a world have in common, those who are replaced too.
  static Agreement agreement_of(const GroupConfig& config, int num_ranks);
  void require_no_send(const char* before) const;
  void require_waiting() const;
  void clean_with_who_comes();
  void clean_with_all(Bootstrap& bootstrap);
  // Behind the last call of any rank, where all begin anew.
  static LlEpochs behind(const std::vector<LlEpochs>& all);
  // replace.cc. Collective among those who meet.
  void check_elastic() const;
  void watch_processes(Bootstrap& bootstrap);
  void join(Bootstrap& bootstrap, const LlEpochs& latest);
  Shape own_shape(const Shape& shape) const;  // of this group's ranks, checked
  // What runs an operation, once it is known that it may run: require_usable(). Each asks once, as asking takes a lock.
  std::shared_ptr<Backend> usable_backend();
  template <class Params>
  std::shared_ptr<Backend> begin(Params& p);  // the same, and what every operation of low latency checks first
  void require_ll() const;
  // Throws ids out of range that kernels have found, if the caller wants to hear of them by himself.
  void require_valid_ids(Backend& backend) const;
  static void throw_invalid_ids(Backend& backend);
  // Of a dispatch, before anything is sent, where the host can read them.
  void check_ids(const Backend& backend, const Shape& shape, const void* ids, bool is_idx64, int num_tokens) const;
  // What `make` returns; where the window is too small, the error tells what the buffer was made with.
  template <class Make>
  auto with_room(Make make) const {
    try {
      return make();
    } catch (const Error& error) {
      raise(error.kind(), error.what(), config_.made_with.empty() ? "" : "; the buffer was made with ",
            config_.made_with);
    }
  }
  bool sends_unweighted(const LlCombineParams& params, const RowFormat& row) const;
  void check_signals(const LlCombineParams& params) const;
  void check_signals(const HtCombineParams& params) const;
  std::shared_ptr<Backend> begin_ht();  // usable_backend(), of a group with high throughput
  void check_phase(Kind kind, Phase phase, const char* call) const;
  // With the ranks that nothing was heard of, which a kernel does not look for.
  Failure failure_in_full(Backend& backend) const;
  // Of a call that some ranks did not come to: what those have called in its place, as far as it has been heard here.
  std::string other_calls(Backend& backend, const Failure& failure) const;
  std::optional<OpHeader> find_header(Backend& backend, int source, Kind kind, bool is_ht, uint64_t epoch) const;
  void note_phase(Kind kind, Phase phase);
  // Of the call that comes, or, for a receive, of the one that was sent.
  uint64_t call_number(Kind kind, Phase phase) const {
    return num_calls_[static_cast<int>(kind)] + (phase == Phase::kRecv ? 0 : 1);
  }

  int rank_;
  Topology topology_;
  GroupConfig config_;
  Window window_;
  std::shared_ptr<Backend> held() const;

  mutable std::mutex mutex_;  // of the pointer
  std::shared_ptr<Backend> backend_;
  bool has_unreceived_send_[kNumKinds] = {false, false};
  std::atomic<bool> is_called_ = false;  // OneCaller
  std::atomic<double> timeout_seconds_;
  std::atomic<bool> is_partly_cleaned_ = false;  // masks are cleaned, or were by some ranks and not by others
  bool has_missed_cleaning_ = false;             // of several domains: a rank did not come, and masks stay
  std::vector<uint32_t> used_numbers_;           // MaskMeeting's
  uint64_t num_calls_[kNumKinds] = {0, 0};
  Calls calls_;
  std::vector<ProcessWatch> processes_;  // of all ranks, where ranks can be replaced
};

constexpr const char* kOrderQuestion = "were buffers made in the same order on all ranks?";
// The sentence that tells what ended a buffer.
std::string describe(const Failure& failure, int rank, double timeout_seconds);
ErrorKind kind_of(const Failure& failure);
std::string describe(const OpHeader& header);

}  // namespace ep
