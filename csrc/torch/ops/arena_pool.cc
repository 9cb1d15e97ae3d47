#include "torch/ops/arena_pool.h"

#if defined(EP_WITH_CUDA)

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "layout/ht/offsets.h"
#include "runtime/graph_pools.h"
#include "torch/ops/device.h"
#include "transport/device/device_guard.h"

namespace ep {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// torch asks for segments of at least this, a multiple of the granularity, and cuts blocks from them.
constexpr uint64_t kLargeSegment = 20 << 20;
constexpr uint64_t kGranularity = 2 << 20;

// Thrown through torch's allocator, which is as it was then. Had it been refused memory by null, it would free all that
// it has cached, in every pool, and wait for the GPU, before it gave up.
struct ArenaIsFull {
  uint64_t bytes;  // that torch asked for
};

// What torch asks for segments of a pool.
std::shared_ptr<allocator::CUDAAllocator> allocator_of(std::shared_ptr<ArenaSegments> segments) {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [segments](size_t bytes, int, cudaStream_t) {
        void* data = segments->take(bytes);
        if (data == nullptr) throw ArenaIsFull{bytes};
        return data;
      },
      [segments](void* data, size_t, int, cudaStream_t) { segments->give_back(data); });
}

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

// A pool of torch over the arena. torch keeps it, and with it the segments, until the last tensor is gone.
class CudaPool : public GraphPools::Pool {
 public:
  CudaPool(std::shared_ptr<Arena> arena, c10::DeviceIndex device)
      : segments(std::make_shared<ArenaSegments>(std::move(arena))),
        id(at::cuda::MemPool::graph_pool_handle()),
        device_(device) {
    allocator::createOrIncrefPool(device, id, allocator_of(segments));
  }

  void close() override { allocator::releasePool(device_, id); }

  // torch returns segments without users, and then forgets the pool. It waits for events of record_stream. While
  // something is captured, older versions refuse that; newer ones wait, which this mode allows beside a capture.
  bool give_back() override {
    try {
      const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(cudaStreamCaptureModeRelaxed);
      allocator::emptyCache(id);
    } catch (const c10::Error&) {
      return false;
    }
    return segments->is_empty();
  }

  const std::shared_ptr<ArenaSegments> segments;
  const c10::MempoolId_t id;

 private:
  const c10::DeviceIndex device_;
};

