// Which NCCL libraries this build can work with. Pure, so that it is tested without NCCL or CUDA.
//
// The kernels see no structure of NCCL, only addresses. What must match is therefore the prototypes of a few host
// functions, which NCCL 2 keeps, and how the addresses of the peers are learnt: by ncclGetLsaDevicePointer where the
// library has it (2.29.2 and later), else on the device from the head of ncclWindow_vidmem, which has been the same in
// the headers of 2.28.9 to 2.30.7. So one binary, compiled with any of them, serves all of them.
#pragma once

#include <string>

#include "base/check.h"
#include "layout/common/topology.h"

namespace ep {

constexpr int kOldestNccl = 22809;  // the first release whose windows were tried here

// 22809 -> "2.28.9"
inline std::string nccl_version_name(int code) {
  const int major = code >= 10000 ? code / 10000 : code / 1000;  // the encoding changed with 2.9
  const int minor = code >= 10000 ? code / 100 % 100 : code / 100 % 10;
  return concat(major, ".", minor, ".", code % 100);
}

// Empty if code compiled with the headers of `compiled` can use the library `loaded`; else the sentence for the user.
inline std::string version_problem(int compiled, int loaded) {
  const bool is_other_major = loaded / 10000 != compiled / 10000;
  if (loaded >= kOldestNccl && !is_other_major) return "";
  const std::string versions = concat("nccl_ep was compiled with NCCL ", nccl_version_name(compiled),
                                      ", but this process has loaded NCCL ", nccl_version_name(loaded));
  if (loaded < kOldestNccl) {
    return concat(versions, ", which is too old: install NCCL ", nccl_version_name(kOldestNccl),
                  " or newer (torch 2.11 and later bring it; or preload it with LD_PRELOAD=.../libnccl.so.2)");
  }
  return concat(versions, ": install a release of NCCL ", compiled / 10000,
                ", or build nccl_ep with the headers of NCCL ", nccl_version_name(loaded));
}

inline std::string ranks_text(int count) { return concat(count, count == 1 ? " rank" : " ranks"); }

// Empty if NCCL's NVLink domains, of `found` ranks, are those of the buffer; else the sentence for the user.
inline std::string domain_problem(const Topology& topology, int found) {
  if (found == topology.domain_size) return "";
  if (topology.num_domains() == 1) {
    return concat("the group of ", topology.num_ranks, " ranks crosses NVLink domains of ", ranks_text(found),
                  ": make the buffer with domain_size=", found, ", or of the ranks of one domain");
  }
  const bool divides = topology.num_ranks % found == 0;
  return concat("the buffer is for NVLink domains of ", ranks_text(topology.domain_size),
                ", but NCCL finds domains of ", found, ": ",
                divides ? concat("make it with domain_size=", found) : "put as many ranks on every machine",
                ", or check NCCL_LSA_TEAM_SIZE and NCCL_MNNVL_ENABLE");
}

}  // namespace ep
