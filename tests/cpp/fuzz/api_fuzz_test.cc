// The C library with random arguments, and with handles that were changed: every call returns a result and says why,
// and touches no memory but its own. AddressSanitizer and UBSan watch (make asan, make fuzz).
// NCCL_EP_FUZZ_SEED and NCCL_EP_FUZZ_SECONDS choose; what ends in a round prints how to run that round alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "fuzz/tensors.h"

extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace ep::fuzz {
namespace {

uint64_t running = 0;  // seed of the round

void print_seed() {
  std::fprintf(stderr, "again: NCCL_EP_FUZZ_SEED=%llu NCCL_EP_FUZZ_SECONDS=0\n",
               static_cast<unsigned long long>(running));
}

void print_seed_of_crash(int number) {
  print_seed();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

uint64_t number_of(const char* variable, uint64_t fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 10);
}

// One rank alone, of one seed: a group, handles, operations.
class Round {
 public:
  explicit Round(uint64_t seed) : seed_(seed), random_(seed), tensors_(random_) {}
  ~Round() {
    for (ncclEpHandle_t handle : handles_) ncclEpHandleDestroy(handle);
    ncclEpGroupDestroy(group_);
    for (ncclEpHandle_t handle : handles_) ncclEpHandleDestroy(handle);  // those with an open send
  }
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  void run() {
    if (!make_group()) return;
    for (int step = static_cast<int>(random_.within(1, 12)); step > 0; step--) {
      if (handle_ == nullptr || random_.one_in(4)) make_handle();
      if (handle_ == nullptr) continue;
      switch (random_.within(0, 7)) {
        case 0:
          update();
          break;
        case 1:
          check(ncclEpRouteHandle(handle_, tensors_.make(NCCL_EP_INT32, {info_size()}), nullptr));
          break;
        case 2:
        case 3:
          dispatch();
          break;
        case 4:
          combine();
          break;
        case 5:
          combine_weights();
          break;
        case 6:
          if (memory_ != nullptr) tensors_.change(memory_, memory_bytes_);
          break;
        default:
          others();
      }
    }
  }
  int num_done() const { return num_done_; }

 private:
  bool check(ncclEpResult_t result) {
    EXPECT_TRUE(result >= NCCL_EP_SUCCESS && result <= NCCL_EP_OVERFLOW) << result << ", seed " << seed_;
    if (result != NCCL_EP_SUCCESS) {
      EXPECT_NE(std::string(ncclEpGetLastError()), "") << "seed " << seed_;
    }
    num_done_ += result == NCCL_EP_SUCCESS ? 1 : 0;
    return result == NCCL_EP_SUCCESS;
  }
  int32_t small(int64_t low, int64_t high, int seldom = 60) {
    return static_cast<int32_t>(random_.mostly(random_.within(low, high), seldom));
  }

  bool make_group() {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = small(0, 2);
    config.num_experts = experts_ = small(1, 4);
    config.max_tokens = most_tokens_ = std::min(small(1, 5), 1000);  // a window of more would only take memory
    config.topk = topk_ = small(1, 4);
    config.domain_size = small(0, 1);
    config.max_token_bytes = random_.mostly(random_.within(1, 16) * 16, 60);
    config.max_combine_row_bytes = random_.mostly(random_.within(0, 16) * 16, 60);
    config.timeout_ns = 20'000'000;  // changed handles may name what does not come
    config.overflow_policy = small(0, 1);
    config.max_num_sms = small(0, 1);
    if (config.algorithm != 1) config.arena_bytes = random_.one_in(2) ? 1 << 16 : 0;
    config.enable_mask = config.algorithm == 2 ? 0 : small(0, 1);
    config.ll_network = small(0, 2);
    return check(ncclEpCreateGroupFromCallback(&group_, small(0, 0), 1, nullptr, nullptr, &config));
  }

  void make_handle() {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.layout = layout_ = small(1, 4);
    config.topk = small(0, topk_);
    config.capacity = random_.mostly(layout_ == NCCL_EP_LAYOUT_RANK_MAJOR ? 0 : random_.within(-1, 20), 40);
    config.expert_alignment = layout_ == NCCL_EP_LAYOUT_PACKED ? small(0, 4) : small(0, 1);
    config.algorithm = small(0, 2, 10);
    config.max_tokens = small(0, most_tokens_);
    size_t bytes = 0;
    if (!check(ncclEpHandleMemSize(group_, &config, &bytes)) || bytes > kMostBytes) return;
    memory_ = random_.one_in(4) ? nullptr : tensors_.allocate(bytes);
    memory_bytes_ = bytes;
    void* given = memory_ != nullptr && random_.one_in(50) ? static_cast<char*>(memory_) + 4 : memory_;
    if (given != nullptr) std::memset(memory_, 0, bytes);
    ncclEpHandle_t made = nullptr;
    if (!check(ncclEpInitHandle(&made, group_, &config, given))) return;
    handles_.push_back(handle_ = made);
    update();
  }

  ncclEpHandleInfo_t info() {
    ncclEpHandleInfo_t info = NCCL_EP_HANDLE_INFO_INIT;
    check(ncclEpHandleGetInfo(handle_, &info));
    return info;
  }
  int64_t bins() { return layout_ <= NCCL_EP_LAYOUT_PACKED ? experts_ : 1; }
  int64_t info_size() { return layout_ == NCCL_EP_LAYOUT_PACKED ? 3 * bins() + 3 : 2 * bins() + 2; }

  void update() {
    const ncclEpHandleInfo_t sizes = info();
    tokens_ = random_.within(0, sizes.max_tokens);
    const int type = random_.one_in(2) ? NCCL_EP_INT64 : NCCL_EP_INT32;
    ncclEpTensor_t* ids = tensors_.make(type, {tokens_, sizes.topk});
    if (Tensors::is_as(ids, type, {tokens_, sizes.topk})) {
      for (int64_t i = 0; i < tokens_ * sizes.topk; i++) {
        const int64_t id = random_.mostly(random_.within(-1, experts_ - 1), 30);
        std::memcpy(static_cast<char*>(ids->data) + i * element_bytes(type), &id, element_bytes(type));
      }
    }
    check(ncclEpUpdateHandle(handle_, ids));
  }

  int float_type() {
    constexpr int kTypes[] = {NCCL_EP_BFLOAT16, NCCL_EP_FLOAT16, NCCL_EP_FLOAT32};
    return random_.pick(kTypes);
  }

  void dispatch() {
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    const int dtype = random_.one_in(3) ? static_cast<int>(random_.within(0, 11)) : float_type();
    const int64_t step = 16 / element_bytes(dtype);
    in.tokens = tensors_.make(dtype, {tokens_, random_.within(1, 4) * step});
    if (random_.one_in(2)) in.topk_weights = tensors_.make(NCCL_EP_FLOAT32, {tokens_, info().topk});
    if (random_.one_in(3)) in.scales = tensors_.make(float_type(), {tokens_, random_.within(1, 5)}, true);
    for (const ncclEpTensor_t*& extra : in.extra) {
      if (random_.one_in(4)) extra = tensors_.make(NCCL_EP_INT32, {tokens_, random_.within(1, 3) * 4});
    }
    config.quant = random_.one_in(5) ? small(1, 3) : 0;
    config.send_only = random_.one_in(4) ? small(1, 1) : 0;
    config.zero_padding = small(0, 1);
    config.num_sms = small(0, 2);
    config.cached = random_.one_in(4) ? small(1, 1) : 0;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpTensor_t** const places[] = {&out.tokens, &out.scales,   &out.topk_weights, &out.topk_idx, &out.row_expert,
                                       &out.info,   &out.extra[0], &out.extra[1],     &out.extra[2]};
    ncclEpTensor_t described[std::size(places)];
    for (size_t i = 0; i < std::size(places); i++) *places[i] = &(described[i] = NCCL_EP_TENSOR_INIT);
    if (!check(ncclEpDispatchShapes(handle_, &in, &config, &out))) return;
    for (size_t i = 0; i < std::size(places); i++) *places[i] = tensors_.fill(described[i]);
    rows_ = described[0];
    check(ncclEpDispatch(handle_, &in, &out, &config, nullptr));
    if (config.send_only == 0) return;
    if (memory_ != nullptr && random_.one_in(3)) tensors_.change(memory_, memory_bytes_);
    if (random_.one_in(8)) return;
    check(ncclEpComplete(handle_, nullptr, nullptr));
  }

  void combine() {
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    const int dtype = float_type();
    const int64_t hidden = random_.within(1, 4) * 8;
    if (rows_.ndim == 3) {
      in.tokens = tensors_.make(dtype, {rows_.sizes[0], rows_.sizes[1], hidden});
    } else {
      in.tokens = tensors_.make(dtype, {rows_.sizes[0], hidden});
    }
    const int out_dtype = random_.one_in(3) ? float_type() : dtype;
    out.tokens = tensors_.make(out_dtype, {tokens_, hidden});
    config.weights = layout_ <= NCCL_EP_LAYOUT_PACKED ? small(0, 2) : small(0, 1);
    if (config.weights == NCCL_EP_WEIGHTS_HOME) {
      in.topk_weights = tensors_.make(NCCL_EP_FLOAT32, {tokens_, info().topk});
      if (random_.one_in(2)) in.topk_idx = tensors_.make(NCCL_EP_INT64, {tokens_, info().topk});
    }
    if (random_.one_in(4)) in.bias0 = tensors_.make(out_dtype, {tokens_, hidden});
    if (random_.one_in(8)) in.bias1 = tensors_.make(out_dtype, {tokens_, hidden});
    config.wire_dtype = random_.one_in(3) ? NCCL_EP_FLOAT32 : NCCL_EP_DTYPE_AUTO;
    config.send_only = random_.one_in(4) ? small(1, 1) : 0;
    const bool is_sent = check(ncclEpCombine(handle_, &in, &out, &config, nullptr));
    if (!is_sent || config.send_only == 0) return;
    if (memory_ != nullptr && random_.one_in(3)) tensors_.change(memory_, memory_bytes_);
    check(ncclEpComplete(handle_, nullptr, nullptr));
  }

  void combine_weights() {
    const int64_t topk = info().topk;
    const bool expert_rows = layout_ <= NCCL_EP_LAYOUT_PACKED;
    ncclEpTensor_t* values = nullptr;
    if (rows_.ndim == 3) {
      values = expert_rows ? tensors_.make(NCCL_EP_FLOAT32, {rows_.sizes[0], rows_.sizes[1]})
                           : tensors_.make(NCCL_EP_FLOAT32, {rows_.sizes[0], rows_.sizes[1], topk});
    } else {
      values = expert_rows ? tensors_.make(NCCL_EP_FLOAT32, {rows_.sizes[0]})
                           : tensors_.make(NCCL_EP_FLOAT32, {rows_.sizes[0], topk});
    }
    check(ncclEpCombineWeights(handle_, values, tensors_.make(NCCL_EP_FLOAT32, {tokens_, topk}), nullptr));
  }

  void others() {
    size_t bytes = 0;
    void* memory = nullptr;
    check(ncclEpTensorBytes(tensors_.make(small(-1, 12), {small(0, 9), small(0, 9)}), &bytes));
    if (check(ncclEpMemAlloc(group_, &memory, random_.within(0, 5000)))) check(ncclEpMemFree(group_, memory));
    check(ncclEpGroupSetTimeout(group_, random_.one_in(50) ? UINT64_MAX : 20'000'000));
    check(ncclEpMaskQuery(group_, tensors_.make(NCCL_EP_INT32, {1}), nullptr));
    check(ncclEpMaskUpdate(group_, small(0, 1, 4), nullptr));
    check(ncclEpComplete(handle_, nullptr, nullptr));
    check(ncclEpCheck(group_));
    ncclEpGroupInfo_t info = NCCL_EP_GROUP_INFO_INIT;
    check(ncclEpGroupGetInfo(group_, &info));
  }

  const uint64_t seed_;
  Random random_;
  Tensors tensors_;
  ncclEpGroup_t group_ = nullptr;
  ncclEpHandle_t handle_ = nullptr;
  std::vector<ncclEpHandle_t> handles_;
  void* memory_ = nullptr;  // of the last handle, if it is ours
  size_t memory_bytes_ = 0;
  ncclEpTensor_t rows_ = NCCL_EP_TENSOR_INIT;  // shape of the last dispatch's output
  int32_t experts_ = 1, most_tokens_ = 1, topk_ = 1, layout_ = 1;
  int64_t tokens_ = 0;
  int num_done_ = 0;
};

TEST(ApiFuzz, SurvivesAnyArguments) {
  const uint64_t first = number_of("NCCL_EP_FUZZ_SEED", std::random_device{}());
  const double seconds = static_cast<double>(number_of("NCCL_EP_FUZZ_SECONDS", 3));
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(&print_seed);
  } else {
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) std::signal(number, &print_seed_of_crash);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t num_rounds = 0, num_done = 0;
  do {
    running = first + num_rounds++;
    Round round(running);
    round.run();
    num_done += round.num_done();
    if (!HasFailure()) continue;
    print_seed();
    break;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%llu rounds from seed %llu, %llu calls that succeeded\n", static_cast<unsigned long long>(num_rounds),
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(num_done));
  if (num_rounds > 100) {
    EXPECT_GE(num_done, 3 * num_rounds) << "most rounds do not get far";
  }
}

}  // namespace
}  // namespace ep::fuzz
