// A program of NVIDIA's NCCL EP: nccl_ep.h alone, a communicator of NCCL, tensors of cudaMalloc, a stream of its own.
//
//   on_gpus RANK RANKS FILE     each rank is a process with GPU RANK; FILE is where rank 0 says where to meet
//
// Every value is a small integer or a power of two, so that all sums are exact.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "rank %d: %s:%d: %s\n", me, __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                    \
    }                                                                                   \
  } while (0)
#define NCCL(call) CHECK((call) == ncclSuccess)
#define CUDA(call) CHECK((call) == cudaSuccess)

namespace {

constexpr int kLocal = 2, kTopk = 2, kHidden = 512, kMost = 8, kAlignment = 4;
int me = 0, ranks = 1;
cudaStream_t stream = nullptr;

using Bf16 = uint16_t;
Bf16 bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<Bf16>(bits >> 16);
}
float number(Bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float made = 0;
  std::memcpy(&made, &bits, 4);
  return made;
}

// ---- The tokens of every rank, and where they go

int experts() { return kLocal * ranks; }
int tokens_of(int rank) { return kMost - 1 - rank; }
float value_of(int rank, int token) { return static_cast<float>(16 * rank + token + 1); }
int64_t id_of(int rank, int token, int k) { return token == 3 && k == 1 ? -1 : (rank + token + 3 * k) % experts(); }
float weight_of(int token, int k) { return token % 2 == k ? 0.5F : 0.25F; }
float weights_of(int rank, int token) {
  float sum = 0;
  for (int k = 0; k < kTopk; ++k) sum += id_of(rank, token, k) < 0 ? 0 : weight_of(token, k);
  return sum;
}
bool goes_to(int rank, int token, int other) {
  for (int k = 0; k < kTopk; ++k)
    if (id_of(rank, token, k) >= 0 && id_of(rank, token, k) / kLocal == other) return true;
  return false;
}
struct Choice {
  int rank, token, k;
};
std::vector<Choice> rows_of(int64_t expert) {
  std::vector<Choice> rows;
  for (int rank = 0; rank < ranks; ++rank)
    for (int token = 0; token < tokens_of(rank); ++token)
      for (int k = 0; k < kTopk; ++k)
        if (id_of(rank, token, k) == expert) rows.push_back({rank, token, k});
  return rows;
}

// ---- Memory of the GPU with its description

template <class T>
struct TypeOf;
template <>
struct TypeOf<Bf16> {
  static constexpr ncclDataType_t value = ncclBfloat16;
};
template <>
struct TypeOf<float> {
  static constexpr ncclDataType_t value = ncclFloat32;
};
template <>
struct TypeOf<int> {
  static constexpr ncclDataType_t value = ncclInt32;
};
template <>
struct TypeOf<int64_t> {
  static constexpr ncclDataType_t value = ncclInt64;
};

