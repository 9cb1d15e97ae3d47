// Random schedules of low latency between domains, over the offsets, signals and expected values of layout/ll/rail.h:
// puts that land in any order and are read as they land, signals that know their own put alone, ranks and their blocks
// at any speed. Looks for what is overwritten before it was read, read before it has come, or changed before it was
// sent. Each mistake in the protocol's rules must show.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "layout/ll/rail.h"

namespace ep {
namespace {

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Mistake { kNone, kOneParity, kOneBankIn, kOneBankOut, kSignalFirst, kSkippedWait, kNoRest };

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
};

using Step = std::function<bool()>;  // false: not yet
using Part = std::deque<Step>;       // of a kernel; blocks and warps that wait for nothing but what the steps say

class Schedule {
 public:
  Schedule(unsigned seed, int domains, int domain_size, int link_size, Mistake mistake)
      : random_(seed), seed_(seed), topology_{domains * domain_size, domain_size}, mistake_(mistake) {
    Carver carver;
    for (RailRegions& each : regions_) each = RailRegions::take(carver, topology_, link_size, 4096, 1 << 16);
    ranks_.resize(topology_.num_ranks);
    for (Rank& each : ranks_) each.slowness = skewed(30);
    net_slowness_ = skewed(12);
    for (int i = 0; i < num_ranks() * num_ranks(); i++) links_.push_back(skewed(40));
  }

  void run(int calls) {
    calls_ = calls;
    for (int r = 0; r < num_ranks(); r++) begin_call(r);
    for (int steps = 0; !has_ended(); steps++) {
      if (steps > 4'000'000) throw Broken("no progress");
      if (!net_.empty() && below(net_slowness_) == 0) land(below(net_.size()));
      const int r = static_cast<int>(below(num_ranks()));
      if (!ranks_[r].stores.empty() && below(3) == 0) store_any(r);
      if (ranks_[r].parts.empty() || below(ranks_[r].slowness) != 0) continue;
      step(r);
    }
  }

