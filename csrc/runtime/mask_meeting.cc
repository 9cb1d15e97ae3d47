#include "runtime/mask_meeting.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "transport/process.h"

namespace ep {
namespace {

using Words = MeetingWords;

uint64_t tagged(uint32_t value, uint32_t tag) { return value | static_cast<uint64_t>(tag) << 32; }

uint32_t new_number() {
  uint32_t number = 0;
  while (number == 0) number = static_cast<uint32_t>(random_token().words[0]);
  return number;
}

std::string names_of(const RankMask& ranks, int num_ranks) {
  std::string names;
  for (int r = 0; r < num_ranks; r++) {
    if (ranks.has(r)) names += concat(names.empty() ? "" : ", ", r);
  }
  return names;
}

}  // namespace

MaskMeeting::MaskMeeting(Setting setting, std::vector<uint32_t>& used)
    : setting_(std::move(setting)),
      used_(used),
      words_of_rank_(Words::count(setting_.num_ranks)),
      number_(new_number()) {
  used_.resize(setting_.num_ranks);
  uint32_t num_active = 0;
  for (int r = 0; r < setting_.num_ranks; r++) num_active += setting_.masked.has(r) ? 0 : 1;
  say_arrival(tagged(num_active, number_));
}

MaskMeeting::~MaskMeeting() { say_arrival(0); }

void MaskMeeting::say_arrival(uint64_t word) noexcept {
  for (int peer = 0; peer < setting_.num_ranks; peer++) {
    try {
      setting_.store(peer, Words::kArrival, {word});
    } catch (const std::exception&) {  // who has not heard waits for a deadline
    }
  }
}

MaskMeeting::Arrival MaskMeeting::arrival_of(int source) const {
  const uint64_t word = word_at(source, Words::kArrival);
  const auto number = static_cast<uint32_t>(word >> 32);
  if (number == used_[source]) return {0, 0};
  return {number, static_cast<uint32_t>(word)};
}

std::optional<uint32_t> MaskMeeting::tagged_at(int source, int index) const {
  const uint64_t word = word_at(source, index);
  if (tag_ == 0 || static_cast<uint32_t>(word >> 32) != tag_) return std::nullopt;
  return static_cast<uint32_t>(word);
}

int MaskMeeting::leader() const {
  int leader = setting_.rank;
  for (int r = 0; r < setting_.num_ranks; r++) {
    const uint32_t mine = arrival_of(leader).num_active, theirs = arrival_of(r).num_active;
    if (is_here(r) && (theirs > mine || (theirs == mine && r < leader))) leader = r;
  }
  return leader;
}

uint32_t MaskMeeting::digest_of(const RankMask& members) const {
  uint64_t digest = 0;
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (!members.has(r)) continue;
    digest = (digest ^ tagged(arrival_of(r).number, r)) * 0x9E3779B97F4A7C15ull;
    digest ^= digest >> 29;
  }
  return static_cast<uint32_t>(digest) | 1;  // 0: no tag
}

// Whether this rank, as the leader, waits for nobody any more.
bool MaskMeeting::closes(double waited) const {
  bool is_active_away = false, is_masked_away = false;
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (is_here(r)) continue;
    (setting_.masked.has(r) ? is_masked_away : is_active_away) = true;
  }
  const double deadlines = is_active_away ? kForActive : is_masked_away ? kForMasked : 0;
  return waited >= deadlines * setting_.timeout();
}

// The members, if `leader` has told this rank that it is one. Arrivals may be seen later than what a leader tells of
// them.
std::optional<RankMask> MaskMeeting::told_by(int leader) const {
  RankMask members;
  const auto tag = static_cast<uint32_t>(word_at(leader, Words::kMembers) >> 32);
  for (int i = 0; i < RankMask::words_of(setting_.num_ranks); i++) {
    const uint64_t word = word_at(leader, Words::kMembers + i);
    if (word >> 32 != tag) return std::nullopt;
    members.words[i] = static_cast<uint32_t>(word);
  }
  if (tag != digest_of(members) || !members.has(setting_.rank) || !members.has(leader)) return std::nullopt;
  return members;
}

