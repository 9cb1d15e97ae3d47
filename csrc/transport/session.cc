#include "transport/session.h"

#include <cstring>

#include "base/check.h"

namespace ep {
namespace {

constexpr const char* kWayOut = "; try again on all ranks, or make a new group";

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kMakeBuffer:
      return "making a buffer";
    case Collective::kCleanMasks:
      return "cleaning masks";
    case Collective::kReplaceRank:
      return "replacing a rank";
  }
  return "an unknown collective";
}

// Of random words, in the order of the ranks.
void mix(Token& digest, const Token& token) {
  for (int i = 0; i < 2; i++) {
    uint64_t word = (digest.words[i] ^ token.words[i]) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(i);
    digest.words[i] = word ^ word >> 29;
  }
}

}  // namespace

Session::Session(Bootstrap& bootstrap, Collective collective) : bootstrap_(bootstrap), collective_(collective) {
  Head mine{.rank = static_cast<uint32_t>(own_rank()), .step = 0, .collective = collective_, .session = session_};
  const auto records = bootstrap_.allgather({reinterpret_cast<const char*>(&mine), sizeof mine});
  Token digest;
  for (size_t r = 0; r < records.size(); r++) {
    mix(digest, checked_head(static_cast<int>(r), records[r]).session);
    if (records[r].size() != sizeof mine) refuse(static_cast<int>(r), records[r].size());
  }
  session_ = digest;
  step_ = 1;
}

std::vector<std::string> Session::allgather(std::string_view mine) {
  const Head head{
      .rank = static_cast<uint32_t>(own_rank()), .step = step_, .collective = collective_, .session = session_};
  std::string record(reinterpret_cast<const char*>(&head), sizeof head);
  record += mine;
  auto records = bootstrap_.allgather(record);
  for (size_t r = 0; r < records.size(); r++) {
    const Head theirs = checked_head(static_cast<int>(r), records[r]);
    if (theirs.session != session_) {
      raise(ErrorKind::kMismatch, "rank ", rank_at(static_cast<int>(r)), " answers another try than this one of rank ",
            own_rank(), " at step ", step_, " of ", name_of(collective_), kWayOut);
    }
    records[r].erase(0, sizeof(Head));
  }
  step_++;
  return records;
}

void Session::refuse(int seat, size_t bytes) const {
  raise(ErrorKind::kMismatch, "rank ", rank_at(seat), " sent ", bytes, " bytes that are no record of ",
        name_of(collective_), ": it has another version of nccl_ep, or calls the group's allgather for something else");
}

Session::Head Session::checked_head(int seat, const std::string& record) const {
  const int rank = rank_at(seat), me = own_rank();
  Head head{};
  const Head known{};
  if (record.size() >= sizeof head) std::memcpy(&head, record.data(), sizeof head);
  if (record.size() < sizeof head || std::memcmp(head.magic, known.magic, sizeof head.magic) != 0) {
    refuse(seat, record.size());
  }
  if (head.rank != static_cast<uint32_t>(rank)) {
    raise(ErrorKind::kMismatch, "the record of rank ", rank, " is that of rank ", head.rank,
          ": allgather must return the ranks' bytes in rank order");
  }
  if (head.collective != collective_) {
    raise(ErrorKind::kMismatch, "rank ", rank, " is ", name_of(head.collective), ", rank ", me, " is ",
          name_of(collective_));
  }
  if (head.step != step_) {
    raise(ErrorKind::kMismatch, "rank ", rank, " is at step ", head.step, " of ", name_of(collective_), ", rank ", me,
          " at step ", step_, ": one of them has begun anew", kWayOut);
  }
  if (rank == me && head.session != session_) {
    raise(ErrorKind::kMismatch, "the record of rank ", me, " is one of an earlier try, not what it sent at step ",
          step_, " of ", name_of(collective_), kWayOut);
  }
  return head;
}

}  // namespace ep
