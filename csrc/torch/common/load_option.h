// Options from Python's arguments.
#pragma once

#include <Python.h>

#include "runtime/options.h"

namespace ep {

// The number that travels for an argument of Python. Throws Python's TypeError for what is of another kind, ValueError
// for what is out of range. With the interpreter's lock.
int64_t load_option(const Option& option, PyObject* given);

}  // namespace ep
