#!/usr/bin/env bash
# build.sh [OUT.so]: compiles the plugin. Needs g++ and cuda.h, of the toolkit or of the wheel beside torch; no GPU, no NCCL.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../build/libgin_loopback.so}
wheel=$(python3 -c 'import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])' 2>/dev/null || true)
for root in "${CUDA_HOME:-}" /usr/local/cuda "$wheel"; do
  if [ -n "$root" ] && [ -e "$root/include/cuda.h" ]; then cuda=$root/include; break; fi
done
[ -n "${cuda:-}" ] || { echo "build.sh: no cuda.h was found: set CUDA_HOME" >&2; exit 2; }
mkdir -p "$(dirname "$out")"
# nodelete: NCCL closes a plugin whose thread may still run.
${CXX:-g++} -std=c++20 -O2 -g1 -Wall -Wextra -Wno-missing-field-initializers -fPIC -shared -fvisibility=hidden \
    ${CXXFLAGS:-} -isystem "$cuda" "$here"/*.cc -o "$out" -Wl,-z,nodelete -Wl,--no-undefined -pthread -ldl
echo "$out"
