#include "runtime/group.h"

#include <algorithm>
#include <string_view>

#include "base/check.h"
#include "base/testing.h"
#include "runtime/agreement.h"
#include "runtime/checks.h"
#include "runtime/failure_node.h"
#include "runtime/handles.h"
#include "runtime/observed.h"
#include "runtime/one_caller.h"
#include "transport/collective_step.h"
#include "transport/session.h"

namespace ep {
namespace {

// Up to which a window of given bytes has room for unweighted rows; _UNWEIGHTED_TOPK of low_latency_memory.py.
constexpr int kWindowTopk = 8;
constexpr int kWireVersion = 16;            // changes with the bytes that ranks exchange
constexpr double kMaxTimeoutSeconds = 1e9;  // clocks count nanoseconds in 64 bits

constexpr const char* kIdsQuestion = "Does num_experts count the experts of all ranks?";

void check_timeout(double seconds) {
  EP_CHECK(seconds > 0 && seconds <= kMaxTimeoutSeconds, "timeout is ", seconds, " s, must be positive and at most ",
           kMaxTimeoutSeconds);
}

const char* name_of(Kind kind, Phase phase) {
  constexpr const char* kNames[kNumKinds][3] = {{"dispatch", "dispatch send", "dispatch receive"},
                                                {"combine", "combine send", "combine receive"}};
  return kNames[static_cast<int>(kind)][static_cast<int>(phase)];
}

}  // namespace

LlSizes sizes_for(const Shape& shape, int dispatch_row_bytes, int combine_row_bytes) {
  // Opaque rows carry keys: reserve for them, so that any payload of the given bytes fits.
  const RowFormat dispatch{align_up(dispatch_row_bytes, 16), 0, true};
  const RowFormat combine{align_up(combine_row_bytes, 16), 0, false};
  LlSizes sizes;
  sizes.tagged_bytes = LlOffsets::tagged_bytes(shape);
  sizes.row_bytes[0] = LlOffsets::row_bytes(shape, dispatch.stride());
  sizes.unweighted_row_bytes = LlOffsets::unweighted_row_bytes(shape, combine.stride());
  sizes.row_bytes[1] = LlOffsets::row_bytes(shape, combine.stride());
  return sizes;
}

LlSizes sizes_for_window(int num_ranks, uint64_t window_bytes) {
  // Records and signals first; then a sixteenth for the tagged words of both kinds, the rest for rows, half each.
  const uint64_t fixed = LlWindow::make(num_ranks, {}).bytes;
  EP_CHECK(window_bytes >= fixed + 65536, "a window of ", window_bytes, " bytes is too small for ", num_ranks,
           " ranks: at least ", fixed + 65536);
  const uint64_t bank = (window_bytes - fixed - 8192) / kNumBanks;
  LlSizes sizes;
  sizes.tagged_bytes = bank / 32 / 128 * 128;
  sizes.row_bytes[0] = (bank - 2 * sizes.tagged_bytes) / 2 / 128 * 128;
  // In the proportion of a token's choices to the ranks.
  const uint64_t part = sizes.row_bytes[0] / (num_ranks + kWindowTopk - 1) / 128 * 128;
  sizes.unweighted_row_bytes = (kWindowTopk - 1) * part;
  sizes.row_bytes[1] = sizes.row_bytes[0] - sizes.unweighted_row_bytes;
  return sizes;
}

uint64_t window_for(int num_ranks, const LlSizes& sizes) {
  // Of a bank, sizes_for_window() gives a thirty-second to the tagged words of a kind, and 15 to its rows.
  const uint64_t combined = sizes.row_bytes[1] + sizes.unweighted_row_bytes;
  const uint64_t part = std::max(align_up<uint64_t>(sizes.tagged_bytes, 128),
                                 ceil_div<uint64_t>(std::max(sizes.row_bytes[0], combined), 15)) +
                        128;
  return align_up<uint64_t>(LlWindow::make(num_ranks, {}).bytes + 8192 + kNumBanks * 32 * part, 4096) + 65536;
}

Agreement Group::agreement_of(const GroupConfig& config, int num_ranks) {
  Agreement agreement;
  agreement.add("the library's version", EP_VERSION);
  agreement.add("the wire format", kWireVersion);
  agreement.add("the number of ranks", num_ranks);
  agreement.add("the kind of device", config.device_kind());
  agreement.add("the domain size", config.domain_size);
  agreement.ask(kOrderQuestion);
  agreement.explain(config.made_with);
  agreement.add("the bytes of routing in a bank", config.sizes.tagged_bytes);
  agreement.add("the bytes of dispatched rows in a bank", config.sizes.row_bytes[0]);
  agreement.add("the bytes of combined rows in a bank", config.sizes.row_bytes[1]);
  agreement.add("the bytes of unweighted combined rows", config.sizes.unweighted_row_bytes);
  agreement.add("the words of a call of high throughput", config.ht_sizes.message_words);
  agreement.add("the bytes of routes of high throughput", config.ht_sizes.slot_bytes);
  agreement.add("the bytes of rows of high throughput", config.ht_sizes.row_bytes);
  agreement.add("the bytes of the arena", config.ht_sizes.arena_bytes);
  agreement.add("whether late ranks are masked", config.masks_late_ranks ? 1 : 0);
  agreement.add("whether ranks can be replaced (elastic)", config.is_elastic ? 1 : 0);
  agreement.add("what windows are made by (window)", config.uses_cumem ? "cuMem" : "NCCL");
  agreement.add("low latency's way between domains (ll_network)", name_of(config.ll_network));
  return agreement;
}

Group::Group(Bootstrap& given, const GroupConfig& config, BackendFactory make_backend)
    : rank_(given.own_rank()), config_(config), timeout_seconds_(config.timeout_seconds) {
  check_timeout(config.timeout_seconds);
  const bool joins = config.joins_world_of > 0;
  const int num_ranks = joins ? config.joins_world_of : given.num_ranks();
  EP_CHECK(rank_ >= 0 && rank_ < num_ranks, "rank ", rank_, " of ", num_ranks, " ranks");
  Session bootstrap(given, joins ? Collective::kReplaceRank : Collective::kMakeBuffer);
  agreement_of(config, num_ranks).check(bootstrap);
  topology_ = Topology::make(num_ranks, config.domain_size == 0 ? num_ranks : config.domain_size);
  check_elastic();
  const bool has_links = config.has_rail && topology_.num_domains() > 1;
  EP_CHECK(!config.masks_late_ranks || has_links || topology_.num_domains() == 1,
           "late ranks can be masked among the ranks of one domain, these are ", topology_.num_ranks, " in ",
           topology_.num_domains(), ": make the buffer without masks (enable_shrink), or of one domain's ranks");
  LlSizes sizes = config.sizes;
  sizes.by_source = config.masks_late_ranks;
  if (has_links) sizes.rail_domain_size = topology_.domain_size;
  const uint64_t bytes = *std::max_element(std::begin(sizes.row_bytes), std::end(sizes.row_bytes));
  sizes.link_size = ll_link_size(config.ll_network, config.masks_late_ranks, topology_,
                                 bytes / static_cast<uint64_t>(topology_.num_ranks));
  HtSizes ht_sizes = config.ht_sizes;
  ht_sizes.rail_domain_size = sizes.rail_domain_size;
  window_ = Window::make(topology_.num_ranks, sizes, ht_sizes);
  LlEpochs latest;
  if (joins)
    latest = behind(gather_from_steps(
        bootstrap, [] { return LlEpochs{}; }, "its epochs"));
  if (config.is_elastic) watch_processes(bootstrap);
  try {
    backend_ = make_backend(bootstrap, topology_, window_, config_);
  } catch (const Error& error) {
    if (!std::string_view(error.what()).starts_with("no memory for a window")) throw;
    with_room([&error] { throw error; });
  }
  if (joins) join(bootstrap, latest);
}

Group::~Group() { destroy(); }

std::shared_ptr<Backend> Group::held() const {
  std::lock_guard lock(mutex_);
  return backend_;
}

std::shared_ptr<Backend> Group::backend() const {
  std::shared_ptr<Backend> backend = held();
  EP_CHECK_USAGE(backend != nullptr, "the buffer was destroyed");
  return backend;
}

std::shared_ptr<Arena> Group::arena() const {
  const std::shared_ptr<Backend> backend = held();
  return backend ? backend->arena() : nullptr;
}

Report Group::report() {
  const std::shared_ptr<Backend> backend = held();
  return backend ? backend->report(false) : Report{};
}

void Group::destroy() {
  std::shared_ptr<Backend> last;
  {
    std::lock_guard lock(mutex_);
    last = std::move(backend_);
  }
  if (last == nullptr) return;
  last->end_waits();
  if (last->failure().code != Failure::kNone) last->abort();
}

void Group::set_timeout(double seconds) {
  check_timeout(seconds);
  require_usable();
  timeout_seconds_ = seconds;
  backend()->set_timeout(seconds);
}

void Group::set_pdl(bool enabled) {
  require_usable();
  backend()->set_pdl(enabled);
}

void Group::require_usable() { usable_backend(); }

std::shared_ptr<Backend> Group::usable_backend() {
  EP_CHECK_USAGE(
      !is_partly_cleaned_,
      "a rank did not come when masks were cleaned (or that of a rank that was replaced), and others may have cleaned "
      "theirs: destroy the buffer and make a new one");
  std::shared_ptr<Backend> backend = this->backend();
  if (!backend->has_failed()) return backend;
  Failure failure = backend->failure();
  std::string others;
  try {
    failure = failure_in_full(*backend);
    others = other_calls(*backend, failure);
  } catch (const Error&) {  // a GPU that cannot be asked any more
  }
  raise(kind_of(failure), "the buffer has failed: ", describe(failure, rank_, timeout_seconds()),
        node_of(failure, topology_), others, "; destroy it and make a new one");
}

Failure Group::failure_in_full(Backend& backend) const {
  Failure failure = backend.failure();
  if (failure.code != Failure::kTimeout || failure.missing.any()) return failure;
  if (failure.awaited == Awaited::kRowSignal) return failure;  // which is of no other rank
  for (int r = 0; r < num_ranks(); r++) {
    const bool is_heard = find_header(backend, r, failure.kind, failure.is_ht != 0, failure.epoch).has_value();
    if (r != rank_ && !is_heard) failure.missing.add(r);
  }
  return failure;
}

std::string Group::other_calls(Backend& backend, const Failure& failure) const {
  std::string text;
  if (failure.code != Failure::kTimeout || !failure.missing.any()) return text;
  const Report report = backend.report(false);
  for (int r = 0; r < num_ranks(); r++) {
    if (!failure.missing.has(r)) continue;
    for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
      const int index = static_cast<int>(kind);
      const uint64_t epochs[] = {report.epochs[index] + 1, report.ht_epochs[index] + 1};
      for (uint32_t is_ht : {0u, 1u}) {
        if (kind == failure.kind && is_ht == failure.is_ht) continue;
        if (is_ht ? window_.ht.message_words == 0 : has_unreceived_send_[index]) continue;
        const auto theirs = find_header(backend, r, kind, is_ht != 0, epochs[is_ht]);
        if (theirs) text += concat("; rank ", r, " called ", describe(*theirs), " instead");
      }
    }
  }
  return text;
}

