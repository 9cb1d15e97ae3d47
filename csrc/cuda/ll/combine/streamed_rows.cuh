// A combine on few SMs. A warp of send.cuh or receive.cuh has the loads of one unit under way, and waits for them: with
// few warps on the GPU that is what takes the time. Here rows come through a ring in shared memory
// (device/row_stream.cuh), across units, so that a warp has as many under way as the ring holds. What travels is the
// same, word by word.
//
// A unit is a piece of a token's row, four times as long as there. Block i of every rank sends, for all homes, and
// receives the pieces whose number is i modulo the number of blocks (docs/memory_model.md, forward progress).
#pragma once

#include "cuda/device/home_sum.cuh"
#include "cuda/device/row_stream.cuh"
#include "cuda/ll/combine/home_weights.cuh"

namespace ep {
inline namespace EP_KERNELS {

using StreamRing = CopyRingOf<LlCombineGeometry::kRingItems, LlCombineGeometry::kStreamSteps>;
static_assert(StreamRing::kItems * StreamRing::kItemBytes == LlCombineGeometry::kRingBytes);

// In the window of `rank`: the partial sum that `source` has of a token.
__device__ __forceinline__ char* partial_at(const CombineRole& role, int rank, int bank, int source, int token) {
  return role.peers.at<char>(rank, role.p.offsets.row<false>(bank, source, token));
}
// In the own window: the weight of choice `lane` of a token, from its home rank.
__device__ __forceinline__ const uint64_t* home_weight_at(const CombineRole& role, int bank, int home, int token) {
  return role.peers.local<uint64_t>(role.p.offsets.weight<false>(bank, 0, 0, 0)) + entry_of(role, home, token);
}

__device__ __forceinline__ uint32_t* unit_counter(const CombineRole& role, char* shared) {
  return reinterpret_cast<uint32_t*>(shared + role.geometry.ring_bytes - LlCombineGeometry::kCounterBytes);
}

// Of either stream: this rank's rows of the unit that was turned to last, and of the one that is added up.
template <DType kType>
struct StreamedTerms {
  static constexpr int kSteps = StreamRing::kSteps, kCount = kLaneElements<kType, kType, kType>;
  using Sums = float[kSteps][kCount];

  const CombineRole& role;
  const WarpContext& op;
  PieceRange pieces;
  OfUnits<unsigned> rows;
  Terms next{kNoRow, 1.0f}, turned, terms;

  // Lanes' worths of a row from this lane's part of a piece on.
  __device__ __forceinline__ int rest(int piece) const {
    return role.geometry.row_lanes - piece * kSteps * 32 - role.lane;
  }
  __device__ __forceinline__ int lane_index(int piece) const { return piece * kSteps * 32 + role.lane; }
  __device__ __forceinline__ void turn_to(unsigned unit, int piece, bool is_token) {
    pieces = {piece, piece + 1};
    turned = checked(role, next, is_token);
    rows.put(unit, __ballot_sync(~0u, turned.row >= 0));
  }
  __device__ __forceinline__ bool await() const { return false; }  // rows are there when the kernel begins
  __device__ __forceinline__ void prefetch(StreamRing& ring, unsigned, int row, int piece) const {
    constexpr int kLaneBytes = Numbers<kType, kCount>::kLaneBytes;
    const int64_t place = __shfl_sync(~0u, turned.row, row);
    ring.prefetch<kLaneBytes>(
        static_cast<const char*>(role.p.rows) + place * role.geometry.row_bytes + lane_index(piece) * kLaneBytes,
        rest(piece));
  }
  // Products and sums are rounded one by one, in the order of k.
  __device__ __forceinline__ void begin(unsigned, int, Sums& sum) const {
    fill(sum, __any_sync(~0u, terms.row >= 0) ? kNothingYet : 0.0f);
  }
  __device__ __forceinline__ void add(unsigned, int row, ptx::SharedAddress item, Sums& sum) const {
    if (__shfl_sync(~0u, terms.row, row) < 0) return;  // the home rank skips it
    const float weight = __shfl_sync(~0u, terms.weight, row);
#pragma unroll
    for (int s = 0; s < kSteps; s++) ringed<kType, kCount>(item, s).add_product_to(sum[s], weight);
  }
  __device__ __forceinline__ void finish(unsigned) const {}
};

// ---- What goes to other ranks

template <DType kType, bool kHome>
struct StreamedPartials : StreamedTerms<kType> {
  using Base = StreamedTerms<kType>;
  using Base::kSteps, Base::kCount, Base::role, Base::op, Base::next, Base::turned, Base::terms;

  int index = 0;                         // of the next unit, in the block's schedule
  int home_tokens = 0, most_tokens = 0;  // of rank `lane`, of the rank that has most
  Unit next_unit{};
  bool has_begun = false;  // the operation is open
  // Of the unit turned to, and of the one that is added up. Null: nothing is sent.
  int turned_home = 0, turned_token = 0, token = 0;
  uint64_t turned_weight = 0;                    // kHome: the word that was there
  char *turned_slot = nullptr, *slot = nullptr;  // in bank 0

  __device__ __forceinline__ StreamedPartials(const CombineRole& a_role, const WarpContext& an_op)
      : Base{a_role, an_op}, index(a_role.warp) {
#pragma unroll 1
    for (int r = role.lane; r < role.p.shape.num_ranks; r += 32) {
      const int tokens = __ldg(role.p.handle.tokens + r);
      if (r == role.lane) home_tokens = tokens;
      most_tokens = max(most_tokens, tokens);
    }
    // max_tokens: of a handle that was changed
    most_tokens = min(__reduce_max_sync(~0u, most_tokens), role.p.shape.max_tokens);
    load_next();
  }
  __device__ __forceinline__ void load_next() {
    next_unit = role.geometry.schedule.static_unit(role.at.block, index);
    index += role.geometry.sender_warps;
    next = {kNoRow, 1.0f};
    if (next_unit.token >= most_tokens) return;
    next = TermsAt::of(role, role.home_of(next_unit.home), next_unit.token).load(role.p.options.weighting);
  }
  __device__ __forceinline__ int tokens_of(int home) const {
    return role.p.shape.num_ranks <= 32 ? __shfl_sync(~0u, home_tokens, home) : __ldg(role.p.handle.tokens + home);
  }
  __device__ __forceinline__ const uint64_t* home_weight() const {
    return home_weight_at(role, op.bank, turned_home, turned_token);
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    if (next_unit.token >= most_tokens) return false;
    turned_home = role.home_of(next_unit.home);
    turned_token = next_unit.token;
    Base::turn_to(unit, next_unit.piece, turned_token < tokens_of(turned_home));
    turned_slot = nullptr;
    if (__any_sync(~0u, turned.row != kNoRow)) {  // if only a dropped one
      turned_slot = partial_at(role, turned_home, 0, role.peers.rank, turned_token);
    }
    turned_weight = 0;
    if (kHome && has_begun && role.lane < role.p.shape.topk) turned_weight = ptx::ld_relaxed_sys(home_weight());
    load_next();
    return true;
  }
  __device__ __forceinline__ void take_over() {
    terms = turned;
    slot = turned_slot;
    token = turned_token;
    if constexpr (!kHome) return;
    if (terms.row >= 0) {
      auto bits = static_cast<uint32_t>(turned_weight);
      if (!is_tagged(turned_weight, op.tag)) bits = await_word(op, home_weight(), Awaited::kWeights, turned_home);
      terms = with_weight(terms, bits);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void store(unsigned, int piece, const typename Base::Sums& sum) const {
    testing_point(Point::kBetweenRows, op, token);
    if (slot == nullptr) return;
    const int rest = Base::rest(piece);
    char* to = slot + op.bank * static_cast<int64_t>(role.p.offsets.row_bank_bytes) +
               Base::lane_index(piece) * Numbers<kType, kCount>::kLaneBytes;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      Numbers<kType, kCount> numbers;
      numbers.from(sum[s]);
      numbers.escape();
      if (32 * s < rest) numbers.store_remote(to, 32 * s);
    }
  }
};

// ---- What comes to the home rank

// Another rank's partial sum of some steps, as it arrives in the own window. `at`: this lane's numbers there; `rest`:
// as in store_steps().
template <DType kType, int kCount, int kSteps>
struct ArrivingSteps {
  Numbers<kType, kCount> numbers[kSteps];

  __device__ __forceinline__ void load(const char* at, int rest) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      numbers[s].fill(0);
      if (32 * s < rest) numbers[s].load_relaxed_sys(at, 32 * s);
    }
  }
  __device__ __forceinline__ bool has_arrived(const OpContext& context) const {
    bool ok = true;
#pragma unroll
    for (int s = 0; s < kSteps; s++) ok = ok && numbers[s].have_arrived();
    if (has_bug(Bug::kTornRows, context.kind)) ok = numbers[0].have_arrived();
    return __all_sync(~0u, ok);
  }
  // Back to the resting state, for the operation after next.
  __device__ __forceinline__ static void reset(char* at, int rest) {
    Numbers<kType, kCount> absent;
    absent.fill(kAbsent);
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      if (32 * s < rest) absent.store(at, 32 * s);
    }
  }
};

