#include "cuda/host/driver.h"

#include <cuda_runtime_api.h>

#include "transport/device/check_cuda.h"

namespace ep {
namespace {

constexpr unsigned kVersion = 12000;  // whose functions these are

template <class Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  EP_CUDA(cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result));
#else
  static_assert(CUDART_VERSION >= kVersion);
  EP_CUDA(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    raise(ErrorKind::kSystem, "CUDA's driver has no ", name, ", which elastic buffers need");
  }
  function = reinterpret_cast<Function>(found);
}

DriverApi find_all() {
  DriverApi api;
  find(api.get_error_string, "cuGetErrorString");
  find(api.mem_get_allocation_granularity, "cuMemGetAllocationGranularity");
  find(api.mem_create, "cuMemCreate");
  find(api.mem_release, "cuMemRelease");
  find(api.mem_export, "cuMemExportToShareableHandle");
  find(api.mem_import, "cuMemImportFromShareableHandle");
  find(api.mem_address_reserve, "cuMemAddressReserve");
  find(api.mem_address_free, "cuMemAddressFree");
  find(api.mem_map, "cuMemMap");
  find(api.mem_unmap, "cuMemUnmap");
  find(api.mem_set_access, "cuMemSetAccess");
  return api;
}

}  // namespace

const DriverApi& driver() {
  static const DriverApi api = find_all();
  return api;
}

}  // namespace ep
