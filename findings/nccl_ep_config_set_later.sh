#!/usr/bin/env bash
# nccl-extensions 0.1.0: nccl.ep.DispatchConfig and CombineConfig, dataclasses in the place of C structs. No GPU.
# Guess: config.send_only = 1 after the construction is what an operation is given.
# Is: the struct for C is filled once, at the construction. The field says 1, the struct 0, and nothing is raised.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check nccl-extensions==0.1.0 nccl4py==0.6.0 \
  cuda-core==1.2.2 cuda-bindings==13.0.3 nvidia-nccl-cu13==2.30.7 nvidia-cuda-runtime==13.5.37
venv/bin/python - << 'EOF'
import sys
from importlib.metadata import version

from nccl import ep

print("nccl-extensions", version("nccl-extensions"))
seen = []
for Config in (ep.DispatchConfig, ep.CombineConfig):
    later = Config()
    later.send_only = 1
    given = Config(send_only=1)
    seen.append((later.send_only, later._lowpp.send_only, given._lowpp.send_only))
    print(Config.__name__, "set later: field", later.send_only, "struct", later._lowpp.send_only,
          "- given at once: struct", given._lowpp.send_only)
if seen != [(1, 0, 1), (1, 0, 1)]:
    sys.exit("changed")
EOF
