#include "torch/ops/ht_payload.h"

#include <algorithm>
#include <span>

#include "torch/ops/device.h"
#include "torch/ops/run.h"

namespace ep {

using at::Tensor;

namespace {

HtPart part_of(const Tensor& x) {
  to_int(x.size(1) * x.element_size(), "bytes of a row");
  return HtPart::of(x.data_ptr(), x.size(0), static_cast<int>(x.size(1)), static_cast<int>(x.element_size()),
                    x.stride(0), x.stride(1));
}

// Its storage may be resized, as frameworks do to free activations: then it is torch's own memory.
Tensor tensor_in(std::shared_ptr<void> extent, at::IntArrayRef sizes, at::ScalarType type) {
  using Extent = std::shared_ptr<void>;
  const size_t bytes = c10::multiply_integers(sizes) * at::elementSize(type);
  void* data = extent.get();
  at::DataPtr owner(
      data, new Extent(std::move(extent)), [](void* kept) { delete static_cast<Extent*>(kept); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(owner), c10::GetAllocator(at::kCPU),
                       /*resizable=*/true);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(type));
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

}  // namespace

Tensor arena_tensor(Registered& registered, at::IntArrayRef sizes, at::ScalarType type, const at::Device& device) {
  int64_t elements = 1;
  for (int64_t size : sizes) {
    EP_CHECK(size >= 0, "a dimension of ", size);
    EP_CHECK(!__builtin_mul_overflow(elements, size, &elements) && elements <= INT64_MAX / 16, "a tensor of ", sizes,
             ": beyond 64 bits");
  }
  if (elements > 0 && device.is_cuda() && registered.pool() != nullptr) return registered.pool()->empty(sizes, type);
  if (elements == 0 || !device.is_cpu()) return new_tensor(sizes, type, device);
  std::shared_ptr<void> extent = Arena::take(registered.group->arena(), elements * at::elementSize(type));
  if (extent == nullptr) return new_tensor(sizes, type, device);
  return tensor_in(std::move(extent), sizes, type);
}

HtHandleShape ht_handle_shape(const OutputShape& output, const Group& group, int64_t num_tokens, int64_t num_slots) {
  return HtHandleShape::make(output, group.topology(), to_int(num_tokens, "number of tokens"), num_slots);
}

void check_payload(const HtPayload& payload, int64_t num_tokens, const at::Device& device) {
  EP_CHECK(!payload.xs.empty() && payload.xs.size() <= kMaxTensors, payload.xs.size(), " tensors, must be 1 to ",
           kMaxTensors);
  for (size_t i = 1; i < payload.xs.size(); i++) {
    const Tensor& x = payload.xs[i];
    EP_CHECK(x.dim() == 2 && x.size(0) == num_tokens, "tensor ", i, " of the dispatch has ", x.dim(),
             " dimensions, the first of them ", x.dim() == 0 ? 0 : x.size(0), ": must be [", num_tokens, ", elements]");
    check_tensor(x, "an extra tensor", x.scalar_type(), x.sizes(), device);
    check_aligned(x, "an extra tensor");
    const int64_t bytes = x.size(1) * x.element_size();
    EP_CHECK(bytes > 0 && bytes % 16 == 0, "rows of tensor ", i, " have ", bytes, " bytes: must be a multiple of 16");
  }
}

void set_parts(HtDispatchParams& p, const HtPayload& payload) {
  const auto add = [&](const Tensor& x) { p.parts[p.num_parts++] = part_of(x); };
  add(payload.xs[0]);
  p.dtype = dtype_of(payload.xs[0].scalar_type());
  p.hidden = to_int(payload.xs[0].size(1), "hidden");
  if (p.options.quant != Quant::kNone) {
    check_scales(p.options.quant, row_scales_of(payload.scales, p.options.quant).has_value());
    p.tensor_scale = tensor_scale_of(payload.scales, p.options.quant, payload.xs[0].device());
    p.add_quant_scales();
  } else if (payload.scales) {
    add(*payload.scales);
  }
  for (const Tensor& x : payload.xs.slice(1)) add(x);
}

PayloadOutputs allocate_payload(Registered& registered, const HtPayload& payload, const OutputShape& output,
                                const OutputTypes& types, const at::Device& device) {
  PayloadOutputs moved;
  moved.xs.reserve(payload.xs.size());
  moved.xs.push_back(arena_tensor(registered, types.x, types.x_type, device));
  const bool has_scales = types.scales.size() > 1;
  if (has_scales || !PackedResultsScope::is_on()) {
    moved.scales = arena_tensor(registered, types.scales, types.scales_type, device);
  }
  for (const Tensor& x : payload.xs.slice(1)) {
    moved.xs.push_back(arena_tensor(registered, row_shape(output, x.size(1)), x.scalar_type(), device));
  }
  return moved;
}

void check_payload_outputs(const PayloadRefs& moved, const HtPayload& payload, const OutputShape& output,
                           const OutputTypes& types, const at::Device& device, AliasCheck& aliases) {
  EP_CHECK(moved.xs.size() == payload.xs.size(), moved.xs.size(), " output tensors for ", payload.xs.size());
  const auto check = [&](const Tensor& out, at::ScalarType type, at::IntArrayRef sizes) {
    check_tensor(out, "out.x", type, sizes, device);
    check_aligned(out, "out.x");
  };
  check(moved.xs[0], types.x_type, types.x);
  for (size_t i = 1; i < moved.xs.size(); i++) {
    check(moved.xs[i], payload.xs[i].scalar_type(), row_shape(output, payload.xs[i].size(1)));
  }
  check_tensor(moved.scales, "out.scales", types.scales_type, types.scales, device);
  for (const Tensor& x : payload.xs) aliases.reads("x", x);
  aliases.reads("scales", pointer_to(payload.scales));
  for (const Tensor& out : moved.xs) aliases.writes("out.x", out);
  aliases.writes("out.scales", moved.scales);
}

void set_payload_outputs(HtDispatchParams& p, const PayloadRefs& moved) {
  const bool has_scales = p.num_parts > static_cast<int>(moved.xs.size());
  int part = 0;
  p.parts[part++].out = pointer<void>(moved.xs[0]);
  if (has_scales) p.parts[part++].out = pointer<void>(moved.scales);
  for (size_t i = 1; i < moved.xs.size(); i++) p.parts[part++].out = pointer<void>(moved.xs[i]);
}

std::array<Tensor, kMaxTensors - 1> extra(PayloadOutputs& moved, const at::Device& device) {
  std::array<Tensor, kMaxTensors - 1> results;
  std::move(moved.xs.begin() + 1, moved.xs.end(), results.begin());
  if (PackedResultsScope::is_on()) return results;
  const int64_t none = 0;
  const NewTensor wanted[] = {
      {&results[0], none, at::kByte}, {&results[1], none, at::kByte}, {&results[2], none, at::kByte}};
  new_tensors(std::span(wanted).subspan(moved.xs.size() - 1), device);
  return results;
}

}  // namespace ep
