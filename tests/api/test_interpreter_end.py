"""The interpreter ends while other threads are in the library, as daemon threads of servers are: the exit code is 0."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

# Each case is a fork, since to import torch takes seconds. It ends as a program does, at the end of its main thread.
# What it says last is where it ended.
PROGRAM = """
import atexit, gc, os, sys, threading, time
import __main__  # which is cleared at the end then, though threads use its names
import torch
torch.set_num_threads(1)
import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks

x, idx, weights = torch.randn(5, 64), torch.rand(5, 4).topk(2)[1], torch.rand(5, 2)
sizes = dict(
    max_tokens=8, hidden=64, topk=2, num_experts=4, dtype=torch.float32, device="cpu", mode="auto", timeout=60.0)

def pair(**how):
    return run_ranks(2, lambda group: nccl_ep.Buffer.for_shapes(group, **(sizes | how)))

def dispatch(buffer, x=x, **how):
    return nccl_ep.dispatch(x, idx, weights, buffer=buffer, num_experts=4, **how)

def send(buffer):
    return nccl_ep.dispatch_send(x, idx, weights, buffer=buffer, num_experts=4)

def at_work(body):
    threading.Thread(target=body, daemon=True).start()
    time.sleep(0.1)

def waiting(call=dispatch, **how):
    global kept
    kept = pair(**how)
    at_work(lambda: call(kept[0]))

def both(call):
    out = [None, None]
    ranks = [threading.Thread(target=lambda r=r: out.__setitem__(r, call(kept[r]))) for r in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return out

def late(buffer):
    buffer.set_timeout(0.12)
    dispatch(buffer)

def combines():
    global kept, out
    kept = pair()
    out = both(dispatch)
    at_work(lambda: nccl_ep.combine(out[0].x, out[0].handle))

def drops(buffer):
    send(buffer)
    buffer.drop_pending()

def backward():
    global kept, out
    kept = pair()
    out = both(lambda buffer: dispatch(buffer, x.clone().requires_grad_()))
    at_work(lambda: out[0].x.sum().backward())

def goes_on(buffer):
    out = dispatch(buffer)
    nccl_ep.combine(out.x, out.handle)

def say(word):
    os.write(1, f"{word}, ".encode())

def destroyed_at_exit():
    waiting()
    atexit.register(lambda: (kept[0].destroy(), say("destroyed")))

def operation_at_exit():
    global kept
    kept = nccl_ep.Buffer.for_shapes(None, **sizes)
    atexit.register(lambda: (goes_on(kept), say("operated")))

def destroyed_and_freed():
    # By its owner, when the interpreter ends, and then as the last reference to it goes.
    class Owner:
        def __init__(self, buffer):
            self.buffer = buffer
        def __del__(self, write=os.write):  # other names are gone
            self.buffer.destroy()
            write(1, b"destroyed, ")
    global owner
    buffer, other = pair()
    owner = Owner(buffer)
    at_work(lambda: dispatch(buffer))

def makes_a_buffer():
    ends = ThreadGroup.make(2)
    at_work(lambda: nccl_ep.Buffer.for_shapes(ends[0], **(sizes | {"timeout": 0.3})))

def idle():
    global kept
    kept = pair()

def leaves():
    waiting()
    os._exit(0)

cases = {
    "waits": waiting,
    "waits with masks": lambda: waiting(enable_shrink=True),
    "waits between domains": lambda: waiting(domain_size=1),
    "waits in high throughput": lambda: waiting(lambda buffer: dispatch(buffer, mode="ht")),
    "waits for exact sizes": lambda: waiting(lambda buffer: dispatch(buffer, mode="ht", layout="packed",
                                                                     capacity="exact")),
    "waits with a gradient": lambda: waiting(lambda buffer: dispatch(buffer, x.clone().requires_grad_())),
    "waits in a backward pass": backward,
    "receives": lambda: waiting(lambda buffer: send(buffer).receive()),
    "combines": combines,
    "drops": lambda: waiting(drops),
    "reaches its deadline": lambda: waiting(late),
    "makes a buffer": makes_a_buffer,
    "is destroyed at exit": destroyed_at_exit,
    "runs at exit": operation_at_exit,
    "is destroyed and then freed": destroyed_and_freed,
    "is freed": idle,
    "leaves by os._exit": leaves,
}
if sys.argv[1] == "1":
    gc.freeze()  # the collector's last rounds, over all that torch is, are half of a fork's time: in the long run only
for name in [name for name in cases for _ in range(int(sys.argv[1]))]:
    child = os.fork()
    if child == 0:
        threading.excepthook = lambda told: None  # of threads whose buffer is destroyed under them
        cases[name]()
        break  # not sys.exit: its traceback would keep what the case has made
    print(f"{name}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
"""
SAID = {  # by the main thread, at its end
    "is destroyed at exit": "destroyed, ",
    "runs at exit": "operated, ",
    "is destroyed and then freed": "destroyed, ",
}
NUM_CASES = 17


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_threads_in_the_library_do_not_abort_the_process(times: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(times)], capture_output=True, text=True, timeout=1200)
    lines = done.stdout.splitlines()
    names = [re.sub(r"^(destroyed|operated), |: -?\d+$", "", line) for line in lines]
    assert len(names) == NUM_CASES * times and len(set(names)) == NUM_CASES, done.stdout + done.stderr
    wrong = [line for line, name in zip(lines, names, strict=True) if line != f"{SAID.get(name, '')}{name}: 0"]
    assert not wrong, "\n".join(wrong) + done.stderr
