#include "torch/ops/arguments.h"

#include <cmath>

#include "api/factory.h"
#include "base/check.h"
#include "runtime/call.h"
#include "runtime/policy.h"
#include "torch/ops/device.h"

namespace ep {

std::string name_of(at::ScalarType type) { return std::string("torch.").append(c10::getDtypeNames(type).first); }

at::ScalarType float_type_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF16:
      return at::kHalf;
    case DType::kF32:
      return at::kFloat;
    default:
      raise(ErrorKind::kInvalidArgument, "combine returns bf16, fp16 or fp32, not ", name_of(dtype));
  }
}

template <class Int>
OutputTypesOf<Int> output_types(const OutputShape& output, Int capacity, Quant quant, at::ScalarType dtype, Int hidden,
                                Int num_scales, at::ScalarType scale_dtype, bool is_idx64) {
  const auto dims = DispatchDims<Int>::of(output, std::move(capacity), quant, std::move(hidden), std::move(num_scales));
  const auto sizes = [](const Dims<Int>& each) {
    if (each.ndim == 0) return c10::SmallVector<Int, 3>{Int(0)};
    return c10::SmallVector<Int, 3>(each.at.begin(), each.at.begin() + each.ndim);
  };
  const bool quantises = quant != Quant::kNone;
  return {.x = sizes(dims.x),
          .scales = sizes(dims.scales),
          .weights = sizes(dims.weights),
          .topk_idx = sizes(dims.topk_idx),
          .row_expert = sizes(dims.row_expert),
          .info = sizes(dims.info),
          .x_type = !quantises        ? dtype
                    : is_nvfp4(quant) ? at::kFloat4_e2m1fn_x2
                                      : at::kFloat8_e4m3fn,
          .scales_type = !quantises                  ? scale_dtype
                         : is_mxfp8(quant)           ? at::kFloat8_e8m0fnu
                         : is_nvfp4(quant)           ? at::kFloat8_e4m3fn
                         : quant == Quant::kFp8Ue8m0 ? at::kInt
                                                     : at::kFloat,
          .idx_type = is_idx64 ? at::kLong : at::kInt};
}
template OutputTypesOf<int64_t> output_types(const OutputShape&, int64_t, Quant, at::ScalarType, int64_t, int64_t,
                                             at::ScalarType, bool);
template OutputTypesOf<c10::SymInt> output_types(const OutputShape&, c10::SymInt, Quant, at::ScalarType, c10::SymInt,
                                                 c10::SymInt, at::ScalarType, bool);

OutputTypes output_types(const InputTypes& inputs, Quant quant, const OutputShape& output) {
  return output_types<int64_t>(output, output.capacity, quant, inputs.dtype, inputs.hidden, inputs.num_scales,
                               inputs.scale_dtype, inputs.is_idx64);
}

at::DimVector values_shape(const OutputShape& output) {
  at::DimVector sizes = row_shape(output, output.topk);
  if (has_expert_rows(output.layout)) sizes.pop_back();
  return sizes;
}

at::DimVector row_shape(const OutputShape& output, int64_t last) {
  if (output.layout == OutputLayout::kExpertMajor) return {output.local_experts, output.capacity, last};
  if (output.layout == OutputLayout::kRankMajor) return {output.num_ranks, output.max_tokens, last};
  return {output.capacity, last};
}

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return DType::kBF16;
    case at::kHalf:
      return DType::kF16;
    case at::kFloat:
      return DType::kF32;
    case at::kFloat8_e4m3fn:
      return DType::kF8E4M3;
    default:
      break;
  }
  switch (at::elementSize(type)) {
    case 1:
      return DType::kOpaque8;
    case 2:
      return DType::kOpaque16;
    case 4:
      return DType::kOpaque32;
    case 8:
      return DType::kOpaque64;
    default:
      raise(ErrorKind::kInvalidArgument, "rows of ", name_of(type), " are not supported");
  }
}

OutputShape output_shape(int num_ranks, const RoutingNumbers& c, int64_t capacity) {
  if (capacity == kDefaultCapacity) capacity = default_capacity_of(num_ranks, c);
  const Shape shape = Shape::make(num_ranks, to_int(c.num_experts, "num_experts"), to_int(c.topk, "top-k"),
                                  to_int(c.max_tokens, "max_tokens"));
  return OutputShape::make(shape, c.layout, capacity, c.alignment);
}

HandleShape handle_shape(const OutputShape& output, int64_t num_tokens) {
  return HandleShape::of(output, to_int(num_tokens, "number of tokens"));
}

