#include "torch/ops/beside.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "torch/ops/fast_call.h"
#include "torch/ops/run.h"

namespace ep {

void Beside::arm(const at::Device& device) {
  if (device.is_cpu()) return;
  if (!own_) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    own_.emplace(Own{backend.getStreamFromGlobalPool(device, /*isHighPriority=*/true), c10::Event(device.type())});
  }
  is_armed_ = true;
}

void Beside::await() const {
  if (own_) own_->end.block(current_stream_of(own_->stream.device()));
}

namespace {

void run_beside(const at::Tensor& seq) {
  guarded([&] {
    const OnGroup on(seq);
    on.registered->beside.arm(on.device);
  });
}

// The tensors are those of the operation: a compiler keeps their memory until here.
void await_beside(const at::Tensor& seq, at::TensorList) {
  guarded([&] { OnGroup(seq).registered->beside.await(); });
}

fast_call::Op beside_ops[] = {EP_OP(run_beside), EP_OP(await_beside)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("run_beside(Tensor(a!) seq) -> ()");
  library.def("await_beside(Tensor(a!) seq, Tensor[] kept) -> ()");
}

EP_IMPLEMENT(beside_ops)
