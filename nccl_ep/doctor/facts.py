"""What a machine has of what the library uses."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.extension import parse_build

# CUdevice_attribute, by the fields of Gpu
ATTRIBUTES = {"vmm": 102, "posix_handles": 103, "fabric_handles": 128, "rdma_with_vmm": 110, "dma_buf": 124}


@dataclass
class Gpu:
    name: str
    capability: tuple[int, int]
    sms: int
    memory_gib: float
    vmm: bool = True  # cuMem: memory that other processes may map
    posix_handles: bool = True
    fabric_handles: bool = False
    rdma_with_vmm: bool = False  # a NIC may write such memory
    dma_buf: bool = False  # and the driver says where it is


@dataclass
class Facts:
    """Of one machine. Empty strings and None: it is not there, or cannot be asked."""

    system: str = ""
    python: str = ""
    torch: str = ""
    torch_cuda: str = ""
    torch_nccl: str = ""  # that comes with this torch
    library: str = ""
    library_cuda: bool = False
    architectures: str = ""  # that the library has kernels for: "90a 100a"
    nccl: dict[str, str] = field(default_factory=dict)
    driver: str = ""
    driver_cuda: str = ""
    toolkit: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    gpu_error: str = ""  # why torch sees none
    pairs: dict[str, str] = field(default_factory=dict)  # "0-1": "NV18", "peer access" or "none"
    pairs_from: str = ""
    cuda_graphs: bool | None = None
    shm_bytes: int | None = None
    nics: dict[str, str] = field(default_factory=dict)  # RDMA devices and the state of their first port
    peermem: bool = False  # the module nvidia-peermem is loaded
    environment: dict[str, str] = field(default_factory=dict)


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _torch_nccl() -> str:
    """The version of the package beside torch, or of what torch was linked with."""
    if torch.version.cuda is None:
        return ""
    try:
        return metadata.version(f"nvidia-nccl-cu{torch.version.cuda.split('.')[0]}")
    except metadata.PackageNotFoundError:
        pass
    try:
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a torch without NCCL
        return ""


def _driver_cuda() -> str:
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return ""


def _attributes(index: int) -> dict[str, bool]:
    """Of a GPU: what of cuMem it supports. Empty if the driver cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = {}
        for name, number in ATTRIBUTES.items():
            value = ctypes.c_int()
            if driver.cuDeviceGetAttribute(ctypes.byref(value), number, index) == 0:
                found[name] = bool(value.value)
        return found
    except (OSError, AttributeError):
        return {}


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        properties.name, (properties.major, properties.minor), properties.multi_processor_count,
        round(properties.total_memory / 2**30, 1), **_attributes(index),
    )  # fmt: skip


def _pairs_of_nvml(count: int) -> dict[str, str] | None:
    """NVLink by asking each link of each GPU where it ends; a switch joins all that reach one. None: no NVML here."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{_uuid(index)}") for index in range(count)]
        buses = [pynvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
        ends: list[list[Any]] = [[] for _ in handles]
        for index, handle in enumerate(handles):
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                        kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                        bus = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
                        ends[index].append("switch" if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH else bus)
                except pynvml.NVMLError:
                    continue
        return join_links(ends, buses)
    except Exception:  # an old driver, or a GPU that NVML may not show
        return None
    finally:
        pynvml.nvmlShutdown()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def join_links(ends: list[list[Any]], buses: list[Any]) -> dict[str, str]:
    """Pairs of GPUs from where the links of each end: at another's bus address, or at a switch that they share."""
    pairs = {}
    for a in range(len(buses)):
        for b in range(a + 1, len(buses)):
            direct = ends[a].count(buses[b])
            links = direct or min(ends[a].count("switch"), ends[b].count("switch"))
            pairs[f"{a}-{b}"] = f"NV{links}" if links else "none"
    return pairs


def parse_topology(text: str, count: int) -> dict[str, str] | None:
    """The matrix of ``nvidia-smi topo -m``: pairs of the first ``count`` GPUs. None if it has not got them."""
    rows: dict[int, list[str]] = {}
    for line in text.splitlines():
        cells = line.replace("\x1b[4m", "").replace("\x1b[0m", "").split()
        if not cells or not (cells[0].startswith("GPU") and cells[0][3:].isdigit()):
            continue
        if "X" in cells[1 : count + 1]:  # not the line of headings
            rows[int(cells[0][3:])] = cells[1 : count + 1]
    if any(len(rows.get(gpu, [])) != count for gpu in range(count)):
        return None
    return {
        f"{a}-{b}": rows[a][b] if rows[a][b].startswith("NV") else "none"
        for a in range(count)
        for b in range(a + 1, count)
    }


def _pairs(count: int) -> tuple[dict[str, str], str]:
    """What joins each pair of GPUs, and the source of that. Peer access shows where links are hidden."""
    if count < 2:
        return {}, ""
    source, found = "NVML", _pairs_of_nvml(count)
    if found is None and "CUDA_VISIBLE_DEVICES" not in os.environ:  # nvidia-smi numbers all GPUs of the machine
        source, found = "nvidia-smi topo -m", parse_topology(_run("nvidia-smi", "topo", "-m"), count)
    if found is None:
        source, found = "torch", {f"{a}-{b}": "none" for a in range(count) for b in range(a + 1, count)}
    for pair in [pair for pair, link in found.items() if link == "none"]:
        a, b = map(int, pair.split("-"))
        if torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a):
            found[pair] = "peer access"
    return found, source


def rdma_devices(folder: Path) -> dict[str, str]:
    """The devices in /sys/class/infiniband, with the state of the first port of each: "ACTIVE" of "4: ACTIVE"."""
    found = {}
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            state = next(iter(sorted(device.glob("ports/*/state")))).read_text()
        except (OSError, StopIteration):
            state = ""
        found[device.name] = state.split(":")[-1].strip() or "no port"
    return found


def _captures_graphs() -> bool:
    try:
        x = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
        return bool((x == 1).all())
    except RuntimeError:
        return False


def collect() -> Facts:
    """Of this machine and process."""
    facts = Facts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        torch_nccl=_torch_nccl(),
        library=nccl_ep.__version__,
        library_cuda=_C.has_cuda(),
        architectures=parse_build(_C.BUILD)["architectures"],
        nccl=_C.nccl_info(),
        driver=_run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").strip().split("\n")[0],
        driver_cuda=_driver_cuda(),
        nics=rdma_devices(Path("/sys/class/infiniband")),
        peermem=Path("/sys/module/nvidia_peermem").is_dir(),
        environment={name: value for name, value in sorted(os.environ.items())
                     if name.startswith(("NCCL_", "CUDA_VISIBLE", "NCCL_EP_LOG"))},
    )  # fmt: skip
    if release := [line for line in _run("nvcc", "--version").splitlines() if "release" in line]:
        facts.toolkit = release[0].split("release", 1)[1].split(",")[0].strip()
    if torch.cuda.is_available():
        facts.gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
        facts.pairs, facts.pairs_from = _pairs(len(facts.gpus))
        facts.cuda_graphs = _captures_graphs()
    elif torch.version.cuda is None:
        facts.gpu_error = "torch is built without CUDA"
    else:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            facts.gpu_error = str(error).splitlines()[0].split(". ")[0]
    if os.path.isdir("/dev/shm"):
        stat = os.statvfs("/dev/shm")
        facts.shm_bytes = stat.f_frsize * stat.f_blocks
    return facts
