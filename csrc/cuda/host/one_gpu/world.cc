#include "cuda/host/one_gpu/world.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <type_traits>

#include "cuda/host/one_gpu/launches.h"
#include "transport/collective_step.h"
#include "transport/device/device_guard.h"

namespace ep {
namespace {

constexpr uint64_t kWindowAlignment = 2u << 20;  // a GPU page, as NCCL's windows have
constexpr size_t kNumSlots = 4;                  // launches that may be in flight before a call waits
constexpr size_t kMaxNetworkBytes = 512;         // of arguments besides, of kernels that cross domains
constexpr size_t kMaxArgBytes =
    kMaxNetworkBytes + std::max({sizeof(KernelArgs<LlDispatchParams>), sizeof(KernelArgs<LlCombineParams>),
                                 sizeof(KernelArgs<LlCombineWeightsParams>), sizeof(KernelArgs<HtRouteParams>),
                                 sizeof(KernelArgs<HtDispatchParams>), sizeof(KernelArgs<HtCombineParams>)});

const char* call_name(const LlDispatchParams&) { return "dispatch"; }
const char* call_name(const LlCombineParams&) { return "combine"; }
const char* call_name(const LlCombineWeightsParams&) { return "combine_weights"; }
const char* call_name(const HtRouteParams&) { return "the routing of a dispatch"; }
const char* call_name(const HtDispatchParams&) { return "a dispatch of high throughput"; }
const char* call_name(const HtCombineParams&) { return "a combine of high throughput"; }

template <class Params>
void run_typed(World& world, int rank, const KernelArgs<Params>& args, void* stream) {
  static_assert(std::is_trivially_copyable_v<KernelArgs<Params>>);
  const World::Launch launch = [](const void* host_args, const void* all, int num_ranks, void* on) {
    launch_world(static_cast<const KernelArgs<Params>*>(host_args), static_cast<const KernelArgs<Params>*>(all),
                 num_ranks, on);
  };
  world.run(rank, {call_name(args.params), launch, sizeof args, stream}, &args);
}

}  // namespace

std::shared_ptr<OneGpuWorld> World::join(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                         bool masks_ranks) {
  on_all_ranks(bootstrap, [&] {
    load_world_dispatch();
    load_world_combine();
    load_world_ht_route();
    load_world_ht_dispatch();
    load_world_ht_combine();
    if (!masks_ranks) return;
    load_world_masking_dispatch();
    load_world_masking_combine();
  });
  return made_by_rank_0<World>(bootstrap, [&] {
    return std::shared_ptr<World>(new World(bootstrap.num_ranks(), window_bytes, timeout_seconds));
  });
}

World::World(int num_ranks, uint64_t window_bytes, double timeout_seconds)
    : num_ranks_(num_ranks),
      stride_(align_up(window_bytes, kWindowAlignment)),
      timeout_seconds_(timeout_seconds),
      arguments_(num_ranks * kMaxArgBytes),
      has_arrived_(num_ranks) {
  EP_CUDA(cudaGetDevice(&device_));
  try {
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&windows_), num_ranks * stride_));
    for (size_t i = 0; i < kNumSlots; i++) slots_.push_back(make_slot());
  } catch (const Error&) {
    free_memory();
    throw;
  }
}

World::~World() { free_memory(); }

void World::free_memory() {
  for (auto* slots : {&slots_, &captured_}) {
    for (const Slot& slot : *slots) {
      cudaFreeHost(slot.host);
      cudaFree(slot.device);
      cudaEventDestroy(slot.done);
    }
  }
  cudaFree(windows_);
}

