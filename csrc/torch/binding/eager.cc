#include "torch/binding/eager.h"

#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "runtime/options.h"
#include "torch/binding/stream_event.h"
#include "torch/ops/arguments.h"

namespace ep::eager {
namespace {

using at::Tensor;
using fast_call::Argument;
using fast_call::wrap;

struct Types {
  Slots handle, output, overlap, event;
};
Types& types() {
  static auto* made = new Types;
  return *made;
}
enum HandleField : size_t {
  kTensor,
  kSeq,
  kNumTokens,
  kTopk,
  kNumExperts,
  kMaxTokens,
  kLayout,
  kCapacity,
  kNumRanks,
  kMode,
  kSlots,
  kAlignment,
  kWeights
};
enum OutputField : size_t { kX, kScales, kTopkIdx, kRowWeights, kRowExpert, kHandle, kExtra, kCarrier, kInfo };
constexpr size_t kEvent = 0, kExtraTensors = 1;

bool is_plain_constant(PyObject* object) {
  return object == Py_None || PyLong_CheckExact(object) || PyBool_Check(object) || PyUnicode_CheckExact(object);
}

// Of plain constants.
bool is_equal(PyObject* left, PyObject* right) {
  if (left == right) return true;
  if (Py_TYPE(left) != Py_TYPE(right) || PyBool_Check(left) || left == Py_None) return false;
  return PyUnicode_CheckExact(left) ? PyUnicode_Compare(left, right) == 0
                                    : PyObject_RichCompareBool(left, right, Py_EQ) == 1;
}

// ---- dispatch

using LlDispatch =
    Op<"nccl_ep::ll_dispatch", torch_ops::LlDispatched(const Tensor&, const Tensor&, const OptionalTensor&,
                                                       const Tensor&, const OptionalTensor&, int64_t, at::IntArrayRef)>;
using HtDispatch =
    Op<"nccl_ep::ht_dispatch", torch_ops::HtDispatched(const Tensor&, at::TensorList, const OptionalTensor&,
                                                       const Tensor&, const OptionalTensor&, int64_t, at::IntArrayRef)>;

// x, scales, weights, topk_idx, row_expert, info, and the tensors of the handle.
PyObject* output_of(const Buffer& buffer, const KnownDispatch& known, int64_t num_tokens, Tensor& x, Tensor& scales,
                    Tensor& weights, Tensor& topk_idx, Tensor& row_expert, Tensor& info, Tensor& handle_tensor,
                    Tensor* slots) {
  PyObject* capacity = known.capacity >= 0   ? new_reference(known.capacity_object)
                       : known.is_rank_major ? new_reference(known.max_tokens)
                                             : PyLong_FromLongLong(x.size(0));
  const auto handle = py::reinterpret_steal<py::object>(types().handle.make());
  const auto output = py::reinterpret_steal<py::object>(types().output.make());
  if (!handle || !output) return nullptr;
  PyObject* weights_object = wrap(std::move(weights));
  const auto set_handle = [&](HandleField field, PyObject* value) {
    return types().handle.set(handle.ptr(), field, value);
  };
  const auto set_output = [&](OutputField field, PyObject* value) {
    return types().output.set(output.ptr(), field, value);
  };
  bool is_ok = set_output(kRowWeights, weights_object);
  is_ok = is_ok && set_handle(kTensor, wrap(std::move(handle_tensor))) && set_handle(kSeq, new_reference(buffer.seq)) &&
          set_handle(kNumTokens, PyLong_FromLongLong(num_tokens)) &&
          set_handle(kTopk, new_reference(known.topk_object)) &&
          set_handle(kNumExperts, new_reference(known.num_experts)) &&
          set_handle(kMaxTokens, new_reference(known.max_tokens)) && set_handle(kLayout, new_reference(known.layout)) &&
          set_handle(kCapacity, capacity) && set_handle(kNumRanks, new_reference(buffer.num_ranks)) &&
          set_handle(kMode, new_reference(known.mode)) &&
          set_handle(kSlots, slots == nullptr ? new_reference(Py_None) : wrap(std::move(*slots))) &&
          set_handle(kAlignment, new_reference(known.alignment)) && set_handle(kWeights, new_reference(weights_object));
  is_ok = is_ok && set_output(kX, wrap(std::move(x))) && set_output(kScales, wrap(std::move(scales))) &&
          set_output(kTopkIdx, wrap(std::move(topk_idx))) && set_output(kRowExpert, wrap(std::move(row_expert))) &&
          set_output(kHandle, new_reference(handle)) && set_output(kExtra, PyTuple_New(0)) &&
          set_output(kCarrier, new_reference(Py_None)) && set_output(kInfo, wrap(std::move(info)));
  return is_ok ? new_reference(output) : nullptr;
}

// buffer, x, topk_idx, topk_weights, scales, and what KnownDispatch has.
PyObject* dispatch(PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kTensors = 5;
  Argument<Tensor> x, topk_idx;
  Argument<OptionalTensor> topk_weights, scales;
  Buffer* buffer =
      count == kTensors + static_cast<Py_ssize_t>(KnownDispatch::kGiven) ? Buffer::of<"_eager">(given[0]) : nullptr;
  if (buffer == nullptr || buffer->raises_overflow || !is_plain_thread()) Py_RETURN_NONE;
  if (!x.load(given[1]) || !topk_idx.load(given[2]) || !topk_weights.load(given[3]) || !scales.load(given[4])) {
    Py_RETURN_NONE;
  }
  const Tensor& seq = buffer->tensor();
  if (wants_gradient(x, topk_weights, scales) || !is_beside(seq, x.get()) || !is_beside(seq, topk_idx.get()) ||
      !is_beside(seq, topk_weights.get()) || !is_beside(seq, scales.get())) {
    Py_RETURN_NONE;
  }
  if (x.get().dim() != 2 || topk_idx.get().dim() != 2) Py_RETURN_NONE;
  if (topk_weights.get() && topk_weights.get()->scalar_type() != at::kFloat) Py_RETURN_NONE;  // autocast
  std::array<PyObject*, KnownDispatch::kGiven> numbers;
  std::copy_n(given + kTensors, numbers.size(), numbers.begin());
  py::object max_tokens;
  if (numbers[3] == Py_None) {
    static PyObject* const name = PyUnicode_InternFromString("max_tokens");
    max_tokens = py::reinterpret_steal<py::object>(PyObject_GetAttr(given[0], name));
    if (!max_tokens) return nullptr;
    numbers[3] = max_tokens.ptr();
  }
  const int64_t num_tokens = x.get().size(0), topk = topk_idx.get().size(1);
  const int64_t row_bytes = x.get().size(1) * static_cast<int64_t>(x.get().element_size());
  std::shared_ptr<const KnownDispatch> known;
  for (const auto& each : buffer->known) {
    if (!each->is_for(numbers, topk, row_bytes)) continue;
    known = each;
    break;
  }
  if (known == nullptr) Py_RETURN_NONE;
  if (known->is_ht) {
    auto [rows, row_scales, weights, ids, row_expert, info, route, slots, x1, x2, x3] =
        HtDispatch::run(seq, x.get(), scales.get(), topk_idx.get(), topk_weights.get(), known->capacity, known->config);
    return output_of(*buffer, *known, num_tokens, rows, row_scales, weights, ids, row_expert, info, route, &slots);
  }
  if (!buffer->is_ready_for("dispatch")) Py_RETURN_NONE;
  auto [rows, row_scales, weights, ids, row_expert, info, handle] =
      LlDispatch::run(seq, x.get(), scales.get(), topk_idx.get(), topk_weights.get(), known->capacity, known->config);
  return output_of(*buffer, *known, num_tokens, rows, row_scales, weights, ids, row_expert, info, handle, nullptr);
}

// ---- combine

#define EP_COMBINE_TYPES const OptionalTensor&, const OptionalTensor&, at::TensorList, int64_t, int64_t, at::IntArrayRef
using LlCombine = Op<"nccl_ep::ll_combine", Tensor(const Tensor&, const Tensor&, const Tensor&, EP_COMBINE_TYPES)>;
using LlCombineOut =
    Op<"nccl_ep::ll_combine_out", void(const Tensor&, const Tensor&, const Tensor&, EP_COMBINE_TYPES, const Tensor&)>;
using HtCombineOut = Op<"nccl_ep::ht_combine_out", void(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                        const Tensor&, const Tensor&, EP_COMBINE_TYPES, const Tensor&)>;

bool load_biases(PyObject* given, std::vector<Tensor>& biases) {
  const auto add = [&](PyObject* object) {
    const Tensor* tensor = fast_call::plain_tensor(object);
    if (tensor != nullptr) biases.push_back(*tensor);
    return tensor != nullptr;
  };
  if (given == Py_None) return true;
  if (!PyTuple_CheckExact(given) && !PyList_CheckExact(given)) return add(given);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
    if (!add(PySequence_Fast_GET_ITEM(given, i))) return false;
  }
  return true;
}

// None: `fallback`.
bool load_dtype(PyObject* given, at::ScalarType fallback, at::ScalarType& dtype) {
  Argument<at::ScalarType> argument;
  dtype = fallback;
  if (given == Py_None) return true;
  if (!argument.load(given)) return false;
  dtype = argument.get();
  return true;
}

// A type that a combine may travel in: None, that of the output, fp32, or the name of a block format.
bool load_wire(PyObject* given, at::ScalarType out_dtype, DType& wire_dtype) {
  if (PyUnicode_CheckExact(given)) {
    for (DType format : {DType::kFp8Blocks, DType::kLogFmt}) {
      if (PyUnicode_CompareWithASCIIString(given, name_of(format)) != 0) continue;
      wire_dtype = format;
      return true;
    }
    return false;
  }
  at::ScalarType dtype;
  if (!load_dtype(given, out_dtype, dtype) || (dtype != out_dtype && dtype != at::kFloat)) return false;
  wire_dtype = dtype_of(dtype);
  return true;
}

// rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, out, num_sms.
PyObject* combine(PyObject* const* given, Py_ssize_t count) {
  Argument<Tensor> rows, tensor, seq_argument;
  Argument<OptionalTensor> weights, topk_idx, slots, out, row_weights;
  std::vector<Tensor> biases;
  if (count != 9 || !types().handle.is_of(given[1]) || !is_plain_thread()) Py_RETURN_NONE;
  const auto of_handle = [&](HandleField field) {
    PyObject* object = types().handle.get(given[1], field);
    return object == nullptr ? Py_NotImplemented : object;
  };
  const bool is_named = PyUnicode_CheckExact(given[2]);
  if (!rows.load(given[0]) || !(is_named || weights.load(given[2])) || !topk_idx.load(given[3]) ||
      !load_biases(given[4], biases) || !out.load(given[7]) || !seq_argument.load(of_handle(kSeq)) ||
      !tensor.load(of_handle(kTensor)) || !slots.load(of_handle(kSlots)) || !row_weights.load(of_handle(kWeights))) {
    Py_RETURN_NONE;
  }
  if (is_named && PyUnicode_CompareWithASCIIString(given[2], "dispatch") != 0) Py_RETURN_NONE;
  const Tensor& seq = seq_argument.get();
  if (seq.dim() != 4 || wants_gradient(rows, weights, topk_idx, out, row_weights)) Py_RETURN_NONE;
  for (const Tensor& bias : biases) {
    if (!is_beside(seq, bias) || gradients::wants_any(bias)) Py_RETURN_NONE;
  }
  if (!is_beside(seq, rows.get()) || !is_beside(seq, tensor.get()) || !is_beside(seq, slots.get()) ||
      !is_beside(seq, weights.get()) || !is_beside(seq, topk_idx.get()) || !is_beside(seq, out.get())) {
    Py_RETURN_NONE;
  }
  at::ScalarType out_dtype;
  CombineConfig config;
  if (!load_dtype(given[5], rows.get().scalar_type(), out_dtype) ||
      !load_wire(given[6], out_dtype, config.wire_dtype)) {
    Py_RETURN_NONE;
  }
  int64_t num_tokens = 0, capacity = 0, num_ranks = 0, layout = 0, num_sms = 0;
  if (!is_number(of_handle(kNumExperts), config.num_experts) || !is_number(of_handle(kTopk), config.topk) ||
      !is_number(of_handle(kMaxTokens), config.max_tokens) || !is_number(of_handle(kLayout), layout) ||
      !is_number(of_handle(kAlignment), config.alignment) || !is_number(of_handle(kNumTokens), num_tokens) ||
      !is_number(of_handle(kCapacity), capacity) || !is_number(of_handle(kNumRanks), num_ranks) ||
      !PyLong_CheckExact(given[8]) || !is_number(given[8], num_sms) || num_sms < 0 || num_sms > INT32_MAX ||
      num_ranks != seq.size(1)) {
    Py_RETURN_NONE;
  }
  config.layout = static_cast<OutputLayout>(layout);
  config.num_sms = static_cast<int>(num_sms);
  const bool by_dispatch = is_named && has_expert_rows(config.layout);
  config.weighting = weights.get() ? Weighting::kHome : by_dispatch ? Weighting::kDispatch : Weighting::kNone;
  config.out_dtype = dtype_of(out_dtype);
  const auto numbers = config.pack();
  PyObject* mode = of_handle(kMode);
  const bool is_ht = PyUnicode_Check(mode) && PyUnicode_CompareWithASCIIString(mode, "ht") == 0;
  const Buffer* buffer = Buffer::of(seq);
  if (is_ht != slots.get().has_value() || buffer == nullptr) Py_RETURN_NONE;
  if (!is_ht && !buffer->is_ready_for("combine")) Py_RETURN_NONE;
  const Tensor& handle = tensor.get();
  if (is_ht && out.get()) {
    HtCombineOut::run(seq, rows.get(), std::nullopt, handle, *slots.get(), weights.get(), topk_idx.get(), biases,
                      num_tokens, capacity, numbers, *out.get());
    return new_reference(given[7]);
  }
  if (is_ht) {
    return wrap(std::get<0>(HtCombine::run(seq, rows.get(), std::nullopt, handle, *slots.get(), weights.get(),
                                           topk_idx.get(), biases, num_tokens, capacity, numbers)));
  }
  if (out.get()) {
    LlCombineOut::run(seq, rows.get(), handle, weights.get(), topk_idx.get(), biases, num_tokens, capacity, numbers,
                      *out.get());
    return new_reference(given[7]);
  }
  return wrap(
      LlCombine::run(seq, rows.get(), handle, weights.get(), topk_idx.get(), biases, num_tokens, capacity, numbers));
}

PyMethodDef methods[] = {method<&dispatch>("dispatch_eager"), method<&combine>("combine_eager")};
const Added added(methods);

// ---- What they know

py::capsule new_buffer(const py::object& seq, const py::object& num_ranks, const py::object& open_sends,
                       bool raises_overflow) {
  auto made = std::make_unique<Buffer>(seq, num_ranks, open_sends, raises_overflow);
  return py::capsule(made.release(), Buffer::kName, [](PyObject* capsule) {
    delete static_cast<Buffer*>(PyCapsule_GetPointer(capsule, Buffer::kName));
  });
}

// `key`: as nccl_ep/config.py: config_of has it; `config`: a DispatchConfig.
void remember(const py::capsule& capsule, const py::tuple& key, const py::object& config) {
  auto* buffer = capsule.get_pointer<Buffer>();
  const bool is_auto = key.size() == KnownDispatch::kGiven + 2;
  auto known = std::make_shared<KnownDispatch>();
  for (size_t i = 0; i < KnownDispatch::kGiven; i++) {
    known->given[i] = key[i];
    if (!is_plain_constant(known->given[i].ptr())) return;
  }
  known->topk = key[KnownDispatch::kGiven].cast<int64_t>();
  if (is_auto) known->row_bytes = key[KnownDispatch::kGiven + 1].cast<int64_t>();
  known->config = config.attr("numbers").cast<std::vector<int64_t>>();
  known->num_experts = config.attr("num_experts");
  known->topk_object = config.attr("topk");
  known->max_tokens = config.attr("max_tokens");
  known->layout = config.attr("layout");
  known->capacity_object = config.attr("capacity");
  known->capacity = known->capacity_object.cast<int64_t>();
  known->mode = config.attr("mode");
  known->alignment = config.attr("alignment");
  known->is_ht = known->mode.cast<std::string>() == "ht";
  known->is_rank_major = known->layout.cast<int64_t>() == static_cast<int64_t>(OutputLayout::kRankMajor);
  if (buffer->known.size() >= Buffer::kMaxKnown) buffer->known.clear();
  buffer->known.push_back(std::move(known));
}

}  // namespace