std::optional<OpHeader> Group::find_header(Backend& backend, int source, Kind kind, bool is_ht, uint64_t epoch) const {
  const auto word_at = [&backend](Offset at) { return backend.window_word(at); };
  return window_.find_header(is_ht, kind, epoch, num_ranks(), source, word_at);
}

void Group::check() { throw_invalid_ids(*usable_backend()); }

void Group::throw_invalid_ids(Backend& backend) {
  const InvalidIds ids = backend.report(true).invalid_ids;
  EP_CHECK(ids.count == 0, ids.count, " expert ids out of range since the last check, the first is ", ids.value,
           " at token ", ids.token, ", k ", ids.k, "; they were taken as -1, no expert. ", kIdsQuestion);
}

void Group::require_valid_ids(Backend& backend) const {
  if (config_.raises_invalid_ids && backend.has_invalid_ids()) throw_invalid_ids(backend);
}

void Group::check_ids(const Backend& backend, const Shape& shape, const void* ids, bool is_idx64,
                      int num_tokens) const {
  if (!config_.raises_invalid_ids || !backend.trusts_handles()) return;
  for (int64_t i = 0; i < static_cast<int64_t>(num_tokens) * shape.topk; i++) {
    const int64_t id = is_idx64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
    EP_CHECK(id == -1 || shape.valid(id), "topk_idx[", i / shape.topk, ", ", i % shape.topk, "] is ", id,
             ", must be 0 to ", shape.num_experts - 1, ", or -1 for no expert. ", kIdsQuestion);
  }
}