World::Slot World::make_slot() {
  Slot slot;
  EP_CUDA(cudaHostAlloc(&slot.host, num_ranks_ * kMaxArgBytes, cudaHostAllocDefault));
  EP_CUDA(cudaMalloc(&slot.device, num_ranks_ * kMaxArgBytes));
  EP_CUDA(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
  return slot;
}

World::Slot& World::free_slot() {
  Slot& slot = slots_[num_launches_ % kNumSlots];
  if (slot.was_used) EP_CUDA(cudaEventSynchronize(slot.done));
  slot.was_used = true;
  return slot;
}

void World::run(int rank, const KernelArgs<LlDispatchParams>& args, void* stream) {
  run_typed(*this, rank, args, stream);
}
void World::run(int rank, const KernelArgs<LlCombineParams>& args, void* stream) {
  run_typed(*this, rank, args, stream);
}
void World::run(int rank, const KernelArgs<LlCombineWeightsParams>& args, void* stream) {
  run_typed(*this, rank, args, stream);
}
void World::run(int rank, const KernelArgs<HtRouteParams>& args, void* stream) { run_typed(*this, rank, args, stream); }
void World::run(int rank, const KernelArgs<HtDispatchParams>& args, void* stream) {
  run_typed(*this, rank, args, stream);
}
void World::run(int rank, const KernelArgs<HtCombineParams>& args, void* stream) {
  run_typed(*this, rank, args, stream);
}

void World::run(int rank, const Call& op, const void* args) {
  EP_CHECK(op.bytes <= kMaxArgBytes, op.name, " has ", op.bytes, " bytes of arguments, of ", kMaxArgBytes);
  std::unique_lock lock(mutex_);
  if (broken_) raise(broken_->kind, broken_->text);
  check_call(rank, op);
  std::memcpy(arguments_.data() + rank * op.bytes, args, op.bytes);
  has_arrived_[rank] = true;
  const uint64_t launch = num_launches_;
  if (++num_arrived_ == num_ranks_) {
    try {
      launch_problem_.reset();
      launch_all();
    } catch (const Error& error) {
      launch_problem_ = Problem{error.kind(), error.what()};
    } catch (const std::exception& error) {
      launch_problem_ = Problem{ErrorKind::kSystem, error.what()};
    }
    num_launches_++;
    num_arrived_ = 0;
    has_arrived_.assign(num_ranks_, false);
    launched_.notify_all();
  } else {
    const std::chrono::duration<double> budget(timeout_seconds_);
    const bool is_spent = launched_.wait_for(lock, budget, [&] { return num_launches_ != launch || broken_; });
    if (!is_spent) {
      break_up(ErrorKind::kTimeout, concat("rank ", rank, " has waited ", timeout_seconds_, " s in ", op.name, " for ",
                                           missing_ranks(), ", in a world on one GPU"));
    }
    if (num_launches_ == launch) raise(broken_->kind, broken_->text);
  }
  // The next launch needs this rank, so the problem is still this launch's.
  if (launch_problem_) raise(launch_problem_->kind, launch_problem_->text);
}

void World::check_call(int rank, const Call& op) {
  if (num_arrived_ == 0) {
    call_ = op;
    return;
  }
  const auto first = std::find(has_arrived_.begin(), has_arrived_.end(), true) - has_arrived_.begin();
  if (op.launch != call_.launch) {
    break_up(ErrorKind::kMismatch, concat("rank ", first, " calls ", call_.name, ", rank ", rank, " calls ", op.name));
  }
  if (op.stream != call_.stream) {
    break_up(ErrorKind::kInvalidUsage,
             concat("in a world on one GPU all ranks use one stream: rank ", first, " calls ", call_.name,
                    " on stream ", call_.stream, ", rank ", rank, " on ", op.stream));
  }
}

void World::launch_all() {
  DeviceGuard guard(device_);
  auto stream = static_cast<cudaStream_t>(call_.stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  EP_CUDA(cudaStreamIsCapturing(stream, &capture));
  const bool is_captured = capture != cudaStreamCaptureStatusNone;
  if (is_captured) captured_.push_back(make_slot());
  Slot& slot = is_captured ? captured_.back() : free_slot();
  std::memcpy(slot.host, arguments_.data(), num_ranks_ * call_.bytes);
  EP_CUDA(cudaMemcpyAsync(slot.device, slot.host, num_ranks_ * call_.bytes, cudaMemcpyHostToDevice, stream));
  call_.launch(slot.host, slot.device, num_ranks_, stream);
  if (!is_captured) EP_CUDA(cudaEventRecord(slot.done, stream));
}

void World::set_timeout(double seconds) {
  std::lock_guard lock(mutex_);
  timeout_seconds_ = seconds;
}

void World::abort(int rank) {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = Problem{ErrorKind::kInvalidUsage, concat("rank ", rank, " has left the world on one GPU")};
  launched_.notify_all();
}

void World::break_up(ErrorKind kind, const std::string& text) {
  broken_ = Problem{kind, text};
  launched_.notify_all();
  raise(kind, text);
}

std::string World::missing_ranks() const {
  std::string text;
  for (int rank = 0; rank < num_ranks_; rank++) {
    if (!has_arrived_[rank]) text += concat(text.empty() ? "rank " : ", rank ", rank);
  }
  return text;
}

}  // namespace ep