bool KnownDispatch::is_for(const std::array<PyObject*, kGiven>& call, int64_t call_topk, int64_t call_row_bytes) const {
  if (topk != call_topk || (row_bytes != 0 && row_bytes != call_row_bytes)) return false;
  for (size_t i = 0; i < kGiven; i++) {
    if (!is_equal(given[i].ptr(), call[i])) return false;
  }
  return true;
}

Buffer* Buffer::of(PyObject* owner, PyObject* name) {
  const py::object capsule = attribute(owner, name);  // which the owner keeps
  if (!capsule || !PyCapsule_IsValid(capsule.ptr(), kName)) return nullptr;
  return static_cast<Buffer*>(PyCapsule_GetPointer(capsule.ptr(), kName));
}

// By the numbers of their tensors. With the interpreter's lock.
std::unordered_map<int64_t, Buffer*>& all_buffers() {
  static auto* all = new std::unordered_map<int64_t, Buffer*>;
  return *all;
}

Buffer::Buffer(const py::object& seq, const py::object& num_ranks, const py::object& open_sends, bool raises_overflow)
    : seq(seq), num_ranks(num_ranks), open_sends(open_sends), raises_overflow(raises_overflow) {
  all_buffers()[tensor().size(0)] = this;
}

Buffer::~Buffer() { all_buffers().erase(tensor().size(0)); }

