// nccl_ep.combine (nccl_ep/functional.py).
#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "runtime/call.h"
#include "torch/call/buffer_state.h"
#include "torch/call/given.h"
#include "torch/call/hand_over.h"
#include "torch/call/types.h"
#include "torch/ops/arguments.h"

namespace ep::call {
namespace {

using at::Tensor;
using c10::SymInt;

// ---- Its numbers

at::ScalarType load_dtype(const char* name, PyObject* object, at::ScalarType fallback) {
  if (object == Py_None) return fallback;
  if (!THPDtype_Check(object)) check_named("require_dtypes", name, object);
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

at::ScalarType load_out_dtype(PyObject* object, at::ScalarType of_rows) {
  const at::ScalarType type = load_dtype("out_dtype", object, of_rows);
  if (object != Py_None && !is_float(dtype_of(type))) {
    raise(ErrorKind::kInvalidArgument, "out_dtype is ", repr(object), ", must be that of rows, or torch.float32");
  }
  return type;
}

// The type of partial sums: None, that of the output; a dtype, or the name of a block format.
DType load_wire(PyObject* object, at::ScalarType out_dtype) {
  std::optional<DType> wire;
  if (object == Py_None) {
    wire = dtype_of(out_dtype);
  } else if (THPDtype_Check(object)) {
    wire = dtype_of(reinterpret_cast<THPDtype*>(object)->scalar_type);
  } else {
    for (DType format : {DType::kFp8Blocks, DType::kLogFmt}) {
      if (is_text(object, name_of(format))) wire = format;
    }
  }
  if (wire && can_travel_as(*wire, dtype_of(out_dtype))) return *wire;
  raise(ErrorKind::kInvalidArgument, "wire_dtype is ", repr(object), ", must be ",
        repr(taken(as_python(out_dtype)).ptr()),
        out_dtype == at::kFloat ? "" : ", torch.float32, \"fp8\" or \"logfmt\"");
}

// What `weights` says of the rows of a layout. A tensor is loaded by others.
Weighting load_weighting(PyObject* object, OutputLayout layout) {
  if (object == Py_None) return Weighting::kNone;
  static PyObject* const by_dispatch = PyUnicode_InternFromString("dispatch");  // as constants of Python are
  if (object == by_dispatch || is_text(object, "dispatch")) return weighting_by_dispatch(layout);
  if (THPVariable_Check(object)) return Weighting::kHome;
  constexpr const char* kMust = ", must be \"dispatch\", a tensor [T, K] or None";
  TORCH_CHECK_TYPE(PyUnicode_Check(object), "weights is a ", Py_TYPE(object)->tp_name, kMust);
  raise(ErrorKind::kInvalidArgument, "weights is ", repr(object), kMust);
}

// The options that are plain numbers: the last arguments, of which the last may be left out.
constexpr size_t kMostOptions = 2;
void load_options(CombineOptions& options, std::span<PyObject* const> given) {
  if (given.size() > 0) load_option_into<CombineOptions, "num_sms">(options.num_sms, given[0]);
  if (given.size() > 1) load_option_into<CombineOptions, "scale">(options.scale, given[1]);
}

CombineConfig config_of(const RoutingNumbers& routing, Weighting weighting, at::ScalarType out_dtype, DType wire,
                        std::span<PyObject* const> options) {
  CombineConfig config{routing, {.weighting = weighting, .out_dtype = dtype_of(out_dtype), .wire_dtype = wire}};
  load_options(config, options);
  return config;
}

// The numbers of a handle, weights (None or "dispatch"; True: a tensor), out_dtype, wire_dtype, options. Returns the
// weighting and the config for the op.
PyObject* combine_numbers(PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kFirst = 8;
  require_count(count, std::clamp<Py_ssize_t>(count, kFirst, kFirst + kMostOptions));
  const std::span<PyObject* const> options(given + kFirst, given + count);
  const RoutingNumbers routing = load_routing(given);
  const Weighting weighting = given[5] == Py_True ? Weighting::kHome : load_weighting(given[5], routing.layout);
  const at::ScalarType out_dtype = load_dtype("out_dtype", given[6], at::kFloat);
  const auto config = config_of(routing, weighting, out_dtype, load_wire(given[7], out_dtype), options);
  return tuple_of(number(static_cast<int64_t>(weighting)), tuple_of_numbers(config.pack()));
}

// ---- The operation

enum Argument : size_t {
  kRows,
  kOfHandle,
  kWeighting,
  kTopkIds,
  kBias,
  kOutDtype,
  kWireDtype,
  kOut,
  kOptions,
  kCount = kOptions + kMostOptions
};

class Combine {
 public:
  explicit Combine(PyObject* const* given) : given_(given), handle_(given[kOfHandle]) {}

  PyObject* run() {
    load();
    auto made = is_ht_ ? run_ht() : run_ll();
    return out_ ? new_reference(given_[kOut]) : wrap(std::move(made));
  }

 private:
  PyObject* field(HandleField name) const { return handles_.get(handle_, name); }
  RoutingNumbers routing() const {
    PyObject* const fields[] = {field(kNumExperts), field(kTopk), field(kMaxTokens), field(kLayout), field(kAlignment)};
    return load_routing(fields);
  }

  void load() {
    TORCH_CHECK_TYPE(THPVariable_Check(field(kSeq)), "handle.seq is a ", Py_TYPE(field(kSeq))->tp_name,
                     ", must be the tensor of a buffer");
    const Tensor& seq = THPVariable_Unpack(field(kSeq));
    is_ht_ = load_name<kModeNames>("handle.mode", field(kMode)) == static_cast<int>(Mode::kHt);
    if (!THPVariable_Check(given_[kRows])) check_named("require_tensors", "rows", given_[kRows]);
    is_plain_ = seq_.load(field(kSeq), seq);
    const RoutingNumbers routing = this->routing();
    const Weighting weighting = load_weighting(given_[kWeighting], routing.layout);
    const at::ScalarType out_dtype = load_out_dtype(given_[kOutDtype], THPVariable_Unpack(given_[kRows]).scalar_type());
    const auto config = config_of(routing, weighting, out_dtype, load_wire(given_[kWireDtype], out_dtype),
                                  {given_ + kOptions, kMostOptions});
    numbers_ = config.pack();
    const BufferState& buffer = BufferState::of_handle(seq, load_integer("handle.num_ranks", field(kNumRanks)));
    load_tensors_of(weighting, seq);
    if (!is_ht_) buffer.receive_lost("combine");
    num_tokens_ = load_length("handle.num_tokens", field(kNumTokens));
    capacity_ = load_length("handle.capacity", field(kCapacity));
    is_plain_ = is_plain_ && is_plain_thread();
  }

  void load_tensors_of(Weighting weighting, const Tensor& seq) {
    PyObject* weights = weighting == Weighting::kHome ? given_[kWeighting] : Py_None;
    bool is_plain = load_all(seq, {{"rows", given_[kRows], rows_},
                                   {"handle", field(kTensor), tensor_},
                                   {"handle", field(kSlots), slots_, !is_ht_},
                                   {"weights", weights, weights_, true},
                                   {"topk_idx", given_[kTopkIds], topk_idx_, true},
                                   {"out", given_[kOut], out_, true}});
    if (!load_tensors(given_[kBias], seq, biases_)) {
      check_in_python("require_biases", seq, py::handle(given_[kBias]));
      is_plain = false;
    }
    // The gradient needs the weights of the dispatch; the operation finds them in the handle.
    if (weighting == Weighting::kDispatch && THPVariable_Check(field(kWeights)) &&
        (gradients::wants_any(*rows_) || gradients::wants_any(THPVariable_Unpack(field(kWeights))))) {
      is_plain = weights_.load(field(kWeights), seq) && is_plain;
    }
    is_plain_ = is_plain_ && is_plain;
  }

  Tensor run_ll() const {
    if (!out_) {
      return call_op(torch_ops::ll_combine(), is_plain_, *seq_, *rows_, *tensor_, weights_.optional(),
                     topk_idx_.optional(), biases_, num_tokens_, capacity_, numbers_);
    }
    call_op(torch_ops::ll_combine_out(), is_plain_, *seq_, *rows_, *tensor_, weights_.optional(), topk_idx_.optional(),
            biases_, num_tokens_, capacity_, numbers_, *out_);
    return {};
  }
  Tensor run_ht() const {
    if (!out_) {
      return std::get<0>(call_op(torch_ops::ht_combine(), is_plain_, *seq_, rows_.optional(), std::nullopt, *tensor_,
                                 *slots_, weights_.optional(), topk_idx_.optional(), biases_, num_tokens_, capacity_,
                                 numbers_));
    }
    call_op(torch_ops::ht_combine_out(), is_plain_, *seq_, rows_.optional(), std::nullopt, *tensor_, *slots_,
            weights_.optional(), topk_idx_.optional(), biases_, num_tokens_, capacity_, numbers_, *out_);
    return {};
  }

  const Slots& handles_ = types().handle;
  PyObject* const* given_;
  PyObject* handle_;
  bool is_ht_ = false, is_plain_ = false;
  GivenTensor seq_, rows_, tensor_, slots_, weights_, topk_idx_, out_;
  std::vector<Tensor> biases_;
  SymInt num_tokens_, capacity_;
  std::array<int64_t, CombineConfig::kSize> numbers_{};
};

// rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, out, options.
PyObject* combine(PyObject* const* given, Py_ssize_t count) {
  require_count(count, kCount);
  if (!types().handle.is_of(given[kOfHandle])) {
    py::module_::import("nccl_ep.handle").attr("require_handle")(py::handle(given[kOfHandle]));
  }
  return Combine(given).run();
}

PyMethodDef combine_calls[] = {method<&combine>("combine"), method<&combine_numbers>("combine_numbers")};
const Added added_combine(combine_calls);

}  // namespace
}  // namespace ep::call
