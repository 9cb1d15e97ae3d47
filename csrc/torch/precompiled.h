// What most files of this folder read of torch, parsed once for all of them (CMakeLists.txt). Each still includes what
// it uses. What few need has no place here, and the header with all of torch's functions none in the folder.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
