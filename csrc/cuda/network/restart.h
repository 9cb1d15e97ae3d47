// The links of low latency after masks are cleaned: their signals come to what they would be if every rank had made
// every call, so that nothing of an earlier call is under way.
#pragma once

#include "layout/ll/rail.h"
#include "transport/device/lsa_peers.h"

namespace ep {

struct DeviceState;

// What the signal words of a parity come to when call `epoch` is over.
EP_HD uint64_t signals_after(uint64_t epoch, int parity) {
  return parity == bank_of(epoch) ? LlRail::expected(epoch) : epoch / 2;
}

struct LinkRestartResult {
  uint32_t has_failed = 0;  // a signal did not come; the rest says which
  int peer = -1;
  uint64_t expected = 0, seen = 0;
};

struct LinkRestartParams {
  LlRail rails[kNumKinds];
  LsaPeers peers;
  uint64_t epochs[kNumKinds] = {0, 0};  // of the last call, on every rank
  DeviceState* state = nullptr;
  uint64_t timeout_ns = 0;
  LinkRestartResult* result = nullptr;  // pinned
};

}  // namespace ep
