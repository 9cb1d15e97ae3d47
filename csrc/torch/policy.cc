#include "torch/policy.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/call.h"
#include "runtime/room.h"
#include "torch/common/load_option.h"
#include "torch/ops/arguments.h"

namespace py = pybind11;

namespace ep {
namespace {

using Numbers = std::vector<int64_t>;
using c10::SymInt;

const char* name_of(OptionKind kind) {
  constexpr const char* kNames[] = {"flag", "integer", "float", "choice"};
  return kNames[static_cast<int>(kind)];
}

const char* name_of(Modes modes) { return modes == Modes::kLl ? "ll" : modes == Modes::kHt ? "ht" : "both"; }

// As Python has it.
py::object value_of(const Option& option, int64_t number) {
  if (option.kind == OptionKind::kFlag) return py::bool_(number != 0);
  if (option.kind == OptionKind::kFloat) return py::float_(from_number<float>(number));
  return py::int_(number);
}

template <class Options>
py::tuple options_of() {
  py::list options;
  for (const Option& option : RoutingNumbers::kTable) options.append(option);
  for (const Option& option : Options::kTable) options.append(option);
  return py::tuple(options);
}

// Sizes that a config fixes; rows and tokens may be symbols, and stay apart.
OutputShape shape_of(const RoutingNumbers& routing, int num_ranks) { return output_shape(num_ranks, routing, 1); }

// (shape, dtype) of x, scales, weights, topk_idx, row_expert, info.
py::list dispatch_outputs(const Numbers& numbers, int num_ranks, const SymInt& capacity, at::ScalarType dtype,
                          const SymInt& hidden, const SymInt& num_scales, at::ScalarType scale_dtype, bool is_idx64) {
  const DispatchConfig config = DispatchConfig::unpack(numbers);
  const auto types = output_types<SymInt>(shape_of(config, num_ranks), capacity, config.quant, dtype, hidden,
                                          num_scales, scale_dtype, is_idx64);
  py::list outputs;
  const auto add = [&](const c10::SmallVector<SymInt, 3>& sizes, at::ScalarType type) {
    outputs.append(py::make_tuple(std::vector<SymInt>(sizes.begin(), sizes.end()), type));
  };
  add(types.x, types.x_type);
  add(types.scales, types.scales_type);
  add(types.weights, at::kFloat);
  add(types.topk_idx, types.idx_type);
  add(types.row_expert, at::kInt);
  add(types.info, at::kInt);
  return outputs;
}

SymInt handle_size(const Numbers& numbers, int num_ranks, const SymInt& num_tokens) {
  return HandleShape::of(shape_of(DispatchConfig::unpack(numbers), num_ranks), 0).size_for(num_tokens);
}

// Of an LL handle: where the ids of own tokens, the row map and the weights begin, and its size. Tokens of the sources
// lie at 0, the tag of the dispatch behind them.
py::tuple ll_handle_parts(int num_ranks, int num_tokens, int max_tokens, int topk, int map_k) {
  const HandleShape shape{num_ranks, num_tokens, max_tokens, topk, map_k};
  return py::make_tuple(shape.ids_at(), shape.map_at(), shape.weights_at(), shape.size());
}

// Of an HT handle: the length of `route`, and words of an entry of `slots`.
py::tuple ht_handle_sizes(const Numbers& numbers, int num_ranks, int domain_size, const SymInt& num_tokens) {
  const OutputShape output = shape_of(DispatchConfig::unpack(numbers), num_ranks);
  const auto shape = HtHandleShape::make(output, Topology::make(num_ranks, domain_size), 0, 0);
  return py::make_tuple(shape.route_size_for(num_tokens), shape.slot_words());
}

// DeepEP's src_info with all that lies behind it.
SymInt source_size(const Numbers& numbers, int num_ranks, const SymInt& num_tokens) {
  const DispatchConfig config = DispatchConfig::unpack(numbers);
  const OutputShape output = output_shape(num_ranks, config, num_ranks * config.max_tokens);
  return SourceShape::of(output).size_for(HandleShape::of(output, 0), num_tokens);
}

// Of the route of an HT handle: where the experts' counts, the ids, rows and slots of own tokens begin, and its size.
py::tuple ht_route_parts(int num_ranks, int domain_size, int num_experts, int num_tokens, int max_tokens, int topk) {
  const OutputShape output =
      OutputShape::make(Shape::make(num_ranks, num_experts, topk, max_tokens), OutputLayout::kFlat, 1, 1);
  const auto shape = HtHandleShape::make(output, Topology::make(num_ranks, domain_size), num_tokens, 0);
  return py::make_tuple(shape.experts_at(), shape.ids_at(), shape.rows_at(), shape.slots_at(), shape.route_size());
}

// Where the parts of an info tensor begin, and its size: counts lie at 0.
py::tuple info_parts(int64_t layout, int num_ranks, int num_experts) {
  const std::array<int64_t, 5> numbers{num_experts, 1, 1, layout, 1};
  const auto output = output_shape(num_ranks, RoutingNumbers::unpack(numbers.data()), 1);
  return py::make_tuple(output.bins(), output.demand_at(), output.overflow_at(), output.total_at(), output.offsets_at(),
                        output.info_size());
}

}  // namespace

void define_policy(py::module_& m) {
  py::class_<Option>(m, "Option", "A number of an operation.")
      .def_readonly("name", &Option::name)
      .def_property_readonly("kind", [](const Option& option) { return name_of(option.kind); })
      .def_property_readonly("modes", [](const Option& option) { return name_of(option.modes); })
      .def_property_readonly("default", [](const Option& option) { return value_of(option, option.fallback); })
      .def_property_readonly("least", [](const Option& option) { return value_of(option, option.least); })
      .def_property_readonly("most", [](const Option& option) { return value_of(option, option.most); })
      .def(
          "number", [](const Option& option, const py::object& value) { return load_option(option, value.ptr()); },
          "The number that travels for a value, which is checked.");
  m.def(
      "float_number", [](double value) { return to_number(static_cast<float>(value)); },
      "A float as the numbers of an operation have it.");
  m.def("dispatch_options", &options_of<DispatchOptions>, "The numbers of a dispatch, in their order.");
  m.def("combine_options", &options_of<CombineOptions>, "The same of a combine.");
  m.attr("AUTO_LL_BYTES") = kAutoLlBytes;
  m.def("most_auto_ll_tokens", &most_auto_ll_tokens, py::arg("row_bytes"), py::arg("topk"), py::arg("num_ranks"),
        py::arg("auto_bytes") = kAutoLlBytes, "max_tokens up to which mode=\"auto\" takes low latency.");
  m.def(
      "auto_ll_tokens",
      [](int num_ranks, int num_experts, int topk, int max_tokens, int64_t row_bytes, bool on_gpu) {
        return auto_ll_tokens(Shape::make(num_ranks, num_experts, topk, max_tokens), row_bytes, on_gpu);
      },
      "The tokens of the largest call up to max_tokens that mode=\"auto\" gives to low latency.");
  m.def(
      "default_capacity",
      [](const Numbers& numbers, int num_ranks) {
        return default_capacity_of(num_ranks, DispatchConfig::unpack(numbers));
      },
      "Rows that suffice for any routing in which no token names an expert twice.");
  m.def("auto_is_ht", &auto_is_ht, py::arg("max_tokens"), py::arg("row_bytes"), py::arg("topk"), py::arg("num_ranks"),
        py::arg("ll_max_tokens") = std::nullopt, "Whether mode=\"auto\" takes high throughput.");
  m.attr("DEFAULT_CAPACITY") = kDefaultCapacity;
  m.def(
      "dtype_code", [](at::ScalarType type) { return static_cast<int>(dtype_of(type)); },
      "A dtype as configs have it.");
  m.def(
      "wire_formats",
      [] {
        std::map<std::string, int> formats;
        for (DType format : {DType::kFp8Blocks, DType::kLogFmt}) formats[name_of(format)] = static_cast<int>(format);
        return formats;
      },
      "Codes of the formats that only partial sums have, by their names.");
  m.def(
      "carries_extra",
      [](int64_t quant, bool has_scales) { return carries_extra(static_cast<Quant>(quant), has_scales); },
      "Whether an extra tensor of low latency travels in the rows of x.");
  m.def("dispatch_outputs", &dispatch_outputs);
  m.def("handle_size", &handle_size);
  m.def("ll_handle_parts", &ll_handle_parts);
  m.def("ht_handle_sizes", &ht_handle_sizes);
  m.def("ht_route_parts", &ht_route_parts);
  m.def("source_size", &source_size);
  m.def("info_parts", &info_parts);
  m.def("combine_out_dtype", [](const Numbers& n) { return float_type_of(CombineConfig::unpack(n).out_dtype); });
  m.def("combine_topk", [](const Numbers& n) { return CombineConfig::unpack(n).topk; });
}

}  // namespace ep
