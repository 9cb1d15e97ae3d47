// Random schedules of low latency between domains, over the offsets, signals and expected values of layout/ll/rail.h:
// puts that land in any order and are read as they land, signals that know their own put alone, ranks and their blocks
// at any speed. Looks for what is overwritten before it was read, read before it has come, or changed before it was
// sent. Each mistake in the protocol's rules must show. With masks, ranks give up others in the middle of calls, go on
// without them, and come back.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/network/restart.h"
#include "layout/ll/rail.h"

namespace ep {
namespace {

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Mistake {
  kNone,
  kOneParity,
  kOneBankIn,
  kOneBankOut,
  kSignalFirst,
  kSkippedWait,
  kNoRest,
  // Of masks.
  kOneRecord,        // all links share it
  kStagedForMasked,  // what is for a masked rank is staged
  kUncounted,        // what was signalled is not counted
  kHastyCleaning,    // cleaning does not wait
};

struct Cell {
  uint64_t call = 0;
  bool is_read = true;
};

struct Put {
  int from, to;
  bool has_data;
  Offset target, source;
  uint64_t call;
  int context, signal;
  uint64_t add = 1;
};

using Step = std::function<bool()>;  // false: not yet
using Part = std::deque<Step>;       // of a kernel; blocks and warps that wait for nothing but what the steps say

class Schedule {
 public:
  Schedule(unsigned seed, int domains, int domain_size, int link_size, bool masks, Mistake mistake)
      : random_(seed), seed_(seed), topology_{domains * domain_size, domain_size}, masks_(masks), mistake_(mistake) {
    Carver carver;
    for (RailRegions& each : regions_) each = RailRegions::take(carver, topology_, link_size, masks, 4096, 1 << 16);
    ranks_.resize(topology_.num_ranks);
    for (Rank& each : ranks_) each.slowness = skewed(30);
    net_slowness_ = skewed(12);
    for (int i = 0; i < num_ranks() * num_ranks(); i++) links_.push_back(skewed(40));
  }

  void run(int calls) {
    for (Rank& each : ranks_) each.last_call = each.calls + calls;
    run_calls();
  }
  // The ranks of the last domain pause in the middle. The others give them up, and each side goes on by itself.
  void run_apart(int calls) {
    const int late = topology_.num_domains() - 1;
    for (int r = 0; r < num_ranks(); r++) {
      ranks_[r].last_call = ranks_[r].calls + (topology_.domain_of(r) == late ? calls / 2 : calls);
    }
    late_ = late;
    run_calls();
    late_ = -1;
    const int more = 1 + static_cast<int>(below(calls));
    for (int r = 0; r < num_ranks(); r++) {
      if (topology_.domain_of(r) == late) ranks_[r].last_call += more;
    }
    run_calls();
  }
  // As Group::clean_masks() does, and network/restart.cuh.
  void clean_masks() {
    uint64_t latest[kNumKinds] = {0, 0};
    int calls = 0;
    for (Rank& each : ranks_) {
      for (int k = 0; k < kNumKinds; k++) latest[k] = std::max(latest[k], each.epoch[k] + 1);
      calls = std::max(calls, each.calls);
    }
    for (int r = 0; r < num_ranks(); r++) make_up(r, latest);
    cleaned_++;
    while (mistake_ != Mistake::kHastyCleaning && !are_clean(latest)) {
      if (net_.empty()) throw Broken("signals are missing when masks are cleaned");
      land(below(net_.size()));
    }
    if (mistake_ != Mistake::kHastyCleaning && !net_.empty()) throw Broken("something is under way after cleaning");
    for (Rank& each : ranks_) {
      std::copy_n(latest, kNumKinds, each.epoch);
      each.calls = calls;  // the same calls follow on all ranks
      each.masked.clear();
      each.told.clear();
      each.slots.clear();
      for (auto& [at, cell] : each.memory) cell.is_read = true;
      for (auto& [of, credit] : each.credits) credit = latest[of.first];
    }
  }

