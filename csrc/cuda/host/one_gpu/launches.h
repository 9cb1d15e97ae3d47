// How calls of all ranks become one launch: between the files of this folder.
#pragma once

#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"
#include "cuda/network/one_gpu_nic.h"
#include "cuda/protocol/kernel_args.h"
#include "layout/ht/rail.h"
#include "layout/ll/rail.h"

namespace ep {

class World;

// ---- One domain
void load_world_dispatch();
void load_world_combine();
void load_world_streamed_combine();
void load_world_masking_dispatch();
void load_world_masking_combine();
void load_world_ht_route();
void load_world_ht_dispatch();
void load_world_ht_combine();

// All ranks in one launch; `args` is a device array, `host_args` its host copy. Each rank gets as many blocks as the
// one whose plan has most.
void launch_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                  int num_ranks, void* stream);
void launch_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args, int num_ranks,
                  void* stream);
void launch_world(const KernelArgs<LlCombineWeightsParams>* host_args, const KernelArgs<LlCombineWeightsParams>* args,
                  int num_ranks, void* stream);
void launch_world(const KernelArgs<HtRouteParams>* host_args, const KernelArgs<HtRouteParams>* args, int num_ranks,
                  void* stream);
void launch_world(const KernelArgs<HtDispatchParams>* host_args, const KernelArgs<HtDispatchParams>* args,
                  int num_ranks, void* stream);
void launch_world(const KernelArgs<HtCombineParams>* host_args, const KernelArgs<HtCombineParams>* args, int num_ranks,
                  void* stream);
// Combine on few SMs has kernels of its own: launch_world() chooses them.
void launch_streamed_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args,
                           int num_ranks, void* stream);
// So has low latency with masks.
void launch_masking_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                          int num_ranks, void* stream);
void launch_masking_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args,
                          int num_ranks, void* stream);
void launch_masking_world(const KernelArgs<LlCombineWeightsParams>* host_args,
                          const KernelArgs<LlCombineWeightsParams>* args, int num_ranks, void* stream);

// ---- Domains that ranks claim: a block of each launch is the NIC
void load_crossing_dispatch();
void load_crossing_combine();
void load_crossing_ht_dispatch();
void load_crossing_ht_combine();

// Returns when all ranks have called, and it was launched.
void run_on_one_gpu(World& world, const KernelArgs<LlDispatchParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(World& world, const KernelArgs<LlCombineParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(World& world, const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(World& world, const KernelArgs<HtRouteParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(World& world, const KernelArgs<HtDispatchParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(World& world, const KernelArgs<HtCombineParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);

}  // namespace ep
