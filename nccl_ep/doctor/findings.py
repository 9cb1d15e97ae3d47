"""What follows from what a machine has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .facts import Facts

TORCH_TRIED = ("2.11", "2.15")  # the oldest that is supported and the newest that the tests have run with
NCCL_TRIED = ("2.28.9", "2.30.7", "2.32.3")  # with which the GPU tests have run, ascending
_OLDEST_CAPABILITY = (9, 0)  # the kernels use what sm_90 has
_SMALLEST_SHM = 64 << 20  # NCCL's shared memory, about 10 MB a GPU


@dataclass
class Finding:
    """level: "problem" (exit code 1) or "note". remedy: how to get what is missing."""

    level: str
    text: str
    remedy: str = ""


def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version: (2, 15) of "2.15.0+cu132"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _judge_newer(what: str, version: str, newest: str, tried: str, remedy: str) -> tuple[str, Finding | None]:
    if _numbers(version) <= _numbers(newest):
        return tried, None
    return f"newer than what was tested: {tried}", Finding(
        "note", f"{what} {version} is newer than {newest}, the newest that nccl_ep was tested with",
        f"if something fails, {remedy}",
    )  # fmt: skip


def judge_torch(version: str) -> tuple[str, Finding | None]:
    """A word on torch's version, and what is wrong with it."""
    oldest, newest = TORCH_TRIED
    tried = f"nccl_ep is tested with {oldest} and {newest}"
    if _numbers(version) < _numbers(oldest):
        return f"too old: {tried}", Finding(
            "problem", f"torch {version} is older than {oldest}, the oldest that nccl_ep supports",
            f"pip install 'torch>={oldest}', then build nccl_ep again",
        )  # fmt: skip
    return _judge_newer("torch", version, newest, tried, f"pip install 'torch=={newest}.*' and build nccl_ep again")


def judge_nccl(version: str) -> tuple[str, Finding | None]:
    """The same of NCCL's, of an NCCL that is not too old."""
    *others, newest = NCCL_TRIED
    tried = f"nccl_ep is tested with {', '.join(others)} and {newest}"
    return _judge_newer("NCCL", version, newest, tried, f"LD_PRELOAD the libnccl.so.2 of NCCL {newest}")


def judge(facts: Facts, several_nodes: bool = False) -> list[Finding]:
    """What is missing on a machine, and how to get it. several_nodes: for buffers of GPUs of several machines, too."""
    found: list[Finding] = []

    def problem(text: str, remedy: str) -> None:
        found.append(Finding("problem", text, remedy))

    def note(text: str, remedy: str = "") -> None:
        found.append(Finding("note", text, remedy))

    if torch := judge_torch(facts.torch)[1]:
        found.append(torch)
    if not facts.gpus:
        why = f" ({facts.gpu_error})" if facts.gpu_error else ""
        remedy = "GPUs need a driver of NVIDIA's and a torch with CUDA (pip install torch)"
        if several_nodes:
            problem(f"torch finds no GPU{why}: a buffer of several nodes joins GPUs", remedy)
        else:
            note(f"torch finds no GPU{why}: ranks run on the CPU, which is for tests, not for speed", remedy)
        return found
    if not facts.library_cuda:
        problem(f"{len(facts.gpus)} GPUs are here, but this nccl_ep is built without CUDA",
                "build it where nvcc is: NCCL_EP_CUDA=ON pip install --force-reinstall --no-deps .")  # fmt: skip
    elif facts.nccl.get("problem"):
        problem(facts.nccl["problem"], "")  # which says what to do
    elif nccl := judge_nccl(facts.nccl.get("loaded", ""))[1]:
        found.append(nccl)
    _judge_gpus(facts, problem, note)
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"):
        if facts.environment.get(name) == "0":
            problem(f"{name} is 0: NCCL then maps no memory of other GPUs", f"unset {name}")
    if facts.environment.get("NCCL_P2P_DISABLE") == "1":
        problem("NCCL_P2P_DISABLE is 1: NCCL then uses no NVLink", "unset NCCL_P2P_DISABLE")
    if facts.shm_bytes is None or facts.shm_bytes < _SMALLEST_SHM:
        size = "is not there" if facts.shm_bytes is None else f"has {facts.shm_bytes / 2**20:.0f} MiB"
        note(f"/dev/shm {size}: NCCL's start may fail for want of shared memory",
             "in a container: docker run --shm-size=1g, or --ipc=host")  # fmt: skip
    if facts.cuda_graphs is False:
        problem("CUDA graphs cannot be captured", "a newer driver; CUDA_LAUNCH_BLOCKING and debuggers must be off")
    if several_nodes:
        _judge_network(facts, problem, note)
    return found


