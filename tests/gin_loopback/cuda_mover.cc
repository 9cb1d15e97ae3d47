#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "mover.h"

namespace gin_loopback {
namespace {

// The driver, found in the process at run time, so that the plugin is built and tested where there is none.
#define GIN_LOOPBACK_DRIVER(DO)         \
  DO(cuCtxGetCurrent)                   \
  DO(cuCtxGetDevice)                    \
  DO(cuCtxPushCurrent)                  \
  DO(cuCtxPopCurrent)                   \
  DO(cuCtxSetCurrent)                   \
  DO(cuCtxGetStreamPriorityRange)       \
  DO(cuDeviceGetUuid)                   \
  DO(cuGetErrorName)                    \
  DO(cuThreadExchangeStreamCaptureMode) \
  DO(cuStreamCreateWithPriority)        \
  DO(cuStreamSynchronize)               \
  DO(cuStreamDestroy)                   \
  DO(cuStreamBatchMemOp)                \
  DO(cuMemAlloc)                        \
  DO(cuMemFree)                         \
  DO(cuMemHostAlloc)                    \
  DO(cuMemFreeHost)                     \
  DO(cuMemcpyAsync)                     \
  DO(cuMemcpyBatchAsync)                \
  DO(cuMemGetAddressRange)              \
  DO(cuMemRetainAllocationHandle)       \
  DO(cuMemExportToShareableHandle)      \
  DO(cuMemImportFromShareableHandle)    \
  DO(cuMemAddressReserve)               \
  DO(cuMemAddressFree)                  \
  DO(cuMemMap)                          \
  DO(cuMemUnmap)                        \
  DO(cuMemSetAccess)                    \
  DO(cuMemRelease)

#define GIN_LOOPBACK_TEXT(name) #name
#define GIN_LOOPBACK_SYMBOL(name) GIN_LOOPBACK_TEXT(name)  // cuda.h gives some functions names with a version

struct Driver {
#define GIN_LOOPBACK_MEMBER(name) decltype(&::name) p_##name = nullptr;
  GIN_LOOPBACK_DRIVER(GIN_LOOPBACK_MEMBER)
#undef GIN_LOOPBACK_MEMBER
  bool is_complete = true;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    const auto find = [&](const char* symbol, auto& function) {
      function = library == nullptr
                     ? nullptr
                     : reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      is_complete &= function != nullptr;
    };
#define GIN_LOOPBACK_FIND(name) find(GIN_LOOPBACK_SYMBOL(name), p_##name);
    GIN_LOOPBACK_DRIVER(GIN_LOOPBACK_FIND)
#undef GIN_LOOPBACK_FIND
  }
};
const Driver& driver() {
  static const Driver driver;
  return driver;
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  driver().p_cuGetErrorName(result, &name);
  throw std::runtime_error(std::string(call) + ": " + (name != nullptr ? name : "an unknown error"));
}
#define CHECKED(name, ...) check(driver().p_##name(__VA_ARGS__), #name)

CUdeviceptr device_pointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

// A call from a thread of NCCL.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) {
    CHECKED(cuCtxPushCurrent, context);
    driver().p_cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~CurrentContext() {
    driver().p_cuThreadExchangeStreamCaptureMode(&mode_);
    CUcontext context;
    driver().p_cuCtxPopCurrent(&context);
  }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// A peer's allocations, mapped one behind the other.
class ImportedCuda : public Imported {
 public:
  ImportedCuda(CUcontext context, CUdevice device, const Mesh::Received& received) : context_(context) {
    for (uint32_t i = 0; i < received.message.num_segments; i++) bytes_ += received.message.segment_bytes[i];
    CHECKED(cuMemAddressReserve, &base_, bytes_, 2 << 20, 0, 0);
    CUdeviceptr at = base_;
    for (uint32_t i = 0; i < received.message.num_segments; i++) {
      CUmemGenericAllocationHandle handle;
      const auto fd = static_cast<uintptr_t>(received.fds.at(i));
      CHECKED(cuMemImportFromShareableHandle, &handle, reinterpret_cast<void*>(fd),
              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      close(received.fds[i]);
      const uint64_t bytes = received.message.segment_bytes[i];
      CHECKED(cuMemMap, at, bytes, 0, handle, 0);
      mapped_.push_back({at, bytes});
      CHECKED(cuMemRelease, handle);  // the mapping keeps it
      at += bytes;
    }
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECKED(cuMemSetAccess, base_, bytes_, &access, 1);
    source.address = base_ + received.message.offset;
  }
  ~ImportedCuda() override {
    const CurrentContext current(context_);
    for (const auto& [address, bytes] : mapped_) driver().p_cuMemUnmap(address, bytes);
    driver().p_cuMemAddressFree(base_, bytes_);
  }

 private:
  CUcontext context_;
  CUdeviceptr base_ = 0;
  uint64_t bytes_ = 0;
  std::vector<std::pair<CUdeviceptr, uint64_t>> mapped_;
};

class CudaMover : public Mover {
 public:
  explicit CudaMover(CUcontext context) : context_(context) {
    const CurrentContext current(context_);
    CHECKED(cuCtxGetDevice, &device_);
    CUuuid uuid;
    CHECKED(cuDeviceGetUuid, &uuid, device_);
    gpu_.assign(uuid.bytes, sizeof uuid.bytes);
    int least = 0, greatest = 0;
    CHECKED(cuCtxGetStreamPriorityRange, &least, &greatest);
    CHECKED(cuStreamCreateWithPriority, &stream_, CU_STREAM_NON_BLOCKING, greatest);
    pinned_ = pin(kBounceBytes + (kNumValues + 1) * sizeof(uint64_t));
    staging_ = pin(kStagingBytes);
    values_ = reinterpret_cast<uint64_t*>(pinned_ + kBounceBytes);
    finished_ = values_ + kNumValues;
    *finished_ = 0;
    CHECKED(cuMemAlloc, &scratch_, kTouchedBytes);
    store(values_, 1);
    submit();
    CHECKED(cuStreamSynchronize, stream_);
    if (*values_ != 1 || num_finished() != 1) {
      throw std::runtime_error("stream memory operations do not reach pinned memory");
    }
  }
  ~CudaMover() override {
    const CurrentContext current(context_);
    driver().p_cuStreamDestroy(stream_);
    driver().p_cuMemFree(scratch_);
    driver().p_cuMemFreeHost(staging_);
    driver().p_cuMemFreeHost(pinned_);
  }

