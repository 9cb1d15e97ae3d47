// nccl_ep.dispatch, but for what takes more than one op (nccl_ep/functional.py).
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <array>
#include <utility>

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

constexpr std::array kLayoutNames{"expert_major", "packed", "rank_major", "flat"};
constexpr std::array kQuantNames{"None",           "fp8",   "fp8_rounded",   "fp8_ue8m0", "mxfp8",
                                 "mxfp8_swizzled", "nvfp4", "nvfp4_swizzled"};
constexpr size_t kNumbers = 9;

// quant, zero_padding, num_sms.
void load_options(DispatchOptions& options, PyObject* const* given) {
  options.quant = static_cast<Quant>(load_name<kQuantNames>("quant", given[0]));
  load_option_into<DispatchOptions, "zero_padding">(options.zero_padding, given[1]);
  load_option_into<DispatchOptions, "num_sms">(options.num_sms, given[2]);
}

// num_experts, mode, layout, max_tokens (None: of none), capacity, expert_alignment, quant, zero_padding, num_sms.
DispatchCall load_numbers(PyObject* const* given, int64_t topk) {
  DispatchCall call;
  call.config.num_experts = load_integer("num_experts", given[0]);
  call.config.topk = topk;
  call.mode = static_cast<Mode>(load_name<kModeNames>("mode", given[1]));
  call.config.layout = static_cast<OutputLayout>(load_name<kLayoutNames>("layout", given[2]));
  if (given[3] != Py_None) call.max_tokens = load_integer("max_tokens", given[3]);
  if (PyUnicode_Check(given[4])) {
    if (!is_text(given[4], "exact")) {
      raise(ErrorKind::kInvalidArgument, "capacity is ", repr(given[4]), ", must be a number, None or \"exact\"");
    }
    call.is_exact = true;
  } else if (given[4] != Py_None) {
    call.capacity = load_integer("capacity", given[4]);
  }
  call.config.alignment = load_integer("expert_alignment", given[5]);
  load_options(call.config, given + 6);
  return call;
}

std::optional<int64_t> load_limit(PyObject* object) {
  if (object == Py_None) return {};
  return load_integer("ll_max_tokens", object);
}

// The numbers, top-k, the bytes of a row of x for mode "auto", and of the buffer its ranks and ll_max_tokens.
// Returns mode, layout, capacity, max_tokens, and the config for the op.
PyObject* dispatch_numbers(PyObject* const* given, Py_ssize_t count) {
  require_count(count, kNumbers + 4);
  PyObject* const* const more = given + kNumbers;
  DispatchCall call = load_numbers(given, load_integer("topk", more[0]));
  call.row_bytes = load_integer("row_bytes", more[1]);
  call.ll_max_tokens = load_limit(more[3]);
  const auto checked = call.check(static_cast<int>(load_integer("num_ranks", more[2])));
  const auto numbers = checked.config.pack();
  return tuple_of(new_reference(types().modes[checked.is_ht ? 1 : 0]),
                  new_reference(types().layouts[static_cast<size_t>(checked.config.layout)]), number(checked.capacity),
                  number(checked.config.max_tokens), tuple_of_numbers(numbers));
}

// Of a dispatch along the routes of a handle: num_experts, topk, max_tokens, layout and alignment of that, quant,
// zero_padding, num_sms. Returns the config for the op.
PyObject* cached_numbers(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 8);
  DispatchConfig config;
  static_cast<RoutingNumbers&>(config) = load_routing(given);
  load_options(config, given + 5);
  return tuple_of_numbers(config.pack());
}

// ---- The operation

struct Given {
  GivenTensor x, topk_idx, topk_weights, scales;
  bool is_plain = false;

  // As the arguments of a call.
  void load(const Tensor& seq, PyObject* const* given) {
    is_plain = load_all(seq, {{"x", given[0], x},
                              {"topk_idx", given[1], topk_idx},
                              {"topk_weights", given[2], topk_weights, true},
                              {"scales", given[3], scales, true}});
    EP_CHECK(x->dim() == 2, "x has shape ", x->sym_sizes(), ", must be [tokens, hidden]");
    require_ids(*topk_idx, "topk_idx");  // before top-k is read off them
    EP_CHECK(topk_idx->dim() == 2, "topk_idx has shape ", topk_idx->sym_sizes(), ", must be [tokens, top-k]");
    is_plain = is_plain && is_plain_thread();
  }
  // Routers under autocast make bf16 or fp16 weights; they become float32, in which dispatch takes them.
  bool casts_weights() const {
    if (!topk_weights) return false;
    const bool is_half = topk_weights->scalar_type() == at::kBFloat16 || topk_weights->scalar_type() == at::kHalf;
    return is_half && at::autocast::is_autocast_enabled(topk_weights->device().type());
  }
};