 private:
  struct Rank {
    uint64_t epoch[kNumKinds] = {0, 0};  // of the running call
    int calls = 0;
    bool is_open = false;
    std::vector<Part> parts;
    std::deque<Step> stores;                               // for ranks of the domain, not there yet
    std::map<Offset, Cell> memory;                         // staging, and what came over the network
    std::map<std::pair<int, int>, uint64_t> signals;       // (context, signal)
    std::map<std::pair<int, int>, uint64_t> credits;       // (kind, rank)
    std::map<std::tuple<int, int, int, int>, Cell> slots;  // (kind, bank, source, channel), in band
    unsigned slowness = 1;
  };

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
    Rank& to = ranks_[put.to];
    if (mistake_ == Mistake::kSignalFirst && put.signal >= 0) {
      to.signals[{put.context, put.signal}]++;
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
    if (put.signal >= 0) to.signals[{put.context, put.signal}]++;
    net_.erase(net_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  int parity(uint64_t epoch) const { return mistake_ == Mistake::kOneParity ? 0 : bank_of(epoch); }
  int bank_in(uint64_t epoch) const { return mistake_ == Mistake::kOneBankIn ? 0 : bank_of(epoch); }
  int bank_out(uint64_t epoch) const { return mistake_ == Mistake::kOneBankOut ? 0 : bank_of(epoch); }

  Step post(int r, Kind kind, uint64_t epoch, int link, int channel) {
    return [=, this] {
      const LlRail rail = rail_of(r, kind);
      const int to = rail.peer(link), row = channel * 8;
      const Offset source = channel == 0 ? rail.own_record(bank_out(epoch)) : rail.row_to(bank_out(epoch), link, row);
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
      if (!skips && !has_come(r, kind, epoch, link, channel)) return false;
      const LlRail rail = rail_of(r, kind);
      if (!has_rows(kind, epoch, rail.peer(link), r, channel)) return true;
      Cell& cell = ranks_[r].memory[channel == 0 ? rail.record_from(bank_in(epoch), link)
                                                 : rail.row_from(bank_in(epoch), link, channel * 8)];
      if (cell.call != epoch) throw Broken("read call " + std::to_string(cell.call) + " for " + std::to_string(epoch));
      cell.is_read = true;
      return true;
    };
  }
  Step await(int r, Kind kind, uint64_t epoch, int link, int channel) {
    return [=, this] { return has_come(r, kind, epoch, link, channel); };
  }

  // ---- The domain

  Step deliver(int r, Kind kind, uint64_t epoch, int to, int source, int channel) {
    return [=, this] {
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
    opener.push_back([&rank] { return rank.is_open = true; });
    rank.parts.push_back(opener);
    if (kind == Kind::kDispatch) {
      add_dispatch(r, epoch, is_open, first, last);
    } else {
      add_combine(r, epoch, is_open, first, last);
    }
  }

  void add_dispatch(int r, uint64_t epoch, const Step& is_open, int first, int last) {
    const Kind kind = Kind::kDispatch;
    Rank& rank = ranks_[r];
    const LlRail rail = rail_of(r, kind);
    for (int channel = 0; channel < rail.channels(); channel++) {
      Part sender{is_open}, local{is_open};
      for (int i = 0; i < rail.others(); i++) sender.push_back(post(r, kind, epoch, rail.other(i), channel));
      for (int q = first; q < last; q++) local.push_back(deliver(r, kind, epoch, q, r, channel));
      rank.parts.push_back(sender);
      rank.parts.push_back(local);
      for (int i = 0; i < rail.others(); i++) {
        const int link = rail.other(i), source = rail.peer(link), served = rail.first_of(rail.link);
        Part forwarder{is_open, channel == 0 ? is_open : await(r, kind, epoch, link, 0),
                       take(r, kind, epoch, link, channel)};
        for (int q = served; q < served + rail.link_size; q++) {
          forwarder.push_back(deliver(r, kind, epoch, q, source, channel));
        }
        rank.parts.push_back(forwarder);
      }
    }
    for (int source = 0; source < num_ranks(); source++) {
      Part receiver{is_open};
      for (int channel = 0; channel < rail.channels(); channel++) {
        receiver.push_back(receive(r, kind, epoch, source, channel));
      }
      rank.parts.push_back(receiver);
    }
  }

  // A partial sum for another domain's rank lies at the rank of the same place among those of the own link, in the slot
  // of the own place among those of the home rank's link.
  void add_combine(int r, uint64_t epoch, const Step& is_open, int first, int last) {
    const Kind kind = Kind::kCombine;
    Rank& rank = ranks_[r];
    const LlRail rail = rail_of(r, kind);
    Part record{is_open}, sender{is_open};
    for (int i = 0; i < rail.others(); i++) record.push_back(post(r, kind, epoch, rail.other(i), 0));
    for (int home = 0; home < num_ranks(); home++) {
      const bool is_near = first <= home && home < last;
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
      for (int place = 0; place < rail.link_size; place++) {
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
      if (put.to == r && put.call <= rank.epoch[put.context / kRailContexts]) {
        throw Broken("a call ended over what a peer had sent before");
      }
    }
    if (rank.calls < calls_) begin_call(r);
  }

  std::mt19937 random_;
  const unsigned seed_;
  const Topology topology_;
  const Mistake mistake_;
  RailRegions regions_[kNumKinds];
  std::vector<Rank> ranks_;
  std::vector<Put> net_;
  unsigned net_slowness_ = 1;
  std::vector<unsigned> links_;  // how slow each is
  int calls_ = 0;
};

// What went wrong first, of so many schedules; empty: nothing.
std::string first_error(Mistake mistake, unsigned schedules, int domains, int domain_size, int link_size) {
  for (unsigned seed = 0; seed < schedules; seed++) {
    try {
      Schedule(seed, domains, domain_size, link_size, mistake).run(12);
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
