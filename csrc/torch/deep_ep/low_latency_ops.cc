// Low-latency dispatch and combine in DeepEP's convention: outputs made when an operation is sent and filled when it is
// received, scales column-major in their last two dimensions (the caller's, of x_scales, row-major), and src_info and
// layout_range beside them. src_info is the front of the allocation that holds the handle: whoever has it has the
// handle. nccl_ep/deep_ep/v1/low_latency.py has the methods over these ops.
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include "runtime/policy.h"
#include "torch/ops/alias_check.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/ll_dispatch.h"
#include "torch/ops/run.h"

namespace ep {
namespace {

using at::Tensor;

const OptionalTensor kNoWeights;
DispatchConfig config_of(int64_t num_experts, int64_t max_tokens, int64_t topk, int64_t quant, int64_t num_sms) {
  constexpr int64_t kLast = static_cast<int64_t>(Quant::kFp8Ue8m0);
  EP_CHECK(quant >= 0 && quant <= kLast, "quant is ", quant, ", must be from 0 to ", kLast,
           ": DeepEP's scales by columns are those of FP8");
  return {{.num_experts = num_experts, .topk = topk, .max_tokens = max_tokens},
          {.quant = static_cast<Quant>(quant), .num_sms = to_int(num_sms, "num_sms")}};
}

// Every expert has room for all that may come, as in DeepEP.
OutputShape whole_output(int num_ranks, const RoutingNumbers& routing) {
  return output_shape(num_ranks, routing, num_ranks * routing.max_tokens);
}

int64_t* take_wait_cost(const OptionalTensor& wait_cost, const Group& group, const at::Device& device) {
  if (!wait_cost) return nullptr;
  check_tensor(*wait_cost, "wait_recv_cost_stats", at::kLong, {group.num_ranks()}, device);
  return wait_cost->data_ptr<int64_t>();
}

// ---- dispatch

// `counts` [L] is the front of the info tensor, `src_info` [L, C] that of the handle.
struct Outputs {
  Tensor x, scales, weights, counts, src_info, layout_range;
};
struct OutputRefs {  // as DispatchRefs
  const Tensor &x, &scales, &weights, &counts, &src_info, &layout_range;
};

// A tensor of the first entries of a larger allocation.
Tensor front(Tensor whole, at::IntArrayRef sizes) {
  whole.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return whole;
}

// The other way: an allocation's int32 entries from `first` on.
Tensor behind(const Tensor& front, int64_t first, int64_t count) {
  const auto key = front.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(front.storage()), c10::DispatchKeySet(key), front.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(first);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return tensor;
}

// Scales as an operation makes them.
struct Columns {
  int64_t sizes[3], strides[3];
  Columns(const OutputShape& output, int64_t groups)
      : sizes{output.local_experts, output.capacity, groups}, strides{groups * output.capacity, 1, output.capacity} {}
};
void check_columns(const Tensor& scales, at::ScalarType type, const OutputShape& output, int64_t groups,
                   const at::Device& device) {
  const Columns columns(output, groups);
  const bool is_as_made = scales.device() == device && scales.scalar_type() == type &&
                          scales.sizes() == at::IntArrayRef(columns.sizes) &&
                          scales.strides() == at::IntArrayRef(columns.strides);
  if (is_as_made) return check_whole(scales, "scales");  // to make a view takes the host longer
  check_tensor(scales.transpose(1, 2), "scales", type, {output.local_experts, groups, output.capacity}, device);
}

// The handle has an allocation of its own, by which combine knows it.
Outputs allocate(const InputTypes& row, Quant quant, const OutputShape& output, const at::Device& device) {
  const OutputTypes types = output_types(row, quant, output);
  const bool quantises = quant != Quant::kNone;  // the scales of a caller stay row by row
  const int64_t ranges[] = {output.local_experts, output.num_ranks};
  Outputs made;
  made.x = new_tensor(types.x, types.x_type, device);
  const NewTensor small[] = {{&made.counts, types.info, at::kInt},  // the first of its allocation
                             {&made.scales, types.scales, types.scales_type},
                             {&made.weights, types.weights, at::kFloat},
                             {&made.layout_range, ranges, at::kLong}};
  new_tensors(small, device);
  if (quantises) {
    const Columns columns(output, types.scales[2]);
    made.scales.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(columns.sizes),
                                                             at::IntArrayRef(columns.strides));
  }
  made.counts = front(made.counts, {output.local_experts});
  made.src_info = front(new_handle({SourceShape::of(output).size(handle_shape(output, row.num_tokens))}, device),
                        {output.local_experts, output.capacity});
  return made;
}

// `size`: int32 entries of the allocation, or its first ones.
void check_front(const Tensor& tensor, const char* name, at::IntArrayRef sizes, int64_t size, bool is_whole,
                 const InputTypes& row, const at::Device& device) {
  check_tensor(tensor, name, at::kInt, sizes, device);
  const int64_t bytes = static_cast<int64_t>(tensor.storage().nbytes());
  EP_CHECK(tensor.storage_offset() == 0 && (is_whole ? bytes == 4 * size : bytes >= 4 * size), name,
           " begins at element ", tensor.storage_offset(), " of ", bytes, " bytes, after a dispatch of ",
           row.num_tokens, " tokens, top-", row.topk, " it is at element 0 of ", 4 * size,
           ": give the tensor that dispatch returned, not a copy, and the topk_idx of that dispatch");
}

void set_all(LlDispatchParams& p, const OutputRefs& t) {
  int32_t* base = t.src_info.data_ptr<int32_t>();
  p.src_info = base;
  p.layout_range = t.layout_range.data_ptr<int64_t>();
  p.handle = HandlePtrs::of(base + SourceShape::of(p.output).handle_at(), handle_shape(p.output, p.num_tokens));
  p.out_x = t.x.data_ptr();
  p.out_weights = t.weights.data_ptr<float>();
  p.info = t.counts.data_ptr<int32_t>();
  if (t.scales.numel() == 0) return;
  p.out_scales.data = t.scales.data_ptr();
  p.out_scales.bin_stride = t.scales.stride(0);
  p.out_scales.row_stride = t.scales.stride(1);
  p.out_scales.group_stride = t.scales.stride(2);
}

// Counters of the caller, which the operation adds to.
struct Statistics {
  const OptionalTensor &recv_stats, &wait_cost;