void Group::check_phase(Kind kind, Phase phase, const char* call) const {
  const bool is_open = has_unreceived_send_[static_cast<int>(kind)];
  if (phase == Phase::kRecv) {
    EP_CHECK_USAGE(is_open, call, ": nothing was sent that could be received");
  } else if (!testing::has_bug(testing::Bug::kSecondSend)) {
    EP_CHECK_USAGE(!is_open, call, " ", num_calls_[static_cast<int>(kind)],
                   " was sent and has not been received; receive it (or destroy the buffer) before the next ", call);
  }
}

// Only of a call that the backend has taken: one that it refuses neither opens nor closes a split call.
void Group::note_phase(Kind kind, Phase phase) {
  if (phase != Phase::kRecv) num_calls_[static_cast<int>(kind)]++;
  has_unreceived_send_[static_cast<int>(kind)] = phase == Phase::kSend;
  if (phase == Phase::kSend) calls_.split++;
}

Shape Group::own_shape(const Shape& shape) const {
  EP_CHECK(config_.max_experts == 0 || shape.num_experts <= config_.max_experts, "num_experts is ", shape.num_experts,
           ", but the buffer was made for num_experts=", config_.max_experts);
  return Shape::make(num_ranks(), shape.num_experts, shape.topk, shape.max_tokens);
}