Buffer* Buffer::of(const Tensor& seq) {
  const auto found = seq.dim() == 4 ? all_buffers().find(seq.size(0)) : all_buffers().end();
  return found == all_buffers().end() ? nullptr : found->second;
}

PyObject* Buffer::comm_stream_of(PyObject* owner) {
  static PyObject* const name = PyUnicode_InternFromString("get_comm_stream");
  if (!comm_stream) comm_stream = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(owner, name));
  return comm_stream.ptr();
}

bool Buffer::is_ready_for(const char* kind) const {
  return PyDict_GET_SIZE(open_sends.ptr()) == 0 || PyDict_GetItemString(open_sends.ptr(), kind) == nullptr;
}

namespace {
PyTypeObject* default_device_mode = nullptr;  // the class of the mode
}

bool is_plain_thread() {
  using Tls = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return fast_call::is_plain_thread();
  for (int64_t i = 0; i < Tls::stack_len(); i++) {
    if (Py_TYPE(Tls::get_stack_at(i)->ptr(getPyInterpreter())) != default_device_mode) return false;
  }
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set).empty() && !fast_call::skips_a_hop<Tls>();
}

Slots::Slots(const py::object& type, std::initializer_list<const char*> names)
    : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
  type.inc_ref();
  for (const char* name : names) {
    const py::object member = type.attr(name);
    if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) {
      raise(ErrorKind::kInvalidArgument, type_->tp_name, ".", name, " is no slot");
    }
    offsets_.push_back(reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset);
  }
}