  void take(LlDispatchParams& p, const Group& group, const at::Device& device) const {
    if (recv_stats) {
      check_tensor(*recv_stats, "cumulative_local_expert_recv_stats", at::kInt, {p.output.local_experts}, device);
      p.recv_stats = recv_stats->data_ptr<int32_t>();
    }
    p.wait_cost = take_wait_cost(wait_cost, group, device);
  }
  void require_apart(const DispatchInputs& inputs) const {
    if (!recv_stats && !wait_cost) return;
    AliasCheck aliases;
    aliases.reads("x", inputs.x);
    aliases.reads("x_scales", pointer_to(inputs.scales));
    aliases.reads("topk_idx", inputs.topk_idx);
    if (recv_stats) aliases.writes("cumulative_local_expert_recv_stats", *recv_stats);
    if (wait_cost) aliases.writes("dispatch_wait_recv_cost_stats", *wait_cost);
  }
};

using DispatchResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// All are made when the operation is sent.
struct NewOutputs final : DispatchOutputs {
  const Statistics& statistics;
  const DispatchInputs& inputs;
  Outputs made;

  NewOutputs(const Statistics& statistics, const DispatchInputs& inputs) : statistics(statistics), inputs(inputs) {}
  void take(LlDispatchParams& p, const InputTypes& row, const Group& group, const at::Device& device) override {
    statistics.require_apart(inputs);
    statistics.take(p, group, device);
    made = allocate(row, p.options.quant, p.output, device);
    set_all(p, {made.x, made.scales, made.weights, made.counts, made.src_info, made.layout_range});
  }
};

// And filled when it is received.
struct GivenOutputs final : DispatchOutputs {
  const Statistics& statistics;
  const OutputRefs& given;