// Whether any rank has told. Of two the one with fewer members was the first, and will not wait for more.
bool MaskMeeting::hear() {
  std::optional<RankMask> members;
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (r == setting_.rank || !is_here(r)) continue;
    const std::optional<RankMask> told = told_by(r);
    if (told && (!members || members->has_all(*told))) members = told;
  }
  if (members) meet(*members);
  return members.has_value();
}

void MaskMeeting::meet(const RankMask& members) {
  members_ = members;
  tag_ = digest_of(members);
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (members.has(r)) used_[r] = arrival_of(r).number;
  }
}

const RankMask& MaskMeeting::members() {
  Arrival silent{0, 0};
  double silent_since = 0;
  wait([&](double waited) {
    if (hear()) return true;
    const int leads = leader();
    const Arrival arrival = arrival_of(leads);
    if (leads != setting_.rank) {
      if (arrival.number != silent.number) {
        silent = arrival;
        silent_since = waited;
      } else if (waited - silent_since > kForLeader * setting_.timeout()) {
        used_[leads] = silent.number;
      }
      return false;
    }
    if (!closes(waited)) return false;
    RankMask members;
    for (int r = 0; r < setting_.num_ranks; r++) {
      if (is_here(r)) members.add(r);
    }
    meet(members);
    tell(Words::kMembers, {members.words, members.words + RankMask::words_of(setting_.num_ranks)});
    return true;
  });
  return members_;
}

void MaskMeeting::tell(int index, const std::vector<uint32_t>& values) {
  std::vector<uint64_t> words;
  for (const uint32_t value : values) words.push_back(tagged(value, tag_));
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (members_.has(r)) setting_.store(r, index, words);
  }
}

std::vector<MeetingReport> MaskMeeting::reports(const MeetingReport& own) {
  std::vector<uint32_t> values{own.is_ready ? 1u : 0u};
  for (const uint64_t epoch : own.epochs.of) {
    values.push_back(static_cast<uint32_t>(epoch));
    values.push_back(static_cast<uint32_t>(epoch >> 32));
  }
  tell(Words::kReport, values);
  await_members(Words::kReport, Words::kReportWords, "reported how far it is");
  std::vector<MeetingReport> reports;
  for (int r = 0; r < setting_.num_ranks; r++) {
    if (!members_.has(r)) continue;
    MeetingReport report{word_at(r, Words::kReport) % 2 == 1, {}};
    for (int kind = 0; kind < kNumKinds; kind++) {
      const int low = Words::kReport + 1 + 2 * kind;
      report.epochs.of[kind] = *tagged_at(r, low) | static_cast<uint64_t>(*tagged_at(r, low + 1)) << 32;
    }
    reports.push_back(report);
  }
  return reports;
}

void MaskMeeting::end() {
  tell(Words::kDone, {1});
  await_members(Words::kDone, 1, "cleaned its masks");
}

void MaskMeeting::await_members(int index, int count, const char* what) {
  wait([&](double waited) {
    RankMask silent;
    for (int r = 0; r < setting_.num_ranks; r++) {
      for (int i = index; i < index + count && members_.has(r); i++) {
        if (!tagged_at(r, i)) silent.add(r);
      }
    }
    if (silent.any() && waited > kForMembers * setting_.timeout()) {
      raise(ErrorKind::kTimeout, "masks are not cleaned: within ", kForMembers, " deadlines rank ",
            names_of(silent, setting_.num_ranks), " has not ", what,
            ". It is gone, or has met others before this rank came");
    }
    return !silent.any();
  });
}

void MaskMeeting::wait(const std::function<bool(double)>& is_over) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kSleep{1};
  const Clock::time_point begin = Clock::now();
  seen_ = setting_.load();
  while (true) {
    // A copy between GPUs may store a word in two parts: what is seen twice is whole.
    const std::vector<uint64_t> before = std::exchange(seen_, setting_.load());
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    if (seen_ == before && is_over(waited)) return;
    setting_.poll();
    std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace ep