 private:
  struct Rank {
    uint64_t epoch[kNumKinds] = {0, 0};  // of the running call
    int calls = 0, last_call = 0;
    bool is_open = false;
    std::set<int> masked, masked_when_opened, told;  // ranks of other domains
    std::map<std::pair<int, int>, uint64_t> posted;  // to (context, signal of the link)
    std::vector<Part> parts;
    std::deque<Step> stores;                               // for ranks of the domain, not there yet
    std::map<Offset, Cell> memory;                         // staging, and what came over the network
    std::map<std::pair<int, int>, uint64_t> signals;       // (context, signal)
    std::map<std::pair<int, int>, uint64_t> credits;       // (kind, rank)
    std::map<std::tuple<int, int, int, int>, Cell> slots;  // (kind, bank, source, channel), in band
    unsigned slowness = 1;
  };

  void run_calls() {
    for (int r = 0; r < num_ranks(); r++) {
      if (ranks_[r].calls < ranks_[r].last_call) begin_call(r);
    }
    for (int steps = 0; !has_ended(); steps++) {
      if (steps > 4'000'000) throw Broken("no progress");
      if (!net_.empty() && below(net_slowness_) == 0) land(below(net_.size()));
      const int r = static_cast<int>(below(num_ranks()));
      if (!ranks_[r].stores.empty() && below(3) == 0) store_any(r);
      if (ranks_[r].parts.empty() || below(ranks_[r].slowness) != 0) continue;
      step(r);
    }
  }

  int num_ranks() const { return topology_.num_ranks; }
  unsigned below(size_t n) { return static_cast<unsigned>(random_() % n); }
  unsigned skewed(unsigned most) { return 1 + below(1 + below(most)); }  // mostly small
  bool has_ended() const {
    for (const Rank& each : ranks_) {
      if (!each.parts.empty()) return false;
    }
    return true;
  }
  LlRail rail_of(int rank, Kind kind) const {
    return LlRail::make(regions_[static_cast<int>(kind)], kind, topology_, rank, 64);
  }
  // Whether anything of the channel goes from one rank by the other's link; the record always does.
  bool has_rows(Kind kind, uint64_t epoch, int from, int to, int channel) const {
    std::mt19937 draw(seed_ * 977 + static_cast<unsigned>(epoch * 64 + from * 16 + to * 4 + channel * 1009) +
                      static_cast<unsigned>(kind));
    return channel == 0 || draw() % 3 != 0;
  }

  // ---- The network

