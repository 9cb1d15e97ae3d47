// How calls of all ranks become one launch with a NIC block: between the files of this folder.
#pragma once

#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"
#include "cuda/network/one_gpu_nic.h"
#include "cuda/protocol/kernel_args.h"
#include "layout/ht/rail.h"
#include "layout/ll/rail.h"

namespace ep {

class OneGpuWorld;

void load_one_gpu_dispatch();
void load_one_gpu_combine();
void load_one_gpu_ht_dispatch();
void load_one_gpu_ht_combine();

// Returns when all ranks have called, and it was launched.
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<LlDispatchParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<LlCombineParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<HtRouteParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<HtDispatchParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);
void run_on_one_gpu(OneGpuWorld& world, const KernelArgs<HtCombineParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream);

}  // namespace ep