template <class T>
class Memory {
 public:
  explicit Memory(std::initializer_list<size_t> sizes) : sizes_(sizes) {
    for (size_t size : sizes_) count_ *= size;
    CUDA(cudaMalloc(&data_, count_ * sizeof(T) + 1));
    CUDA(cudaMemset(data_, 0x55, count_ * sizeof(T)));
    described_ = ncclEpTensor_t{};
    described_.size = sizeof described_;
    described_.magic = NCCL_EP_TENSOR_MAGIC;
    described_.ndim = static_cast<unsigned>(sizes_.size());
    described_.datatype = TypeOf<T>::value;
    described_.data = data_;
    described_.sizes = sizes_.data();
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  ncclEpTensor_t* operator&() { return &described_; }
  void write(const std::vector<T>& values) {
    CUDA(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    CUDA(cudaStreamSynchronize(stream));
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    CUDA(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return values;
  }

 private:
  std::vector<size_t> sizes_;
  size_t count_ = 1;
  T* data_ = nullptr;
  ncclEpTensor_t described_;
};

template <class Struct>
Struct made() {
  Struct each = Struct();
  each.size = sizeof each;
  each.magic = NCCL_EP_MAGIC;
  return each;
}

// ---- What all of them do

struct Program {
  Memory<Bf16> x, y;
  Memory<int64_t> ids;
  Memory<float> weights;
  ncclEpGroup_t group = nullptr;
  ncclEpHandle_t handle = nullptr;
  ncclEpDispatchInputs_t inputs = made<ncclEpDispatchInputs_t>();
  ncclEpCombineOutputs_t home = made<ncclEpCombineOutputs_t>();

  Program(ncclComm_t comm, ncclEpAlgorithm_t algorithm, unsigned received)
      : x({size_t(tokens_of(me)), kHidden}),
        y({size_t(tokens_of(me)), kHidden}),
        ids({size_t(tokens_of(me)), kTopk}),
        weights({size_t(tokens_of(me)), kTopk}) {
    std::vector<Bf16> rows;
    std::vector<int64_t> chosen;
    std::vector<float> given;
    for (int token = 0; token < tokens_of(me); ++token) {
      rows.insert(rows.end(), kHidden, bf16(value_of(me, token)));
      for (int k = 0; k < kTopk; ++k) {
        chosen.push_back(id_of(me, token, k));
        given.push_back(weight_of(token, k));
      }
    }
    x.write(rows);
    ids.write(chosen);
    weights.write(given);
    ncclEpGroupConfig_t config = made<ncclEpGroupConfig_t>();
    config.version = NCCL_EP_API_VERSION;
    config.algorithm = algorithm;
    config.num_experts = static_cast<unsigned>(experts());
    config.max_dispatch_tokens_per_rank = kMost;
    config.max_recv_tokens_per_rank = received;
    config.max_token_bytes = kHidden * 2;
    config.num_topk = kTopk;
    config.timeout_ns = 30'000'000'000;
    NCCL(ncclEpCreateGroup(&group, comm, &config));
    inputs.tokens = &x;
    home.tokens = &y;
  }
  ~Program() {
    NCCL(ncclEpHandleDestroy(handle));
    NCCL(ncclEpGroupDestroy(group));
  }

  void check_home(bool weighted) const {
    const std::vector<Bf16> rows = y.read();
    for (int token = 0; token < tokens_of(me); ++token) {
      float factor = 0;  // of rows that come back without a weight: one a rank
      for (int rank = 0; rank < ranks; ++rank) factor += goes_to(me, token, rank) ? 1 : 0;
      const float want = value_of(me, token) * (weighted ? weights_of(me, token) : factor);
      for (int i = 0; i < kHidden; ++i) CHECK(number(rows[token * kHidden + i]) == want);
    }
  }
};

void low_latency_by_expert(ncclComm_t comm) {
  Program run(comm, NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_AUTO);
  NCCL(ncclEpCreateHandle(&run.handle, run.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &run.ids, nullptr, nullptr, stream));
  const size_t length = size_t(ranks) * kMost;
  for (unsigned staged = 0; staged < 2; ++staged) {
    Memory<Bf16> rows({kLocal, length, kHidden});
    Memory<int> counts({kLocal});
    ncclEpDispatchOutputs_t outputs = made<ncclEpDispatchOutputs_t>();
    outputs.tokens = &rows;
    ncclEpLayoutInfo_t info = made<ncclEpLayoutInfo_t>();
    info.expert_counters = &counts;
    ncclEpDispatchConfig_t config = made<ncclEpDispatchConfig_t>();
    config.send_only = staged;
    NCCL(ncclEpUpdateHandle(run.handle, &run.ids, nullptr, stream));
    NCCL(ncclEpDispatch(run.handle, &run.inputs, &outputs, &info, &config, stream));
    NCCL(ncclEpComplete(run.handle, nullptr, stream));
    const std::vector<int> counted = counts.read();
    const std::vector<Bf16> received = rows.read();
    for (int local = 0; local < kLocal; ++local) {
      const std::vector<Choice> want = rows_of(me * kLocal + local);
      CHECK(counted[local] == static_cast<int>(want.size()));
      for (size_t at = 0; at < want.size(); ++at)
        CHECK(number(received[(local * length + at) * kHidden + 7]) == value_of(want[at].rank, want[at].token));
    }
    ncclEpCombineInputs_t back = made<ncclEpCombineInputs_t>();
    back.tokens = &rows;
    ncclEpCombineConfig_t how = made<ncclEpCombineConfig_t>();
    how.send_only = staged;
    run.home.topk_weights = &run.weights;
    NCCL(ncclEpCombine(run.handle, &back, &run.home, &how, stream));
    NCCL(ncclEpComplete(run.handle, nullptr, stream));
    run.check_home(true);
  }
}

void low_latency_by_rank(ncclComm_t comm) {
  Program run(comm, NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_AUTO);
  NCCL(ncclEpCreateHandle(&run.handle, run.group, NCCL_EP_LAYOUT_RANK_MAJOR, &run.ids, nullptr, nullptr, stream));
  Memory<Bf16> rows({size_t(ranks), kMost, kHidden});
  Memory<float> weights({size_t(ranks), kMost, kTopk});
  Memory<int> ids({size_t(ranks), kMost, kTopk}), counts({size_t(ranks)});
  ncclEpDispatchOutputs_t outputs = made<ncclEpDispatchOutputs_t>();
  outputs.tokens = &rows;
  outputs.topk_weights = &weights;
  outputs.topk_idx = &ids;
  ncclEpLayoutInfo_t info = made<ncclEpLayoutInfo_t>();
  info.src_rank_counters = &counts;
  info.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
  run.inputs.topk_weights = &run.weights;
  NCCL(ncclEpDispatch(run.handle, &run.inputs, &outputs, &info, nullptr, stream));
  const std::vector<int> counted = counts.read(), chosen = ids.read();
  const std::vector<float> given = weights.read();
  std::vector<Bf16> received = rows.read();
  for (int source = 0; source < ranks; ++source) {
    int at = 0;
    for (int token = 0; token < tokens_of(source); ++token) {
      if (!goes_to(source, token, me)) continue;
      const int row = source * kMost + at++;
      float sum = 0;
      for (int k = 0; k < kTopk; ++k) {
        const int64_t id = id_of(source, token, k);
        const bool here = id >= 0 && id / kLocal == me;
        CHECK(chosen[row * kTopk + k] == (here ? id : -1));
        if (here) sum += given[row * kTopk + k];
      }
      CHECK(number(received[row * kHidden]) == value_of(source, token));
      for (int i = 0; i < kHidden; ++i) received[row * kHidden + i] = bf16(value_of(source, token) * sum);
    }
    CHECK(counted[source] == at);
  }
  rows.write(received);
  ncclEpCombineInputs_t back = made<ncclEpCombineInputs_t>();
  back.tokens = &rows;
  NCCL(ncclEpCombine(run.handle, &back, &run.home, nullptr, stream));
  run.check_home(true);
}

// Rows as they came, whatever the layout: the backward pass, too.
void high_throughput(ncclComm_t comm, bool by_expert) {
  const size_t length = size_t(ranks) * kMost * kTopk + size_t(kLocal) * kAlignment;
  Program run(comm, NCCL_EP_ALGO_HIGH_THROUGHPUT, static_cast<unsigned>(length));
  Memory<int> counts({kLocal}), offsets({kLocal}), total({1});
  ncclEpLayoutInfo_t info = made<ncclEpLayoutInfo_t>();
  info.expert_counters = &counts;
  info.recv_total_counter = &total;
  if (by_expert) info.expert_offsets = &offsets;
  ncclEpHandleConfig_t aligned = made<ncclEpHandleConfig_t>();
  aligned.dispatch_output_per_expert_alignment = by_expert ? kAlignment : 0;
  const ncclEpLayout_t layout = by_expert ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
  NCCL(ncclEpCreateHandle(&run.handle, run.group, layout, &run.ids, &info, &aligned, stream));
  Memory<Bf16> rows({length, kHidden});
  Memory<float> flat_weights({length, kTopk}), row_weights({length});
  Memory<int64_t> ids({length, kTopk});
  ncclEpDispatchOutputs_t outputs = made<ncclEpDispatchOutputs_t>();
  outputs.tokens = &rows;
  outputs.topk_weights = by_expert ? &row_weights : &flat_weights;
  if (!by_expert) outputs.topk_idx = &ids;
  run.inputs.topk_weights = &run.weights;
  NCCL(ncclEpDispatch(run.handle, &run.inputs, &outputs, nullptr, nullptr, stream));
  const std::vector<int> counted = counts.read();
  std::vector<Bf16> received = rows.read(), made_rows(received.size(), 0);
  int came = 0;
  if (by_expert) {
    const std::vector<int> begins = offsets.read();
    const std::vector<float> given = row_weights.read();
    for (int local = 0; local < kLocal; ++local) {
      const std::vector<Choice> want = rows_of(me * kLocal + local);
      const int padded = (static_cast<int>(want.size()) + kAlignment - 1) / kAlignment * kAlignment;
      CHECK(begins[local] == came && counted[local] == padded);
      for (int at = 0; at < padded; ++at) {
        const bool is_row = at < static_cast<int>(want.size());
        const float value = is_row ? value_of(want[at].rank, want[at].token) : 0;
        const size_t row = size_t(came) + at;
        CHECK(number(received[row * kHidden + 1]) == value);
        if (is_row) CHECK(given[row] == weight_of(want[at].token, want[at].k));
        for (int i = 0; i < kHidden && is_row; ++i) made_rows[row * kHidden + i] = bf16(value * given[row]);
      }
      came += padded;
    }
  } else {
    const std::vector<float> given = flat_weights.read();
    const std::vector<int64_t> chosen = ids.read();
    for (int source = 0; source < ranks; ++source)
      for (int token = 0; token < tokens_of(source); ++token) {
        if (!goes_to(source, token, me)) continue;
        const int row = came++;
        float sum = 0;
        for (int k = 0; k < kTopk; ++k) {
          const int64_t id = id_of(source, token, k);
          const bool here = id >= 0 && id / kLocal == me;
          CHECK(chosen[row * kTopk + k] == (here ? id - me * kLocal : -1));
          CHECK(given[row * kTopk + k] == (here ? weight_of(token, k) : 0));
          sum += given[row * kTopk + k];
        }
        CHECK(number(received[row * kHidden + 1]) == value_of(source, token));
        for (int i = 0; i < kHidden; ++i) made_rows[row * kHidden + i] = bf16(value_of(source, token) * sum);
      }
    for (int local = 0; local < kLocal; ++local)
      CHECK(counted[local] == static_cast<int>(rows_of(me * kLocal + local).size()));
  }
  CHECK(total.read()[0] == came);
  rows.write(made_rows);
  ncclEpCombineInputs_t back = made<ncclEpCombineInputs_t>();
  back.tokens = &rows;
  NCCL(ncclEpCombine(run.handle, &back, &run.home, nullptr, stream));
  run.check_home(true);

  ncclEpDispatchConfig_t backward = made<ncclEpDispatchConfig_t>();
  backward.pass_direction = NCCL_EP_BWD_PASS;
  outputs = made<ncclEpDispatchOutputs_t>();
  outputs.tokens = &rows;
  run.inputs.topk_weights = nullptr;
  NCCL(ncclEpDispatch(run.handle, &run.inputs, &outputs, nullptr, &backward, stream));
  Memory<float> numbers({size_t(tokens_of(me)), kTopk});
  back.topk_weights = by_expert ? &row_weights : &flat_weights;
  run.home.topk_weights = &numbers;
  ncclEpCombineConfig_t how = made<ncclEpCombineConfig_t>();
  how.pass_direction = NCCL_EP_BWD_PASS;
  NCCL(ncclEpCombine(run.handle, &back, &run.home, &how, stream));
  if (!by_expert) run.check_home(false);
  const std::vector<float> home = numbers.read();
  for (int token = 0; token < tokens_of(me); ++token)
    for (int k = 0; k < kTopk; ++k)
      CHECK(home[token * kTopk + k] == (id_of(me, token, k) < 0 ? 0 : weight_of(token, k)));
}

ncclComm_t meet(const std::string& file) {
  ncclUniqueId id;
  if (me == 0) {
    NCCL(ncclGetUniqueId(&id));
    std::ofstream(file + ".new", std::ios::binary).write(reinterpret_cast<const char*>(&id), sizeof id);
    CHECK(std::rename((file + ".new").c_str(), file.c_str()) == 0);
  } else {
    std::ifstream from;
    for (int tries = 0; tries < 3000 && !from.is_open(); ++tries) {
      from.open(file, std::ios::binary);
      if (!from.is_open()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(from.read(reinterpret_cast<char*>(&id), sizeof id));
  }
  ncclComm_t comm = nullptr;
  NCCL(ncclCommInitRank(&comm, ranks, id, me));
  return comm;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  me = std::atoi(argv[1]);
  ranks = std::atoi(argv[2]);
  CUDA(cudaSetDevice(me));
  CUDA(cudaStreamCreate(&stream));
  ncclComm_t comm = meet(argv[3]);
  low_latency_by_expert(comm);
  low_latency_by_rank(comm);
  high_throughput(comm, false);
  high_throughput(comm, true);
  NCCL(ncclCommDestroy(comm));
  std::printf("rank %d: all is right\n", me);
}
