// The arena as a pool of torch's allocator, and pools of captured graphs over it: what torch really does with them, for
// which no GPU is needed.
#include "torch/ops/arena_pool.h"

#include <ATen/Context.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "layout/ht/offsets.h"
#include "torch_allocator/fake_cuda.h"

namespace ep {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using at::Tensor;
using fake_cuda::Graph;

constexpr uint64_t kMb = 1 << 20;
constexpr uint64_t kOutput = 8;  // MB of most tensors; torch cuts two of them from a segment of 20
const at::Device kDevice(at::kCUDA, 0);

// What torch.cuda.graph does.
class Capture {
 public:
  Capture()
      : stream_(c10::cuda::getStreamFromPool()),
        pool_(at::cuda::MemPool::graph_pool_handle(/*is_user_created=*/false)),
        graph_(new Graph{next_++, {}}),
        guard_(stream_) {
    fake_cuda::begin_capture(stream_.stream(), graph_);
    allocator::beginAllocateToPool(
        0, pool_, [id = graph_->capture](cudaStream_t stream) { return fake_cuda::is_capturing(stream, id); });
  }
  ~Capture() {
    fake_cuda::end_capture(stream_.stream());
    allocator::endAllocateToPool(0, pool_);
  }
  Graph* graph() const { return graph_; }

 private:
  static inline unsigned long long next_ = 1;
  const c10::cuda::CUDAStream stream_;
  const c10::MempoolId_t pool_;
  Graph* const graph_;
  const c10::cuda::CUDAStreamGuard guard_;
};

class OnStream {
 public:
  OnStream() : guard_(c10::cuda::getStreamFromPool()) {}

 private:
  const c10::cuda::CUDAStreamGuard guard_;
};

class Pool {
 public:
  explicit Pool(uint64_t mb) {
    static std::once_flag once;
    std::call_once(once, [] { at::globalContext().lazyInitDevice(at::kCUDA); });
    auto* base = static_cast<char*>(std::aligned_alloc(2 * kMb, mb * kMb));
    std::shared_ptr<void> owner(base, std::free);
    memory_ = owner;
    arena_ = std::make_shared<Arena>(base, 0, mb * kMb, std::move(owner));
    pool_ = ArenaPool::make(arena_, kDevice);
  }

  Tensor eager(uint64_t mb = kOutput) { return pool_->empty({static_cast<int64_t>(mb * kMb)}, at::kByte); }
  Tensor captured(uint64_t mb = kOutput) {
    const GraphOutputsScope in_arena;
    return eager(mb);
  }
  bool is_inside(const Tensor& tensor) const {
    return arena_->offset_of(tensor.data_ptr(), tensor.nbytes()) != kNoOffset;
  }
  uint64_t free_bytes() {
    eager(1);  // collects
    return arena_->free_bytes();
  }
  // Until the arena is full.
  std::vector<Tensor> fill() {
    std::vector<Tensor> held;
    for (Tensor next = eager(); is_inside(next); next = eager()) held.push_back(next);
    return held;
  }
  void end() {
    pool_.reset();
    arena_.reset();
  }
  bool is_memory_there() const { return !memory_.expired(); }