  void use_in_this_thread() override {
    CHECKED(cuCtxSetCurrent, context_);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CHECKED(cuThreadExchangeStreamCaptureMode, &mode);
  }
  std::string gpu() const override { return gpu_; }

  // Memory that cannot be shared (NCCL's signals) is written by its owner alone: no descriptors then.
  std::vector<int> share(const void* data, uint64_t bytes, Message& message) override {
    const CurrentContext current(context_);
    std::vector<int> fds;
    const CUdeviceptr begin = device_pointer(data), end = begin + bytes;
    for (CUdeviceptr at = begin; at < end;) {
      CUdeviceptr base;
      size_t length;
      CUmemGenericAllocationHandle handle;
      int fd = -1;
      bool is_shared = fds.size() < kMaxSegments;
      is_shared = is_shared && driver().p_cuMemGetAddressRange(&base, &length, at) == CUDA_SUCCESS &&
                  driver().p_cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(base)) == CUDA_SUCCESS;
      if (is_shared) {
        is_shared = driver().p_cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
                    CUDA_SUCCESS;
        driver().p_cuMemRelease(handle);
      }
      if (!is_shared) {
        for (int each : fds) close(each);
        message.num_segments = 0;
        return {};
      }
      if (fds.empty()) message.offset = at - base;
      message.segment_bytes[fds.size()] = length;
      fds.push_back(fd);
      at = base + length;
    }
    message.num_segments = static_cast<uint32_t>(fds.size());
    return fds;
  }

