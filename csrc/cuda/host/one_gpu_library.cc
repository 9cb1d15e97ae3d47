// Finds the kernels for a world on one GPU, in builds that have them.
#include <cstring>

#include "base/check.h"
#include "cuda/host/one_gpu_world.h"
#include "transport/collective_step.h"

#if defined(EP_LAB)
#include "base/beside.h"
#endif

namespace ep {

#if defined(EP_LAB)

namespace {

constexpr char kFile[] = "libnccl_ep_one_gpu.so";

const OneGpuTable* load_table() {
  const auto function = reinterpret_cast<decltype(&nccl_ep_one_gpu_table)>(
      function_beside(kFile, kOneGpuSymbol, "the kernels for several ranks on one GPU"));
  const OneGpuTable* const table = function == nullptr ? nullptr : function();
  if (table == nullptr || table->bytes != sizeof(OneGpuTable) || std::strcmp(table->build, EP_VERSION) != 0) {
    raise(ErrorKind::kSystem, kFile, " is of another build of nccl_ep than this library (", EP_VERSION,
          "): build and install both together");
  }
  return table;
}

const OneGpuTable& library() {
  static const OneGpuTable* const table = load_table();  // a failed attempt is made again at the next call
  return *table;
}

// The library's kernels, among those of this one.
[[maybe_unused]] const bool has_setter =
    add_gpu_testing_setter([](const GpuTesting& testing) { library().set_testing(testing); });
[[maybe_unused]] const bool has_readers =
    add_stamps_reader("ll_dispatch", [] { return library().take_stamps("ll_dispatch"); }) &&
    add_stamps_reader("ll_combine", [] { return library().take_stamps("ll_combine"); }) &&
    add_stamps_reader("ll_streamed_combine", [] { return library().take_stamps("ll_streamed_combine"); }) &&
    add_stamps_reader("ht_route", [] { return library().take_stamps("ht_route"); }) &&
    add_stamps_reader("ht_dispatch", [] { return library().take_stamps("ht_dispatch"); }) &&
    add_stamps_reader("ht_combine", [] { return library().take_stamps("ht_combine"); });

}  // namespace

std::shared_ptr<OneGpuWorld> join_one_gpu_world(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                                bool masks_ranks) {
  on_all_ranks(bootstrap, [] { library(); });
  return library().join(bootstrap, window_bytes, timeout_seconds, masks_ranks);
}

#else

std::shared_ptr<OneGpuWorld> join_one_gpu_world(Bootstrap& bootstrap, uint64_t, double, bool) {
  raise(ErrorKind::kInvalidUsage, "all ", bootstrap.num_ranks(),
        " ranks use the same GPU, and this build has no kernels for that: give every rank its own (in torch, "
        "torch.cuda.set_device(local_rank) before the buffer is made), make the buffer with device=\"cpu\", or build "
        "nccl_ep with -DNCCL_EP_LAB=ON");
}

#endif

}  // namespace ep
