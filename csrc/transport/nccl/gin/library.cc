#include "transport/nccl/gin/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/beside.h"
#include "transport/nccl/api.h"
#include "transport/nccl/version.h"

namespace ep {
namespace {

const GinTable* load_table() {
  const std::vector<int> compiled = gin_releases();
  const int release = gin_release_for(nccl().version, compiled);
  if (release == 0) {
    raise(ErrorKind::kSystem, gin_version_problem(nccl().version, compiled), " (loaded: ", nccl().path, ")");
  }
  const std::string file = concat("libnccl_ep_gin_", nccl_version_name(release), ".so");
  const auto function =
      reinterpret_cast<GinTableFunction>(function_beside(file, kGinSymbol, "the kernels for several NVLink domains"));
  const GinTable* const table = function == nullptr ? nullptr : function();
  if (table == nullptr || table->bytes != sizeof(GinTable) || std::strcmp(table->build, EP_VERSION) != 0) {
    raise(ErrorKind::kSystem, file, " is of another build of nccl_ep than this library (", EP_VERSION,
          "): build and install both together");
  }
  return table;
}

GinNccl look_up() {
  Dl_info info{};
  void* const library = dladdr(reinterpret_cast<void*>(nccl().comm_count), &info) != 0
                            ? dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY)
                            : nullptr;
  GinNccl functions;
  const auto find = [&](const char* name, void*& function) {
    function = dlsym(library != nullptr ? library : RTLD_DEFAULT, name);
    if (function == nullptr) {
      raise(ErrorKind::kSystem, "NCCL ", nccl_version_name(nccl().version), " in ", nccl().path, " has no function ",
            name, ": install an unmodified NCCL ", nccl_version_name(kOldestGin), " or newer");
    }
  };
  find("ncclCommQueryProperties", functions.comm_query_properties);
  find("ncclDevCommCreate", functions.dev_comm_create);
  find("ncclDevCommDestroy", functions.dev_comm_destroy);
  return functions;
}

}  // namespace

const char* gin_backend_name(GinBackend backend) {
  switch (backend) {
    case GinBackend::kProxy:
      return "proxy";
    case GinBackend::kGdaki:
      return "gdaki";
    case GinBackend::kGpi:
      return "gpi";
    case GinBackend::kEfaGda:
      return "efa_gda";
    default:
      return "none";
  }
}

std::vector<int> gin_releases() {
  std::vector<int> releases;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(own_folder(), error)) {
    if (const int release = gin_release_of(entry.path().filename().string())) releases.push_back(release);
  }
  std::sort(releases.begin(), releases.end());
  return releases;
}

const GinTable& gin_library() {
  static const GinTable* const table = load_table();  // a failed attempt is made again at the next call
  return *table;
}

const GinNccl& gin_nccl() {
  static const GinNccl functions = look_up();
  return functions;
}

}  // namespace ep
