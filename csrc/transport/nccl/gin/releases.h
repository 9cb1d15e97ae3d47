// Which GIN library serves which NCCL. Pure, so that it is tested without NCCL or CUDA.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "base/check.h"
#include "transport/nccl/version.h"

namespace ep {

constexpr int kOldestGin = 23007;      // older ones corrupt memory, or lack what the kernels need
constexpr int kGinCompatible = 23100;  // from here on, NCCL runs kernels that were compiled with an older release

// The release among `compiled` whose kernels the NCCL `loaded` runs: before 2.31 exactly its own, later the newest one
// that is no newer. 0: there is none.
inline int gin_release_for(int loaded, const std::vector<int>& compiled) {
  int best = 0;
  for (int release : compiled) {
    const bool is_served = loaded < kGinCompatible ? release == loaded : release >= kGinCompatible && release <= loaded;
    if (is_served && release / 10000 == loaded / 10000 && release >= kOldestGin && release > best) best = release;
  }
  return best;
}

// The releases of NCCL that these kernels run on, as text.
inline std::string gin_served(const std::vector<int>& compiled) {
  std::string text;
  for (int release : compiled) {
    if (!text.empty()) text += ", ";
    text += concat("NCCL ", nccl_version_name(release), release >= kGinCompatible ? " and newer" : " exactly");
  }
  return text;
}

// The sentence for the user if there is none.
inline std::string gin_version_problem(int loaded, const std::vector<int>& compiled) {
  if (compiled.empty()) {
    return concat(
        "this nccl_ep was built without kernels for several NVLink domains: build it with "
        "NCCL_EP_GIN_NCCL_INCLUDE_DIRS, the directories of nccl.h of NCCL ",
        nccl_version_name(kOldestGin), " or of NCCL 2.31.2 or newer");
  }
  const bool has_newer = compiled.back() >= kGinCompatible;
  const std::string wanted =
      has_newer ? concat(">=", nccl_version_name(compiled.back())) : concat("==", nccl_version_name(compiled.back()));
  return concat("several NVLink domains need ", gin_served(compiled), ", but this process has loaded NCCL ",
                nccl_version_name(loaded), ": pip install --no-deps \"nvidia-nccl-cu13", wanted,
                "\", or preload one with LD_PRELOAD=.../libnccl.so.2");
}

// "libnccl_ep_gin_2.30.7.so" -> 23007; 0: not such a name.
inline int gin_release_of(const std::string& file_name) {
  int major = 0, minor = 0, patch = 0, end = 0;
  const int found = std::sscanf(file_name.c_str(), "libnccl_ep_gin_%d.%d.%d.so%n", &major, &minor, &patch, &end);
  const bool is_whole = found == 3 && end == static_cast<int>(file_name.size());
  return is_whole ? major * 10000 + minor * 100 + patch : 0;
}

}  // namespace ep
