"""examples/two_nodes.sh as a person types it on two nodes: two torchruns of one rank each, with a GPU each, which
meet over TCP. The loopback plugin (tests/gin_loopback) is in the place of a NIC."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.gin_loopback.worlds import LIBRARIES, environment_of, why_not
from tests.support.gpus import NUM_GPUS

_reason = why_not() if NUM_GPUS else "no GPU here"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_reason), reason=_reason)]
SECONDS = 60.0


def free_port() -> int:
    """Below those that the system gives to connections, one of which might take it before torchrun does."""
    while True:
        port = random.randint(20000, 30000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_two_nodes_of_one_gpu_send_rows_to_one_another(mode: str, tmp_path: Path) -> None:
    given = environment_of(domain_size=1) | {"PYTHON": sys.executable, "RANKS": "1", "PORT": str(free_port())}
    if LIBRARIES:
        given["NCCL_LIBRARY"] = str(LIBRARIES[0])
    nodes, logs = [], [tmp_path / "node_0", tmp_path / "node_1"]
    for node, log in enumerate(logs):
        command = [ROOT / "examples" / "two_nodes.sh", str(node), "127.0.0.1", "--mode", mode]
        # Each node's first GPU is its own; the plugin maps the other one's memory.
        visible = {"CUDA_VISIBLE_DEVICES": "0,1" if node == 0 else "1,0"}
        with log.open("w") as file:
            nodes.append(subprocess.Popen(command, env=given | visible, stdout=file, stderr=subprocess.STDOUT))
    end = time.monotonic() + SECONDS
    while None in (codes := [each.poll() for each in nodes]) and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)  # until both have ended, or one has failed: the other may wait for it
    for each in nodes:
        each.terminate()
        each.wait()
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join([f"exit codes {codes}", *said])
    assert f"2 ranks on 2 nodes, {mode}: right" in said[0]
    lines = re.findall(r"node (\d) rank (\d): (\d+) rows to other nodes", said[0])
    assert [(int(node), int(rank)) for node, rank, _ in lines] == [(0, 0), (1, 1)]
    assert all(0 < int(rows) <= 64 for *_, rows in lines)
    print(said[0])