// What ops of both modes return.
struct Results {
  Tensor x, scales, weights, topk_idx, row_expert, info, handle, slots;

  static Results of(torch_ops::LlDispatched&& made) {
    auto& [x, scales, weights, topk_idx, row_expert, info, handle] = made;
    return {std::move(x),          std::move(scales), std::move(weights), std::move(topk_idx),
            std::move(row_expert), std::move(info),   std::move(handle),  {}};
  }
  static Results of(torch_ops::HtDispatched&& made) {
    auto& [x, scales, weights, topk_idx, row_expert, info, route, slots, x1, x2, x3] = made;
    return {std::move(x),          std::move(scales), std::move(weights), std::move(topk_idx),
            std::move(row_expert), std::move(info),   std::move(route),   std::move(slots)};
  }
};

class Dispatch {
 public:
  Dispatch(const BufferState& buffer, const Given& given, const DispatchCall::Checked& checked)
      : buffer_(buffer), seq_(buffer.tensor()), given_(given), checked_(checked), numbers_(checked.config.pack()) {}

  PyObject* run() {
    std::optional<Tensor> cast;
    if (given_.casts_weights()) cast = given_.topk_weights->to(at::kFloat);
    const std::optional<Tensor>& weights = cast ? cast : given_.topk_weights.optional();
    if (checked_.is_ht) {
      return output(
          Results::of(call_op(torch_ops::ht_dispatch(), given_.is_plain, seq_, *given_.x, given_.scales.optional(),
                              *given_.topk_idx, weights, checked_.capacity, numbers_)));
    }
    buffer_.receive_lost("dispatch");
    return output(
        Results::of(call_op(torch_ops::ll_dispatch(), given_.is_plain, seq_, *given_.x, given_.scales.optional(),
                            *given_.topk_idx, weights, checked_.capacity, numbers_)));
  }

 private:
  OutputLayout layout() const { return checked_.config.layout; }

  SymInt capacity(const Results& results) const {
    if (checked_.capacity >= 0) return checked_.capacity;
    return layout() == OutputLayout::kRankMajor ? SymInt(checked_.config.max_tokens) : results.x.sym_size(0);
  }

  PyObject* output(Results&& results) {
    const bool quantises = checked_.config.quant != Quant::kNone;
    const SymInt capacity = this->capacity(results);
    Tensor carrier;
    if (quantises && gradients::wants_any(*given_.x)) {
      const auto slots = checked_.is_ht ? std::optional(results.slots) : std::nullopt;
      c10::SymDimVector sizes(results.x.sym_sizes());
      sizes.back() = (*given_.x).sym_size(1);  // of NVFP4 x has half of it
      carrier =
          call_op(torch_ops::row_carrier(), given_.is_plain, seq_, *given_.x, results.handle, slots, sizes, numbers_);
    }
    if (buffer_.raises_overflow) {
      call_op(torch_ops::require_no_overflow(), given_.is_plain, seq_, results.info, capacity, numbers_);
    }
    // What the layout has not got is None.
    if (!given_.scales && !quantises) results.scales = Tensor();
    if (has_expert_rows(layout())) results.topk_idx = Tensor();
    if (layout() != OutputLayout::kPacked) results.row_expert = Tensor();
    return made(std::move(results), capacity, std::move(carrier)).release().ptr();
  }

