"""``python -m nccl_ep.doctor``: on this machine, on machines that are made up, and with planted faults."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.doctor import __main__ as doctor
from nccl_ep.doctor import facts as facts_of
from nccl_ep.doctor import self_test
from nccl_ep.doctor.facts import Facts, Gpu, collect, join_links, parse_topology
from nccl_ep.doctor.findings import NCCL_TRIED, TORCH_TRIED, judge, judge_nccl, judge_torch, plan
from nccl_ep.testing import run_ranks
from tests import ROOT
from tests.support.processes import run_python

HAS_GPU = torch.cuda.is_available()


def run(*arguments: str, code: int, first_path: Path | None = None) -> str:
    path = os.pathsep.join(filter(None, [str(first_path or ""), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": path}
    done = run_python("-m", "nccl_ep.doctor", *arguments, environment=environment, timeout=600, cwd=Path.cwd())
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def machine(gpus: int = 4) -> Facts:
    """H200s on which all is well."""
    pairs = {f"{a}-{b}": "NV18" for a in range(gpus) for b in range(a + 1, gpus)}
    return Facts(
        system="Linux", python="3.12", torch="2.11.0", torch_cuda="13.0", torch_nccl="2.28.9", library="0.1.0",
        library_cuda=True, architectures="90a",
        nccl={"compiled": "2.28.9", "loaded": "2.28.9", "path": "libnccl.so.2", "problem": ""}, driver="580.1",
        driver_cuda="13.0", gpus=[Gpu("NVIDIA H200", (9, 0), 132, 139.8) for _ in range(gpus)], pairs=pairs,
        pairs_from="NVML", cuda_graphs=True, shm_bytes=1 << 30,
    )  # fmt: skip


# ---- This machine


@pytest.mark.skipif(HAS_GPU, reason="what is well on a machine with GPUs depends on them")
def test_a_machine_without_a_gpu_gets_a_note_and_a_self_test() -> None:
    shown = run(code=0)
    for line in ("note: torch finds no GPU", "Remedy: ", "will be used:  CPU ranks", "2 ranks on cpu: well"):
        assert line in shown
    report = json.loads(run("--json", code=0))
    assert report["self_test"] == {"device": "cpu", "ranks": 2, "failure": ""} and report["exit_code"] == 0
    assert report["facts"]["torch"] == torch.__version__ and report["facts"]["library_cuda"] == _C.has_cuda()
    about_torch = judge_torch(torch.__version__)[1]  # that this one is newer than those that were tried
    others = [finding for finding in report["findings"] if about_torch is None or finding["text"] != about_torch.text]
    assert [finding["level"] for finding in others] == ["note"]


@pytest.mark.gpu
@pytest.mark.skipif(not (HAS_GPU and _C.has_cuda()), reason="no GPU, or a build without CUDA")
def test_every_gpu_takes_part_in_the_self_test() -> None:
    report = json.loads(run("--json", code=0))
    count = torch.cuda.device_count()
    assert report["self_test"] == {"device": "cuda", "ranks": count, "failure": ""}
    assert len(report["facts"]["gpus"]) == count and len(report["facts"]["pairs"]) == count * (count - 1) // 2


def test_nccls_version_is_known_where_the_build_needs_it() -> None:
    info = _C.nccl_info()
    assert set(info) == {"compiled", "loaded", "path", "problem", "network", "network_problem"}
    assert bool(info["compiled"]) == _C.has_cuda()
    assert bool(info["loaded"] or info["problem"]) == _C.has_cuda()


def test_the_facts_are_those_of_this_machine() -> None:
    found = collect()
    assert found.library == nccl_ep.__version__ and found.python == sys.version.split()[0]
    assert re.fullmatch(r"2\.\d+(\.\d+)*" if torch.version.cuda else "", found.torch_nccl)
    assert bool(found.gpus) == HAS_GPU
    if os.path.isdir("/dev/shm"):
        total = int(subprocess.check_output(["df", "--output=size", "-B1", "/dev/shm"], text=True).split()[1])
        assert found.shm_bytes == total


# ---- Machines that are made up


def test_a_machine_on_which_all_is_well() -> None:
    facts = machine()
    assert judge(facts) == [] and plan(facts, []) == ("cuda", 4)
    assert [finding.level for finding in judge(machine(1))] == ["note"]
    lines = dict(doctor._lines(facts))
    assert lines["pairs of GPUs"] == "NV18: 0-1 0-2 0-3 1-2 1-3 2-3 (from NVML)"
    assert lines["Python, torch"] == "3.12, 2.11.0 (CUDA 13.0); nccl_ep is tested with 2.11 and 2.15"
    assert lines["NCCL"].startswith("torch brings 2.28.9; nccl_ep is compiled with 2.28.9, loaded is 2.28.9 ")
    assert "132 SMs" in lines["GPU 3"] and "vmm" in lines["GPU 3"]


def test_a_torch_that_was_not_tried_is_told() -> None:
    """Every torch from the oldest to the newest that was tried is taken, with what stands behind the two numbers."""
    oldest, newest = TORCH_TRIED
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"torch=={oldest}." in (ROOT / "requirements/dev.txt").read_text()
    for version in (f"{oldest}.0", "2.12.1", f"{newest}.0+cu132", f"{newest}.0a0+git1234"):
        said, finding = judge_torch(version)
        assert finding is None and said == f"nccl_ep is tested with {oldest} and {newest}"
    for version in ("1.13.1", "2.9.1", "2.10.0+cpu", "from source"):
        said, finding = judge_torch(version)
        assert said.startswith("too old") and finding is not None and finding.level == "problem"
        assert f"torch {version} is older than {oldest}" in finding.text and f"torch>={oldest}" in finding.remedy
    for version in (f"{newest[:-1]}99.0", "3.0.0"):
        said, finding = judge_torch(version)
        assert said.startswith("newer than") and finding is not None and finding.level == "note"
        assert f"torch {version} is newer than {newest}" in finding.text


def test_an_nccl_that_was_not_tried_is_told() -> None:
    for version in (*NCCL_TRIED, "2.29.3", "2.32.9", ""):
        assert judge_nccl(version) == ("nccl_ep is tested with 2.28.9, 2.30.7 and 2.32.3", None)
    for version in ("2.33.1", "3.0.2"):
        said, finding = judge_nccl(version)
        assert said.startswith("newer than") and finding is not None and finding.level == "note"
        assert f"NCCL {version} is newer than 2.32.3" in finding.text
    newer = machine()
    newer.nccl |= {"loaded": "2.33.1"}
    assert judge(newer) == [judge_nccl("2.33.1")[1]]
    assert dict(doctor._lines(newer))["NCCL"].endswith("nccl_ep is tested with 2.28.9, 2.30.7 and 2.32.3")


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no CUDA in the build": ({"library_cuda": False}, "built without CUDA", "NCCL_EP_CUDA=ON"),
    "old torch": ({"torch": "2.10.0+cu130"}, "torch 2.10.0+cu130 is older than 2.11", "torch>=2.11"),
    "old NCCL": ({"nccl": {"problem": "this process has loaded NCCL 2.26.2, which is too old"}}, "2.26.2", ""),
    "no NVLink": ({"pairs": {"0-1": "NV18", "0-2": "none"}}, "GPUs 0-2 reach", "nvidia-fabricmanager"),
    "no cuMem": ({"gpus": [Gpu("A", (9, 0), 132, 80.0, vmm=False)]}, "cannot share memory by cuMem", "driver"),
    "no handles": ({"gpus": [Gpu("A", (9, 0), 1, 1.0, posix_handles=False)]}, "cannot share memory", "driver"),
    "old GPU": ({"gpus": [Gpu("A100", (8, 0), 108, 80.0)]}, "A100, has compute capability 8.0", "Hopper"),
    "cuMem off": ({"environment": {"NCCL_CUMEM_ENABLE": "0"}}, "NCCL_CUMEM_ENABLE is 0", "unset"),
    "windows off": ({"environment": {"NCCL_WIN_ENABLE": "0"}}, "NCCL_WIN_ENABLE is 0", "unset"),
    "peers off": ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "uses no NVLink", "unset"),
    "no graphs": ({"cuda_graphs": False}, "CUDA graphs cannot be captured", "driver"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_machine_has_its_remedy(fault: str) -> None:
    changed, text, remedy = FAULTS[fault]
    facts = machine()
    for name, value in changed.items():
        setattr(facts, name, value)
    problems = [finding for finding in judge(facts) if finding.level == "problem"]
    assert len(problems) == 1 and text in problems[0].text and remedy in problems[0].remedy
    assert plan(facts, problems) == ("cpu", 2)


def connected(gpus: int = 4) -> Facts:
    """The same with a NIC for each GPU."""
    facts = machine(gpus)
    facts.nccl |= {"network": "NCCL 2.30.7 exactly", "network_problem": ""}
    facts.nics = {f"mlx5_{i}": "ACTIVE" for i in range(gpus)}
    facts.peermem = True
    facts.gpus = [Gpu("NVIDIA H200", (9, 0), 132, 139.8, rdma_with_vmm=True) for _ in range(gpus)]
    return facts


NETWORK_FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "old NCCL": (
        {"nccl": {"network_problem": "several NVLink domains need NCCL 2.30.7 exactly"}},
        "need NCCL 2.30.7",
        "",
    ),
    "no NIC": ({"nics": {}}, "no RDMA device is here", "--device=/dev/infiniband"),
    "no link": ({"nics": {"mlx5_0": "DOWN"}}, "no RDMA device has an active port: mlx5_0 DOWN", "ibstat"),
    "no GPUDirect": ({"gpus": [Gpu("A", (9, 0), 1, 1.0)] * 2}, "cannot write memory of GPU 0, 1", "driver"),
    "no peermem": ({"peermem": False}, "nvidia-peermem is not loaded", "modprobe"),
    "GIN off": ({"environment": {"NCCL_GIN_ENABLE": "0"}}, "NCCL_GIN_ENABLE is 0", "unset"),
    "one rail": ({"environment": {"NCCL_CROSS_NIC": "0"}}, "NCCL_CROSS_NIC is 0", "unset"),
}


@pytest.mark.parametrize("fault", NETWORK_FAULTS)
def test_a_fault_between_machines_has_its_remedy(fault: str) -> None:
    changed, text, remedy = NETWORK_FAULTS[fault]
    facts = connected()
    for name, value in changed.items():
        setattr(facts, name, value)
    assert not [finding for finding in judge(facts) if finding.level == "problem"]  # one machine does without
    problems = [finding for finding in judge(facts, several_nodes=True) if finding.level == "problem"]
    assert len(problems) == 1 and text in problems[0].text and remedy in problems[0].remedy


def test_a_machine_without_gpus_cannot_take_part_in_several_nodes() -> None:
    facts = machine(0)
    assert [finding.level for finding in judge(facts)] == ["note"]
    (found,) = judge(facts, several_nodes=True)
    assert found.level == "problem" and "a buffer of several nodes joins GPUs" in found.text and found.remedy


def test_machines_that_are_connected_have_no_fault() -> None:
    facts = connected()
    assert judge(facts, several_nodes=True) == []
    assert "kernels for NCCL 2.30.7 exactly; RDMA devices: mlx5_0 ACTIVE" in dict(doctor._lines(facts))["several nodes"]
    assert "domain_size=4" in dict(doctor._lines(facts))["several nodes"]
    facts.peermem, facts.gpus = False, [dataclasses.replace(gpu, dma_buf=True) for gpu in facts.gpus]
    assert judge(facts, several_nodes=True) == []
    facts.nics = {"mlx5_0": "ACTIVE", "mlx5_1": "DOWN"}
    facts.environment = {"NCCL_LSA_TEAM_SIZE": "2"}
    notes = judge(facts, several_nodes=True)
    assert [finding.level for finding in notes] == ["note", "note"]
    assert "1 active RDMA devices for 4 GPUs" in notes[0].text and "NCCL_LSA_TEAM_SIZE is 2" in notes[1].text
    assert plan(facts, notes) == ("cuda", 2)
    for claimed in ("", "0", "-1", "two", "64"):
        facts.environment = {"NCCL_LSA_TEAM_SIZE": claimed}
        assert plan(facts, notes) == ("cuda", 4), claimed


def test_a_plugin_may_take_the_place_of_nics() -> None:
    facts = connected()
    facts.nics, facts.peermem = {}, False
    facts.environment = {"NCCL_RMA_PLUGIN": "libmine.so"}
    (note,) = judge(facts, several_nodes=True)
    assert note.level == "note" and "NCCL_RMA_PLUGIN is libmine.so" in note.text


def test_rdma_devices_are_told_with_their_state(tmp_path: Path) -> None:
    assert facts_of.rdma_devices(tmp_path / "none") == {}
    for name, state in (("mlx5_1", "4: ACTIVE\n"), ("mlx5_0", "1: DOWN\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    (tmp_path / "broken").mkdir()
    assert facts_of.rdma_devices(tmp_path) == {"broken": "no port", "mlx5_0": "DOWN", "mlx5_1": "ACTIVE"}


@pytest.mark.parametrize(
    ("driver", "cuda", "shown"),
    [("580.1", "13.0", "driver 580.1 (up to CUDA 13.0), toolkit none"), ("", "", "driver none, toolkit none")],
)
def test_a_driver_is_told_with_its_cuda(driver: str, cuda: str, shown: str) -> None:
    assert ("CUDA", shown) in doctor._lines(dataclasses.replace(machine(), driver=driver, driver_cuda=cuda))


def test_notes_are_no_problems() -> None:
    for changed, text in (
        ({"torch": "2.99.0"}, "torch 2.99.0 is newer than"),
        ({"shm_bytes": 32 << 20}, "/dev/shm has 32 MiB"),
        ({"shm_bytes": None}, "/dev/shm is not there"),
        ({"pairs": {"0-1": "peer access"}}, "whether by NVLink or PCIe"),
        ({"gpus": [Gpu("NVIDIA B200", (10, 0), 148, 180.0)] * 4}, "needs kernels for 100a; this build has"),
        ({"environment": {"NCCL_CUMEM_ENABLE": "1"}}, ""),
    ):
        facts = machine()
        for name, value in changed.items():
            setattr(facts, name, value)
        findings = judge(facts)
        assert all(finding.level == "note" for finding in findings) and bool(findings) == bool(text)
        assert text in " ".join(finding.text for finding in findings)
        assert plan(facts, findings) == ("cuda", 4)


def test_the_exit_code_and_the_report_tell_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = []
    monkeypatch.setattr(doctor, "self_test", lambda kind, ranks: tested.append((kind, ranks)) or failure)
    for fault, failure, code in (("", "", 0), ("", "rank 1: it broke", 1), ("cuMem off", "", 1)):
        facts = copy.deepcopy(machine())
        if fault:
            facts.environment = FAULTS[fault][0]["environment"]
        monkeypatch.setattr(doctor, "collect", lambda facts=facts: facts)
        assert doctor.main(["--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["exit_code"] == code and report["self_test"]["failure"] == failure
        assert report["uses"] == ("CPU ranks" if fault else "4 GPUs over NVLink")
        assert doctor.main([]) == code
        shown = capsys.readouterr().out
        assert ("PROBLEM: NCCL_CUMEM_ENABLE" in shown) == bool(fault) and failure in shown
    assert tested == [("cuda", 4)] * 4 + [("cpu", 2)] * 2


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:
  X    = Self
"""


