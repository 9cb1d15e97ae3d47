// Low latency's kernels, and what they are made of, exist in sets: one can mask late ranks (ll/masking_*.cu), one
// crosses domains over a network (ll/rail_*), one does both, one tells of rows that have come (announcing_dispatch.cu),
// as the three before it do, too, and the usual one has no code for any of it.
#pragma once

#if defined(EP_MASKS_RANKS) && defined(EP_NETWORK)
#define EP_KERNELS masking_crossing
#elif defined(EP_MASKS_RANKS)
#define EP_KERNELS masking
#elif defined(EP_NETWORK)  // the class of EP_NETWORK_HEADER that carries bytes between domains (network/network.h)
#define EP_KERNELS crossing
#elif defined(EP_ANNOUNCES_ROWS)
#define EP_KERNELS announcing
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
#if defined(EP_NETWORK)
constexpr bool kCrossesDomains = true;
#else
constexpr bool kCrossesDomains = false;
#endif
#if defined(EP_ANNOUNCES_ROWS)
constexpr bool kAnnouncesRows = true;
#else
constexpr bool kAnnouncesRows = kMasksRanks || kCrossesDomains;
#endif
constexpr bool kMasksFarRanks = kMasksRanks && kCrossesDomains;

}  // namespace EP_KERNELS
}  // namespace ep