template <class Params>
std::shared_ptr<Backend> Group::begin(Params& p) {
  std::shared_ptr<Backend> backend = usable_backend();
  if constexpr (requires { p.phase; }) {
    if (sends(p.phase)) require_valid_ids(*backend);
  } else {
    require_valid_ids(*backend);
  }
  require_ll();
  p.shape = own_shape(p.shape);
  check_tokens(p.num_tokens, p.shape);
  return backend;
}

void Group::require_ll() const {
  EP_CHECK(config_.has_ll(),
           "the buffer was made without room for low latency: make it with mode=\"ll\" or \"auto\", or call with "
           "mode=\"ht\"");
}

void Group::prepare(LlDispatchParams& p) {
  begin(p);
  p.options.check(Modes::kLl);
  check_output(p.output);
  const bool quantises = p.options.quant != Quant::kNone;
  check_quant(p.options.quant, p.dtype, p.hidden);
  check_scales(p.options.quant, p.scales.data != nullptr);
  const int64_t row_bytes = quantises ? quant_row_bytes<int64_t>(p.options.quant, p.hidden)
                                      : static_cast<int64_t>(p.hidden) * size_of(p.dtype);
  check_row_bytes(row_bytes, "a row");
  p.row.payload_bytes = static_cast<int>(row_bytes);
  const int64_t scale_bytes = static_cast<int64_t>(p.out_scales.count) * p.out_scales.element_bytes;
  EP_CHECK(scale_bytes <= kMaxRowBytes, "scales of ", scale_bytes, " bytes a row, at most ", kMaxRowBytes);
  p.row.scale_bytes = static_cast<int>(scale_bytes);
  p.scales.row_stride = usable_stride(p.num_tokens, p.scales.row_stride);
  p.scales.group_stride = usable_stride(p.scales.count, p.scales.group_stride);
  p.row.is_keyed = !quantises && (!is_float(p.dtype) || p.row.scale_bytes > 0);
  p.offsets = with_room([&] { return LlOffsets::make(window_, Kind::kDispatch, p.shape, p.row); });
  EP_CHECK(!p.options.all_weights || !has_expert_rows(p.output.layout), "all_weights is set, but rows of layout ",
           name_of(p.output.layout), " have one weight each");
  const Operation operation = p.options.all_weights ? Operation::kDispatchAllWeights : Operation::kDispatch;
  p.header = header_of(pack_operation(operation, p.dtype, p.options.quant, p.dtype), p.hidden, p.shape,
                       p.row.scale_bytes, p.num_tokens);
}

void Group::check_opaque_rows(const Shape& shape, int64_t row_bytes) const {
  check_row_bytes(row_bytes, "a row");
  const RowFormat row{static_cast<int>(row_bytes), 0, true};
  with_room([&] { return LlOffsets::make(window_, Kind::kDispatch, own_shape(shape), row); });
}

void Group::dispatch(LlDispatchParams& p, void* stream) {
  prepare(p);
  run(p, stream);
}

void Group::run(LlDispatchParams& p, void* stream) {
  const OneCaller one_caller(is_called_);
  const std::shared_ptr<Backend> backend = this->backend();
  check_phase(Kind::kDispatch, p.phase, "dispatch");
  if (sends(p.phase)) check_ids(*backend, p.shape, p.topk_idx, p.is_idx64, p.num_tokens);
  if (receives(p.phase) && is_swizzled(p.options.quant)) {
    EP_CHECK(reinterpret_cast<uintptr_t>(p.out_scales.data) % 16 == 0, "output scales at address ", p.out_scales.data,
             " are not aligned to 16 bytes, which ", name_of(p.options.quant), " wants");
  }
  Observation seen = Observation::of(*this, name_of(Kind::kDispatch, p.phase), call_number(Kind::kDispatch, p.phase),
                                     p.shape, p.num_tokens, p.hidden, stream);
  if (sends(p.phase)) {
    seen.row_bytes = p.row.wire_bytes();
    seen.ids = p.topk_idx;
    seen.is_idx64 = p.is_idx64;
  }
  const Observed observed(seen);
  backend->dispatch(p, stream);
  note_phase(Kind::kDispatch, p.phase);
  if (sends(p.phase)) calls_.dispatch++;
}

