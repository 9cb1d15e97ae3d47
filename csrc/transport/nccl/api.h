// The functions of NCCL that we call, looked up at run time in the library that the process has loaded, so that torch
// and we share one and a preloaded newer one serves both. NCCL is never linked.
#pragma once

#include <nccl.h>

#include <string>

#include "base/check.h"

namespace ep {

// ncclTeam of nccl_device.h, which only nvcc can include.
struct NcclTeam {
  int num_ranks, rank, stride;
};

struct NcclApi {
  int version = 0;   // of the library, as NCCL_VERSION_CODE
  std::string path;  // of the library

  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommCount) comm_count = nullptr;
  decltype(&ncclCommUserRank) comm_user_rank = nullptr;
  decltype(&ncclCommCuDevice) comm_cu_device = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclMemAlloc) mem_alloc = nullptr;
  decltype(&ncclMemFree) mem_free = nullptr;
  decltype(&ncclCommWindowRegister) comm_window_register = nullptr;
  decltype(&ncclCommWindowDeregister) comm_window_deregister = nullptr;
  NcclTeam (*team_lsa)(ncclComm_t) = nullptr;
  // Null before 2.29.2, whose headers do not declare it.
  ncclResult_t (*get_lsa_device_pointer)(ncclWindow_t, size_t offset, int lsa_rank, void** pointer) = nullptr;
};

// Throws kSystem with one sentence if there is no library, or one that cannot be used.
const NcclApi& nccl();

[[noreturn]] void raise_nccl(ncclResult_t result, const char* call, ncclComm_t comm);

inline void check_nccl(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) {
  if (result != ncclSuccess) raise_nccl(result, call, comm);
}

}  // namespace ep