void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes,
                  const at::Device& device) {
  EP_CHECK(tensor.device() == device, name, " is on ", tensor.device().str(), ", the buffer on ", device.str(),
           tensor.is_cuda() && !has_cuda_backend() ? ": " + why_no_cuda() : "");
  EP_CHECK(tensor.scalar_type() == dtype, name, " is ", name_of(tensor.scalar_type()), ", must be ", name_of(dtype));
  EP_CHECK(tensor.sizes() == sizes, name, " has shape ", tensor.sizes(), ", must be ", sizes);
  EP_CHECK(tensor.is_contiguous(), name, " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
           " is not contiguous");
  check_whole(tensor, name);
}

void check_whole(const at::Tensor& tensor, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(address_of(tensor));
  EP_CHECK((address & (tensor.element_size() - 1)) == 0, name, " at address ", tensor.const_data_ptr(),
           " is not aligned to its elements of ", tensor.element_size(), " bytes");
}

void check_aligned(const at::Tensor& tensor, const char* name) {
  EP_CHECK((reinterpret_cast<uintptr_t>(address_of(tensor)) & 15) == 0, name, " at address ", tensor.const_data_ptr(),
           " is not aligned to 16 bytes");
}

void require_ids(const at::Tensor& tensor, const char* name) {
  const at::ScalarType type = tensor.scalar_type();
  EP_CHECK(type == at::kLong || type == at::kInt, name, " is ", name_of(type), ", must be torch.int64 or torch.int32");
}

InputTypes check_inputs(const at::Tensor& x, const OptionalTensor& scales, const at::Tensor& topk_idx,
                        const OptionalTensor& topk_weights, int64_t topk, const at::Device& device) {
  InputTypes row = check_rows(x, scales, device);
  EP_CHECK(topk_idx.dim() == 2 && topk_idx.size(0) == x.size(0), "topk_idx has shape ", topk_idx.sizes(), ", must be [",
           x.size(0), ", top-k]");
  EP_CHECK(topk_idx.size(1) == topk, "topk_idx has shape ", topk_idx.sizes(), ", the config says top-", topk);
  require_ids(topk_idx, "topk_idx");
  const at::ScalarType idx_type = topk_idx.scalar_type();
  check_tensor(topk_idx, "topk_idx", idx_type, topk_idx.sizes(), device);
  if (topk_weights) check_tensor(*topk_weights, "topk_weights", at::kFloat, topk_idx.sizes(), device);
  row.topk = topk;
  row.is_idx64 = idx_type == at::kLong;
  return row;
}

InputTypes check_rows(const at::Tensor& x, const OptionalTensor& scales, const at::Device& device) {
  EP_CHECK(x.dim() == 2, "x has shape ", x.sizes(), ", must be [tokens, hidden]");
  check_tensor(x, "x", x.scalar_type(), x.sizes(), device);
  check_aligned(x, "x");
  InputTypes row{x.scalar_type(), x.size(1), 0, at::kFloat, x.size(0), 0, true};
  if (scales) {
    EP_CHECK(scales->dim() == 2 && scales->size(0) == x.size(0), "scales have shape ", scales->sizes(), ", must be [",
             x.size(0), ", scales of a row]");
    EP_CHECK(scales->device() == device, "scales are on ", scales->device().str(), ", the buffer on ", device.str());
    EP_CHECK(scales->size(1) > 0, "scales have shape ", scales->sizes(), ", must be at least one a row");
    row.num_scales = scales->size(1);
    row.scale_dtype = scales->scalar_type();
  }
  return row;
}

const OptionalTensor& row_scales_of(const OptionalTensor& given, Quant quant) {
  static const OptionalTensor none;
  return is_nvfp4(quant) ? none : given;
}

const float* tensor_scale_of(const OptionalTensor& given, Quant quant, const at::Device& device) {
  if (!is_nvfp4(quant) || !given) return nullptr;
  EP_CHECK(given->device() == device, "scales are on ", given->device().str(), ", the buffer on ", device.str());
  EP_CHECK(given->scalar_type() == at::kFloat && given->numel() == 1, "scales are ", name_of(given->scalar_type()), " ",
           given->sizes(), ", with quant ", name_of(quant), " they must be one torch.float32 for the whole tensor");
  const auto* scale = static_cast<const float*>(given->data_ptr());
  EP_CHECK(!device.is_cpu() || (*scale > 0 && std::isfinite(*scale)), "scales are ", *scale, ", with quant ",
           name_of(quant), " they must be positive and finite");
  return scale;
}

at::Tensor allocate_handle(const InputTypes& row, const OutputShape& output, const at::Device& device) {
  return new_handle({handle_shape(output, row.num_tokens).size()}, device);
}

