#include "transport/nccl/api.h"

#include <dlfcn.h>

#include "transport/nccl/version.h"

namespace ep {
namespace {

// In this order: a library in the global scope (a preloaded one comes first there), one that torch has loaded for
// itself, and for the C library without torch the system's. Null if there is none.
void* find_library() {
  if (void* symbol = dlsym(RTLD_DEFAULT, "ncclGetVersion")) {
    // A handle of that very file: with two libraries mapped, all functions must come from one.
    Dl_info info{};
    if (dladdr(symbol, &info) != 0 && info.dli_fname != nullptr) {
      if (void* handle = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY)) return handle;
    }
    return dlopen(nullptr, RTLD_LAZY);  // NCCL is linked into the program
  }
  if (void* handle = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY)) return handle;
  return dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
}

std::string path_of(void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "an unknown file";
}

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
void require(void* library, const char* name, Function& function, const NcclApi& api) {
  look_up(library, name, function);
  if (function == nullptr) {
    raise(ErrorKind::kSystem, "NCCL ", nccl_version_name(api.version), " in ", api.path, " has no function ", name,
          ": install an unmodified NCCL ", nccl_version_name(kOldestNccl), " or newer");
  }
}

NcclApi load() {
  void* library = find_library();
  if (library == nullptr) {
    raise(ErrorKind::kSystem, "no NCCL library was found (", dlerror(),
          "): import a torch with CUDA first, or put libnccl.so.2 of NCCL ", nccl_version_name(kOldestNccl),
          " or newer on LD_LIBRARY_PATH");
  }
  NcclApi api;
  decltype(&ncclGetVersion) get_version = nullptr;
  require(library, "ncclGetVersion", get_version, api);
  api.path = path_of(reinterpret_cast<void*>(get_version));
  get_version(&api.version);
  const std::string problem = version_problem(NCCL_VERSION_CODE, api.version);
  if (!problem.empty()) raise(ErrorKind::kSystem, problem, " (loaded: ", api.path, ")");
  require(library, "ncclGetErrorString", api.get_error_string, api);
  require(library, "ncclGetLastError", api.get_last_error, api);
  require(library, "ncclGetUniqueId", api.get_unique_id, api);
  require(library, "ncclCommInitRankConfig", api.comm_init_rank_config, api);
  require(library, "ncclCommGetAsyncError", api.comm_get_async_error, api);
  require(library, "ncclCommFinalize", api.comm_finalize, api);
  require(library, "ncclCommDestroy", api.comm_destroy, api);
  require(library, "ncclCommAbort", api.comm_abort, api);
  require(library, "ncclCommCount", api.comm_count, api);
  require(library, "ncclCommUserRank", api.comm_user_rank, api);
  require(library, "ncclCommCuDevice", api.comm_cu_device, api);
  require(library, "ncclAllGather", api.all_gather, api);
  require(library, "ncclMemAlloc", api.mem_alloc, api);
  require(library, "ncclMemFree", api.mem_free, api);
  require(library, "ncclCommWindowRegister", api.comm_window_register, api);
  require(library, "ncclCommWindowDeregister", api.comm_window_deregister, api);
  require(library, "ncclTeamLsa", api.team_lsa, api);
  look_up(library, "ncclGetLsaDevicePointer", api.get_lsa_device_pointer);
  return api;
}

}  // namespace

const NcclApi& nccl() {
  static const NcclApi api = load();  // a failed attempt is made again at the next call
  return api;
}

void raise_nccl(ncclResult_t result, const char* call, ncclComm_t comm) {
  const char* last = nccl().get_last_error(comm);
  raise(ErrorKind::kSystem, call, ": ", nccl().get_error_string(result), last != nullptr && *last != '\0' ? ": " : "",
        last != nullptr ? last : "", " (NCCL ", nccl_version_name(nccl().version), "; NCCL_DEBUG=WARN tells more)");
}

}  // namespace ep
