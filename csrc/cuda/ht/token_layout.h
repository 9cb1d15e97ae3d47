// Which rank gets which token, on CUDA: one kernel, of this rank alone.
#pragma once

#include "runtime/ht/params.h"

namespace ep {

void load_token_layout_kernel();
void launch_token_layout(const TokenLayoutParams& params, void* stream);

}  // namespace ep
