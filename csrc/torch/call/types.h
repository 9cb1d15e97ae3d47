// The classes of Python that calls take and return.
#pragma once

#include <array>

#include "torch/call/python.h"

namespace ep::call {

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

struct Types {
  Slots handle, output;
  std::array<py::object, 4> layouts;  // the members of Layout
  std::array<py::object, 2> modes;    // "ll", "ht"
};
const Types& types();

// A new EventOverlap without an event; one of an EventHandle of `event`, with `extra_tensors`.
PyObject* no_event();
PyObject* new_overlap(PyObject* event, PyObject* extra_tensors);

}  // namespace ep::call
