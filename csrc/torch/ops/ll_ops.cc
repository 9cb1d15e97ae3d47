// The ops under torch.ops.nccl_ep: one schema, served by the backend of the buffer that is named. Only tensors, numbers
// and that name cross. `seq` is a tensor of the buffer that every op claims to change, so that a compiler neither
// drops, merges nor reorders communication. docs/architecture.md lists the ops; nccl_ep/ops.py has their fakes.
#include <torch/library.h>

#include <sstream>
#include <tuple>

#include "runtime/handles.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/ll_dispatch.h"
#include "torch/ops/ops.h"

namespace ep {
namespace {

using at::Tensor;

// ---- dispatch

// Those of the native convention, new or given.
class NativeOutputs final : public DispatchOutputs {
 public:
  // What is to be made: all, but for a receive, whose handle is there; of a send the handle alone.
  NativeOutputs(Phase phase, const Tensor* handle = nullptr) : phase_(phase), handle_(handle) {}
  NativeOutputs(const DispatchRefs& given, const DispatchInputs& inputs) : given_(&given), inputs_(&inputs) {}
  explicit NativeOutputs(const DispatchRefs& given) : given_(&given) {}  // of a receive

  void take(LlDispatchParams& p, const InputTypes& row, const Group&, const at::Device& device) override {
    if (given_ != nullptr) {
      check_given(p, row, device);
    } else if (phase_ == Phase::kSend) {
      made.handle = allocate_handle(row, p.output, device);
    } else {
      if (handle_ != nullptr) {
        check_tensor(*handle_, "handle", at::kInt, {handle_shape(p.output, row.num_tokens).size()}, device);
      }
      made = allocate_outputs(row, p.options.quant, p.output, device, /*with_handle=*/handle_ == nullptr);
    }
    const DispatchRefs outputs = given_ != nullptr ? *given_ : DispatchRefs::of(made);
    set_handle(p, handle_ != nullptr ? *handle_ : outputs.handle);
    if (phase_ != Phase::kSend) set_outputs(p, outputs);
  }

  DispatchTensors made;

 private:
  void check_given(const LlDispatchParams& p, const InputTypes& row, const at::Device& device) const {
    AliasCheck aliases;
    if (inputs_ != nullptr) {
      aliases.reads("x", inputs_->x);
      aliases.reads("scales", pointer_to(inputs_->scales));
      aliases.reads("topk_idx", inputs_->topk_idx);
      aliases.reads("topk_weights", pointer_to(inputs_->topk_weights));
    }
    check_outputs(*given_, row, p.options.quant, p.output, device, aliases);
  }

