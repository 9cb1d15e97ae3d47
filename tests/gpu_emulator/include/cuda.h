// The part of the CUDA driver's interface that csrc/cuda uses, for the emulator: memory with a file behind it.
#pragma once

#include <cstddef>

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED };
enum CUmemAllocationHandleType { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

CUresult cuGetErrorString(CUresult result, const char** text);
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags);
CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle memory);
CUresult cuMemExportToShareableHandle(void* fd, CUmemGenericAllocationHandle memory, CUmemAllocationHandleType,
                                      unsigned long long);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* memory, void* fd, CUmemAllocationHandleType);
CUresult cuMemAddressReserve(CUdeviceptr* base, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long);
CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes);
CUresult cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,
                  unsigned long long);
CUresult cuMemUnmap(CUdeviceptr base, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc*, size_t);