  GivenOutputs(const Statistics& statistics, const OutputRefs& given) : statistics(statistics), given(given) {}
  void take(LlDispatchParams& p, const InputTypes& row, const Group& group, const at::Device& device) override {
    const OutputShape& output = p.output;
    const bool quantises = p.options.quant != Quant::kNone;
    check_tensor(given.x, "x", quantises ? at::kFloat8_e4m3fn : row.dtype, row_shape(output, row.hidden), device);
    check_aligned(given.x, "x");
    const int64_t by_row[] = {output.local_experts, output.capacity, row.num_scales};
    if (quantises) {
      const at::ScalarType type = output_types(row, p.options.quant, output).scales_type;
      check_columns(given.scales, type, output, p.out_scales.count, device);
    } else {
      check_tensor(given.scales, "scales", row.scale_dtype,
                   row.num_scales > 0 ? at::IntArrayRef(by_row) : at::IntArrayRef{0}, device);
    }
    check_tensor(given.weights, "weights", at::kFloat, {output.local_experts, output.capacity}, device);
    check_front(given.counts, "counts", {output.local_experts}, output.info_size(), /*is_whole=*/false, row, device);
    check_front(given.src_info, "src_info", {output.local_experts, output.capacity},
                SourceShape::of(output).size(handle_shape(output, row.num_tokens)), /*is_whole=*/true, row, device);
    check_tensor(given.layout_range, "layout_range", at::kLong, {output.local_experts, output.num_ranks}, device);
    statistics.take(p, group, device);
    set_all(p, given);
  }
};

DispatchResult dispatch(const at::Tensor& seq, const Tensor& x, const OptionalTensor& x_scales, const Tensor& topk_idx,
                        int64_t num_experts, int64_t max_tokens, int64_t quant, const OptionalTensor& recv_stats,
                        const OptionalTensor& wait_cost, int64_t num_sms, Phase phase) {
  return guarded([&] {
    EP_CHECK(topk_idx.dim() == 2, "topk_idx has ", topk_idx.dim(), " dimensions, must be [tokens, top-k]");
    const Statistics statistics{recv_stats, wait_cost};
    const DispatchInputs inputs{x, x_scales, topk_idx, kNoWeights};
    NewOutputs outputs(statistics, inputs);
    run_dispatch(seq, inputs, kDefaultCapacity, config_of(num_experts, max_tokens, topk_idx.size(1), quant, num_sms),
                 phase, outputs);
    Outputs& t = outputs.made;
    return DispatchResult{std::move(t.x),      std::move(t.scales),   std::move(t.weights),
                          std::move(t.counts), std::move(t.src_info), std::move(t.layout_range)};
  });
}

DispatchResult ll_dispatch_deepep(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales,
                                  const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t quant,
                                  const OptionalTensor& recv_stats, const OptionalTensor& wait_cost, int64_t num_sms) {
  return dispatch(seq, x, x_scales, topk_idx, num_experts, max_tokens, quant, recv_stats, wait_cost, num_sms,
                  Phase::kFused);
}

DispatchResult ll_dispatch_deepep_send(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales,
                                       const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t quant,
                                       const OptionalTensor& recv_stats, const OptionalTensor& wait_cost,
                                       int64_t num_sms) {
  return dispatch(seq, x, x_scales, topk_idx, num_experts, max_tokens, quant, recv_stats, wait_cost, num_sms,
                  Phase::kSend);
}

void ll_dispatch_deepep_recv(const Tensor& seq, const Tensor& x, const Tensor& scales, const Tensor& weights,
                             const Tensor& counts, const Tensor& src_info, const Tensor& layout_range,
                             at::ScalarType dtype, int64_t num_tokens, int64_t topk, bool is_idx64, int64_t num_experts,
                             int64_t max_tokens, int64_t quant, const OptionalTensor& recv_stats,
                             const OptionalTensor& wait_cost, int64_t num_sms) {
  guarded([&] {
    EP_CHECK(x.dim() == 3, "x has ", x.dim(), " dimensions, must have 3");
    const bool has_given_scales = static_cast<Quant>(quant) == Quant::kNone && scales.dim() == 3;
    const InputTypes row{dtype, x.size(2), has_given_scales ? scales.size(2) : 0, scales.scalar_type(), num_tokens,
                         topk,  is_idx64};
    const Statistics statistics{recv_stats, wait_cost};
    const OutputRefs given{x, scales, weights, counts, src_info, layout_range};
    GivenOutputs outputs(statistics, given);
    receive_dispatch(seq, row, kDefaultCapacity, config_of(num_experts, max_tokens, topk, quant, num_sms), outputs);
  });
}

// ---- combine

// The handle behind src_info, in the same memory.
Tensor handle_of(const Tensor& src_info, const OutputShape& output, int64_t num_tokens, const at::Device& device) {
  const SourceShape sources = SourceShape::of(output);
  const HandleShape native = handle_shape(output, num_tokens);
  const InputTypes row{at::kInt, 0, 0, at::kFloat, num_tokens, output.topk, true};
  check_front(src_info, "src_info", {output.local_experts, output.capacity}, sources.size(native), /*is_whole=*/true,
              row, device);
  return behind(src_info, sources.handle_at(), native.size());
}

struct Signals {  // RowSignals
  const Tensor* counters = nullptr;
  int64_t rows_per_signal = 0, threshold = 0;
};

// The result. If that is given: empty, or no tensor at all where C++ has called the op (PackedResultsScope).
Tensor combine(const at::Tensor& seq, const Tensor& src_info, int64_t num_experts, int64_t max_tokens,
               int64_t num_tokens, int64_t topk, int64_t num_sms, bool use_logfmt, CombineArgs args,
               const OptionalTensor& wait_cost, const Tensor* given, Phase phase, const Signals& signals = {}) {
  const OnGroup on(seq);
  const auto& [registered, group, device, on_device] = on;
  const DType dtype = dtype_of(args.rows_dtype);
  const CombineConfig config{{.num_experts = num_experts, .topk = topk, .max_tokens = max_tokens},
                             {.weighting = Weighting::kHome,
                              .out_dtype = dtype,
                              .wire_dtype = use_logfmt ? DType::kLogFmt : dtype,
                              .num_sms = to_int(num_sms, "num_sms"),
                              .rows_per_signal = signals.rows_per_signal,
                              .signal_threshold = to_int(signals.threshold, "signal_threshold")}};
  const OutputShape output = whole_output(group.num_ranks(), config);
  args.row_signals = signals.counters;
  args.wait_cost = take_wait_cost(wait_cost, group, device);
  if (given != nullptr) check_tensor(*given, "out", args.rows_dtype, {num_tokens, args.hidden}, device);
  const Tensor handle = handle_of(src_info, output, num_tokens, device);
  if (wait_cost) {
    AliasCheck aliases;
    aliases.reads("x", args.rows);
    aliases.reads("the handle", handle);
    aliases.reads("topk_weights", args.weights);
    aliases.reads("topk_idx", args.topk_idx);
    aliases.reads("out", given);
    aliases.writes("combine_wait_recv_cost_stats", *wait_cost);
  }
  Tensor made;
  if (given == nullptr) {
    made = new_tensor({num_tokens, args.hidden}, args.rows_dtype, device);
  } else if (!PackedResultsScope::is_on()) {  // torch wants a result
    made = new_tensor({0}, args.rows_dtype, device);
  }
  run_combine(on, handle, num_tokens, output.capacity, config, args, phase, given != nullptr ? given : &made);
  return made;
}

Tensor combine_rows(const at::Tensor& seq, const Tensor& rows, const Tensor& src_info, const Tensor& weights,
                    const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, const OptionalTensor& wait_cost,
                    const OptionalTensor& out, int64_t num_sms, bool use_logfmt, Phase phase,
                    const Signals& signals = {}) {
  return guarded([&] {
    EP_CHECK(rows.dim() == 3, "x has ", rows.dim(), " dimensions, must be [local experts, ranks * max_tokens, hidden]");
    EP_CHECK(topk_idx.dim() == 2, "topk_idx has ", topk_idx.dim(), " dimensions, must be [tokens, top-k]");
    CombineArgs args;
    args.rows = &rows;
    args.weights = &weights;
    args.topk_idx = &topk_idx;
    args.hidden = rows.size(2);
    args.rows_dtype = rows.scalar_type();
    return combine(seq, src_info, num_experts, max_tokens, topk_idx.size(0), topk_idx.size(1), num_sms, use_logfmt,
                   args, wait_cost, pointer_to(out), phase, signals);
  });
}

Tensor ll_combine_deepep(const Tensor& seq, const Tensor& rows, const Tensor& src_info, const Tensor& weights,
                         const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens,
                         const OptionalTensor& wait_cost, const OptionalTensor& out, int64_t num_sms, bool use_logfmt) {
  return combine_rows(seq, rows, src_info, weights, topk_idx, num_experts, max_tokens, wait_cost, out, num_sms,
                      use_logfmt, Phase::kFused);
}

Tensor ll_combine_deepep_send(const Tensor& seq, const Tensor& rows, const Tensor& src_info, const Tensor& weights,
                              const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens,
                              const OptionalTensor& wait_cost, const OptionalTensor& out, int64_t num_sms,
                              bool use_logfmt, const OptionalTensor& row_signals, int64_t rows_per_signal,
                              int64_t signal_threshold) {
  return combine_rows(seq, rows, src_info, weights, topk_idx, num_experts, max_tokens, wait_cost, out, num_sms,
                      use_logfmt, Phase::kSend, {pointer_to(row_signals), rows_per_signal, signal_threshold});
}

void ll_combine_deepep_recv(const Tensor& seq, const Tensor& src_info, int64_t topk, int64_t num_experts,
                            int64_t max_tokens, const OptionalTensor& wait_cost, const Tensor& out, int64_t num_sms,
                            bool use_logfmt) {
  guarded([&] {
    EP_CHECK(out.dim() == 2, "out has ", out.dim(), " dimensions, must be [tokens, hidden]");
    CombineArgs args;
    args.hidden = out.size(1);
    args.rows_dtype = out.scalar_type();
    combine(seq, src_info, num_experts, max_tokens, out.size(0), topk, num_sms, use_logfmt, args, wait_cost, &out,
            Phase::kRecv);
  });
}

#define EP_STATS_SCHEMA "Tensor(b!)? out_recv_stats, Tensor(c!)? out_wait_cost, int num_sms"
#define EP_DISPATCH_SCHEMA                                                                              \
  "(Tensor(a!) seq, Tensor x, Tensor? x_scales, Tensor topk_idx, int num_experts, int max_tokens, int " \
  "quant, " EP_STATS_SCHEMA                                                                             \
  ") -> (Tensor x, Tensor scales, Tensor weights, Tensor counts, Tensor src_info, Tensor layout_range)"
#define EP_COMBINE_SCHEMA                                                                \
  "(Tensor(a!) seq, Tensor rows, Tensor src_info, Tensor weights, Tensor topk_idx, int " \
  "num_experts, int max_tokens, Tensor(b!)? out_wait_cost, Tensor(c!)? out, int num_sms, bool use_logfmt"

fast_call::Op deepep_low_latency_ops[] = {
    EP_OP(ll_dispatch_deepep), EP_OP(ll_dispatch_deepep_send), EP_OP(ll_dispatch_deepep_recv),
    EP_OP(ll_combine_deepep),  EP_OP(ll_combine_deepep_send),  EP_OP(ll_combine_deepep_recv),
};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("ll_dispatch_deepep" EP_DISPATCH_SCHEMA);
  library.def("ll_dispatch_deepep_send" EP_DISPATCH_SCHEMA);
  library.def(
      "ll_dispatch_deepep_recv(Tensor(a!) seq, Tensor(d!) out_x, Tensor(e!) out_scales, Tensor(f!) "
      "out_weights, Tensor(g!) out_counts, Tensor(h!) out_src_info, Tensor(i!) out_layout_range, ScalarType dtype, int "
      "num_tokens, int topk, bool is_idx64, "
      "int num_experts, int max_tokens, int quant, " EP_STATS_SCHEMA ") -> ()");
  library.def("ll_combine_deepep" EP_COMBINE_SCHEMA ") -> Tensor");
  library.def("ll_combine_deepep_send" EP_COMBINE_SCHEMA
              ", Tensor? row_signals, int rows_per_signal, int signal_threshold) -> Tensor");
  library.def(
      "ll_combine_deepep_recv(Tensor(a!) seq, Tensor src_info, int topk, int num_experts, int max_tokens, "
      "Tensor(b!)? out_wait_cost, Tensor(c!) out, int num_sms, bool use_logfmt) -> ()");
}

EP_IMPLEMENT(deepep_low_latency_ops)