template <DType kType, bool kHome>
struct StreamedSumsAtHome : StreamedTerms<kType> {
  using Base = StreamedTerms<kType>;
  using Base::kSteps, Base::kCount, Base::role, Base::op, Base::next, Base::turned, Base::terms;
  static constexpr int kHalf = kSteps / 2;  // of a piece is added up at a time: registers are few
  static constexpr int kBatch = 3;          // other ranks whose sums are loaded at a time

  uint32_t* counter;  // of the block's units that are taken
  Unit next_unit{};
  int next_id = -1, turned_id = -1, id = -1;  // of choice `lane`
  int turned_token = 0, token = 0;
  OwnHomeWeight next_weight{}, turned_weight{};
  bool has_given_up = false;  // a wait

  __device__ __forceinline__ StreamedSumsAtHome(const CombineRole& a_role, const WarpContext& an_op,
                                                uint32_t* a_counter)
      : Base{a_role, an_op}, counter(a_counter) {
    load_next();
  }
  __device__ __forceinline__ bool has_next() const { return next_unit.token < role.p.num_tokens; }
  __device__ __forceinline__ void load_next() {
    uint32_t round = 0;
    if (role.lane == 0) round = atomicAdd(counter, 1u);
    round = __shfl_sync(~0u, round, 0);
    next_unit = role.geometry.schedule.unit(0, static_cast<int>(round) * role.at.num_blocks + role.at.block);
    next_id = -1;
    if (!has_next()) return;
    const int entry = next_unit.token * role.p.shape.topk + role.lane;
    if (role.lane < role.p.shape.topk) {
      next_id = __ldg(role.p.handle.ids + entry);
      if (kHome) next_weight.load(role.p, entry);
    }
    next = TermsAt::of(role, role.peers.rank, next_unit.token).load(role.p.options.weighting);
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    if (!has_next() || has_given_up) return false;
    Base::turn_to(unit, next_unit.piece, true);
    turned_token = next_unit.token;
    turned_id = next_id;
    turned_weight = next_weight;
    load_next();
    return true;
  }
  __device__ __forceinline__ void take_over() {
    terms = turned;
    token = turned_token;
    id = turned_id;
    if (kHome && terms.row >= 0) terms = with_weight(terms, turned_weight.bits(role.p));
  }
  __device__ __forceinline__ void store(unsigned, int piece, const typename Base::Sums& sum) {
    Numbers<kType, kCount> own[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; s++) own[s].from(sum[s]);
    const Choice choice = Choice::of(id, role.p.shape.num_experts, role.geometry.by_local_experts);
    const bool is_own = choice.rank == role.peers.rank;
    const bool adds_own = __any_sync(~0u, is_own);
    const LaneRanks others = LaneRanks::of(is_own ? -1 : choice.rank);
#pragma unroll
    for (int first = 0; first < kSteps; first += kHalf) {
      if (has_given_up) continue;
      add_ranks(others, adds_own, Base::lane_index(piece) + first * 32, Base::rest(piece) - first * 32, piece,
                own + first);
    }
  }
  // Adds up steps of the ranks' sums in the order of ranks. `own`: this rank's, which counts if `adds_own`.
  __device__ __forceinline__ void add_ranks(LaneRanks others, bool adds_own, int lane_index, int rest, int piece,
                                            const Numbers<kType, kCount>* own) {
    const LlCombineParams& p = role.p;
    const int self = role.peers.rank, num_ranks = p.shape.num_ranks;
    char* const slots = partial_at(role, self, op.bank, 0, token) + lane_index * Numbers<kType, kCount>::kLaneBytes;
    const auto slot_of = [&](int rank) { return slots + static_cast<uint64_t>(rank) * role.geometry.source_bytes; };
    const HomePlace place{static_cast<int64_t>(token) * p.hidden * size_of(kType), lane_index, rest};
    float total[kHalf][kCount];
    const bool has_terms = adds_own || others.has_more(num_ranks);
    begin_home_sum<kType>(
        p, [&] { return place; }, has_terms || begins_with_bias(p) ? kNothingYet : 0.0f, total);
    const auto add_own = [&] {
#pragma unroll
      for (int s = 0; s < kHalf; s++) own[s].add_to(total[s]);
      adds_own = false;
    };
#pragma unroll 1
    while (others.has_more(num_ranks)) {
      others.find();
      const int first = others.first();
      const auto first_of = [&](uint32_t word) { return first + __ffs(static_cast<int>(word)) - 1; };
#pragma unroll 1
      while (others.word != 0) {
        ArrivingSteps<kType, kCount, kHalf> batch[kBatch];
        uint32_t left = others.word;
#pragma unroll
        for (int q = 0; q < kBatch; q++) {
          if (left != 0) batch[q].load(slot_of(first_of(left)), rest);
          left &= left - 1;
        }
#pragma unroll
        for (int q = 0; q < kBatch; q++) {
          if (others.word == 0) break;
          const int rank = first_of(others.word);
          others.word &= others.word - 1;
          if (adds_own && rank > self) add_own();
          LeanWaitBudget budget;
          while (!batch[q].has_arrived(op)) {
            has_given_up = __any_sync(~0u, budget.is_spent(op, Awaited::kPartials, rank, token, piece));
            if (has_given_up) return;
            batch[q].load(slot_of(rank), rest);
          }
#pragma unroll
          for (int s = 0; s < kHalf; s++) batch[q].numbers[s].add_to(total[s]);
          testing_point(Point::kBeforeReset, op, token);
          if (!(has_bug(Bug::kSkippedReset, op.context.kind) && token == 0)) batch[q].reset(slot_of(rank), rest);
        }
      }
    }
    if (adds_own) add_own();
    store_home_sum<kType>(p, place, total);
  }
};

