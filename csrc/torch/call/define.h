// The functions of csrc/torch/call and csrc/torch/deep_ep in the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace ep::call {

void define(pybind11::module_& module);

}  // namespace ep::call
