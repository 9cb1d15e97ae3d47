#include "torch/ops/arena_pool.h"

#if !defined(EP_WITH_CUDA)

namespace ep {

std::unique_ptr<ArenaPool> ArenaPool::make(std::shared_ptr<Arena>, const at::Device&) { return nullptr; }

}  // namespace ep

#else

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "layout/ht/offsets.h"
#include "torch/ops/device.h"

namespace ep {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// torch asks for segments of at least this, a multiple of the granularity, and cuts blocks from them.
constexpr uint64_t kLargeSegment = 20 << 20;
constexpr uint64_t kGranularity = 2 << 20;

// Thrown through torch's allocator, which is as it was then. Had it been refused memory by null, it would free all that
// it has cached, in every pool, and wait for the GPU, before it gave up.
struct ArenaIsFull {};

// What torch cuts into blocks.
class Segments {
 public:
  explicit Segments(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  void* take(size_t bytes) {
    Block block = Arena::take(arena_, bytes);
    if (block == nullptr) throw ArenaIsFull();
    void* data = block.get();
    std::lock_guard lock(mutex_);
    blocks_[data] = std::move(block);
    return data;
  }

  void give_back(void* data) {
    std::lock_guard lock(mutex_);
    blocks_.erase(data);
  }

 private:
  using Block = std::shared_ptr<void>;

  const std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

// What this thread allocates in its scope comes from the pool.
class Allocating {
 public:
  Allocating(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
    allocator::beginAllocateToPool(device, pool, [owner = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == owner;
    });
  }
  ~Allocating() {
    allocator::endAllocateToPool(device_, pool_);
    allocator::releasePool(device_, pool_);  // the beginning has counted one more user
  }
  Allocating(const Allocating&) = delete;
  Allocating& operator=(const Allocating&) = delete;

 private:
  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_;
};

class CudaArenaPool : public ArenaPool {
 public:
  // The pool, and with it the segments, live until the last tensor is gone: torch sees to that.
  CudaArenaPool(std::shared_ptr<Arena> arena, const at::Device& device)
      : device_(device), arena_(std::move(arena)), pool_(segments_of(arena_)) {}

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) override {
    // More than the arena has; or of the graph's own pool, as what a graph writes at every replay is its.
    const auto bytes = static_cast<uint64_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
    if (bytes > arena_->bytes() || is_capturing(device_)) return new_tensor(sizes, type, device_);
    std::lock_guard lock(mutex_);
    try {
      Allocating scope(device_.index(), pool_.id());
      claim(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
      return at::detail::empty_cuda(sizes, type, device_, std::nullopt);
    } catch (const ArenaIsFull&) {
      return new_tensor(sizes, type, device_);
    }
  }

 private:
  static std::shared_ptr<allocator::CUDAAllocator> segments_of(const std::shared_ptr<Arena>& arena) {
    auto segments = std::make_shared<Segments>(arena);
    return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [segments](size_t bytes, int, cudaStream_t) { return segments->take(bytes); },
        [segments](void* data, size_t, int, cudaStream_t) { segments->give_back(data); });
  }

  // Phase of the arena, or what of it is left, becomes one segment of a stream that comes for the first time. Blocks of
  // all sizes are cut from it and grow packed in it again; segments made one by one to measure would fit no other
  // size later. Phase, as there is a stream of the caller's and one of the buffer's.
  void claim(cudaStream_t stream) {
    if (streams_.contains(stream)) return;
    const c10::cuda::CUDAGuard guard(device_);
    const c10::DataPtr probe = allocator::get()->allocate(1);
    if (arena_->offset_of(probe.get(), 1) == kNoOffset) return;  // of another pool, were one begun inside this
    streams_.insert(stream);
    const uint64_t share = std::min((arena_->bytes() + 1) / 2, arena_->largest_free()) / kGranularity * kGranularity;
    if (share >= kLargeSegment) allocator::get()->allocate(share);  // and free again, of this stream
  }

  const at::Device device_;
  const std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::set<cudaStream_t> streams_;
  at::cuda::MemPool pool_;
};

}  // namespace

std::unique_ptr<ArenaPool> ArenaPool::make(std::shared_ptr<Arena> arena, const at::Device& device) {
  if (arena == nullptr || !device.is_cuda() || allocator::get()->name() != "native") return nullptr;
  const c10::cuda::CUDAGuard guard(device);
  return std::make_unique<CudaArenaPool>(std::move(arena), device);
}

}  // namespace ep

#endif