// Has the graph keep an object that sets the flag when it dies. CUDA destroys it in a thread in which CUDA must not be
// called, after the last replay that is under way. False: the graph took none.
bool tell_when_gone(cudaGraph_t graph, const GraphPools::Flag& is_gone) {
  auto flag = std::make_unique<GraphPools::Flag>(is_gone);
  const auto set = [](void* kept) {
    const std::unique_ptr<GraphPools::Flag> taken(static_cast<GraphPools::Flag*>(kept));
    (*taken)->store(true, std::memory_order_release);
  };
  cudaUserObject_t object = nullptr;
  if (cudaUserObjectCreate(&object, flag.get(), set, 1, cudaUserObjectNoDestructorSync) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  flag.release();  // the object has it
  if (cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess) return true;
  cudaGetLastError();
  cudaUserObjectRelease(object, 1);
  return false;
}

class CudaArenaPool : public ArenaPool {
 public:
  CudaArenaPool(std::shared_ptr<Arena> arena, const at::Device& device)
      : device_(device), arena_(std::move(arena)), pool_(arena_, device.index()) {}
  ~CudaArenaPool() override {
    graphs_.reset();  // they return what they borrowed
    pool_.close();
    pool_.give_back();
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) override {
    const bool is_captured = is_capturing(device_);
    const auto bytes = static_cast<uint64_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
    if (bytes > arena_->bytes() || (is_captured && !GraphOutputsScope::is_on())) {
      return new_tensor(sizes, type, device_);
    }
    std::lock_guard lock(mutex_);
    if (is_captured) return empty_of_graph(sizes, type);
    if (graphs_->size() > 0) graphs_->collect();
    try {
      Allocating scope(device_.index(), pool_.id);
      claim(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
      return at::detail::empty_cuda(sizes, type, device_, std::nullopt);
    } catch (const ArenaIsFull&) {
      return new_tensor(sizes, type, device_);
    }
  }

 private:
  at::Tensor empty_of_graph(at::IntArrayRef sizes, at::ScalarType type) {
    CudaPool* graph = graph_under_capture();
    if (graph == nullptr) return new_tensor(sizes, type, device_);
    const auto allocate = [&] {
      Allocating scope(device_.index(), graph->id);
      return at::detail::empty_cuda(sizes, type, device_, std::nullopt);
    };
    uint64_t missing = 0;
    try {
      return allocate();
    } catch (const ArenaIsFull& full) {
      missing = full.bytes;
    }
    if (!lend(*graph->segments, missing)) return new_tensor(sizes, type, device_);
    try {
      return allocate();
    } catch (const ArenaIsFull&) {
      graph->segments->lend(nullptr, 0);
      return new_tensor(sizes, type, device_);
    }
  }

  // Null: this capture can have no such pool.
  CudaPool* graph_under_capture() {
    // With that option torch looks, at the end of each Allocating, whether a capture has ended.
    if (allocator::CUDAAllocatorConfig::graph_capture_record_stream_reuse()) return nullptr;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    GraphPools::Capture capture = 0;
    cudaGraph_t graph = nullptr;
    EP_CUDA(
        cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(device_.index()).stream(), &status, &capture, &graph));
    if (status != cudaStreamCaptureStatusActive) return nullptr;
    if (GraphPools::Pool* known = graphs_->find(capture)) return static_cast<CudaPool*>(known);
    const auto is_gone = std::make_shared<GraphPools::Flag::element_type>(false);
    if (!tell_when_gone(graph, is_gone)) return nullptr;
    return static_cast<CudaPool*>(graphs_->add(capture, is_gone, std::make_unique<CudaPool>(arena_, device_.index())));
  }

  // To a graph's pool, of what streams have claimed and do not use now. What they did there before must be over at the
  // first replay: torch.cuda.graph waits for the GPU before it captures, and who captures otherwise orders replays.
  bool lend(ArenaSegments& to, uint64_t bytes) {
    const c10::cuda::CUDAGuard guard(device_);
    Allocating scope(device_.index(), pool_.id);
    for (cudaStream_t stream : streams_) {
      try {
        // torch knows blocks by their addresses, of which the first that is cut from this must not have the same.
        void* whole = allocator::raw_alloc_with_stream(kArenaAlignment + bytes, stream);
        char* data = static_cast<char*>(whole) + kArenaAlignment;
        const ArenaSegments::Extent extent(data, [whole](void*) { allocator::raw_delete(whole); });
        if (arena_->offset_of(data, bytes) == kNoOffset) return false;
        to.lend(extent, bytes);
        return true;
      } catch (const ArenaIsFull&) {
        continue;
      }
    }
    return false;
  }

  // Half of the arena, or what of it is left, becomes one segment of a stream that comes for the first time. Blocks of
  // all sizes are cut from it and grow packed in it again; segments made one by one to measure would fit no other
  // size later. Half, as there is a stream of the caller's and one of the buffer's.
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
  CudaPool pool_;
  std::unique_ptr<GraphPools> graphs_ = std::make_unique<GraphPools>();
};

}  // namespace

std::unique_ptr<ArenaPool> ArenaPool::make(std::shared_ptr<Arena> arena, const at::Device& device) {
  if (arena == nullptr || !device.is_cuda() || allocator::get()->name() != "native") return nullptr;
  const c10::cuda::CUDAGuard guard(device);
  return std::make_unique<CudaArenaPool>(std::move(arena), device);
}

}  // namespace ep

#else

namespace ep {

std::unique_ptr<ArenaPool> ArenaPool::make(std::shared_ptr<Arena>, const at::Device&) { return nullptr; }

}  // namespace ep

#endif
