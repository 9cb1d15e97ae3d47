// Which rank gets which token, on the host.
#pragma once

#include "runtime/ht/params.h"

namespace ep {

void cpu_token_layout(const TokenLayoutParams& params);

}  // namespace ep
