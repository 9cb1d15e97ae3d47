#include <string>

#include "base/check.h"
#include "runtime/failure_node.h"
#include "runtime/group.h"

namespace ep {
namespace {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kDispatchAllWeights:
      return "dispatch with all weights";
    case Operation::kCombine:
      return "combine";
    case Operation::kCombineWeighted:
      return "combine with weights of the home rank";
    case Operation::kCombineUnweighted:
      return "split combine with weights of the home rank";
    case Operation::kCombineWeights:
      return "combine of weights";
    case Operation::kHtDispatch:
      return "high-throughput dispatch";
    case Operation::kHtRoute:
      return "counts of a high-throughput dispatch";
    case Operation::kHtSend:
      return "rows of a high-throughput dispatch";
    case Operation::kHtCached:
      return "cached high-throughput dispatch";
    case Operation::kHtCombine:
      return "high-throughput combine";
    case Operation::kHtCombineWeighted:
      return "high-throughput combine with weights of the home rank";
    case Operation::kHtCombineWeights:
      return "high-throughput combine of weights";
  }
  return "unknown operation";
}

template <class Enum>
Enum field(const OpHeader& header, int shift, int max) {
  const int value = static_cast<int>(header.word(OpHeader::kOperation) >> shift & 0xFF);
  return static_cast<Enum>(value > max ? max : value);
}

std::string missing_ranks(const RankMask& missing) {
  constexpr int kRun = 8;  // so many ranks and more are told by the first and the last
  std::string text;
  for (int r = 0; r < kMaxRanks; r++) {
    if (!missing.has(r)) continue;
    int last = r;
    while (last + 1 < kMaxRanks && missing.has(last + 1)) last++;
    text += concat(text.empty() ? "" : ", ", r);
    if (last - r < kRun) continue;
    text += concat(" to ", last);
    r = last;
  }
  return text;
}

// By its tag, as a handle has it.
std::string dispatch_of(uint64_t tag) { return tag == 0 ? "no dispatch" : concat("dispatch ", tag - 1); }

std::string waited(const Failure& failure, int rank, double timeout_seconds) {
  if (failure.code == Failure::kInterrupted) return concat("rank ", rank, " was interrupted while it waited");
  if (failure.code == Failure::kDestroyed) {
    return concat("the buffer was destroyed by another thread while rank ", rank, " waited");
  }
  if (failure.waited_seconds == 0) return concat("rank ", rank, " waited ", timeout_seconds, " s");
  return concat("rank ", rank, " waited ", failure.waited_seconds, " s, with a timeout that was changed to ",
                timeout_seconds, " s meanwhile,");
}

}  // namespace

std::string describe(const OpHeader& header) {
  const auto operation = static_cast<Operation>(header.word(OpHeader::kOperation) & 0xFF);
  std::string text =
      concat(name_of(operation), "(", name_of(field<DType>(header, 8, 7)), ", hidden ", header.word(OpHeader::kHidden),
             ", top-", header.word(OpHeader::kTopk), ", ", header.word(OpHeader::kNumExperts), " experts, max_tokens ",
             header.word(OpHeader::kMaxTokens));
  const bool is_dispatch = operation == Operation::kDispatch || operation == Operation::kDispatchAllWeights ||
                           (operation >= Operation::kHtDispatch && operation <= Operation::kHtCached);
  if (is_dispatch) {
    const uint32_t metadata = header.word(OpHeader::kScaleBytes), order = metadata >> OpHeader::kMetadataBits;
    text += concat(", quant ", name_of(field<Quant>(header, 16, static_cast<int>(Quant::kNvfp4Swizzled))), ", ",
                   metadata & ((1u << OpHeader::kMetadataBits) - 1), " bytes of scales a row");
    if (order != 0) text += concat(" and extra tensors, order ", order);
  } else {
    text += concat(", wire ", name_of(field<DType>(header, 24, static_cast<int>(DType::kLogFmt))));
    if (is_high_throughput(header) && header.word(OpHeader::kScaleBytes) != 0 &&
        operation != Operation::kHtCombineWeights) {
      text += ", with a scalar for each choice, as gradients of weights are";
    }
  }
  return text + ")";
}

ErrorKind kind_of(const Failure& failure) {
  switch (failure.code) {
    case Failure::kOtherOp:
    case Failure::kOtherHandle:
      return ErrorKind::kMismatch;
    case Failure::kHandle:
      return ErrorKind::kInvalidArgument;
    case Failure::kDestroyed:
      return ErrorKind::kInvalidUsage;
    default:
      return ErrorKind::kTimeout;
  }
}

std::string describe(const Failure& failure, int rank, double timeout_seconds) {
  const std::string kind =
      concat(failure.is_ht ? "high-throughput " : "", failure.kind == Kind::kDispatch ? "dispatch" : "combine");
  if (failure.code == Failure::kOtherOp) {
    return concat("ranks made different calls in ", kind, " ", failure.epoch, ": rank ", rank, " called ",
                  describe(failure.mine), ", rank ", failure.peer, " called ", describe(failure.theirs), "; ",
                  kOrderQuestion);
  }
  if (failure.code == Failure::kOtherHandle) {
    return concat("ranks gave handles of different dispatches to ", kind, " ", failure.epoch, ": rank ", rank,
                  " that of ", dispatch_of(failure.expected), ", rank ", failure.peer, " that of ",
                  dispatch_of(failure.seen));
  }
  if (failure.code == Failure::kHandle) {
    return concat("the handle that rank ", rank, " gave to ", kind, " ", failure.epoch,
                  " is not of these sizes, or was changed: row ", failure.seen, " of rank ", failure.peer,
                  ", which has ", failure.expected, "; ", kOrderQuestion);
  }
  if (failure.awaited == Awaited::kRowSignal) {
    return concat(waited(failure, rank, timeout_seconds), " for the signal of row block ", failure.expected >> 32,
                  failure.peer < 0 ? "" : concat(" of local expert ", failure.peer, "'s rows"), " in ", kind, " ",
                  failure.epoch, " (expected ", static_cast<uint32_t>(failure.expected), ", saw ",
                  static_cast<int32_t>(failure.seen), ")");
  }
  std::string text =
      concat(waited(failure, rank, timeout_seconds), " for the ", name_of(failure.awaited), " of ",
             failure.peer < 0 ? "all ranks" : concat("rank ", failure.peer), " in ", kind, " ", failure.epoch);
  if (failure.expected != failure.seen) text += concat(" (expected ", failure.expected, ", saw ", failure.seen, ")");
  if (failure.missing.any()) {
    text += concat("; nothing of this call was heard from rank ", missing_ranks(failure.missing));
  }
  return text;
}

std::string node_of(const Failure& failure, const Topology& topology) {
  if (topology.num_domains() == 1 || failure.peer < 0 || failure.awaited == Awaited::kRowSignal) return "";
  const int node = topology.domain_of(failure.peer), first = node * topology.domain_size;
  const std::string text = concat("; rank ", failure.peer, " is on node ", node);
  return failure.missing.has_all(first, topology.domain_size) ? text + ", of which no rank was heard" : text;
}

}  // namespace ep
