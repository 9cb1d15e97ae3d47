// What Python records of operations (nccl_ep/recording.py).
#pragma once

#include <pybind11/pybind11.h>

namespace ep {

void define_observer(pybind11::module_& m);

}  // namespace ep
