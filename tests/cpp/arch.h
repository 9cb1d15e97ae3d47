// The GPU that plans are tested for.
#pragma once

#include "runtime/common/arch.h"

namespace ep {

inline Arch sm_90(int num_sms = 132) { return {.compute = 90, .num_sms = num_sms, .shared_bytes = 227 * 1024}; }

}  // namespace ep