 private:
  std::weak_ptr<void> memory_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<ArenaPool> pool_;
};

bool are_apart(const std::vector<Tensor>& tensors) {
  for (const Tensor& a : tensors) {
    for (const Tensor& b : tensors) {
      const auto *begin = static_cast<char*>(a.data_ptr()), *other = static_cast<char*>(b.data_ptr());
      if (!a.is_same(b) && begin < other + b.nbytes() && other < begin + a.nbytes()) return false;
    }
  }
  return true;
}

TEST(GraphsOfArena, EachHasItsOwnMemory) {
  Pool pool(192);
  pool.eager();
  std::vector<Tensor> tensors;
  Graph* graphs[2];
  for (Graph*& graph : graphs) {
    const Capture capture;
    EXPECT_FALSE(pool.is_inside(pool.eager())) << "outside the scope it is torch's";
    for (int i = 0; i < 3; i++) tensors.push_back(pool.captured());
    graph = capture.graph();
  }
  for (const Tensor& each : tensors) EXPECT_TRUE(pool.is_inside(each));
  EXPECT_TRUE(are_apart(tensors));
  std::vector<Tensor> all = pool.fill();
  EXPECT_FALSE(all.empty());
  all.insert(all.end(), tensors.begin(), tensors.end());
  EXPECT_TRUE(are_apart(all));
  for (Graph* graph : graphs) fake_cuda::destroy(graph);
}

TEST(GraphsOfArena, OneCaptureReusesWhatItFreed) {
  Pool pool(64);
  pool.eager();
  const Capture capture;
  for (int layer = 0; layer < 20; layer++) {
    Tensor rows = pool.captured();
    EXPECT_TRUE(pool.is_inside(rows)) << layer;
    EXPECT_TRUE(pool.is_inside(pool.captured(4))) << layer;
  }
  fake_cuda::destroy(capture.graph());
}

TEST(GraphsOfArena, DeadTensorsAreTheGraphs) {
  Pool pool(128);
  pool.eager();
  Graph* graph;
  const void* address;
  {
    const Capture capture;
    address = pool.captured().data_ptr();
    graph = capture.graph();
  }
  for (const Tensor& each : pool.fill()) EXPECT_NE(each.data_ptr(), address);
  fake_cuda::destroy(graph);
}

TEST(GraphsOfArena, MemoryReturnsWhenGraphAndTensorsAreGone) {
  Pool pool(192);
  pool.eager();
  const uint64_t before = pool.free_bytes();
  for (const bool graph_dies_first : {true, false, true}) {
    Graph* graph;
    Tensor rows;
    {
      const Capture capture;
      rows = pool.captured();
      graph = capture.graph();
    }
    EXPECT_LT(pool.free_bytes(), before);
    if (graph_dies_first) {
      fake_cuda::destroy(graph);
      EXPECT_LT(pool.free_bytes(), before);
      rows.reset();
    } else {
      rows.reset();
      EXPECT_LT(pool.free_bytes(), before);
      fake_cuda::destroy(graph);
    }
    EXPECT_EQ(pool.free_bytes(), before);
  }
}

TEST(GraphsOfArena, BorrowWhatStreamsHaveClaimed) {
  Pool pool(64);
  pool.eager();
  {
    const OnStream other;
    pool.eager();
  }
  EXPECT_LT(pool.free_bytes(), 20 * kMb) << "there is no segment left";
  const size_t count = pool.fill().size();
  Graph* graph;
  Tensor one, two;
  {
    const Capture capture;
    one = pool.captured();
    two = pool.captured();
    graph = capture.graph();
  }
  EXPECT_TRUE(pool.is_inside(one) && pool.is_inside(two));
  std::vector<Tensor> rest = pool.fill();
  EXPECT_LT(rest.size(), count);
  rest.push_back(one);
  rest.push_back(two);
  EXPECT_TRUE(are_apart(rest));
  rest.clear();
  one.reset();
  two.reset();
  EXPECT_LT(pool.fill().size(), count) << "the graph may be replayed";
  fake_cuda::destroy(graph);
  EXPECT_EQ(pool.fill().size(), count);
}

TEST(GraphsOfArena, LieElsewhereWhereTheArenaIsFull) {
  Pool pool(64);
  const std::vector<Tensor> held = pool.fill();
  std::vector<Tensor> others;
  {
    const OnStream other;
    others = pool.fill();
  }
  const Capture capture;
  EXPECT_FALSE(pool.is_inside(pool.captured()));
  fake_cuda::destroy(capture.graph());
}

TEST(GraphsOfArena, GiveMemoryBackWhileAnotherCaptureIsUnderWay) {
  Pool pool(192);
  pool.eager();
  const uint64_t before = pool.free_bytes();
  Graph* graph;
  {
    const Capture capture;
    Tensor rows = pool.captured();
    graph = capture.graph();
  }
  fake_cuda::destroy(graph);
  {
    const Capture capture;
    const c10::cuda::CUDAStreamGuard beside(c10::cuda::getDefaultCUDAStream());
    EXPECT_TRUE(pool.is_inside(pool.eager()));
    fake_cuda::destroy(capture.graph());
  }
  EXPECT_EQ(pool.free_bytes(), before);
}

TEST(GraphsOfArena, RecordStreamIsWaitedFor) {
  Pool pool(192);
  pool.eager();
  const uint64_t before = pool.free_bytes();
  Graph* graph;
  Tensor rows;
  {
    const Capture capture;
    rows = pool.captured();
    graph = capture.graph();
  }
  allocator::recordStream(rows.storage().data_ptr(), c10::cuda::getStreamFromPool());
  fake_cuda::destroy(graph);
  rows.reset();
  const int waits = fake_cuda::num_waits_for_events();
  {
    const Capture capture;  // beside which it may be waited for, or later
    const c10::cuda::CUDAStreamGuard beside(c10::cuda::getDefaultCUDAStream());
    pool.eager();
    fake_cuda::destroy(capture.graph());
  }
  EXPECT_EQ(pool.free_bytes(), before);
  EXPECT_GT(fake_cuda::num_waits_for_events(), waits);
}

TEST(GraphsOfArena, ABufferEndsWhileAnotherStreamIsCaptured) {
  Pool pool(64);
  pool.eager();
  {
    const Capture capture;
    pool.end();
    fake_cuda::destroy(capture.graph());
  }
  allocator::emptyCache();
  EXPECT_FALSE(pool.is_memory_there());
}

class AtTheEnd : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(GraphsOfArena, AtTheEnd, testing::Bool());

TEST_P(AtTheEnd, TensorsKeepTheMemory) {
  Pool pool(64);
  pool.eager();
  if (GetParam()) {  // all is claimed: the graph borrows
    const OnStream other;
    pool.eager();
  }
  Graph* graph;
  Tensor rows;
  {
    const Capture capture;
    rows = pool.captured();
    graph = capture.graph();
  }
  EXPECT_TRUE(pool.is_inside(rows));
  pool.end();
  ASSERT_TRUE(pool.is_memory_there());
  std::memset(rows.data_ptr(), 1, rows.nbytes());
  fake_cuda::destroy(graph);
  rows.reset();
  for (int i = 0; i < 2; i++) allocator::emptyCache();
  EXPECT_FALSE(pool.is_memory_there());
}

}  // namespace
}  // namespace ep
