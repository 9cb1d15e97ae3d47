#!/usr/bin/env bash
# NCCL 2.28.9, 2.30.7 and 2.32.3 (wheels nvidia-nccl-cu13): structs that a program with kernels of its own compiles in.
# Guess: as with the host's functions, what is compiled against one 2.x runs over a newer one: the sizes stay.
# Is: ncclDevComm, which goes to a kernel by value, and the requirements that make it grow with each of these.
# Seen: 200, 240 and 248 bytes; requirements 56, 96 and 120. (ncclConfig_t carries its size and a version for this.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
get() { venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$1" "${@:2}"; }
get cuda nvidia-cuda-runtime==13.2.86 nvidia-cuda-crt==13.2.86 nvidia-cuda-cccl==13.2.86
cat > sizes.cc << 'EOF'
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <cstdio>

int main() {
  std::printf("NCCL %d: %zu %zu\n", NCCL_VERSION_CODE, sizeof(ncclDevComm), sizeof(ncclDevCommRequirements));
}
EOF
for version in 2.28.9 2.30.7 2.32.3; do
  get "$version" "nvidia-nccl-cu13==$version"
  g++ -std=c++17 -w -I "$version/nvidia/nccl/include" -I cuda/nvidia/cu13/include -I cuda/nvidia/cu13/include/cccl \
    sizes.cc -o sizes
  ./sizes | tee -a seen
done
diff seen - << 'EOF' || { echo changed >&2; exit 1; }
NCCL 22809: 200 56
NCCL 23007: 240 96
NCCL 23203: 248 120
EOF
