"""``python -m nccl_ep.doctor``: what this machine offers, what will be used, what is missing, and a short self-test.

Exit code 0: the library works on what was found. 1: it does not, or not on the GPUs that are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from .facts import ATTRIBUTES, Facts, collect
from .findings import Finding, judge, judge_nccl, judge_torch, plan
from .self_test import run_rank, self_test


def _lines(facts: Facts) -> list[tuple[str, str]]:
    nccl = facts.nccl
    up_to = f" (up to CUDA {facts.driver_cuda})" if facts.driver_cuda else ""
    lines = [
        ("system", facts.system),
        ("Python, torch", f"{facts.python}, {facts.torch} (CUDA {facts.torch_cuda or 'none'}); "
         f"{judge_torch(facts.torch)[0]}"),
        ("nccl_ep", f"{facts.library}, {'with' if facts.library_cuda else 'without'} CUDA"),
        ("NCCL", f"torch brings {facts.torch_nccl or 'none'}; " + (
            f"nccl_ep is compiled with {nccl['compiled']}, loaded is {nccl['loaded'] or 'none'} {nccl['path']}".strip()
            + f"; {judge_nccl(nccl['loaded'])[0]}" if nccl.get("compiled") else "not part of this build of nccl_ep")),
        ("CUDA", f"driver {facts.driver or 'none'}{up_to}, toolkit {facts.toolkit or 'none'}"),
    ]  # fmt: skip
    for index, gpu in enumerate(facts.gpus):
        shares = [name for name in ATTRIBUTES if getattr(gpu, name)]
        lines.append((
            f"GPU {index}", f"{gpu.name}, {gpu.capability[0]}.{gpu.capability[1]}, {gpu.sms} SMs, "
            f"{gpu.memory_gib} GiB; cuMem: {', '.join(shares) or 'none'}",
        ))  # fmt: skip
    if facts.pairs:
        kinds: dict[str, list[str]] = {}
        for pair, link in facts.pairs.items():
            kinds.setdefault(link, []).append(pair)
        shown = "; ".join(f"{link}: {' '.join(pairs)}" for link, pairs in kinds.items())
        lines.append(("pairs of GPUs", f"{shown} (from {facts.pairs_from})"))
    if facts.cuda_graphs is not None:
        lines.append(("CUDA graphs", "yes" if facts.cuda_graphs else "no"))
    lines.append(("/dev/shm", "none" if facts.shm_bytes is None else f"{facts.shm_bytes / 2**20:.0f} MiB"))
    if facts.gpus:
        nics = ", ".join(f"{name} {state}" for name, state in facts.nics.items())
        lines.append((
            "several nodes", f"kernels for {nccl.get('network') or 'no NCCL'}; RDMA devices: {nics or 'none'}; "
            f"domain_size={len(facts.gpus)} with a rank a GPU",
        ))  # fmt: skip
    if facts.environment:
        lines.append(("environment", " ".join(f"{name}={value}" for name, value in facts.environment.items())))
    return lines


def _show(report: dict[str, Any], facts: Facts, findings: list[Finding]) -> None:
    for name, text in _lines(facts):
        print(f"{name:<15}{text}")
    for finding in findings:
        print(f"{finding.level.upper() if finding.level == 'problem' else finding.level}: {finding.text}"
              + (f". Remedy: {finding.remedy}" if finding.remedy else ""))  # fmt: skip
    print(f"will be used:  {report['uses']}")
    tested = report["self_test"]
    if tested is not None:
        print(f"self-test:     {tested['ranks']} ranks on {tested['device']}: {tested['failure'] or 'well'}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nccl_ep.doctor",
        description="What this machine offers nccl_ep, what is missing and how to get it, and a short self-test. "
        "Exit code 0 if the library works on what is here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of text")
    parser.add_argument("--no-self-test", action="store_true", help="look only")
    parser.add_argument(
        "--several-nodes", action="store_true", help="what buffers across machines want is no longer optional"
    )
    parser.add_argument("--rank-of", choices=("cpu", "cuda"), help=argparse.SUPPRESS)  # set by self_test()
    options = parser.parse_args(argv)
    if options.rank_of:
        return run_rank(options.rank_of)
    facts = collect()
    findings = judge(facts, options.several_nodes)
    device_kind, num_ranks = plan(facts, findings)
    over = "over NVLink" if num_ranks > 1 else "alone"
    uses = f"{num_ranks} GPUs {over}" if device_kind == "cuda" else "CPU ranks"
    report: dict[str, Any] = {"uses": uses, "self_test": None}
    if not options.no_self_test:
        failure = self_test(device_kind, num_ranks)
        report["self_test"] = {"device": device_kind, "ranks": num_ranks, "failure": failure}
    failed = bool(report["self_test"] and report["self_test"]["failure"])
    code = 1 if failed or any(finding.level == "problem" for finding in findings) else 0
    if options.json:
        report |= {"facts": asdict(facts), "findings": [asdict(finding) for finding in findings], "exit_code": code}
        print(json.dumps(report, indent=2))
    else:
        _show(report, facts, findings)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