  void land(size_t i) {
    Put& put = net_[i];
    if (below(links_[put.from * num_ranks() + put.to]) != 0) return;
    const bool is_slow = topology_.domain_of(put.from) == late_ || topology_.domain_of(put.to) == late_;
    if (is_slow && below(20) != 0) return;
    Rank& to = ranks_[put.to];
    if (mistake_ == Mistake::kSignalFirst && put.signal >= 0) {
      to.signals[{put.context, put.signal}] += put.add;
      put.signal = -1;
      if (put.has_data) return;
    }
    if (put.has_data) {
      if (ranks_[put.from].memory[put.source].call != put.call) throw Broken("a source changed under its put");
      Cell& cell = to.memory[put.target];
      if (!cell.is_read) throw Broken("a put overwrote what was not read");
      cell = {put.call, false};
      put.has_data = false;
      if (put.signal >= 0 && below(2) == 0) return;  // the signal comes later
    }
    if (put.signal >= 0) to.signals[{put.context, put.signal}] += put.add;
    net_.erase(net_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  int parity(uint64_t epoch) const { return mistake_ == Mistake::kOneParity ? 0 : bank_of(epoch); }
  int bank_in(uint64_t epoch) const { return mistake_ == Mistake::kOneBankIn ? 0 : bank_of(epoch); }
  int bank_out(uint64_t epoch) const { return mistake_ == Mistake::kOneBankOut ? 0 : bank_of(epoch); }

  Step post(int r, Kind kind, uint64_t epoch, int link, int channel) {
    return [=, this] {
      const LlRail rail = rail_of(r, kind);
      const int to = rail.peer(link), row = channel * 8;
      const int record = mistake_ == Mistake::kOneRecord ? 0 : link;
      const Offset source =
          channel == 0 ? rail.own_record(bank_out(epoch), record) : rail.row_to(bank_out(epoch), link, row);
      if (ranks_[r].masked_when_opened.count(to) != 0) {
        tell(r, to);
        if (mistake_ == Mistake::kStagedForMasked) ranks_[r].memory[source].call = epoch;
        return true;
      }
      ranks_[r].posted[{rail.context(channel), rail.signal(parity(epoch), link, channel)}]++;
      const Offset target =
          channel == 0 ? rail.record_from(bank_in(epoch), rail.link) : rail.row_from(bank_in(epoch), rail.link, row);
      const bool has_data = has_rows(kind, epoch, r, to, channel);
      if (has_data) ranks_[r].memory[source].call = epoch;
      net_.push_back({r, to, has_data, target, source, epoch, rail.context(channel),
                      rail.signal(parity(epoch), rail.link, channel)});
      return true;
    };
  }
  bool has_come(int r, Kind kind, uint64_t epoch, int link, int channel) {
    const LlRail rail = rail_of(r, kind);
    const uint64_t seen = ranks_[r].signals[{rail.context(channel), rail.signal(parity(epoch), link, channel)}];
    return seen >= (mistake_ == Mistake::kOneParity ? epoch : LlRail::expected(epoch));
  }
  Step take(int r, Kind kind, uint64_t epoch, int link, int channel) {
    return [=, this] {
      const bool skips = mistake_ == Mistake::kSkippedWait && channel == 2;
      const LlRail rail = rail_of(r, kind);
      if (!skips && !has_come(r, kind, epoch, link, channel)) return leaves_out(r, rail.peer(link));
      if (is_masked(r, rail.peer(link))) return true;
      if (!has_rows(kind, epoch, rail.peer(link), r, channel)) return true;
      Cell& cell = ranks_[r].memory[channel == 0 ? rail.record_from(bank_in(epoch), link)
                                                 : rail.row_from(bank_in(epoch), link, channel * 8)];
      if (cell.call != epoch) throw Broken("read call " + std::to_string(cell.call) + " for " + std::to_string(epoch));
      cell.is_read = true;
      return true;
    };
  }
  Step await(int r, Kind kind, uint64_t epoch, int link, int channel) {
    return [=, this] { return has_come(r, kind, epoch, link, channel) || leaves_out(r, rail_of(r, kind).peer(link)); };
  }

  // ---- Masks

  bool is_masked(int r, int peer) const { return ranks_[r].masked.count(peer) != 0; }
  // Whether a wait for a rank of another domain is over: it is masked, has masked this one, or is given up now.
  bool leaves_out(int r, int peer) {
    if (!masks_ || is_masked(r, peer)) return masks_;
    const LlRail rail = rail_of(r, Kind::kDispatch);
    const bool has_left = ranks_[r].signals[{LlRail::kMaskContext, rail.mask_signal(peer)}] > cleaned_;
    const bool is_late = topology_.domain_of(peer) == late_;
    if (!has_left && below(is_late ? 100 : 20'000) != 0) return false;
    ranks_[r].masked.insert(peer);
    if (!has_left) tell(r, peer);
    return true;
  }
  void tell(int r, int peer) {
    if (!ranks_[r].told.insert(peer).second) return;
    const LlRail rail = rail_of(r, Kind::kDispatch);
    net_.push_back({r, peer, false, 0, 0, ~0ull, LlRail::kMaskContext, rail.mask_signal(r)});
  }
  // What `body(context, own word, peer's word, expected)` is called for: all words between a rank and its links.
  template <class Body>
  void for_all_words(int r, const uint64_t (&epochs)[kNumKinds], Body body) {
    for (int k = 0; k < kNumKinds; k++) {
      const LlRail rail = rail_of(r, static_cast<Kind>(k));
      for (int i = 0; i < rail.others(); i++) {
        for (int channel = 0; channel < rail.channels(); channel++) {
          for (int parity = 0; parity < kNumBanks; parity++) {
            const int link = rail.other(i);
            body(rail, link, rail.context(channel), rail.signal(parity, link, channel),
                 rail.signal(parity, rail.link, channel), signals_after(epochs[k], parity));
          }
        }
      }
    }
  }
  void make_up(int r, const uint64_t (&epochs)[kNumKinds]) {
    for_all_words(r, epochs, [&](const LlRail& rail, int link, int context, int own, int theirs, uint64_t expected) {
      uint64_t& posted = ranks_[r].posted[{context, own}];
      if (mistake_ == Mistake::kUncounted) posted = std::min(posted, expected - 1);
      const uint64_t missing = expected - posted;
      if (missing > 0) net_.push_back({r, rail.peer(link), false, 0, 0, ~0ull, context, theirs, missing});
      posted = expected;
    });
    const LlRail rail = rail_of(r, Kind::kDispatch);
    for (int i = 0; i < rail.others(); i++) tell(r, rail.peer(rail.other(i)));
  }
  bool are_clean(const uint64_t (&epochs)[kNumKinds]) {
    bool are = true;
    for (int r = 0; r < num_ranks(); r++) {
      for_all_words(r, epochs, [&](const LlRail& rail, int link, int context, int own, int, uint64_t expected) {
        const uint64_t masks = ranks_[r].signals[{LlRail::kMaskContext, rail.mask_signal(rail.peer(link))}];
        are = are && ranks_[r].signals[{context, own}] >= expected && masks >= cleaned_;
      });
    }
    return are;
  }

  // ---- The domain

  Step deliver(int r, Kind kind, uint64_t epoch, int to, int source, int channel) {
    return [=, this] {
      if (is_masked(r, source)) return true;
      ranks_[r].stores.push_back([=, this] {
        Cell& cell = ranks_[to].slots[{static_cast<int>(kind), bank_of(epoch), source, channel}];
        if (!cell.is_read) throw Broken("a row overwrote one that was not read");
        cell = {epoch, false};
        return true;
      });
      return true;
    };
  }
  Step receive(int r, Kind kind, uint64_t epoch, int source, int channel) {
    return [=, this] {
      Cell& cell = ranks_[r].slots[{static_cast<int>(kind), bank_of(epoch), source, channel}];
      if (is_masked(r, source)) return true;
      if (cell.is_read) return false;
      if (cell.call != epoch) throw Broken("a receiver found another call's row");
      cell.is_read = true;
      return true;
    };
  }
  void store_any(int r) {
    auto& stores = ranks_[r].stores;
    const size_t i = below(stores.size());
    stores[i]();
    stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
  }

  // ---- Calls

  void begin_call(int r) {
    Rank& rank = ranks_[r];
    // The same order on all ranks: now and then several of a kind.
    const Kind kind =
        (seed_ / 7 + static_cast<unsigned>(rank.calls) * (seed_ % 3 + 1)) % 5 < 3 ? Kind::kDispatch : Kind::kCombine;
    const uint64_t epoch = ++rank.epoch[static_cast<int>(kind)];
    rank.calls++;
    rank.is_open = false;
    const int first = topology_.domain_of(r) * topology_.domain_size, last = first + topology_.domain_size;
    const Step is_open = [&rank] { return rank.is_open; };
    Part opener;
    for (int q = first; q < last; q++) {
      opener.push_back([=, this] {
        ranks_[r].stores.push_back([=, this] {
          uint64_t& credit = ranks_[q].credits[{static_cast<int>(kind), r}];
          credit = std::max(credit, epoch);
          return true;
        });
        return true;
      });
    }
    for (int q = first; q < last; q++) {
      opener.push_back([=, this] { return ranks_[r].credits[{static_cast<int>(kind), q}] + 1 >= epoch; });
    }
    opener.push_back([&rank] {
      rank.masked_when_opened = rank.masked;
      return rank.is_open = true;
    });
    rank.parts.push_back(opener);
    if (kind == Kind::kDispatch) {
      add_dispatch(r, epoch, is_open, first, last);
    } else {
      add_combine(r, epoch, is_open, first, last);
    }
  }

  // Where links serve one rank, receivers take rows from where they came, and forwarders the record alone.
  void add_dispatch(int r, uint64_t epoch, const Step& is_open, int first, int last) {
    const Kind kind = Kind::kDispatch;
    Rank& rank = ranks_[r];
    const LlRail rail = rail_of(r, kind);
    const bool places_rows = rail.link_size == 1 && !masks_;
    Part rest{is_open};
    for (int channel = 0; channel < rail.channels(); channel++) {
      Part sender{is_open}, local{is_open};
      for (int i = 0; i < rail.others(); i++) sender.push_back(post(r, kind, epoch, rail.other(i), channel));
      for (int q = first; q < last; q++) local.push_back(deliver(r, kind, epoch, q, r, channel));
      rank.parts.push_back(sender);
      rank.parts.push_back(local);
      for (int i = 0; i < rail.others(); i++) {
        const int link = rail.other(i), source = rail.peer(link), served = rail.first_of(rail.link);
        Part taker{is_open, channel == 0 ? is_open : await(r, kind, epoch, link, 0),
                   take(r, kind, epoch, link, channel)};
        if (places_rows && channel > 0) {
          if (has_rows(kind, epoch, source, r, channel)) rank.parts.push_back(taker);
          rest.push_back(await(r, kind, epoch, link, channel));
          continue;
        }
        for (int q = served; q < served + rail.link_size; q++) {
          taker.push_back(deliver(r, kind, epoch, q, source, channel));
        }
        rank.parts.push_back(taker);
      }
    }
    for (int source = 0; source < num_ranks(); source++) {
      const bool are_placed = places_rows && rail.is_far(source);
      Part receiver{is_open};
      for (int channel = 0; channel < (are_placed ? 1 : rail.channels()); channel++) {
        receiver.push_back(receive(r, kind, epoch, source, channel));
      }
      rank.parts.push_back(receiver);
    }
    if (mistake_ != Mistake::kNoRest) rank.parts.push_back(rest);
  }

  // A partial sum for another domain's rank lies at the rank of the same place among those of the own link, in the slot
  // of the own place among those of the home rank's link. Where links serve one rank, a call that is whole adds up the
  // rows where they lie; a split one does not.
  void add_combine(int r, uint64_t epoch, const Step& is_open, int first, int last) {
    const Kind kind = Kind::kCombine;
    Rank& rank = ranks_[r];
    const LlRail rail = rail_of(r, kind);
    const bool adds_rows = rail.link_size == 1 && !masks_ && (seed_ / 2 + epoch) % 3 != 0;
    Part record{is_open}, sender{is_open};
    for (int i = 0; i < rail.others(); i++) record.push_back(post(r, kind, epoch, rail.other(i), 0));
    for (int home = 0; home < num_ranks(); home++) {
      const bool is_near = first <= home && home < last;
      if (adds_rows && !is_near) continue;
      const int target = rail.first_of(rail.link) + home % rail.link_size;
      const int source = rail.first_of(rail.link_of(home)) + r % rail.link_size;
      sender.push_back(deliver(r, kind, epoch, is_near ? home : target, is_near ? r : source, 1));
    }
    rank.parts.push_back(record);
    rank.parts.push_back(sender);
    Part rest{is_open};
    for (int i = 0; i < rail.others(); i++) {
      const int link = rail.other(i);
      rank.parts.push_back({is_open, take(r, kind, epoch, link, 0)});
      Part adder{is_open};
      for (int place = 0; place < (adds_rows ? 0 : rail.link_size); place++) {
        adder.push_back(receive(r, kind, epoch, rail.first_of(link) + place, 1));
      }
      for (int channel = 1; channel < rail.channels(); channel++) adder.push_back(post(r, kind, epoch, link, channel));
      rank.parts.push_back(adder);
      for (int channel = 1; channel < rail.channels(); channel++) {
        // Nobody at home waits for a channel without rows, but at the end of the call.
        if (has_rows(kind, epoch, rail.peer(link), r, channel)) {
          rank.parts.push_back({is_open, take(r, kind, epoch, link, channel)});
        }
        rest.push_back(await(r, kind, epoch, link, channel));
      }
    }
    if (mistake_ != Mistake::kNoRest) rank.parts.push_back(rest);
    for (int q = first; q < last; q++) rank.parts.push_back({is_open, receive(r, kind, epoch, q, 1)});
  }

  void step(int r) {
    Rank& rank = ranks_[r];
    const size_t i = below(rank.parts.size());
    Part& part = rank.parts[i];
    if (!part.front()()) return;
    part.pop_front();
    if (!part.empty()) return;
    rank.parts.erase(rank.parts.begin() + static_cast<std::ptrdiff_t>(i));
    if (!rank.parts.empty()) return;
    while (!rank.stores.empty()) store_any(r);  // the end of a kernel; puts stay under way
    for (const Put& put : net_) {
      if (put.to == r && put.call <= rank.epoch[put.context / kRailContexts] && !is_masked(r, put.from)) {
        throw Broken("a call ended over what a peer had sent before");
      }
    }
    if (rank.calls < rank.last_call) begin_call(r);
  }

  std::mt19937 random_;
  const unsigned seed_;
  const Topology topology_;
  const bool masks_;
  const Mistake mistake_;
  RailRegions regions_[kNumKinds];
  std::vector<Rank> ranks_;
  std::vector<Put> net_;
  unsigned net_slowness_ = 1;
  std::vector<unsigned> links_;  // how slow each is
  int late_ = -1;                // domain
  uint64_t cleaned_ = 0;
};

// What went wrong first, of so many schedules; empty: nothing.
std::string first_error(Mistake mistake, unsigned schedules, int domains, int domain_size, int link_size) {
  for (unsigned seed = 0; seed < schedules; seed++) {
    try {
      Schedule(seed, domains, domain_size, link_size, false, mistake).run(12);
    } catch (const Broken& error) {
      return "seed " + std::to_string(seed) + ": " + error.what();
    }
  }
  return "";
}

// The same over the mesh with masks.
std::string first_error_of_masks(Mistake mistake, unsigned schedules, int domains, int domain_size) {
  for (unsigned seed = 0; seed < schedules; seed++) {
    try {
      Schedule schedule(seed, domains, domain_size, 1, true, mistake);
      for (int i = 0; i < 3; i++) {
        schedule.run(3);
        schedule.run_apart(10);
        schedule.clean_masks();
      }
      schedule.run(3);
    } catch (const Broken& error) {
      return "seed " + std::to_string(seed) + ": " + error.what();
    }
  }
  return "";
}

TEST(RailSchedules, AreRight) {
  EXPECT_EQ(first_error(Mistake::kNone, 60, 2, 1, 1), "");
  EXPECT_EQ(first_error(Mistake::kNone, 40, 2, 2, 2), "");
  EXPECT_EQ(first_error(Mistake::kNone, 20, 3, 2, 2), "");
  EXPECT_EQ(first_error(Mistake::kNone, 20, 4, 1, 1), "");
}

TEST(RailSchedules, OfTheMeshAreRight) {
  EXPECT_EQ(first_error(Mistake::kNone, 40, 2, 2, 1), "");
  EXPECT_EQ(first_error(Mistake::kNone, 20, 3, 2, 1), "");
}

TEST(RailSchedules, OfMasksAreRight) {
  EXPECT_EQ(first_error_of_masks(Mistake::kNone, 60, 2, 1), "");
  EXPECT_EQ(first_error_of_masks(Mistake::kNone, 40, 2, 2), "");
  EXPECT_EQ(first_error_of_masks(Mistake::kNone, 20, 3, 2), "");
  EXPECT_EQ(first_error_of_masks(Mistake::kNone, 20, 4, 1), "");
}

TEST(RailSchedules, OfMasksShowEveryMistake) {
  const std::pair<Mistake, const char*> mistakes[] = {
      {Mistake::kOneRecord, "one record for all links"},
      {Mistake::kStagedForMasked, "rows are staged for masked ranks"},
      {Mistake::kUncounted, "signals are not counted"},
      {Mistake::kHastyCleaning, "cleaning does not wait"},
  };
  for (const auto& [mistake, name] : mistakes) {
    const std::string found = first_error_of_masks(mistake, 300, 3, 1);
    EXPECT_NE(found, "") << name;
    std::printf("%s: %s\n", name, found.c_str());
  }
}

TEST(RailSchedules, ShowEveryMistake) {
  const std::pair<Mistake, const char*> mistakes[] = {
      {Mistake::kOneParity, "one parity"},           {Mistake::kOneBankIn, "one bank of what comes"},
      {Mistake::kOneBankOut, "one bank of staging"}, {Mistake::kSignalFirst, "signal first"},
      {Mistake::kSkippedWait, "skipped wait"},       {Mistake::kNoRest, "no wait for the rest"},
  };
  for (const auto& [mistake, name] : mistakes) {
    for (int link_size : {2, 1}) {
      const std::string found = first_error(mistake, 200, 2, 2, link_size);
      EXPECT_NE(found, "") << name;
      std::printf("%s, links to %d: %s\n", name, link_size, found.c_str());
    }
  }
}

}  // namespace
}  // namespace ep
