#!/bin/bash
# Dispatch and combine over two nodes (examples/two_nodes.py), after a look at each node. docs/network.md explains.
#
#   On node 0, whose name is HOST:   examples/two_nodes.sh 0 HOST [options of two_nodes.py]
#   On node 1:                       examples/two_nodes.sh 1 HOST [...]
#   Without a second node or GPUs:   examples/two_nodes.sh --local [...]      two "nodes" of CPU ranks on this host
#
#   PORT=29500       on HOST, free there and reachable from node 1
#   RANKS=8          of a node; default: its GPUs, with --local 2
#   NCCL_LIBRARY=f   a libnccl.so.2 to preload where torch brings one that is too old for several nodes
#   PYTHON=python    the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python}

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

# Below the ports that the system gives to connections, one of which might take it before torchrun does.
free_port() {
  "$PYTHON" - << 'END'
import contextlib, random, socket
port = None
while port is None:
    with contextlib.suppress(OSError), socket.socket() as listener:
        listener.bind(("", random.randint(20000, 30000)))
        port = listener.getsockname()[1]
print(port)
END
}

# node, host, options of two_nodes.py
start() {
  local node=$1 host=$2
  shift 2
  exec "$PYTHON" -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node "$RANKS" \
    --master-addr "$host" --master-port "$PORT" examples/two_nodes.py "$@"
}

case "${1:-}" in
  --local)
    shift
    RANKS=${RANKS:-2}
    PORT=${PORT:-$(free_port)}
    "$PYTHON" -m nccl_ep.doctor
    start 0 127.0.0.1 --device cpu "$@" & first=$!
    start 1 127.0.0.1 --device cpu "$@" & second=$!
    trap 'kill "$first" "$second" 2>/dev/null || true' EXIT
    code=0
    wait "$first" || code=$?
    wait "$second" || code=$?
    exit "$code"
    ;;
  0 | 1)
    [ $# -ge 2 ] || usage
    [ -z "${NCCL_LIBRARY:-}" ] || export LD_PRELOAD="$NCCL_LIBRARY${LD_PRELOAD:+:$LD_PRELOAD}"
    RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
    PORT=${PORT:-29500}
    "$PYTHON" -m nccl_ep.doctor --several-nodes || {
      echo "two_nodes.sh: this node is not ready for several nodes: the doctor says above what is missing" >&2
      exit 1
    }
    start "$@"
    ;;
  *)
    usage
    ;;
esac
