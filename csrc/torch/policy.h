// What Python asks the library for, so that no rule is written twice: fields of configs, capacities, shapes of outputs.
#pragma once

#include <pybind11/pybind11.h>

namespace ep {

void define_policy(pybind11::module_& m);

}  // namespace ep
