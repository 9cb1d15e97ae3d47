"""examples/two_nodes.sh: two "nodes" of CPU ranks on this host, each started by a torchrun of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPT = ROOT / "examples" / "two_nodes.sh"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT.parent,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("mode", [pytest.param("ll", marks=pytest.mark.slow), "ht"])
def test_two_nodes_on_one_host_send_rows_to_one_another(mode: str) -> None:
    done = _run("--local", "--mode", mode, "--tokens", "16", "--hidden", "64", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self-test:" in done.stdout  # the doctor came first
    assert f"4 ranks on 2 nodes, {mode}: right" in done.stdout
    lines = re.findall(r"node (\d) rank (\d): (\d+) rows to other nodes", done.stdout)
    assert [(int(node), int(rank)) for node, rank, _ in lines] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(0 < int(rows) <= 16 for *_, rows in lines)


def test_a_node_that_is_not_ready(tmp_path: os.PathLike[str]) -> None:
    """Without GPUs, or without a NIC, nothing is started: the doctor says what is missing."""
    doctor = f"{tmp_path}/python"
    with open(doctor, "w") as file:
        file.write('#!/bin/sh\ncase "$*" in *doctor*several-nodes*) echo no NIC; exit 1;; *) echo started; esac\n')
    os.chmod(doctor, 0o755)
    done = _run("1", "nowhere", PYTHON=doctor, RANKS="2")
    assert done.returncode == 1 and "no NIC" in done.stdout and "started" not in done.stdout
    assert "this node is not ready for several nodes" in done.stderr


def test_a_node_starts_its_ranks_with_the_given_nccl(tmp_path: os.PathLike[str]) -> None:
    """The command of node 1, with the NCCL that it preloads."""
    python = f"{tmp_path}/python"
    with open(python, "w") as file:
        file.write('#!/bin/sh\necho "$LD_PRELOAD: $*"\n')
    os.chmod(python, 0o755)
    done = _run("1", "host0", "--mode", "ht", PYTHON=python, RANKS="8", PORT="29555", NCCL_LIBRARY="/nccl/libnccl.so.2")
    assert done.returncode == 0, done.stderr
    look, start = done.stdout.splitlines()
    assert look == "/nccl/libnccl.so.2: -m nccl_ep.doctor --several-nodes"
    assert start == (
        "/nccl/libnccl.so.2: -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr host0 "
        "--master-port 29555 examples/two_nodes.py --mode ht"
    )


@pytest.mark.parametrize("arguments", [(), ("2", "host"), ("0",)])
def test_it_says_how_it_is_used(arguments: tuple[str, ...]) -> None:
    done = _run(*arguments)
    assert done.returncode == 2 and "examples/two_nodes.sh 0 HOST" in done.stderr and "set -euo" not in done.stderr
