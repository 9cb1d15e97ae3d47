// The high-throughput window and handle: no two things share a byte, and everything lies inside.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layout/ht/offsets.h"
#include "layout/window.h"
#include "runtime/group.h"
#include "unit/errors.h"
#include "unit/pieces.h"

namespace ep {
namespace {

// `words`: of an op message.
void add_calls(std::vector<Piece>& pieces, const HtOffsets& offsets, const std::string& kind, const Shape& shape,
               int words) {
  for (int source = 0; source < shape.num_ranks; source++) {
    for (int bank = 0; bank < kNumBanks; bank++) {
      const Offset begin = offsets.message_word(bank, source, 0);
      const Offset end = offsets.message_word(bank, source, words);
      pieces.push_back({begin, end, kind + "call"});
    }
  }
}

// Every byte that the two kinds may touch; rows of both use the same place, one operation after the other.
std::vector<Piece> all_pieces(const HtOffsets& dispatch, const HtOffsets& combine, const Shape& shape) {
  std::vector<Piece> pieces;
  add_calls(pieces, dispatch, "dispatch ", shape, HtMessage::words(shape.num_ranks, shape.num_experts));
  add_calls(pieces, combine, "combine ", shape, HtMessage::kCounts);
  for (int which = 0; which < kNumHtSignals; which++) {
    for (int source = 0; source < shape.num_ranks; source++) {
      const Offset at = dispatch.signal(static_cast<HtSignal>(which), source);
      EXPECT_EQ(at, combine.signal(static_cast<HtSignal>(which), source));
      pieces.push_back({at, at + HtWindow::kSignalStride, "signal"});
    }
  }
  for (int slot = 0; slot < shape.num_ranks * shape.max_tokens; slot++) {
    const Offset words = dispatch.slot_words(slot), row = dispatch.staged_row(slot);
    EXPECT_EQ(words, dispatch.slot_words(0) + slot * dispatch.slot.words() * 4);  // no gaps
    EXPECT_EQ(row % 128, 0u);
    pieces.push_back({words, words + dispatch.slot.words() * 4, "slot"});
    pieces.push_back({row, row + dispatch.row.body_bytes, "row"});
  }
  const int domains = dispatch.topology.num_domains();
  for (int domain = 0; domain < domains && domains > 1; domain++) {
    for (int token = 0; token < shape.max_tokens; token++) {
      const uint64_t route = dispatch.route.stride(), row = dispatch.row.body_bytes;
      pieces.push_back({dispatch.route_out(domain, token), dispatch.route_out(domain, token) + route, "route out"});
      pieces.push_back({dispatch.route_in(domain, token), dispatch.route_in(domain, token) + route, "route in"});
      pieces.push_back({dispatch.rail_row_out(domain, token), dispatch.rail_row_out(domain, token) + row, "rail out"});
      pieces.push_back({dispatch.rail_row_in(domain, token), dispatch.rail_row_in(domain, token) + row, "rail in"});
    }
  }
  return pieces;
}

TEST(HtOffsets, NothingOverlaps) {
  for (const auto& [num_ranks, domain_size] : {std::pair{1, 1}, {2, 2}, {3, 1}, {8, 4}, {8, 2}}) {
    for (int local_experts : {1, 64}) {
      for (int topk : {1, 3, 8, 32}) {
        for (int max_tokens : {1, 5}) {
          const Topology topology = Topology::make(num_ranks, domain_size);
          const Shape shape = Shape::make(num_ranks, num_ranks * local_experts, topk, max_tokens);
          HtRowFormat dispatch, combine;
          for (int bytes : {112, 7, 16}) dispatch.add(bytes);
          EXPECT_EQ(dispatch.offset[2], 128);
          EXPECT_EQ(dispatch.body_bytes, 144);
          combine.add(128);
          combine.add(topk * 4);
          const HtSizes sizes = ht_sizes_for(topology, shape, 144, 128, 4096);
          const Window window = Window::make(num_ranks, sizes_for(shape, 144, 128), sizes);
          const HtOffsets there = HtOffsets::make(window.ht, Kind::kDispatch, topology, shape, dispatch);
          const HtOffsets back = HtOffsets::make(window.ht, Kind::kCombine, topology, shape, combine);
          std::vector<Piece> pieces = all_pieces(there, back, shape);
          pieces.push_back({0, LlWindow::make(num_ranks, sizes_for(shape, 144, 128)).bytes, "low latency"});
          pieces.push_back({window.ht.arena.offset, window.ht.arena.offset + 4096, "arena"});
          expect_apart(pieces, window.bytes);
          EXPECT_EQ(window.ht.rail_in.count, domain_size == num_ranks ? 0 : sizes.rail_bytes);
        }
      }
    }
  }
}

TEST(HtOffsets, ABufferWithoutHighThroughputPaysNothing) {
  const LlSizes sizes = sizes_for(Shape{2, 4, 2, 4}, 64, 64);
  EXPECT_EQ(Window::make(2, sizes, {}).bytes, LlWindow::make(2, sizes).bytes);
}

TEST(HtOffsets, RefusesWhatDoesNotFit) {
  const Topology topology = Topology::make(2, 1);
  const HtSizes sizes = ht_sizes_for(topology, Shape{2, 4, 2, 4}, 128, 64, 0);
  const Window window = Window::make(2, {}, sizes);
  HtRowFormat row;
  row.add(128);
  EXPECT_EQ(error_of([&] { HtOffsets::make(window.ht, Kind::kDispatch, topology, Shape{2, 4, 2, 4}, row); }), "");
  for (const Shape& shape : {Shape{2, 4, 2, 5}, Shape{2, 4, 5, 4}, Shape{2, 60, 2, 4}}) {
    EXPECT_NE(error_of([&] {
                HtOffsets::make(window.ht, Kind::kDispatch, topology, shape, row);
              }).find("the window is too small for high throughput"),
              std::string::npos);
  }
  row.add(16);
  EXPECT_NE(error_of([&] {
              HtOffsets::make(window.ht, Kind::kDispatch, topology, Shape{2, 4, 2, 4}, row);
            }).find("rows of 144 bytes"),
            std::string::npos);
}

TEST(HtHandleShape, PartsDoNotOverlap) {
  for (int num_domains : {1, 2}) {
    for (int topk : {1, 3, 8}) {
      const HtHandleShape shape{4, num_domains, 3, 5, 7, topk, true, 9};  // 3: what follows them begins a line anew
      std::vector<int32_t> route(shape.route_size()), slots(9 * shape.slot_words());
      const HtHandlePtrs handle = HtHandlePtrs::of(route.data(), slots.data(), shape);
      const auto piece = [&](const int32_t* part, int64_t count, const char* name) {
        const auto begin = static_cast<uint64_t>(part - route.data());
        return Piece{begin, begin + count, name};
      };
      std::vector<Piece> pieces{piece(handle.counts, 16, "counts"),        piece(handle.expert_counts, 3, "experts"),
                                piece(handle.alignment, 1, "alignment"),   piece(handle.dispatch, 1, "dispatch"),
                                piece(handle.own.ids, 5 * topk, "ids"),    piece(handle.own.rows, 5 * topk, "rows"),
                                piece(handle.own.slots, 5 * topk, "slots")};
      if (num_domains > 1) {
        pieces.push_back(piece(handle.rail_tokens, 2, "rail tokens"));
        pieces.push_back(piece(handle.rail.ids, 14 * topk, "rail ids"));
        pieces.push_back(piece(handle.rail.rows, 14 * topk, "rail rows"));
        pieces.push_back(piece(handle.rail.slots, 14 * topk, "rail slots"));
      }
      expect_apart(pieces, route.size());
      EXPECT_GE(handle.slot_words, 2 * topk + 1);
      EXPECT_EQ(handle.slot(8) + handle.slot_words, slots.data() + slots.size());
    }
  }
}

}  // namespace
}  // namespace ep