// The work of a warp: its share of what is sent, if it is a sender, and then of what the block receives. begin() waits
// until the epoch is known; false: nothing may be sent. `shared`: the warps' rings, and behind them the counter of the
// block's units, which is zero.
template <DType kType, bool kHome, class Begin>
__device__ __forceinline__ void stream_rows(const CombineRole& role, const WarpContext& op, char* shared,
                                            const Begin& begin) {
  const StreamRing ring(shared + role.warp * LlCombineGeometry::kRingBytes);
  bool has_begun = false;
  if (role.is_sender()) {
    StreamedPartials<kType, kHome> partials(role, op);
    RowStreamOf<StreamRing, StreamedPartials<kType, kHome>> stream{partials, ring};
    stream.prefetch_ahead();
    has_begun = partials.has_begun = begin();
    if (!has_begun) return ptx::copy_async_wait<0>();
    testing_point(Point::kBeforeRows, op);
    stream.run();
    stamp(Stamp::kSent, role.peers.rank);
  }
  StreamedSumsAtHome<kType, kHome> sums(role, op, unit_counter(role, shared));
  RowStreamOf<StreamRing, StreamedSumsAtHome<kType, kHome>> stream{sums, ring};
  stream.prefetch_ahead();
  if (!has_begun && !begin()) return ptx::copy_async_wait<0>();
  testing_point(Point::kBeforeReceive, op);
  stream.run();
}

}  // namespace EP_KERNELS
}  // namespace ep