  py::object made(Results&& results, const SymInt& capacity, Tensor&& carrier) const {
    const Slots &handles = types().handle, &outputs = types().output;
    py::object handle = taken(handles.make()), output = taken(outputs.make());
    PyObject* weights = wrap(std::move(results.weights));
    const auto& config = checked_.config;
    bool is_ok = true;
    const auto set_output = [&](OutputField field, PyObject* value) {
      is_ok = outputs.set(output.ptr(), field, value) && is_ok;
    };
    const auto set_handle = [&](HandleField field, PyObject* value) {
      is_ok = handles.set(handle.ptr(), field, value) && is_ok;
    };
    set_output(kRowWeights, weights);
    set_output(kX, wrap(std::move(results.x)));
    set_output(kScales, wrap(std::move(results.scales)));
    set_output(kTopkIdx, wrap(std::move(results.topk_idx)));
    set_output(kRowExpert, wrap(std::move(results.row_expert)));
    set_output(kHandle, new_reference(handle));
    set_output(kExtra, PyTuple_New(0));
    set_output(kCarrier, wrap(std::move(carrier)));
    set_output(kInfo, wrap(std::move(results.info)));
    set_handle(kTensor, wrap(std::move(results.handle)));
    set_handle(kSeq, new_reference(buffer_.seq));
    set_handle(kNumTokens, as_python((*given_.x).sym_size(0)));
    set_handle(kTopk, number(config.topk));
    set_handle(kNumExperts, number(config.num_experts));
    set_handle(kMaxTokens, number(config.max_tokens));
    set_handle(kLayout, new_reference(types().layouts[static_cast<size_t>(config.layout)]));
    set_handle(kCapacity, as_python(capacity));
    set_handle(kNumRanks, new_reference(buffer_.num_ranks));
    set_handle(kMode, new_reference(types().modes[checked_.is_ht ? 1 : 0]));
    set_handle(kSlots, wrap(std::move(results.slots)));
    set_handle(kAlignment, number(config.alignment));
    if (is_ok) set_handle(kWeights, new_reference(weights));
    if (!is_ok) throw py::error_already_set();
    return output;
  }

  const BufferState& buffer_;
  const Tensor& seq_;
  const Given& given_;
  const DispatchCall::Checked& checked_;
  const std::array<int64_t, DispatchConfig::kSize> numbers_;
};

// The log tells of a shape that a buffer serves for the first time.
void note_served(BufferState& buffer, PyObject* owner, const DispatchCall::Checked& checked) {
  const auto numbers = checked.config.pack();
  if (std::ranges::equal(buffer.last_served, numbers)) return;
  buffer.last_served.assign(numbers.begin(), numbers.end());
  const py::object config = taken(tuple_of_numbers(numbers));
  py::module_::import("nccl_ep.log")
      .attr("note_served")(py::handle(owner), types().modes[checked.is_ht ? 1 : 0], checked.capacity, config);
}

// x, topk_idx, topk_weights, scales, buffer, and the numbers.
PyObject* dispatch(PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kTensors = 4;
  require_count(count, kTensors + 1 + kNumbers);
  BufferState& buffer = BufferState::of_argument(given[kTensors]);
  Given tensors;
  tensors.load(buffer.tensor(), given);
  std::array<PyObject*, kNumbers> numbers;
  std::copy_n(given + kTensors + 1, numbers.size(), numbers.begin());
  const auto of_buffer = [&](const char* name) { return taken(PyObject_GetAttrString(given[kTensors], name)); };
  py::object max_tokens;
  if (numbers[3] == Py_None) {
    static PyObject* const name = PyUnicode_InternFromString("max_tokens");
    max_tokens = taken(PyObject_GenericGetAttr(given[kTensors], name));
    numbers[3] = max_tokens.ptr();
  }
  DispatchCall call = load_numbers(numbers.data(), tensors.topk_idx->sym_size(1).guard_int(__FILE__, __LINE__));
  if (call.mode == Mode::kAuto) {
    call.row_bytes = tensors.x->sym_size(1).guard_int(__FILE__, __LINE__) * tensors.x->element_size();
    call.ll_max_tokens = load_limit(of_buffer("ll_max_tokens").ptr());
  }
  const auto checked = call.check(static_cast<int>(buffer.tensor().size(1)));
  note_served(buffer, given[kTensors], checked);
  return Dispatch(buffer, tensors, checked).run();
}

PyMethodDef dispatch_calls[] = {method<&dispatch>("dispatch"), method<&dispatch_numbers>("dispatch_numbers"),
                                method<&cached_numbers>("cached_numbers")};
const Added added_dispatch(dispatch_calls);

}  // namespace
}  // namespace ep::call
