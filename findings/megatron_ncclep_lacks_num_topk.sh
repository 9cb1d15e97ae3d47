#!/usr/bin/env bash
# megatron-core 0.19.2, dispatcher "ncclep", with Transformer Engine 2.20.2, the newest of both. No GPU, no torch.
# Guess: Megatron's call of transformer_engine.pytorch.ep.ep_bootstrap fits the newest Transformer Engine.
# Is: num_topk is required, since 2.19.0 at least, and Megatron does not give it: TypeError in the first step.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  megatron-core==0.19.2 transformer-engine==2.20.2
venv/bin/python - << 'EOP'
import ast
import glob
import inspect
import sys
import zipfile


def nodes(package, file):
    wheel, = glob.glob(f"{package}-*.whl")
    print(wheel)
    return ast.walk(ast.parse(zipfile.ZipFile(wheel).read(file)))


made, = (n for n in nodes("transformer_engine", "transformer_engine/pytorch/ep.py")
         if isinstance(n, ast.FunctionDef) and n.name == "ep_bootstrap")
call, = (n for n in nodes("megatron_core", "megatron/core/transformer/moe/fused_a2a.py")
         if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "ep_bootstrap")
made.body, made.returns = [ast.Pass()], None
for each in made.args.args:
    each.annotation = None
made.args.defaults = [ast.Constant(None)] * len(made.args.defaults)
names = {}
exec(compile(ast.fix_missing_locations(ast.Module([made], [])), "ep", "exec"), names)
try:
    inspect.signature(names["ep_bootstrap"]).bind(*call.args, **{each.arg: None for each in call.keywords})
except TypeError as error:
    print("TypeError:", error)
    sys.exit("num_topk" not in str(error))
sys.exit("changed")
EOP