Tensor part_of(const Tensor& whole, int64_t first, at::IntArrayRef sizes) {
  const c10::DispatchKeySet key(whole.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), key, whole.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + first);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

namespace {

PyObject* overlap_of(PyObject* event, PyObject* extra_tensors) {
  PyObject* overlap = types().overlap.make();
  if (overlap == nullptr) return nullptr;
  types().overlap.set(overlap, kEvent, new_reference(event));
  types().overlap.set(overlap, kExtraTensors, new_reference(extra_tensors));
  return overlap;
}

}  // namespace

PyObject* no_event() { return overlap_of(Py_None, Py_None); }

PyObject* new_overlap(PyObject* event, PyObject* extra_tensors) {
  const auto handle = py::reinterpret_steal<py::object>(types().event.make());
  if (!handle) return nullptr;
  types().event.set(handle.ptr(), 0, new_reference(event));
  return overlap_of(handle.ptr(), extra_tensors);
}

void define(py::module_& m) {
  m.def(
      "set_eager_types",
      [](const py::object& handle, const py::object& output, const py::object& overlap, const py::object& event) {
        types().handle = Slots(handle, {"tensor", "seq", "num_tokens", "topk", "num_experts", "max_tokens", "layout",
                                        "capacity", "num_ranks", "mode", "slots", "alignment", "weights"});
        types().output =
            Slots(output, {"x", "scales", "topk_idx", "weights", "row_expert", "handle", "extra", "carrier", "_info"});
        types().overlap = Slots(overlap, {"event", "extra_tensors"});
        types().event = Slots(event, {"_event"});
      },
      py::arg("handle"), py::arg("output"), py::arg("overlap"), py::arg("event"),
      "The classes of what the eager calls take and return.");
  m.def(
      "set_default_device_mode",
      [](const py::object& type) {
        type.inc_ref();
        default_device_mode = reinterpret_cast<PyTypeObject*>(type.ptr());
      },
      "The mode of torch.set_default_device, past which ops are called.");
  m.def("normal_row_bytes", &normal_row_bytes, py::arg("hidden"), py::arg("element_bytes"), py::arg("scale_bytes"));
  m.def("eager_buffer", &new_buffer, py::arg("seq"), py::arg("num_ranks"), py::arg("open_sends"),
        py::arg("raises_overflow"));
  m.attr("StreamEvent") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(stream_event_type()));
  m.def("remember_dispatch", &remember, py::arg("eager"), py::arg("key"), py::arg("config"));
  for (const std::span<PyMethodDef> each_file : all_methods()) {
    for (PyMethodDef& each : each_file) {
      m.attr(each.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&each, nullptr));
    }
  }
}

}  // namespace ep::eager
