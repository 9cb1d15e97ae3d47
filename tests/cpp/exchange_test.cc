// One operation's view of the wire, below dispatch and combine.
#include "cpu/ll/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "transport/host/transport.h"
#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

constexpr int kRowWords = 64;

// Two ranks with a network between them, or with common memory.
template <class Body>
void on_two_ranks(int domain_size, Body body) {
  EXPECT_EQ(joined(run_ranks(
                2,
                [&](Bootstrap& bootstrap) {
                  const Shape shape{2, 2, 1, 8};
                  const LlWindow window = LlWindow::make(2, sizes_for(shape, kRowWords * 4, kRowWords * 4));
                  auto windows = HostWindows::create(bootstrap, window.bytes);
                  char* base = windows->base(windows->rank());
                  std::memset(base, 0, window.bytes);
                  for (const auto& kind : window.kind) std::memset(base + kind.rows.offset, 0xFF, kind.rows.count * 4);
                  bootstrap.allgather("clean");
                  const auto transport = make_host_transport(std::move(windows), Topology::make(2, domain_size), 9);
                  CpuState state;
                  state.control.timeout_seconds = 60;
                  state.wire = {{0, 0}, {0, 0}, {0, 0}};
                  const LlOffsets offsets = LlOffsets::make(window, Kind::kDispatch, shape, {kRowWords * 4, 0, false});
                  body(bootstrap, *transport, state, offsets);
                })),
            "");
}

// A call that throws between its puts and the end of its stage frees the puts' sources.
TEST(Exchange, LeavesNoPutsBehind) {
  on_two_ranks(1, [](Bootstrap& bootstrap, Transport& transport, CpuState& state, const LlOffsets& offsets) {
    const int peer = 1 - bootstrap.rank();
    {
      Exchange exchange(transport, state, Kind::kDispatch, offsets, {}, nullptr);
      const std::vector<uint32_t> words(kRowWords, 42);
      for (int token = 0; token < 8; token++) exchange.send_row(peer, token, words.data(), kRowWords);
    }
    const std::vector<std::vector<uint32_t>> others(64, std::vector<uint32_t>(kRowWords, 7));  // reuses what was freed
    transport.signal_add(peer, offsets.signal(bootstrap.rank()), 1);
    while (transport.signal(offsets.signal(peer)) == 0) std::this_thread::yield();
    for (int token = 0; token < 8; token++) {
      uint32_t row[kRowWords];
      std::memcpy(row, transport.local_window() + offsets.row(1, peer, token), sizeof row);
      require(std::all_of(row, row + kRowWords, [](uint32_t word) { return word == 42; }), concat("row ", token));
    }
    bootstrap.allgather("done");
  });
}

// A slot is as empty after a row was taken as before it came, so that a shorter row may follow a longer one.
TEST(Exchange, TakingARowEmptiesItsSlot) {
  for (int domain_size : {1, 2}) {
    on_two_ranks(domain_size, [](Bootstrap& bootstrap, Transport& transport, CpuState& state,
                                 const LlOffsets& offsets) {
      const int peer = 1 - bootstrap.rank();
      for (int words = kRowWords; words > 0; words -= 16) {
        Exchange exchange(transport, state, Kind::kDispatch, offsets, {}, nullptr);
        std::vector<uint32_t> row(words);
        for (int i = 0; i < words; i++) row[i] = 1000 * words + i;
        for (int p = 0; p < 2; p++) exchange.send_header(p);
        exchange.send_row(peer, 3, row.data(), words);
        exchange.close_stage();
        exchange.await_arrivals();
        exchange.await_headers();
        std::vector<uint32_t> taken(words);
        exchange.take_row(peer, 3, Awaited::kRows, taken.data(), words);
        require(taken == row, concat("row of ", words, " words"));
        uint32_t slot[kRowWords];
        std::memcpy(slot, transport.local_window() + offsets.row(exchange.bank(), peer, 3), sizeof slot);
        require(std::all_of(slot, slot + kRowWords, [](uint32_t word) { return word == kAbsent; }), "the slot is full");
        exchange.complete();
      }
      require(state.epoch[0] == kRowWords / 16, "epochs");
      require(state.wire.rows[peer] == kRowWords / 16, "rows counted");
      require(state.wire.row_bytes[peer] == 4 * (64 + 48 + 32 + 16), "bytes counted");
      bootstrap.allgather("done");
    });
  }
}

// The epoch is not advanced by a call that failed: nothing may follow it but the end of the group.
TEST(Exchange, ATimeoutNamesWhatIsMissing) {
  on_two_ranks(2, [](Bootstrap& bootstrap, Transport& transport, CpuState& state, const LlOffsets& offsets) {
    state.control.timeout_seconds = 0.2;
    Exchange exchange(transport, state, Kind::kDispatch, offsets, {}, nullptr);
    for (int p = 0; p < 2; p++) exchange.send_header(p);
    exchange.close_stage();
    bootstrap.allgather("sent");  // what is there is taken, whether the deadline has passed or not
    exchange.await_headers();
    const int peer = 1 - bootstrap.rank();
    uint32_t words[kRowWords];
    const std::string error = error_of([&] { exchange.take_row(peer, 5, Awaited::kRows, words, kRowWords); });
    require(error == concat("rank ", bootstrap.rank(), " waited 0.2 s for the token rows of rank ", peer,
                            " in dispatch 1 (expected 5, saw 0)"),
            error);
    const Failure failure = state.failure.get();
    require(failure.code == Failure::kTimeout && !failure.missing.any(), "the failure");
    require(state.epoch[0] == 0, "the epoch");
    bootstrap.allgather("done");
  });
}

}  // namespace
}  // namespace ep