def _judge_network(facts: Facts, problem: Any, note: Any) -> None:
    """What NCCL's GPU-initiated networking (GIN) wants of a machine, as far as it can be seen without a peer."""
    if facts.library_cuda and facts.nccl.get("network_problem"):
        problem(facts.nccl["network_problem"], "")  # which says what to do
    if plugin := facts.environment.get("NCCL_RMA_PLUGIN"):
        note(f"NCCL_RMA_PLUGIN is {plugin}: the plugin brings the network for kernels, so NICs were not judged")
    else:
        _judge_nics(facts, problem, note)
    if facts.environment.get("NCCL_GIN_ENABLE") == "0":
        problem("NCCL_GIN_ENABLE is 0: NCCL then has no network for kernels", "unset NCCL_GIN_ENABLE")
    if facts.environment.get("NCCL_CROSS_NIC") == "0":
        problem("NCCL_CROSS_NIC is 0: NCCL then joins only GPUs of one rail", "unset NCCL_CROSS_NIC")
    if size := facts.environment.get("NCCL_LSA_TEAM_SIZE"):
        note(f"NCCL_LSA_TEAM_SIZE is {size}: NCCL's NVLink domains are made smaller, which is for tests",
             "unset NCCL_LSA_TEAM_SIZE")  # fmt: skip


def _judge_nics(facts: Facts, problem: Any, note: Any) -> None:
    active = [name for name, state in facts.nics.items() if state == "ACTIVE"]
    if not facts.nics:
        problem("no RDMA device is here (/sys/class/infiniband): NCCL then has no network that kernels can use",
                "a NIC for InfiniBand or RoCE with its driver; in a container: --device=/dev/infiniband")  # fmt: skip
    elif not active:
        states = ", ".join(f"{name} {state}" for name, state in facts.nics.items())
        problem(f"no RDMA device has an active port: {states}", "ibstat tells; cables, subnet manager, RoCE set-up")
    elif len(active) < len(facts.gpus):
        note(f"{len(active)} active RDMA devices for {len(facts.gpus)} GPUs: GPUs share NICs", "one NIC a GPU")
    if without := [index for index, gpu in enumerate(facts.gpus) if not gpu.rdma_with_vmm]:
        problem(f"a NIC cannot write memory of GPU {', '.join(map(str, without))} (GPUDirect RDMA with cuMem)",
                "a newer driver; in a virtual machine, a GPU that is passed through whole")  # fmt: skip
    elif not facts.peermem and not all(gpu.dma_buf for gpu in facts.gpus):
        problem("a NIC cannot find memory of GPUs: nvidia-peermem is not loaded, and the driver has no DMA-BUF",
                "modprobe nvidia-peermem, or the open kernel modules")  # fmt: skip


def _judge_gpus(facts: Facts, problem: Any, note: Any) -> None:
    for index, gpu in enumerate(facts.gpus):
        if gpu.capability < _OLDEST_CAPABILITY:
            problem(f"GPU {index}, {gpu.name}, has compute capability {gpu.capability[0]}.{gpu.capability[1]}; the "
                    "kernels are for 9.0", "a Hopper GPU or newer; hide others with CUDA_VISIBLE_DEVICES")  # fmt: skip
        elif facts.library_cuda and (needed := "{}{}a".format(*gpu.capability)) not in facts.architectures.split():
            note(f"GPU {index}, {gpu.name}, needs kernels for {needed}; this build has them for {facts.architectures}",
                 f"build with NCCL_EP_CUDA_ARCHS='90a;{needed}'")  # fmt: skip
        if not (gpu.vmm and gpu.posix_handles):
            problem(f"GPU {index}, {gpu.name}, cannot share memory by cuMem (virtual memory management)",
                    "a newer driver; in a virtual machine, a GPU that is passed through whole")  # fmt: skip
    if bad := [pair for pair, link in facts.pairs.items() if link == "none"]:
        problem(f"GPUs {', '.join(bad)} reach one another neither by NVLink nor by PCIe",
                "use GPUs that NVLink joins (CUDA_VISIBLE_DEVICES); on an NVSwitch machine the fabric manager must run "
                "(systemctl status nvidia-fabricmanager)")  # fmt: skip
    if any(link == "peer access" for link in facts.pairs.values()):
        note("GPUs reach one another, whether by NVLink or PCIe is not known here",
             "pip install nvidia-ml-py, or nvidia-smi on the PATH, tells")  # fmt: skip
    if len(facts.gpus) == 1:
        note('one GPU: a world of one rank; several ranks need a GPU each, or device="cpu"')


def plan(facts: Facts, findings: list[Finding]) -> tuple[str, int]:
    """The device kind and the number of ranks that the self-test uses: GPUs only where nothing speaks against them."""
    if facts.gpus and facts.library_cuda and not any(finding.level == "problem" for finding in findings):
        claimed = facts.environment.get("NCCL_LSA_TEAM_SIZE", "")
        domain = int(claimed) if claimed.isdecimal() else 0  # the self-test is of one
        return "cuda", min(len(facts.gpus), domain or len(facts.gpus))
    return "cpu", 2
