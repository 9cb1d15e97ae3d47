// The low-latency window: no two things share a byte, and everything lies inside.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layout/ll/offsets.h"
#include "runtime/group.h"
#include "unit/errors.h"
#include "unit/pieces.h"

namespace ep {
namespace {

// Every word that an operation of this kind may touch.
void add_pieces(std::vector<Piece>& pieces, const LlOffsets& offsets, const RowFormat& row, const std::string& kind,
                bool has_further_rows = false) {
  const auto add = [&](Offset offset, uint64_t bytes, const std::string& name) {
    pieces.push_back({offset, offset + bytes, kind + name});
  };
  for (int source = 0; source < offsets.num_ranks; source++) {
    add(offsets.signal(source), 8, "signal");
    for (int bank = 0; bank < kNumBanks; bank++) {
      add(offsets.header(bank, source), OpHeader::kWords * sizeof(TaggedWord), "header");
      for (int token = 0; token < offsets.max_tokens; token++) {
        EXPECT_EQ(offsets.id_words(bank, source, token) % 16, 0u);
        EXPECT_EQ(offsets.row(bank, source, token) % 16, 0u);
        add(offsets.id_words(bank, source, token), offsets.id_bytes(), "ids");
        for (int k = 0; k < offsets.topk; k++) add(offsets.weight(bank, source, token, k), 8, "weight");
        if (row.wire_bytes() > 0) add(offsets.row(bank, source, token), row.wire_bytes(), "row");
      }
    }
  }
  if (!has_further_rows) return;
  for (int bank = 0; bank < kNumBanks; bank++) {
    for (int token = 0; token < offsets.max_tokens; token++) {
      EXPECT_EQ(offsets.unweighted_row(bank, 0, token, 0, true), offsets.row(bank, 0, token));
      for (int source = 0; source < (offsets.by_source ? offsets.num_ranks : 1); source++) {
        for (int k = 1; k < offsets.topk; k++) {
          add(offsets.unweighted_row(bank, source, token, k, false), row.wire_bytes(), "further row");
        }
      }
    }
  }
}

LlWindow window_for_rows(const Shape& shape, int dispatch_bytes, int combine_bytes, bool by_source) {
  LlSizes sizes = sizes_for(shape, dispatch_bytes, combine_bytes);
  sizes.by_source = by_source;
  return LlWindow::make(shape.num_ranks, sizes);
}

TEST(LlOffsets, NothingOverlaps) {
  for (int num_ranks : {1, 2, 3, 8}) {
    for (int local_experts : {1, 254, 255}) {
      for (int topk : {1, 2, 8, 9, 32}) {
        for (int max_tokens : {1, 3, 8}) {
          const Shape shape = Shape::make(num_ranks, num_ranks * local_experts, topk, max_tokens);
          for (int payload : {16, 112, 528}) {
            for (bool by_source : {false, true}) {
              const LlWindow window = window_for_rows(shape, payload + 16, 2 * payload, by_source);
              const RowFormat dispatch{payload, 12, true}, combine{2 * payload, 0, false};
              std::vector<Piece> pieces;
              add_pieces(pieces, LlOffsets::make(window, Kind::kDispatch, shape, dispatch), dispatch, "dispatch ");
              add_pieces(pieces, LlOffsets::make(window, Kind::kCombine, shape, combine), combine, "combine ",
                         LlOffsets::fits_unweighted_rows(window, shape, combine));
              pieces.push_back({window.heartbeats.offset, window.heartbeats.at(num_ranks), "signs of life"});
              expect_apart(pieces, window.bytes);
            }
          }
        }
      }
    }
  }
}

// A word that was a tag must never serve as a row's, nor the reverse, whatever the shapes of two operations.
TEST(LlOffsets, TagsAndRowsKeepTheirPlacesOverShapes) {
  const Shape large = Shape::make(4, 4 * 300, 8, 16);
  const LlWindow window = window_for_rows(large, 1024, 1024, true);
  for (const Shape& shape : {large, Shape::make(4, 4, 1, 1), Shape::make(4, 8, 8, 16), Shape::make(4, 1200, 1, 7)}) {
    for (int k = 0; k < kNumKinds; k++) {
      const RowFormat row{256, 0, false};
      const LlOffsets offsets = LlOffsets::make(window, static_cast<Kind>(k), shape, row);
      const LlWindow::PerKind& regions = window.kind[k];
      for (int bank = 0; bank < kNumBanks; bank++) {
        const uint64_t tagged_end = regions.tagged.offset + (bank + 1) * offsets.tagged_bank_bytes;
        const uint64_t rows_end = regions.rows.offset + (bank + 1) * offsets.row_bank_bytes;
        EXPECT_EQ(offsets.id_words(bank, 0, 0), regions.tagged.offset + bank * offsets.tagged_bank_bytes);
        EXPECT_LE(offsets.weight(bank, 3, shape.max_tokens - 1, shape.topk - 1) + 8, tagged_end);
        EXPECT_EQ(offsets.row(bank, 0, 0), regions.rows.offset + bank * offsets.row_bank_bytes);
        EXPECT_LE(offsets.row(bank, 3, shape.max_tokens - 1) + row.stride(), rows_end);
        const LlOffsets other = LlOffsets::make(window, static_cast<Kind>(k), large, row);
        for (int source = 0; source < 4; source++) {  // and so does every source's part
          EXPECT_EQ(offsets.header(bank, source), other.header(bank, source));
          EXPECT_EQ(offsets.id_words(bank, source, 0), other.id_words(bank, source, 0));
          EXPECT_EQ(offsets.row(bank, source, 0), other.row(bank, source, 0));
        }
      }
    }
  }
}

TEST(LlOffsets, RefusesWhatDoesNotFitWithTheBytes) {
  const Shape shape = Shape::make(2, 4, 2, 4);
  const LlWindow window = LlWindow::make(2, sizes_for(shape, 64, 64));
  EXPECT_EQ(error_of([&] { LlOffsets::make(window, Kind::kDispatch, shape, {64, 0, true}); }), "");
  const std::string rows = error_of([&] { LlOffsets::make(window, Kind::kDispatch, shape, {4096, 0, false}); });
  EXPECT_NE(rows.find("rows of 4096 bytes: a bank needs"), std::string::npos) << rows;
  EXPECT_NE(rows.find("and 32768 bytes of rows"), std::string::npos) << rows;
  const Shape more_tokens = Shape::make(2, 4, 2, 400);
  const std::string tokens = error_of([&] { LlOffsets::make(window, Kind::kCombine, more_tokens, {16, 0, false}); });
  EXPECT_NE(tokens.find("400 tokens a rank"), std::string::npos) << tokens;
}

TEST(LlOffsets, AWindowOfGivenBytesIsNotExceeded) {
  for (int num_ranks : {1, 2, 8, 64}) {
    for (uint64_t bytes : {1ull << 18, 1ull << 20, (1ull << 24) + 12345, 1ull << 32}) {
      const LlSizes sizes = sizes_for_window(num_ranks, bytes);
      const LlWindow window = LlWindow::make(num_ranks, sizes);
      EXPECT_LE(window.bytes, bytes) << num_ranks << " ranks";
      EXPECT_GE(window.bytes, bytes - bytes / 4) << num_ranks << " ranks";  // and used
    }
  }
  const std::string error = error_of([] { sizes_for_window(8, 4096); });
  EXPECT_NE(error.find("a window of 4096 bytes is too small for 8 ranks: at least"), std::string::npos) << error;
}

// Rows that travel in place of sums have room where the window was made for the shape: once, for each source with
// masks, and for each link between domains.
TEST(LlOffsets, UnweightedRowsFitWhereThereIsRoomForAllChoices) {
  const Shape shape = Shape::make(4, 16, 4, 16);
  const RowFormat row{256, 0, false};
  LlSizes sizes = sizes_for(shape, 256, 256);
  EXPECT_EQ(sizes.row_bytes[1], 4u * 16 * 256);
  EXPECT_EQ(sizes.unweighted_row_bytes, 3u * 16 * 256);
  const LlWindow one_domain = LlWindow::make(4, sizes);
  const auto fits = [&](const LlSizes& of, const RowFormat& format) {
    return LlOffsets::fits_unweighted_rows(LlWindow::make(4, of), shape, format);
  };
  const RowFormat wider{256 + 128, 0, false};
  LlSizes masks = sizes, rail = sizes, mesh = sizes;
  masks.by_source = true;
  rail.rail_domain_size = mesh.rail_domain_size = rail.link_size = 2;
  mesh.link_size = 1;
  int places[] = {1, 4, 2, 4}, i = 0;
  for (const LlSizes& each : {sizes, masks, rail, mesh}) {
    EXPECT_TRUE(fits(each, row));
    EXPECT_FALSE(fits(each, wider));
    LlSizes less = each;
    less.unweighted_row_bytes -= 256;
    EXPECT_FALSE(fits(less, row));
    const uint64_t further = LlWindow::make(4, each).kind[1].rows.count - one_domain.kind[1].rows.count;
    EXPECT_EQ(further * 4, kNumBanks * (places[i++] - 1) * sizes.unweighted_row_bytes);
  }
}

// Between domains each link has further rows of its own.
TEST(LlOffsets, EachLinkHasUnweightedRowsOfItsOwn) {
  const Shape shape = Shape::make(4, 16, 4, 16);
  const RowFormat row{256, 0, false};
  LlSizes sizes = sizes_for(shape, 256, 256);
  sizes.rail_domain_size = sizes.link_size = 2;
  const LlWindow window = LlWindow::make(4, sizes);
  const LlOffsets offsets = LlOffsets::make(window, Kind::kCombine, shape, row);
  std::vector<Piece> pieces;
  add_pieces(pieces, offsets, row, "combine ");
  for (int bank = 0; bank < kNumBanks; bank++) {
    for (int link = 0; link < 2; link++) {
      for (int token = 0; token < 16; token++) {
        for (int k = 1; k < 4; k++) {
          const Offset at = offsets.unweighted_row<false>(bank, 0, token, k, false, link);
          pieces.push_back({at, at + 256, "further row"});
        }
      }
    }
  }
  expect_apart(pieces, window.bytes);
}

// One bit of a word of 32 says that there is a sum.
TEST(LlOffsets, UnweightedRowsOfARailHaveABitForEachChoice) {
  for (int topk : {31, 32}) {
    const Shape shape = Shape::make(2, 64, topk, 4);
    LlSizes sizes = sizes_for(shape, 256, 256);
    EXPECT_TRUE(LlOffsets::fits_unweighted_rows(LlWindow::make(2, sizes), shape, {256, 0, false}));
    sizes.rail_domain_size = sizes.link_size = 1;
    EXPECT_EQ(LlOffsets::fits_unweighted_rows(LlWindow::make(2, sizes), shape, {256, 0, false}), topk == 31);
  }
}

// Reserving for a shape serves every smaller one.
TEST(LlOffsets, SizesServeTheirShape) {
  for (int payload : {16, 144, 7168 * 2}) {
    const Shape shape = Shape::make(4, 16, 4, 32);
    const LlWindow window = LlWindow::make(4, sizes_for(shape, payload, payload));
    EXPECT_EQ(error_of([&] { LlOffsets::make(window, Kind::kDispatch, shape, {payload, 0, true}); }), "");
    EXPECT_EQ(error_of([&] { LlOffsets::make(window, Kind::kCombine, shape, {payload, 0, false}); }), "");
  }
}

}  // namespace
}  // namespace ep
