// Low latency's kernels over NCCL's GIN, in a GIN library: the launchers of dispatch.cu and combine.cu. Those that can
// mask late ranks are in masking_dispatch.cu and masking_combine.cu, and launch_gin() chooses.
#pragma once

#include "cuda/network/gin/gin_network.cuh"
#include "cuda/protocol/kernel_args.h"
#include "layout/ll/rail.h"

namespace ep {

void load_gin_dispatch();
void load_gin_combine();
void launch_gin(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream);
void launch_gin(const KernelArgs<LlCombineParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream);
void launch_gin(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream);

void load_masking_gin_dispatch();
void load_masking_gin_combine();
void launch_masking_gin(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                        void* stream);
void launch_masking_gin(const KernelArgs<LlCombineParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                        void* stream);
void launch_masking_gin(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                        const GinNetwork::Args& network, void* stream);

}  // namespace ep