// The send waits for no rank, so it cannot know the weights of the home ranks. The same for send and receive.
bool Group::sends_unweighted(const LlCombineParams& p, const RowFormat& row) const {
  return p.options.weighting == Weighting::kHome && p.phase != Phase::kFused && has_expert_rows(p.output.layout) &&
         LlOffsets::fits_unweighted_rows(window_, p.shape, row);
}

// Rows that are still being written are sent one by one, as they come: not in sums.
void Group::check_signals(const LlCombineParams& p) const {
  if (p.signals.counters == nullptr) return;
  constexpr const char* kWhat = "row_signals are of a send that sends rows as they are: ";
  EP_CHECK(p.phase == Phase::kSend && p.options.weighting == Weighting::kHome, kWhat,
           "give weights [tokens, top-k] at combine, and split it");
  EP_CHECK(p.dtype == p.options.wire_dtype && p.dtype == p.options.out_dtype, kWhat, "rows are ", name_of(p.dtype),
           ", the wire ", name_of(p.options.wire_dtype), ", outputs ", name_of(p.options.out_dtype),
           ", must be of one type");
  EP_CHECK(!config_.masks_late_ranks, kWhat, "the buffer has masks (enable_shrink), with which signals are not served");
  EP_CHECK(!config_.has_rail || topology_.num_domains() == 1, kWhat, "the ranks' GPUs are in ", topology_.num_domains(),
           " NVLink domains, between which signals are not served");
  EP_CHECK(p.sends_unweighted, kWhat, "the window has no room for every choice of a token, of which there are ",
           p.shape.topk, ": make the buffer for that top-k, with late_weights");
  check_sms_beside_writer(p.options);
}

void Group::combine(LlCombineParams& p, void* stream) {
  const OneCaller one_caller(is_called_);
  const std::shared_ptr<Backend> backend = begin(p);
  p.options.check(Modes::kLl);
  check_combined_rows(p);
  if (backend->trusts_handles()) check_handle(p.handle, p.output, p.shape, p.num_tokens);
  p.domain_size = topology_.domain_size;
  const RowFormat unweighted{wire_row_bytes(p.dtype, p.hidden), 0, false};
  p.sends_unweighted = sends_unweighted(p, unweighted);
  p.row = p.sends_unweighted ? unweighted : RowFormat{wire_row_bytes(p.options.wire_dtype, p.hidden), 0, false};
  p.offsets = with_room([&] { return LlOffsets::make(window_, Kind::kCombine, p.shape, p.row); });
  check_signals(p);
  const Operation operation = p.sends_unweighted                        ? Operation::kCombineUnweighted
                              : p.options.weighting == Weighting::kHome ? Operation::kCombineWeighted
                                                                        : Operation::kCombine;
  p.header = header_of(pack_operation(operation, p.dtype, Quant::kNone, p.options.wire_dtype), p.hidden, p.shape, 0,
                       p.num_tokens);
  check_phase(Kind::kCombine, p.phase, "combine");
  Observation seen = Observation::of(*this, name_of(Kind::kCombine, p.phase), call_number(Kind::kCombine, p.phase),
                                     p.shape, p.num_tokens, p.hidden, stream);
  seen.is_home_bound = true;
  seen.has_row_per_choice = p.sends_unweighted;
  if (sends(p.phase)) {
    seen.row_bytes = p.row.wire_bytes();
    seen.ids = p.handle.ids;
  }
  const Observed observed(seen);
  backend->combine(p, stream);
  note_phase(Kind::kCombine, p.phase);
  if (sends(p.phase)) calls_.combine++;
}

void Group::combine_weights(LlCombineWeightsParams& p, void* stream) {
  const OneCaller one_caller(is_called_);
  const std::shared_ptr<Backend> backend = begin(p);
  if (backend->trusts_handles()) check_handle(p.handle, p.output, p.shape, p.num_tokens);
  p.offsets = with_room([&] { return LlOffsets::make(window_, Kind::kCombine, p.shape, RowFormat{}); });
  p.header = header_of(pack_operation(Operation::kCombineWeights, DType::kF32, Quant::kNone, DType::kF32), 0, p.shape,
                       0, p.num_tokens);
  check_phase(Kind::kCombine, Phase::kFused, "combine");
  Observation seen = Observation::of(*this, "combine_weights", call_number(Kind::kCombine, Phase::kFused), p.shape,
                                     p.num_tokens, 0, stream);
  seen.is_home_bound = true;
  const Observed observed(seen);
  backend->combine_weights(p, stream);
  note_phase(Kind::kCombine, Phase::kFused);
  calls_.combine_weights++;
}

}  // namespace ep