def test_the_topology_of_nvidia_smi_is_read() -> None:
    assert parse_topology(TOPOLOGY, 3) == {"0-1": "NV18", "0-2": "none", "1-2": "none"}
    assert parse_topology(TOPOLOGY, 2) == {"0-1": "NV18"}
    assert parse_topology(TOPOLOGY, 4) is None and parse_topology("", 2) is None


def test_the_links_of_nvml_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 0 and 1 have two links to one another and one to a switch, 2 has one to the switch, 3 has none."""
    assert join_links([["b", "b", "switch"], ["a", "a", "switch"], ["switch"], []], ["a", "b", "c", "d"]) == {
        "0-1": "NV2", "0-2": "NV1", "0-3": "none", "1-2": "NV1", "1-3": "none", "2-3": "none",
    }  # fmt: skip

    class NVMLError(Exception):
        pass

    links = {0: [("gpu", "b"), ("switch", "s")], 1: [("gpu", "a"), ("switch", "s")]}

    def link(handle: int, index: int) -> tuple[str, str]:
        if index >= len(links[handle]):
            raise NVMLError
        return links[handle][index]

    fake: Any = types.SimpleNamespace(
        NVMLError=NVMLError, NVML_NVLINK_MAX_LINKS=18, NVML_NVLINK_DEVICE_TYPE_SWITCH="switch",
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId="ab"[handle]),
        nvmlDeviceGetNvLinkState=lambda handle, index: bool(link(handle, index)),
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, index: link(handle, index)[0],
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, index: types.SimpleNamespace(busId=link(handle, index)[1]),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(facts_of, "_uuid", str)
    assert facts_of._pairs_of_nvml(2) == {"0-1": "NV1"}
    del fake.nvmlDeviceGetPciInfo
    assert facts_of._pairs_of_nvml(2) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts_of._pairs_of_nvml(2) is None


def test_pairs_fall_back_to_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {1, 2})
    monkeypatch.setattr(facts_of, "_run", lambda *_: TOPOLOGY)
    assert facts_of._pairs(3) == ({"0-1": "NV18", "0-2": "none", "1-2": "peer access"}, "nvidia-smi topo -m")
    monkeypatch.setattr(facts_of, "_run", lambda *_: "")
    assert facts_of._pairs(3) == ({"0-1": "none", "0-2": "none", "1-2": "peer access"}, "torch")
    assert facts_of._pairs(1) == ({}, "")


# ---- The self-test

PLANTED = {
    "a wrong bit": (
        "import torch, nccl_ep\n"
        "combine = nccl_ep.combine\n"
        "def wrong(*args):\n"
        "    y = combine(*args)\n"
        "    y.view(torch.int16)[5, 7] ^= 1\n"
        "    return y\n"
        "nccl_ep.combine = wrong\n",
        "rank 1: AssertionError: eager: not the oracle's result: 1 of 4096 elements differ, first at [5, 7]",
    ),
    "a rank that dies": ("import os\nos._exit(7)\n", "rank 1 ended with code 7"),
    "a rank that raises": (
        "import nccl_ep\n"
        "def wrong(*args, **kwargs):\n"
        "    raise MemoryError('no window')\n"
        "nccl_ep.Buffer.for_shapes = wrong\n",
        "rank 1: MemoryError: no window",
    ),
}


@pytest.mark.skipif(HAS_GPU, reason="planted in two CPU ranks")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_rank_that_fails_is_told_with_its_words(fault: str, tmp_path: Path) -> None:
    program, said = PLANTED[fault]
    indented = "".join(f"    {line}\n" for line in program.splitlines())
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n{indented}")
    report = json.loads(run("--json", code=1, first_path=tmp_path))
    assert said in report["self_test"]["failure"] and report["exit_code"] == 1


def test_a_rank_that_hangs_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    code = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(60)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    failure = self_test.self_test("cpu", 1, seconds=2.0)
    assert failure == "the time limit ended rank 0"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_self_test_passes_on_threads(num_ranks: int) -> None:
    run_ranks(num_ranks, lambda group: self_test.check_rank(group, torch.device("cpu")))