  std::unique_ptr<Imported> import(const Mesh::Received& received) override {
    if (received.message.num_segments == 0) return std::make_unique<Imported>();
    const CurrentContext current(context_);
    auto imported = std::make_unique<ImportedCuda>(context_, device_, received);
    imported->source.is_same_gpu = std::memcmp(received.message.gpu, gpu_.data(), gpu_.size()) == 0;
    // What a first copy from there sets up must not happen while a kernel waits.
    CHECKED(cuMemcpyAsync, scratch_, imported->source.address,
            std::min<uint64_t>(received.message.bytes, kTouchedBytes), stream_);
    CHECKED(cuStreamSynchronize, stream_);
    return imported;
  }

  void copy(void* to, const Source& from, uint64_t bytes) override {
    if (!from.is_same_gpu || is_staging(to)) {
      to_.push_back(device_pointer(to));
      from_.push_back(from.address);
      bytes_.push_back(bytes);
      return;
    }
    // The driver copies within a GPU by a kernel, which would wait for kernels that fill it. Through pinned memory,
    // both halves are for copy engines.
    for (uint64_t done = 0; done < bytes; done += kBounceBytes) {
      const uint64_t part = std::min(bytes - done, kBounceBytes);
      CHECKED(cuMemcpyAsync, device_pointer(pinned_), from.address + done, part, stream_);
      CHECKED(cuMemcpyAsync, device_pointer(to) + done, device_pointer(pinned_), part, stream_);
    }
  }
  void copy_value(void* to, uint64_t value, uint32_t bytes) override {
    const uint64_t number = num_values_++;
    if (number >= kNumValues) await(value_batches_[number % kNumValues]);
    values_[number % kNumValues] = value;
    value_batches_[number % kNumValues] = submitted_ + 1;
    to_.push_back(device_pointer(to));
    from_.push_back(device_pointer(values_ + number % kNumValues));
    bytes_.push_back(bytes);
  }
  void store(void* word, uint64_t value) override {
    CUstreamBatchMemOpParams& op = stores_.emplace_back();
    std::memset(&op, 0, sizeof op);
    op.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op.writeValue.address = device_pointer(word);
    op.writeValue.value64 = value;
  }
  uint64_t submit() override {
    if (!to_.empty()) {
      CUmemcpyAttributes attributes{};
      attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
      attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
      attributes.srcLocHint = attributes.dstLocHint = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
      size_t first = 0;
      CHECKED(cuMemcpyBatchAsync, to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, stream_);
    }
    store(finished_, ++submitted_);
    constexpr size_t kMostOps = 250;  // in one call of the driver
    for (size_t first = 0; first < stores_.size(); first += kMostOps) {
      const size_t count = std::min(stores_.size() - first, kMostOps);
      CHECKED(cuStreamBatchMemOp, stream_, static_cast<unsigned>(count), stores_.data() + first, 0);
    }
    to_.clear();
    from_.clear();
    bytes_.clear();
    stores_.clear();
    return submitted_;
  }
  uint64_t num_finished() override { return __atomic_load_n(finished_, __ATOMIC_ACQUIRE); }

 private:
  static constexpr uint64_t kBounceBytes = 4ull << 20, kNumValues = 1024, kTouchedBytes = 64;

  static char* pin(uint64_t bytes) {
    void* memory = nullptr;
    CHECKED(cuMemHostAlloc, &memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    return static_cast<char*>(memory);  // one address on host and GPU
  }
  void await(uint64_t batch) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (num_finished() < batch) {
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("copies have not ended within 10 s");
    }
  }

  CUcontext context_;
  CUdevice device_ = 0;
  std::string gpu_;
  CUstream stream_ = nullptr;
  char* pinned_ = nullptr;
  uint64_t* values_ = nullptr;
  uint64_t* finished_ = nullptr;
  CUdeviceptr scratch_ = 0;
  uint64_t submitted_ = 0, num_values_ = 0;
  uint64_t value_batches_[kNumValues] = {};
  std::vector<CUdeviceptr> to_, from_;
  std::vector<size_t> bytes_;
  std::vector<CUstreamBatchMemOpParams> stores_;
};

}  // namespace

std::unique_ptr<Mover> make_cuda_mover() {
  CUcontext context = nullptr;
  if (!driver().is_complete || driver().p_cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr)
    return nullptr;
  return std::make_unique<CudaMover>(context);
}

}  // namespace gin_loopback