  const Phase phase_ = Phase::kFused;
  const Tensor* const handle_ = nullptr;
  const DispatchRefs* const given_ = nullptr;
  const DispatchInputs* const inputs_ = nullptr;
};

using DispatchResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

DispatchResult ll_dispatch(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales, const Tensor& topk_idx,
                           const OptionalTensor& topk_weights, int64_t capacity, at::IntArrayRef config) {
  return guarded([&] {
    NativeOutputs outputs(Phase::kFused);
    run_dispatch(seq, {x, x_scales, topk_idx, topk_weights}, capacity, dispatch_config(config), Phase::kFused, outputs);
    DispatchTensors& t = outputs.made;
    return DispatchResult{std::move(t.x),          std::move(t.scales), std::move(t.weights), std::move(t.topk_idx),
                          std::move(t.row_expert), std::move(t.info),   std::move(t.handle)};
  });
}

void ll_dispatch_out(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales, const Tensor& topk_idx,
                     const OptionalTensor& topk_weights, int64_t capacity, at::IntArrayRef config, const Tensor& out_x,
                     const Tensor& out_scales, const Tensor& out_weights, const Tensor& out_topk_idx,
                     const Tensor& out_row_expert, const Tensor& out_info, const Tensor& handle) {
  guarded([&] {
    const DispatchRefs given{out_x, out_scales, out_weights, out_topk_idx, out_row_expert, out_info, handle};
    const DispatchInputs inputs{x, x_scales, topk_idx, topk_weights};
    NativeOutputs outputs(given, inputs);
    run_dispatch(seq, inputs, capacity, dispatch_config(config), Phase::kFused, outputs);
  });
}

Tensor ll_dispatch_send(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales, const Tensor& topk_idx,
                        const OptionalTensor& topk_weights, int64_t capacity, at::IntArrayRef config) {
  return guarded([&] {
    NativeOutputs outputs(Phase::kSend);
    run_dispatch(seq, {x, x_scales, topk_idx, topk_weights}, capacity, dispatch_config(config), Phase::kSend, outputs);
    return std::move(outputs.made.handle);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> ll_dispatch_recv(
    const Tensor& seq, const Tensor& handle, at::ScalarType dtype, int64_t hidden, int64_t num_scales,
    at::ScalarType scale_dtype, int64_t num_tokens, bool is_idx64, int64_t capacity, at::IntArrayRef numbers,
    const OptionalTensor&, const OptionalTensor&) {
  return guarded([&] {
    const DispatchConfig config = dispatch_config(numbers);
    const InputTypes row{dtype, hidden, num_scales, scale_dtype, num_tokens, config.topk, is_idx64};
    NativeOutputs outputs(Phase::kRecv, &handle);
    receive_dispatch(seq, row, capacity, config, outputs);
    const DispatchTensors& t = outputs.made;
    return std::make_tuple(t.x, t.scales, t.weights, t.topk_idx, t.row_expert, t.info);
  });
}

void ll_dispatch_recv_out(const Tensor& seq, const Tensor& handle, at::ScalarType dtype, int64_t hidden,
                          int64_t num_scales, at::ScalarType scale_dtype, int64_t num_tokens, bool is_idx64,
                          int64_t capacity, at::IntArrayRef numbers, const Tensor& out_x, const Tensor& out_scales,
                          const Tensor& out_weights, const Tensor& out_topk_idx, const Tensor& out_row_expert,
                          const Tensor& out_info) {
  guarded([&] {
    const DispatchConfig config = dispatch_config(numbers);
    const InputTypes row{dtype, hidden, num_scales, scale_dtype, num_tokens, config.topk, is_idx64};
    const DispatchRefs given{out_x, out_scales, out_weights, out_topk_idx, out_row_expert, out_info, handle};
    NativeOutputs outputs(given);
    receive_dispatch(seq, row, capacity, config, outputs);
  });
}

// ---- combine

HandlePtrs resolve_handle(const HandleInfo& info, const Tensor& handle, const at::Device& device) {
  const HandleShape sizes = handle_shape(info.output, info.num_tokens);
  check_tensor(handle, "handle", at::kInt, {sizes.size()}, device);
  return HandlePtrs::of(handle.data_ptr<int32_t>(), sizes);
}

}  // namespace

Tensor run_combine(const OnGroup& on, const Tensor& handle, int64_t num_tokens, int64_t capacity,
                   const CombineConfig& config, const CombineArgs& args, Phase phase, const Tensor* given) {
  const auto& [registered, group, device, on_device] = on;
  const Beside::Turn turn = registered->beside.take();
  const auto info = HandleInfo::of(group.num_ranks(), num_tokens, capacity, config);
  LlCombineParams p;
  set_combine(p, info.output, static_cast<int>(info.num_experts), to_int(num_tokens, "number of tokens"), config);
  p.handle = resolve_handle(info, handle, device);
  p.phase = phase;
  set_types(p, args);
  const at::ScalarType out_dtype = float_type_of(config.out_dtype);
  if (args.rows != nullptr) {
    check_tensor(*args.rows, "rows", args.rows_dtype, row_shape(p.output, args.hidden), device);
    check_aligned(*args.rows, "rows");
    p.rows = args.rows->data_ptr();
  }
  if (sends(phase)) set_weights(p, args, info, device);
  set_biases(p, args, info, out_dtype, device);
  set_signals(p, args.row_signals, device);
  Tensor made;
  if (receives(phase)) p.out = take_combined(args, {&handle}, info, out_dtype, device, given, made);
  p.wait_cost = args.wait_cost;
  if (p.signals.counters != nullptr) registered->order.expect_signals();
  void* stream = registered->order.next_stream(device);
  group.combine(p, stream);
  registered->order.note_before_signals(device, stream);
  turn.note_end();
  return made;
}

namespace {

#define EP_COMBINE_ARGS                                                                                    \
  const Tensor &rows, const Tensor &handle, const OptionalTensor &weights, const OptionalTensor &topk_idx, \
      at::TensorList biases, int64_t num_tokens, int64_t capacity, at::IntArrayRef config

Tensor ll_combine(const Tensor& seq, EP_COMBINE_ARGS) {
  return guarded([&] {
    return run_combine(OnGroup(seq), handle, num_tokens, capacity, combine_config(config),
                       combine_args(rows, weights, topk_idx, biases), Phase::kFused, nullptr);
  });
}

void ll_combine_out(const Tensor& seq, EP_COMBINE_ARGS, const Tensor& out) {
  guarded([&] {
    run_combine(OnGroup(seq), handle, num_tokens, capacity, combine_config(config),
                combine_args(rows, weights, topk_idx, biases), Phase::kFused, &out);
  });
}

void ll_combine_send(const Tensor& seq, EP_COMBINE_ARGS, const OptionalTensor& row_signals) {
  guarded([&] {
    CombineArgs args = combine_args(rows, weights, topk_idx, biases);
    args.row_signals = pointer_to(row_signals);
    run_combine(OnGroup(seq), handle, num_tokens, capacity, combine_config(config), args, Phase::kSend, nullptr);
  });
}

Tensor ll_combine_recv(const Tensor& seq, const Tensor& handle, at::TensorList biases, at::ScalarType rows_dtype,
                       int64_t hidden, int64_t num_tokens, int64_t capacity, at::IntArrayRef config,
                       const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  return guarded([&] {
    const CombineArgs args{.biases = biases, .hidden = hidden, .rows_dtype = rows_dtype};
    return run_combine(OnGroup(seq), handle, num_tokens, capacity, combine_config(config), args, Phase::kRecv, nullptr);
  });
}

void ll_combine_recv_out(const Tensor& seq, const Tensor& handle, at::TensorList biases, at::ScalarType rows_dtype,
                         int64_t hidden, int64_t num_tokens, int64_t capacity, at::IntArrayRef config,
                         const Tensor& out) {
  guarded([&] {
    const CombineArgs args{.biases = biases, .hidden = hidden, .rows_dtype = rows_dtype};
    run_combine(OnGroup(seq), handle, num_tokens, capacity, combine_config(config), args, Phase::kRecv, &out);
  });
}

Tensor ll_combine_weights(const Tensor& seq, const Tensor& values, const Tensor& handle, int64_t num_tokens,
                          int64_t capacity, at::IntArrayRef config) {
  return guarded([&] {
    const auto [registered, group, device, on_device] = OnGroup(seq);
    const auto info = HandleInfo::of(group.num_ranks(), num_tokens, capacity, combine_config(config));
    LlCombineWeightsParams p;
    p.output = info.output;
    p.shape = info.shape();
    p.handle = resolve_handle(info, handle, device);
    check_tensor(values, "values", at::kFloat, values_shape(p.output), device);
    p.values = values.data_ptr<float>();
    p.num_tokens = to_int(num_tokens, "number of tokens");
    Tensor out = new_tensor({num_tokens, info.topk}, at::kFloat, device);
    p.out = out.data_ptr<float>();
    group.combine_weights(p, registered->order.next_stream(device));
    return out;
  });
}

// ---- Capacities that are a promise

// Of either mode. On a GPU the host waits for the counts.
void require_no_overflow(const Tensor& seq, const Tensor& info, int64_t capacity, at::IntArrayRef numbers) {
  guarded([&] {
    const OutputShape output = output_shape(static_cast<int>(seq.size(1)), dispatch_config(numbers), capacity);
    check_tensor(info, "info", at::kInt, {output.info_size()}, info.device());
    const Tensor host = info.cpu();
    const int32_t* words = host.data_ptr<int32_t>();
    const int32_t dropped = words[output.overflow_at()];
    if (dropped == 0) return;
    std::ostringstream text;
    text << dropped << " rows did not fit into capacity " << capacity << " of layout " << name_of(output.layout)
         << ": demand was [";
    for (int i = 0; i < output.bins(); i++) text << (i > 0 ? ", " : "") << words[output.demand_at() + i];
    text << "]";
    throw_overflow(text.str());
  });
}

// `seq` is the first mutable argument of all.
#define EP_DISPATCH_SCHEMA                                                \
  "Tensor(a!) seq, Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? " \
  "topk_weights, " EP_DISPATCH_CONFIG_SCHEMA
#define EP_COMBINE_SCHEMA                                                                    \
  "Tensor(a!) seq, Tensor rows, Tensor handle, Tensor? weights, Tensor? topk_idx, Tensor[] " \
  "biases, " EP_HANDLE_SCHEMA

fast_call::Op ll_ops[] = {
    EP_OP(ll_dispatch),          EP_OP(ll_dispatch_out),     EP_OP(ll_dispatch_send),   EP_OP(ll_dispatch_recv),
    EP_OP(ll_dispatch_recv_out), EP_OP(ll_combine),          EP_OP(ll_combine_out),     EP_OP(ll_combine_send),
    EP_OP(ll_combine_recv),      EP_OP(ll_combine_recv_out), EP_OP(ll_combine_weights), EP_OP(require_no_overflow),
};

}  // namespace
}  // namespace ep

TORCH_LIBRARY(nccl_ep, library) {
  library.def("ll_dispatch(" EP_DISPATCH_SCHEMA
              ") -> (Tensor x, Tensor scales, Tensor weights, Tensor topk_idx, Tensor row_expert, Tensor info, "
              "Tensor handle)");
  library.def("ll_dispatch_out(" EP_DISPATCH_SCHEMA
              ", Tensor(b!) out_x, Tensor(c!) out_scales, Tensor(d!) out_weights, Tensor(e!) out_topk_idx, "
              "Tensor(f!) out_row_expert, Tensor(g!) out_info, Tensor(h!) handle) -> ()");
  library.def("ll_dispatch_send(" EP_DISPATCH_SCHEMA ") -> Tensor handle");
  library.def(
      "ll_dispatch_recv(Tensor(a!) seq, Tensor(b!) handle, ScalarType dtype, SymInt hidden, SymInt "
      "num_scales, ScalarType scale_dtype, SymInt num_tokens, bool is_idx64, " EP_DISPATCH_CONFIG_SCHEMA
      ", Tensor? x, Tensor? topk_weights) -> (Tensor x, Tensor scales, Tensor weights, Tensor topk_idx, Tensor "
      "row_expert, Tensor info)");
  library.def(
      "ll_dispatch_recv_out(Tensor(a!) seq, Tensor(b!) handle, ScalarType dtype, SymInt hidden, SymInt "
      "num_scales, ScalarType scale_dtype, SymInt num_tokens, bool is_idx64, " EP_DISPATCH_CONFIG_SCHEMA
      ", Tensor(c!) out_x, Tensor(d!) out_scales, Tensor(e!) out_weights, Tensor(f!) out_topk_idx, Tensor(g!) "
      "out_row_expert, Tensor(h!) out_info) -> ()");
  library.def("ll_combine(" EP_COMBINE_SCHEMA ") -> Tensor out");
  library.def("ll_combine_out(" EP_COMBINE_SCHEMA ", Tensor(b!) out) -> ()");
  library.def("ll_combine_send(" EP_COMBINE_SCHEMA ", Tensor? row_signals) -> ()");
  library.def(
      "ll_combine_recv(Tensor(a!) seq, Tensor handle, Tensor[] biases, ScalarType rows_dtype, SymInt "
      "hidden, " EP_HANDLE_SCHEMA ", Tensor? carrier, Tensor? rows, Tensor? weights, Tensor? topk_idx) -> Tensor out");
  library.def(
      "ll_combine_recv_out(Tensor(a!) seq, Tensor handle, Tensor[] biases, ScalarType rows_dtype, SymInt "
      "hidden, " EP_HANDLE_SCHEMA ", Tensor(b!) out) -> ()");
  library.def("ll_combine_weights(Tensor(a!) seq, Tensor values, Tensor handle, " EP_HANDLE_SCHEMA ") -> Tensor out");
  library.def("require_no_overflow(Tensor(a!) seq, Tensor info, SymInt capacity, int[] config) -> ()");
}

EP_IMPLEMENT(ll_ops)
