// GPUs that plans are tested for.
#pragma once

#include "runtime/common/arch.h"

namespace ep {

inline Arch sm_90(int num_sms = 132) { return {.compute = 90, .num_sms = num_sms, .shared_bytes = 227 * 1024}; }
// B200 and B300, and an RTX PRO 6000.
inline Arch sm_100() { return {.compute = 100, .num_sms = 148, .shared_bytes = 227 * 1024}; }
inline Arch sm_120() { return {.compute = 120, .num_sms = 188, .shared_bytes = 99 * 1024}; }

}  // namespace ep