DispatchTensors allocate_outputs(const InputTypes& row, Quant quant, const OutputShape& output,
                                 const at::Device& device, bool with_handle) {
  const OutputTypes types = output_types(row, quant, output);
  const int64_t handle_size = handle_shape(output, row.num_tokens).size();
  DispatchTensors t;
  t.x = new_tensor(types.x, types.x_type, device);
  c10::SmallVector<NewTensor, 7> small = {{&t.weights, types.weights, at::kFloat}, {&t.info, types.info, at::kInt}};
  if (types.scales.size() > 1) small.push_back({&t.scales, types.scales, types.scales_type});
  if (with_handle) small.push_back({&t.handle, handle_size, at::kInt});
  // What the layout has not got is empty to torch, and undefined, in Python None, to who takes results together.
  const auto add = [&](bool is_there, NewTensor tensor) {
    if (is_there || !PackedResultsScope::is_on()) small.push_back(tensor);
  };
  add(!has_expert_rows(output.layout), {&t.topk_idx, types.topk_idx, types.idx_type});
  add(output.layout == OutputLayout::kPacked, {&t.row_expert, types.row_expert, at::kInt});
  if (types.scales.size() == 1) add(false, {&t.scales, types.scales, types.scales_type});
  new_tensors({small.data(), small.size()}, device);
  if (with_handle) clear_handle(t.handle);
  return t;
}

void check_outputs(const DispatchRefs& given, const InputTypes& row, Quant quant, const OutputShape& output,
                   const at::Device& device, AliasCheck& aliases) {
  const OutputTypes types = output_types(row, quant, output);
  check_tensor(given.x, "out_x", types.x_type, types.x, device);
  check_aligned(given.x, "out_x");
  check_tensor(given.scales, "out_scales", types.scales_type, types.scales, device);
  check_tensor(given.weights, "out_weights", at::kFloat, types.weights, device);
  check_tensor(given.topk_idx, "out_topk_idx", types.idx_type, types.topk_idx, device);
  check_tensor(given.row_expert, "out_row_expert", at::kInt, types.row_expert, device);
  check_tensor(given.info, "out_info", at::kInt, types.info, device);
  check_tensor(given.handle, "handle", at::kInt, {handle_shape(output, row.num_tokens).size()}, device);
  aliases.writes("out_x", given.x);
  aliases.writes("out_scales", given.scales);
  aliases.writes("out_weights", given.weights);
  aliases.writes("out_topk_idx", given.topk_idx);
  aliases.writes("out_row_expert", given.row_expert);
  aliases.writes("out_info", given.info);
  aliases.writes("handle", given.handle);
}

LlDispatchParams dispatch_params(const InputTypes& row, const DispatchConfig& config, const OutputShape& output) {
  LlDispatchParams p;
  p.options = config;
  p.shape = {output.num_ranks, to_int(config.num_experts, "num_experts"), output.topk, output.max_tokens};
  p.dtype = dtype_of(row.dtype);
  p.hidden = to_int(row.hidden, "hidden");
  p.is_idx64 = row.is_idx64;
  p.num_tokens = to_int(row.num_tokens, "number of tokens");
  p.output = output;
  // The size of the scales is part of the call, for the send too.
  const bool quantises = p.options.quant != Quant::kNone;
  p.out_scales.count = quantises ? static_cast<int>(num_quant_scales(p.options.quant, row.hidden))
                                 : to_int(row.num_scales, "number of scales");
  p.out_scales.element_bytes =
      quantises ? quant_scale_size(p.options.quant) : static_cast<int>(at::elementSize(row.scale_dtype));
  return p;
}

void set_inputs(LlDispatchParams& p, const at::Tensor& x, const OptionalTensor& scales, const at::Tensor& topk_idx,
                const OptionalTensor& topk_weights) {
  p.x = x.data_ptr();
  p.topk_idx = topk_idx.data_ptr();
  if (topk_weights) p.topk_weights = topk_weights->data_ptr<float>();
  if (scales) {
    p.scales = {scales->data_ptr(), scales->stride(0), scales->stride(1), to_int(scales->size(1), "number of scales"),
                static_cast<int>(scales->element_size())};
  }
}

void set_handle(LlDispatchParams& p, const at::Tensor& handle) {
  p.handle = HandlePtrs::of(handle.data_ptr<int32_t>(), handle_shape(p.output, p.num_tokens));
}

void set_outputs(LlDispatchParams& p, const DispatchRefs& tensors) {
  p.out_x = tensors.x.data_ptr();
  p.out_scales.data = pointer<void>(tensors.scales);
  p.out_scales.row_stride = p.out_scales.count;
  p.out_scales.group_stride = 1;
  p.info = tensors.info.data_ptr<int32_t>();
  p.row_expert = pointer<int32_t>(tensors.row_expert);
  p.out_topk_idx = pointer<void>(tensors.topk_idx);
  p.out_weights = tensors.weights.data_ptr<float>();
}

}  // namespace ep
