// What a group knows of itself, as dictionaries of Python: those of nccl_ep.Buffer.stats() and wire_bytes().
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/group.h"

namespace ep {

pybind11::dict stats(Group& group);
pybind11::dict wire_bytes(Group& group);

}  // namespace ep
