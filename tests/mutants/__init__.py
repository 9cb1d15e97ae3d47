"""Mutants: mistakes in rare branches, each an edit of one place in the sources, and the tests that see them.

docs/mutants.md shows them. tools/mutants.py plants them in a copy of the tree and runs the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = {"test": "`make test`", "emulated": "`make emulated`", "fuzz": "fuzz"}
RUNS_IT_NOT = "does not run it"  # kernels in tests of CPU ranks, and the other way round


def not_in(seconds: int) -> str:
    """Of the fuzz: no round failed in this time."""
    return f"not in {seconds} s"


def not_by(*files: str) -> str:
    """The tests of `make emulated` in those files run the code, and pass."""
    return f"not by {' and '.join(f'`{file}`' for file in files)}"


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in ``file``, and ``new`` takes its place.

    breaks: what is wrong then. test, emulated, fuzz: what sees it, a test of pytest, ``ep_tests`` and a test of C++,
    or arguments of ``python -m tests.fuzz``; else why there is none.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    breaks: str
    test: str = RUNS_IT_NOT
    emulated: str = RUNS_IT_NOT
    fuzz: str = RUNS_IT_NOT

    def seen_by(self, column: str) -> str:
        return str(getattr(self, column))

    def planted_in(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"what {self.name} changes stands {count} times in {self.file}, must once: {self.old!r}")
        return text.replace(self.old, self.new)


def is_test(text: str) -> bool:
    """Whether a column names a test."""
    return "::" in text or text.startswith(("ep_tests ", "--"))


def listed() -> str:
    """In Markdown: of each area its mutants, what is wrong then, and which test sees them."""
    lines = []
    for area in dict.fromkeys(each.area for each in MUTANTS):
        lines += [f"## {area[0].upper()}{area[1:]}", ""]
        for each in MUTANTS:
            if each.area == area:
                seen = [f"  - {head}: {_shown(each.seen_by(column))}" for column, head in COLUMNS.items()]
                lines += [f"- `{each.name}`: {each.breaks}", *seen]
        lines.append("")
    return "\n".join(lines)


def _shown(text: str) -> str:
    """Without the parameters of a test."""
    if not is_test(text):
        return text
    parts = text.split("[")[0].split("::")
    return ", ".join(f"`{part}`" for part in (parts[0], *parts[1:][-1:]))


_LL, _HT = "CPU ranks, low latency", "CPU ranks, high throughput"
_GRADIENTS, _DEEP_EP, _ARGUMENTS = "gradients", "DeepEP's methods", "checks of arguments"

MUTANTS = (
    Mutant(
        "ll_scale_stride", _LL, "csrc/cpu/ll/dispatch.cc",
        old="(token * s.row_stride + g * s.group_stride)",
        new="(token * s.row_stride + g)",
        breaks="the stride between the scales of a row is taken as 1",
        test="tests/contract/test_cpu_threads.py::TestCpuThreads::test_every_payload_arrives_as_the_oracle_says[ll-expert_major-scales]",
        fuzz=not_in(60),
    ),
    Mutant(
        "ll_home_id_range", _LL, "csrc/cpu/ll/combine.cc",
        old="if (!p_.shape.valid(id)) return kSkippedWeight;",
        new="if (id < 0) return kSkippedWeight;",
        breaks="an id at combine that is no expert, and not negative, skips nothing",
        test="tests/contract/test_cpu_threads.py::TestCpuThreads::test_sums_are_the_oracles[ll-home_weights_of_few]",
        fuzz="--kinds low_latency --seed 81 --rounds 1",
    ),
    Mutant(
        "ll_dropped_assigned", _LL, "csrc/cpu/ll/dispatch.cc",
        old="state.dropped_rows += placement.dropped;",
        new="state.dropped_rows = placement.dropped;",
        breaks="`stats()` has the dropped rows of the last dispatch, not of all",
        test="tests/api/test_observing.py::test_stats_count_dropped_rows_and_invalid_ids",
        fuzz=not_in(60),
    ),
    Mutant(
        "ll_header_scale_bytes", _LL, "csrc/cpu/ll/exchange.cc",
        old="i < OpHeader::kComparedWords;",
        new="i < OpHeader::kScaleBytes;",
        breaks="ranks whose rows have different bytes of scales are not told",
        test="tests/api/test_disagreement.py::test_ranks_with_different_dispatches_are_told_both[('scales', 3)-2-2]",
        fuzz=not_in(60),
    ),
    Mutant(
        "ht_peer_alignment", _HT, "csrc/cpu/ht/dispatch.cc",
        old="    receiver.output.alignment = static_cast<int>(word(HtMessage::kAlignment));\n",
        new="",
        breaks="rows go to another rank by the sender's `expert_alignment`",
        test="tests/ht/test_chains.py::test_ranks_may_have_layouts_of_their_own",
        fuzz=not_in(60),
    ),
    Mutant(
        "ht_first_choice_dropped", _HT, "csrc/cpu/ht/dispatch.cc",
        old="        if (route.rows[k] < 0) continue;\n        first_row = route.rows[k];\n",
        new="        first_row = route.rows[k];\n        if (first_row < 0) continue;\n",
        breaks="no row comes for a token whose first choice at a rank is dropped and whose second is not",
        test="tests/contract/test_cpu_threads.py::TestCpuThreads::test_rows_past_a_capacity_are_the_oracles[ht-packed]",
        fuzz="--kinds high_throughput --seed 10 --rounds 1",
    ),
    Mutant(
        "ht_row_expert_alignment", _HT, "csrc/cpu/ht/receive.cc",
        old="start += p_.output.span(p_.handle.expert_counts[e]);",
        new="start += p_.handle.expert_counts[e];",
        breaks="`row_expert` is worked out as if experts' rows were not aligned",
        test="tests/contract/test_cpu_threads.py::TestCpuThreads::test_every_payload_arrives_as_the_oracle_says[ht-packed-bf16]",
        fuzz="--kinds handles --seed 4 --rounds 1",
    ),
    Mutant(
        "ht_most_tokens", _HT, "csrc/cpu/ht/dispatch.cc",
        old="std::max<int64_t>(*p.host_most_tokens, exchange.num_tokens(r))",
        new="exchange.num_tokens(r)",
        breaks="of exact sizes, the most tokens of a rank are those of the last rank",
        test="tests/deep_ep/test_normal.py::test_the_window_grows_for_more_tokens[3-None]",
        fuzz=not_in(60),
    ),
    Mutant(
        "ht_failed_info", _HT, "csrc/cpu/ht/dispatch.cc",
        old="    if (routes(p.variant)) std::fill(p.info, p.info + p.output.info_size(), 0);\n",
        new="",
        breaks="after a dispatch that failed, its counts are what they were before",
        test="tests/ht/test_failures.py::test_the_outputs_of_a_failed_dispatch_are_empty",
        fuzz=not_in(60),
    ),
    Mutant(
        "ht_rail_skip_marks", "CPU ranks, rail", "csrc/cpu/ht/combine.cc",
        old="std::memcpy(words + format.expert(0) * 4, marks.data(), topk * 4);",
        new="std::memset(words + format.expert(0) * 4, 0, topk * 4);",
        breaks="choices that are skipped at combine are not skipped in other domains",
        test="tests/contract/test_cpu_network.py::TestCpuNetwork::test_sums_are_the_oracles[ht-home_weights_of_few]",
        fuzz="--kinds high_throughput --seed 274 --rounds 1",
    ),
    Mutant(
        "ht_own_domain_sum", "CPU ranks, rail", "csrc/cpu/ht/combine.cc",
        old="        round(sum_.values);  // as if it had travelled\n",
        new="",
        breaks="the own domain's sum is not rounded as those that travel",
        test="tests/contract/test_cpu_network.py::TestCpuNetwork::test_sums_are_the_oracles[ht-no_weights]",
        fuzz=not_in(60),
    ),
    Mutant(
        "skipped_id_range", _GRADIENTS, "csrc/torch/ops/gradient_functions.h",
        old="at::where(ids.ge(0).logical_and(ids.lt(routing.numbers.num_experts)), values,",
        new="at::where(ids.ge(0).logical_or(ids.ge(routing.numbers.num_experts)), values,",
        breaks="a weight whose id at combine is too large for an expert has a gradient",
        test="tests/training/test_gradients.py::test_choices_that_combine_skips_have_no_gradient[ll]",
        emulated="tests/training/test_gradients.py::test_choices_that_combine_skips_have_no_gradient[ll]",
    ),
    Mutant(
        "missing_rows", _GRADIENTS, "csrc/torch/ops/saved_routing.cc",
        old="{.zero_padding = true}",
        new="{}",
        breaks="gradients of rows that do not exist are not zero",
        test="tests/training/test_zero_weights.py::test_the_gradient_of_weights_of_rows_that_do_not_exist_is_zero[ll]",
        emulated="tests/training/test_zero_weights.py::test_the_gradient_of_weights_of_rows_that_do_not_exist_is_zero[ll]",
    ),
    Mutant(
        "scales_gradient", _GRADIENTS, "csrc/torch/deep_ep/gradients.cc",
        old="if (!wants_gradient(x, x_scales, topk_weights)) return run();",
        new="if (!wants_gradient(x, topk_weights)) return run();",
        breaks="scales have no gradient in DeepEP's normal mode, where neither rows nor weights have one",
        test="tests/deep_ep/test_normal.py::test_scales_have_gradients_where_rows_have_none",
        emulated=not_by("tests/training/test_gradients.py"),
    ),
    Mutant(
        "wait_cost", _DEEP_EP, "csrc/cpu/ll/exchange.cc",
        old="wait_cost_[source] += std",
        new="wait_cost_[source] = std",
        breaks="the cost of a wait takes the place of earlier ones, and is not added to them",
        test="tests/deep_ep/test_low_latency.py::test_waits_are_measured",
    ),
    Mutant(
        "alignment_without_topk", _DEEP_EP, "nccl_ep/deep_ep/v1/normal.py",
        old="aligned = [-(-count // alignment) * alignment for count in",
        new="aligned = [count for count in",
        breaks="without `topk_idx`, the experts' counts are not rounded up to `expert_alignment`",
        test="tests/deep_ep/test_normal.py::test_the_normal_mode_gives_the_oracles_bits[1-30]",
    ),
    Mutant(
        "arena_end", "arena and handles", "csrc/runtime/arena.cc",
        old="address - base > bytes_ - bytes)",
        new="address - base > bytes_)",
        breaks="a tensor that begins in the arena and ends behind it counts as inside",
        test="ep_tests Arena.KnowsWhatLiesInside",
        fuzz=not_in(60),
        emulated=not_by("tests/training/test_gradients.py", "tests/training/test_zero_weights.py"),
    ),
    Mutant(
        "handle_row_end", "arena and handles", "csrc/runtime/handles.cc",
        old='output.map_k(), kDroppedRow, output.rows() - 1, "row");',
        new='output.map_k(), kDroppedRow, output.rows(), "row");',
        breaks="a handle may name the row behind the last",
        test="tests/api/test_bad_input.py::test_a_bad_call_is_refused_and_changes_nothing"
        "[combine: handle and rows of a smaller capacity]",
        fuzz=not_in(60),
    ),
    Mutant(
        "rank_major_capacity", _ARGUMENTS, "csrc/runtime/call.cc",
        old='  EP_CHECK(layout != OutputLayout::kRankMajor, "capacity is ", *capacity,\n'
        '           ", but layout rank_major always holds max_tokens rows of a rank");\n',
        new="",
        breaks="a capacity of rank_major is not refused",
        test="tests/api/test_bad_input.py::test_a_bad_call_is_refused_and_changes_nothing[capacity of rank_major]",
        emulated="tests/contract/test_emulated_gpu.py::TestEmulatedGpu::test_a_refused_call_sends_nothing[ll]",
    ),
    Mutant(
        "ht_gpu_peer_alignment", "kernels, high throughput", "csrc/cuda/ht/route.cuh",
        old="const int alignment = role.tables.alignment[r];",
        new="const int alignment = role.p.output.alignment;",
        breaks="rows go to another rank by the sender's `expert_alignment`",
        emulated="tests/gpu/test_emulated.py::test_high_throughput_keeps_each_promise[own_layouts-4]",
    ),
    Mutant(
        "ht_gpu_rail_skip_marks", "kernels, rail", "csrc/cuda/ht/links/combine.cuh",
        old="marks[k] = static_cast<uint32_t>(is_skipped ? kNoRow : 0);",
        new="marks[k] = 0;",
        breaks="choices that are skipped at combine are not skipped in other domains",
        emulated="tests/contract/test_emulated_gpu.py::TestEmulatedNetwork::test_sums_are_the_oracles[ht-home_weights_of_few]",
    ),
    Mutant(
        "ht_gpu_domain_drops", "kernels, rail", "csrc/cuda/ht/links/combine.cuh",
        old="put_token(unit, 0, !has_all || present == 0);",
        new="put_token(unit, 0, present == 0);",
        breaks="of a domain's sum, a rank that has dropped all rows of a token does not count with +0",
        emulated="tests/contract/test_emulated_gpu.py::TestEmulatedNetwork::test_sums_of_special_numbers_are_the_oracles[ht-expert_major-few]",
    ),
    Mutant(
        "ll_gpu_rounded_once", "kernels, mesh", "csrc/cuda/ll/links/combine.cuh",
        old="if (kIsBlockFormat<kWire> && rail.has_domain_sums()) {",
        new="if (false) {",
        breaks="a rank's sum in a block format, which is its domain's too, is rounded once and not twice",
        emulated="tests/network/test_emulated_network.py::test_sums_in_fewer_bytes_have_the_oracles_bits[fp8-2x1]",
    ),
    Mutant(
        "ll_gpu_empty_channel", "kernels, mesh", "csrc/cuda/ll/links/scalars.cuh",
        old="      is_ok = await_channel(role, op, role.rail.other(i), channel) != Arrival::kFailed;\n",
        new="      if (Share::of(role.rail, p.num_tokens, channel).count == 0) continue;\n"
        "      is_ok = await_channel(role, op, role.rail.other(i), channel) != Arrival::kFailed;\n",
        breaks="a combine of weights does not wait for channels without a token, which land in a later call",
        emulated="tests/network/test_emulated_network.py::test_a_call_ends_behind_all_that_is_sent_to_it",
    ),
    Mutant(
        "ll_gpu_wait_cost", "kernels, low latency", "csrc/cuda/ll/common/headers.cuh",
        old="wait_cost[source] += static_cast",
        new="wait_cost[source] = static_cast",
        breaks="the cost of a wait takes the place of earlier ones, and is not added to them",
        emulated="tests/deep_ep/test_low_latency.py::test_waits_are_measured",
    ),
    Mutant(
        "ll_gpu_dropped_of_many", "kernels, low latency", "csrc/cuda/ll/dispatch/info.cuh",
        old="    dropped = atomicAdd(&bitmap.total(RoutingBitmap::kDropped), 0);\n",
        new="",
        breaks="of more than 64 experts, `overflow` has the dropped rows of some",
        emulated="tests/gpu/test_emulated.py::test_dropped_rows_of_many_experts_are_added_up",
    ),
    Mutant(
        "arrivals_block", "arrivals", "csrc/runtime/common/arrivals.h",
        old="if (output.layout != OutputLayout::kExpertMajor) return row / rows_per_block;",
        new="return row / rows_per_block;",
        breaks="of a capacity that is no multiple of a block's rows, a row counts for a block of another expert",
        test="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ll-3-dropped rows]",
        emulated="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ll-3-dropped rows]",
    ),
    Mutant(
        "arrivals_gpu_word_first", "kernels, arrivals", "csrc/cuda/device/arrivals.cuh",
        old="block), units) != -units) return;",
        new="block), units) != -units - (units == 1 ? 1 : 0)) return;",
        breaks="the word of a block is set when all of its rows but one have come",
        emulated="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ll-3-dropped rows]",
    ),
    Mutant(
        "arrivals_gpu_no_fence", "kernels, arrivals", "csrc/cuda/device/arrivals.cuh",
        old="  __threadfence();\n  if (atomicAdd(arrivals.entry",
        new="  if (atomicAdd(arrivals.entry",
        breaks="no fence stands between a block's rows and the count of them",
        emulated="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ll-3-repeated experts]",
    ),
    Mutant(
        "arrivals_gpu_plan_no_fence", "kernels, arrivals", "csrc/cuda/ht/dispatch/receive.cuh",
        old="  __threadfence();\n  __syncwarp();\n  blocks = ",
        new="  blocks = ",
        breaks="no fence stands between what a high-throughput dispatch knows of the blocks and the word that tells so",
        emulated="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ht-3-dropped rows]",
    ),
    Mutant(
        "arrivals_plan_early", "arrivals", "csrc/cpu/common/arrivals.h",
        old="    back_ = arrivals_.blocks_of(output);\n",
        new="    back_ = arrivals_.blocks_of(output), store(arrivals_.plan(), Arrivals::told(expected_, back_));\n",
        breaks="the plan of blocks is announced before it is made",
        test="tests/api/test_arrivals.py::test_words_come_behind_their_rows[ll-3-dropped rows]",
    ),
    Mutant(
        "signals_of_one_row", "row signals", "csrc/cpu/ht/combine.cc",
        old="if (p_.signals.counters != nullptr) exchange_.await_row",
        new="if (p_.signals.counters != nullptr && !sum_.has_term()) exchange_.await_row",
        breaks="high throughput waits for the signal of a token's first row alone",
        test="tests/ht/test_signals.py::test_rows_are_read_when_their_signals_come[packed]",
    ),
    Mutant(
        "signals_gpu_of_one_row", "kernels, row signals", "csrc/cuda/ht/combine/stage.cuh",
        old="const bool all = __all_sync(~0u, row_under_way(seen) == kNoRow) != 0;",
        new="const bool all = __any_sync(~0u, row_under_way(seen) == kNoRow) != 0;",
        breaks="high throughput reads the rows of a token when one of them may be read",
        emulated="tests/ht/test_signals.py::test_rows_are_read_when_their_signals_come[packed]",
    ),
    Mutant(
        "rank_mask_bit_64", "masks of ranks", "csrc/layout/common/rank_mask.h",
        old="  EP_HD static int word_of(int rank) { return rank >> 5; }\n",
        new="  EP_HD static int word_of(int rank) { return rank >> 5 & 1; }\n",
        breaks="rank 64 and later ones share their bits with the first 64",
        test="ep_tests RankMask.HasABitForEachRank",
        emulated="tests/ll/test_masks.py::test_masks_serve_more_ranks_than_bits_of_a_word[66]",
    ),
    Mutant(
        "gpu_ranks_of_token_past_64", "kernels, both modes", "csrc/cuda/protocol/ids.cuh",
        old="    return word != 0 || (num_ranks > 32 && __any_sync(~0u, mine() >= first() + 32));\n",
        new="    return word != 0 || (first() == 0 && num_ranks > 32 && __any_sync(~0u, mine() >= first() + 32));\n",
        breaks="of the ranks of a token from 32 on, those of one word of 32 get it, or are added up",
        emulated="tests/network/test_emulated_many_ranks.py::test_high_throughput_of_more_than_64_ranks_gives_the_oracles_bits",
    ),
    Mutant(
        "ht_gpu_chunks_of_domain_64", "kernels, rail", "csrc/cuda/ht/links/combine.cuh",
        old="      if (role.lane == domain % 32 && domain < 64) known |=",
        new="      if (role.lane == domain % 32) known |=",
        breaks="a sum of domain 32 + i is taken for there when that of domain 64 + i is",
        emulated="tests/network/test_emulated_many_ranks.py::test_a_domain_past_64_is_not_taken_for_another",
    ),
)  # fmt: skip
