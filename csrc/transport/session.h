// One collective of the hosts, as making a buffer. Its records carry what no earlier try knew, so that nothing which a
// store or a callback still has of one is believed, and ranks that are at different steps hear of it at once.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/process.h"
#include "transport/transport.h"

namespace ep {

enum class Collective : uint32_t { kMakeBuffer = 1, kCleanMasks = 2, kReplaceRank = 3 };

class Session : public Bootstrap {
 public:
  // Collective: every rank draws a token, and all gather them. The records of later steps repeat a digest of all
  // tokens, and so of the receiver's own, which is new. `bootstrap` must outlive the session.
  Session(Bootstrap& bootstrap, Collective collective);
  int rank() const override { return bootstrap_.rank(); }
  int num_ranks() const override { return bootstrap_.num_ranks(); }
  int rank_at(int seat) const override { return bootstrap_.rank_at(seat); }
  // Throws kMismatch if a record is of another try, another step or another collective.
  std::vector<std::string> allgather(std::string_view mine) override;

 private:
  // Before the bytes of a record. This library's other versions must be able to read it.
  struct Head {
    char magic[8] = {'n', 'c', 'c', 'l', '_', 'e', 'p', '1'};
    uint32_t rank, step;
    Collective collective;
    uint32_t reserved = 0;
    Token session;  // step 0: the sender's token; then the digest of all
  };
  [[noreturn]] void refuse(int seat, size_t bytes) const;
  Head checked_head(int seat, const std::string& record) const;

  Bootstrap& bootstrap_;
  const Collective collective_;
  uint32_t step_ = 0;
  Token session_ = random_token();
};

}  // namespace ep
