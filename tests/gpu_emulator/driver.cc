// Functions of the CUDA driver for the emulator: a handle is the descriptor of a file in memory. As on a GPU, memory
// can be accessed once it was mapped and cuMemSetAccess was called.
#include "cuda/host/driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

namespace {

constexpr size_t kGranularity = 64 << 10;

CUresult result_of(bool is_good) { return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "of the emulator";
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  const int fd = memfd_create("emulated_gpu", MFD_CLOEXEC);
  if (fd < 0 || bytes % kGranularity != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *memory = static_cast<CUmemGenericAllocationHandle>(fd);
  const std::vector<char> garbage(kGranularity, static_cast<char>(0xA5));  // with which device memory begins
  for (size_t at = 0; at < bytes; at += garbage.size()) {
    if (pwrite(fd, garbage.data(), garbage.size(), static_cast<off_t>(at)) < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle memory) { return result_of(close(static_cast<int>(memory)) == 0); }
CUresult cuMemExportToShareableHandle(void* fd, CUmemGenericAllocationHandle memory, CUmemAllocationHandleType,
                                      unsigned long long) {
  *static_cast<int*>(fd) = fcntl(static_cast<int>(memory), F_DUPFD_CLOEXEC, 0);
  return result_of(*static_cast<int*>(fd) >= 0);
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* memory, void* fd, CUmemAllocationHandleType) {
  const int copy = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
  *memory = static_cast<CUmemGenericAllocationHandle>(copy);
  return result_of(copy >= 0);
}
CUresult cuMemAddressReserve(CUdeviceptr* base, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* const reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *base = reinterpret_cast<CUdeviceptr>(reserved);
  return result_of(reserved != MAP_FAILED);
}
CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes) { return result_of(munmap(pointer(base), bytes) == 0); }
CUresult cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,
                  unsigned long long) {
  const int fd = static_cast<int>(memory);
  return result_of(mmap(pointer(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) !=
                   MAP_FAILED);
}
CUresult cuMemUnmap(CUdeviceptr base, size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return result_of(mmap(pointer(base), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED);
}
CUresult cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc*, size_t) {
  return result_of(mprotect(pointer(base), bytes, PROT_READ | PROT_WRITE) == 0);
}

namespace ep {

const DriverApi& driver() {
  static const DriverApi api{&cuGetErrorString,
                             &cuMemGetAllocationGranularity,
                             &cuMemCreate,
                             &cuMemRelease,
                             &cuMemExportToShareableHandle,
                             &cuMemImportFromShareableHandle,
                             &cuMemAddressReserve,
                             &cuMemAddressFree,
                             &cuMemMap,
                             &cuMemUnmap,
                             &cuMemSetAccess};
  return api;
}

}  // namespace ep
