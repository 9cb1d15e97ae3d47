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
    ncclEpxCommDestroy(comm_);
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
          check(ncclEpxRouteHandle(handle_, of(tensors_.make(ncclInt32, {info_size()})), nullptr));
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
  bool check(ncclResult_t result) {
    EXPECT_TRUE(result >= ncclSuccess && result <= ncclRemoteError) << result << ", seed " << seed_;
    if (result != ncclSuccess) {
      EXPECT_NE(std::string(ncclEpxGetLastError()), "") << "seed " << seed_;
      EXPECT_NE(ncclEpxGetLastErrorKind(), NCCL_EPX_NO_ERROR) << "seed " << seed_;
    }
    num_done_ += result == ncclSuccess ? 1 : 0;
    return result == ncclSuccess;
  }
  int32_t small(int64_t low, int64_t high, int seldom = 60) {
    return static_cast<int32_t>(random_.mostly(random_.within(low, high), seldom));
  }
  // Any number as one of an enumeration.
  template <class Enum>
  void choose(Enum& field, int64_t high, int seldom = 60) {
    const int32_t number = small(0, high, seldom);
    static_assert(sizeof field == sizeof number);
    std::memcpy(&field, &number, sizeof number);
  }
  template <class Enum>
  static bool is(const Enum& field, int number) {
    int32_t seen;
    std::memcpy(&seen, &field, sizeof seen);
    return seen == number;
  }
  // A struct of another size or without its magic, seldom.
  template <class Struct>
  const Struct* odd(Struct& given) {
    if (random_.one_in(150)) given.size = static_cast<unsigned>(random_.mostly(random_.within(0, sizeof given), 3));
    if (random_.one_in(300)) given.magic = static_cast<unsigned>(random_.odd());
    return random_.one_in(300) ? nullptr : &given;
  }

  bool make_group() {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    ncclEpxGroupOptions_t options = NCCL_EPX_GROUP_OPTIONS_INIT;
    choose(config.algorithm, 1);
    options.both_algorithms = small(0, 1);
    const bool is_ht = is(config.algorithm, NCCL_EP_ALGO_HIGH_THROUGHPUT), is_both = options.both_algorithms == 1;
    experts_ = small(1, 4);
    most_tokens_ = std::min(small(1, 5), 1000);  // a window of more would only take memory
    topk_ = small(1, 4);
    config.num_experts = static_cast<unsigned>(experts_);
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(most_tokens_);
    config.max_recv_tokens_per_rank = is_ht && random_.one_in(2) ? static_cast<unsigned>(small(0, 40)) : 0;
    config.num_topk = random_.one_in(3) ? 0 : static_cast<unsigned>(topk_);
    options.domain_size = small(0, 1);
    config.max_token_bytes = static_cast<unsigned>(random_.mostly(random_.within(1, 16) * 16, 60));
    options.max_combine_row_bytes = random_.mostly(random_.within(0, 16) * 16, 60);
    config.timeout_ns = 20'000'000;  // changed handles may name what does not come
    if (config.max_recv_tokens_per_rank > 0) choose(config.overflow_policy, 2);
    choose(config.zero_copy, 2);
    config.max_num_sms = static_cast<unsigned>(small(0, 1));
    if (is_both || is_ht) options.arena_bytes = random_.one_in(2) ? 1 << 16 : 0;
    config.enable_mask = is_both || !is_ht ? static_cast<unsigned>(small(0, 1)) : 0;
    options.ll_network = small(0, 2);
    options.window = small(0, 1);
    if (!check(ncclEpxCommFromCallback(&comm_, small(0, 0), 1, NCCL_EPX_DEVICE_CPU, nullptr, nullptr))) return false;
    return check(ncclEpxCreateGroup(&group_, comm_, odd(config), random_.one_in(8) ? nullptr : &options));
  }

  // A caller in C gives any integer for a layout; to C++ only reading it is undefined.
  __attribute__((no_sanitize("enum"))) void make_handle() {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpxHandleOptions_t options = NCCL_EPX_HANDLE_OPTIONS_INIT;
    ncclEpLayout_t layout = NCCL_EP_LAYOUT_UNSET;
    const bool is_plain = random_.one_in(3);
    const int topk = small(0, topk_);
    layout_ = small(1, 4);
    if (is_plain) {
      choose(layout, 3);
    } else {
      options.layout = layout_;
      options.capacity = random_.mostly(layout_ == NCCL_EPX_LAYOUT_RANK_MAJOR ? 0 : random_.within(-1, 20), 40);
      options.algorithm = small(0, 2, 10);
      options.max_tokens = small(0, most_tokens_);
    }
    const bool is_packed = layout_ == NCCL_EPX_LAYOUT_PACKED;
    config.dispatch_output_per_expert_alignment = static_cast<size_t>(is_packed ? small(0, 4) : small(0, 1));
    const ncclEpxHandleOptions_t* given_options = is_plain ? nullptr : odd(options);
    size_t bytes = 0;
    const bool is_known = check(ncclEpxHandleMemSize(group_, layout, &config, &bytes, topk, given_options));
    if (!is_known || bytes > static_cast<size_t>(kMostBytes)) return;
    Described memory;
    memory_ = random_.one_in(4) ? nullptr : tensors_.allocate(bytes);
    memory_bytes_ = bytes;
    memory.tensor.ndim = 1;
    memory.tensor.datatype = ncclUint8;
    memory.sizes[0] = random_.one_in(50) ? bytes / 2 : bytes;
    memory.tensor.data = memory_;
    if (memory_ != nullptr) std::memset(memory_, 0, bytes);
    if (memory_ != nullptr && random_.one_in(50)) memory.tensor.data = static_cast<char*>(memory_) + 4;
    ncclEpHandle_t made = nullptr;
    const ncclEpTensor_t* given = memory_ == nullptr ? nullptr : &memory.tensor;
    if (!check(ncclEpxInitHandle(&made, group_, layout, &config, topk, given, given_options))) return;
    handles_.push_back(handle_ = made);
    is_plain_ = given_options == nullptr;
    layout_ = info().layout;
    update();
  }

  ncclEpxHandleInfo_t info() {
    ncclEpxHandleInfo_t info = NCCL_EPX_HANDLE_INFO_INIT;
    check(ncclEpxHandleGetInfo(handle_, &info));
    return info;
  }
  bool has_expert_rows() const { return layout_ <= NCCL_EPX_LAYOUT_PACKED; }
  int64_t bins() const { return has_expert_rows() ? experts_ : 1; }
  int64_t info_size() const { return layout_ == NCCL_EPX_LAYOUT_PACKED ? 3 * bins() + 3 : 2 * bins() + 2; }

  ncclEpLayoutInfo_t counters() {
    ncclEpLayoutInfo_t made = NCCL_EP_LAYOUT_INFO_INIT;
    const int type = random_.one_in(3) ? ncclInt64 : ncclInt32;
    const bool is_ht = info().algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT;
    if (has_expert_rows() || random_.one_in(3)) made.expert_counters = of(tensors_.make(ncclInt32, {experts_}));
    if (!has_expert_rows() && !is_ht) made.src_rank_counters = of(tensors_.make(ncclInt32, {1}));
    if (has_expert_rows() && is_ht) made.expert_offsets = of(tensors_.make(type, {experts_}));
    if (is_ht || random_.one_in(20)) made.recv_total_counter = of(tensors_.make(type, {1}));
    choose(made.recv_topk_idx_kind, 2);
    return made;
  }

  void update() {
    const ncclEpxHandleInfo_t sizes = info();
    tokens_ = random_.within(0, sizes.max_tokens);
    const int type = random_.one_in(2) ? ncclInt64 : ncclInt32;
    Described* ids = tensors_.make(type, {tokens_, sizes.topk});
    if (Tensors::is_as(ids, type, {tokens_, sizes.topk})) {
      for (int64_t i = 0; i < tokens_ * sizes.topk; i++) {
        const int64_t id = random_.mostly(random_.within(-1, experts_ - 1), 30);
        std::memcpy(static_cast<char*>(ids->tensor.data) + i * element_bytes(type), &id, element_bytes(type));
      }
    }
    ncclEpLayoutInfo_t given = counters();
    const bool has_counters = is_plain_ && sizes.algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT && random_.one_in(2);
    check(ncclEpUpdateHandle(handle_, of(ids), has_counters ? odd(given) : nullptr, nullptr));
  }

  int float_type() {
    constexpr int kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    return random_.pick(kTypes);
  }

  void dispatch() {
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpxDispatchExtra_t extra = NCCL_EPX_DISPATCH_EXTRA_INIT;
    const int dtype = random_.one_in(3) ? static_cast<int>(random_.within(0, 12)) : float_type();
    const int64_t step = 16 / element_bytes(dtype);
    in.tokens = of(tensors_.make(dtype, {tokens_, random_.within(1, 4) * step}));
    if (random_.one_in(2)) in.topk_weights = of(tensors_.make(ncclFloat32, {tokens_, info().topk}));
    if (random_.one_in(3)) {
      Described* scales = tensors_.make(float_type(), {tokens_, random_.within(1, 5)}, true);
      in.scales = of(scales);
      if (scales != nullptr) std::copy_n(scales->strides, 2, extra.scale_strides);
    }
    config.send_only = random_.one_in(4) ? static_cast<unsigned>(small(1, 1)) : 0;
    choose(config.quant_recipe, 0, 20);
    if (in.scales != nullptr) config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    // Without their strides scales are contiguous, and their memory may be too small for that.
    const bool has_strides = extra.scale_strides[0] != 0 || extra.scale_strides[1] != 0;
    if (is_plain_ && !has_strides && random_.one_in(3)) return dispatch_plain(in, config);
    for (ncclEpTensor_t*& each : extra.extra) {
      if (random_.one_in(4)) each = of(tensors_.make(ncclInt32, {tokens_, random_.within(1, 3) * 4}));
    }
    extra.quant = random_.one_in(5) ? small(1, 3) : 0;
    extra.zero_padding = small(0, 1);
    extra.num_sms = small(0, 2);
    extra.cached = random_.one_in(4) ? small(1, 1) : 0;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpTensor_t** const places[] = {&out.tokens,
                                       &out.scales,
                                       &out.topk_weights,
                                       &out.topk_idx,
                                       &extra.row_expert,
                                       &extra.info,
                                       &extra.extra_outputs[0],
                                       &extra.extra_outputs[1],
                                       &extra.extra_outputs[2]};
    Described described[std::size(places)];
    for (size_t i = 0; i < std::size(places); i++) *places[i] = &described[i].tensor;
    if (!check(ncclEpxDispatchShapes(handle_, &in, &out, &config, odd(extra)))) return;
    for (size_t i = 0; i < std::size(places); i++) *places[i] = of(tensors_.fill(described[i]));
    rows_ = described[0];
    const ncclEpxDispatchExtra_t* given = has_strides ? &extra : odd(extra);
    check(ncclEpxDispatch(handle_, odd(in), odd(out), nullptr, odd(config), given, nullptr));
    complete(config.send_only != 0);
  }

  // As a program of NCCL EP, which knows the shapes.
  void dispatch_plain(ncclEpDispatchInputs_t& in, ncclEpDispatchConfig_t& config) {
    const ncclEpxHandleInfo_t sizes = info();
    const bool is_ht = sizes.algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT;
    const int64_t rows = is_ht ? random_.within(0, 50) : sizes.max_tokens;
    const int64_t hidden = in.tokens == nullptr || in.tokens->sizes == nullptr ? 8 : in.tokens->sizes[1];
    if (hidden < 1 || hidden > 1024) return;
    int dtype = ncclFloat32;
    if (in.tokens != nullptr) std::memcpy(&dtype, &in.tokens->datatype, sizeof dtype);
    if (is_ht) choose(config.pass_direction, 1);
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    const bool is_forward = !is(config.pass_direction, NCCL_EP_BWD_PASS);
    if (is_ht) {
      out.tokens = of(tensors_.make(dtype, {rows, hidden}));
      if (is_forward && has_expert_rows()) out.topk_weights = of(tensors_.make(ncclFloat32, {rows}));
      if (is_forward && !has_expert_rows()) out.topk_weights = of(tensors_.make(ncclFloat32, {rows, sizes.topk}));
      if (is_forward && !has_expert_rows()) out.topk_idx = of(tensors_.make(ncclInt64, {rows, sizes.topk}));
      if (is_forward && in.topk_weights == nullptr)
        in.topk_weights = of(tensors_.make(ncclFloat32, {tokens_, sizes.topk}));
    } else if (has_expert_rows()) {
      out.tokens = of(tensors_.make(dtype, {experts_, rows, hidden}));
    } else {
      out.tokens = of(tensors_.make(dtype, {1, rows, hidden}));
      out.topk_weights = of(tensors_.make(ncclFloat32, {1, rows, sizes.topk}));
      out.topk_idx = of(tensors_.make(random_.one_in(2) ? ncclInt64 : ncclInt32, {1, rows, sizes.topk}));
    }
    if (out.tokens != nullptr && out.tokens->ndim <= 4) {
      rows_.tensor.ndim = out.tokens->ndim;
      if (out.tokens->sizes != nullptr) std::copy_n(out.tokens->sizes, 4, rows_.sizes);
    }
    ncclEpLayoutInfo_t given = counters();
    if (is_ht) given = NCCL_EP_LAYOUT_INFO_INIT;
    check(ncclEpDispatch(handle_, odd(in), odd(out), odd(given), odd(config), nullptr));
    complete(config.send_only != 0);
  }

  void complete(bool is_split) {
    if (!is_split) return;
    if (memory_ != nullptr && random_.one_in(3)) tensors_.change(memory_, memory_bytes_);
    if (random_.one_in(8)) return;
    check(ncclEpComplete(handle_, nullptr, nullptr));
  }

  Described* like_rows(int dtype, std::initializer_list<int64_t> more) {
    std::vector<int64_t> sizes(rows_.sizes, rows_.sizes + (rows_.tensor.ndim == 3 ? 2 : 1));
    sizes.insert(sizes.end(), more);
    switch (sizes.size()) {
      case 1:
        return tensors_.make(dtype, {sizes[0]});
      case 2:
        return tensors_.make(dtype, {sizes[0], sizes[1]});
      default:
        return tensors_.make(dtype, {sizes[0], sizes[1], sizes[2]});
    }
  }

  void combine() {
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    ncclEpxCombineExtra_t extra = NCCL_EPX_COMBINE_EXTRA_INIT;
    const int dtype = float_type();
    const int64_t hidden = random_.within(1, 4) * 8;
    const auto choices = [&](int type) { return of(tensors_.make(type, {tokens_, info().topk})); };
    in.tokens = of(like_rows(dtype, {hidden}));
    const int out_dtype = random_.one_in(3) ? float_type() : dtype;
    out.tokens = of(tensors_.make(out_dtype, {tokens_, hidden}));
    choose(config.quant_recipe, 0, 20);
    if (random_.one_in(4)) choose(config.pass_direction, 1);
    if (is(config.pass_direction, NCCL_EP_BWD_PASS)) {
      in.topk_weights = of(has_expert_rows() ? like_rows(ncclFloat32, {}) : like_rows(ncclFloat32, {info().topk}));
      out.topk_weights = choices(ncclFloat32);
    } else if (random_.one_in(3)) {
      out.topk_weights = choices(ncclFloat32);
    }
    extra.weights = has_expert_rows() ? small(0, 3) : small(0, 2);
    if (extra.weights == NCCL_EPX_WEIGHTS_HOME) {
      extra.topk_weights = choices(ncclFloat32);
      if (random_.one_in(2)) extra.topk_idx = choices(ncclInt64);
    }
    for (ncclEpTensor_t*& bias : extra.bias) {
      if (random_.one_in(6)) bias = of(tensors_.make(out_dtype, {tokens_, hidden}));
    }
    extra.wire_dtype = random_.one_in(3) ? small(1, 3) : NCCL_EPX_WIRE_AUTO;
    config.send_only = random_.one_in(4) ? static_cast<unsigned>(small(1, 1)) : 0;
    const bool has_extra = !random_.one_in(6);
    const bool is_sent =
        check(ncclEpxCombine(handle_, odd(in), odd(out), odd(config), has_extra ? odd(extra) : nullptr, nullptr));
    if (!is_sent || config.send_only == 0) return;
    if (memory_ != nullptr && random_.one_in(3)) tensors_.change(memory_, memory_bytes_);
    check(ncclEpComplete(handle_, nullptr, nullptr));
  }

  void combine_weights() {
    const int64_t topk = info().topk;
    Described* values = has_expert_rows() ? like_rows(ncclFloat32, {}) : like_rows(ncclFloat32, {topk});
    check(ncclEpxCombineWeights(handle_, of(values), of(tensors_.make(ncclFloat32, {tokens_, topk})), nullptr));
  }

  void others() {
    size_t bytes = 0;
    void* memory = nullptr;
    check(ncclEpxTensorBytes(of(tensors_.make(small(-1, 13), {small(0, 9), small(0, 9)})), &bytes));
    if (check(ncclEpxMemAlloc(group_, &memory, random_.within(0, 5000)))) check(ncclEpxMemFree(group_, memory));
    check(ncclEpxGroupSetTimeout(group_, random_.one_in(50) ? UINT64_MAX : 20'000'000));
    int mask = small(0, 1, 4), seen = 0;
    check(ncclEpMaskQuery(group_, random_.one_in(50) ? nullptr : &seen, nullptr));
    check(ncclEpMaskUpdate(group_, &mask, nullptr));
    check(ncclEpGetAsyncError(group_, &seen));
    check(ncclEpErrorClear(group_));
    check(ncclEpComplete(handle_, nullptr, nullptr));
    check(ncclEpxCheck(group_));
    ncclEpxGroupInfo_t info = NCCL_EPX_GROUP_INFO_INIT;
    check(ncclEpxGroupGetInfo(group_, &info));
    size_t sizes[5] = {1, 2, 3, 4, 5};
    ncclEpTensor_t* made = nullptr;
    const unsigned ndim = static_cast<unsigned>(small(0, 5));
    if (check(ncclEpTensorAlloc(&made, ndim, ncclInt8, random_.one_in(20) ? nullptr : sizes, nullptr))) {
      check(ncclEpTensorDestroy(made));
    }
  }

  const uint64_t seed_;
  Random random_;
  Tensors tensors_;
  ncclComm_t comm_ = nullptr;
  ncclEpGroup_t group_ = nullptr;
  ncclEpHandle_t handle_ = nullptr;
  std::vector<ncclEpHandle_t> handles_;
  void* memory_ = nullptr;  // of the last handle, if it is ours
  size_t memory_bytes_ = 0;
  Described rows_;  // shape of the last dispatch's output
  bool is_plain_ = false;
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
