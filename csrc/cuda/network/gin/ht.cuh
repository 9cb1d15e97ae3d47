// High throughput's kernels over NCCL's GIN, in a GIN library: the launchers of ht_dispatch.cu and ht_combine.cu.
#pragma once

#include "cuda/network/gin/gin_network.cuh"
#include "cuda/protocol/kernel_args.h"
#include "layout/ht/rail.h"
#include "runtime/ht/params.h"

namespace ep {

struct HtRouteParams;

void load_gin_ht_dispatch();
void load_gin_ht_combine();
void launch_gin(const KernelArgs<HtRouteParams>& args, const HtRail& rail, const GinNetwork::Args& network,
                void* stream);
void launch_gin(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, const GinNetwork::Args& network,
                void* stream);
void launch_gin(const KernelArgs<HtCombineParams>& args, const HtRail& rail, const GinNetwork::Args& network,
                void* stream);

}  // namespace ep
