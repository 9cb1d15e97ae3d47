// The backend for a kind of device.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/common/expert_map.h"
#include "runtime/common/layout_info.h"
#include "runtime/group.h"

struct ncclWindow_vidmem;

namespace ep {

// The time line of the last kernel of that name (cuda/testing/stamps.h); empty without CUDA.
std::vector<std::vector<uint64_t>> take_time_line(std::string_view kernel);

// False in a build without CUDA.
bool has_cuda_backend();

// A sentence that says why, and what to do; empty in a build with CUDA.
std::string why_no_cuda();

// NCCL as "2.28.9": whose headers the build had, and what this process has loaded, from which file. `problem`: why it
// cannot be used. All empty in a build without CUDA.
struct NcclInfo {
  std::string compiled, loaded, path, problem;
  std::string network;          // releases whose kernels for several domains are here, as "NCCL 2.30.7 exactly"
  std::string network_problem;  // why none of them can be used
};
NcclInfo nccl_info();

// The ranks of a caller's NCCL communicator, which must be of GPU `device`. Throws kSystem in a build without CUDA.
std::unique_ptr<Bootstrap> bootstrap_of(ncclComm* comm, int device, double seconds);

// The GPU of a caller's NCCL communicator.
int device_of(ncclComm* comm);
// Where a window of the communicator lies on this rank.
void* window_address(ncclComm* comm, ncclWindow_vidmem* window, uint64_t offset);

// Of a rank by itself, without a group. `on_gpu`: the pointers are the current GPU's, and `stream` is its cudaStream_t.
void token_layout(const TokenLayoutParams& params, bool on_gpu, void* stream);
void map_experts(const ExpertMapParams& params, bool on_gpu, void* stream);
void write_layout_info(const LayoutInfoParams& params, bool on_gpu, void* stream);

// `config.device_index` < 0: the CPU backend, else CUDA's.
std::unique_ptr<Group> make_group(Bootstrap& bootstrap, const GroupConfig& config);

}  // namespace ep
