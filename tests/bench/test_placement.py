"""The benchmark's ``placement``: the load of ranks before and after experts move."""

from bench.placement import balance
from bench.workload import Shape
from tests.bench.test_bench import run


def test_copies_make_the_fullest_rank_less_full() -> None:
    shape = Shape(8, 512, 64, 4, 32, "bf16", "packed", "hot_expert", 0, "ht")
    found = balance(shape, 1)
    assert found.before > 1.5 and 1 <= found.copied < 1.1 and found.copied <= found.moved <= found.before
    assert abs(found.fresh - found.copied) < 0.1 and 8 <= found.moves <= 40


def test_the_command_prints_a_row_for_each() -> None:
    arguments = "--ranks 2,4 --copies 1 --tokens 64 --topk 2 --experts 8 --routing uniform,skewed"
    rows = [line.split("|")[1:4] for line in run("-m", "bench", "placement", *arguments.split()).splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [routing, ranks, "1"] for routing in ("uniform", "skewed") for ranks in "24"
    ]
