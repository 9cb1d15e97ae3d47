// Low latency's kernels, and what they are made of, exist in two sets: one can mask late ranks (ll/masking_*.cu), the
// other has no code for that.
#pragma once

#if defined(EP_MASKS_RANKS)
#define EP_KERNELS masking
#else
#define EP_KERNELS unmasking
#endif

namespace ep {
inline namespace EP_KERNELS {

#if defined(EP_MASKS_RANKS)
constexpr bool kMasksRanks = true;
#else
constexpr bool kMasksRanks = false;
#endif

}  // namespace EP_KERNELS
}  // namespace ep
