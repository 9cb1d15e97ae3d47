#!/usr/bin/env bash
# torch 2.11.0 and 2.15.0: a tensor that is one constant, seen as another dtype by view(), eagerly and under torch.compile
# with its default backend. Scales of 1 as UE8M0, four in an int32, are such a tensor; so are codes seen as narrower ones.
# Guess: the bits are those of eager code.
# Is: 2.15.0 has them. 2.11.0 computes with one element in the place of all: a view as a wider dtype raises, as "1 is not
# divisible by 4"; a view as a narrower one repeats the first of its elements, so that bits are wrong without a word.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat > program.py << 'EOF'
import torch


def packed_scales(x):
    return torch.full((len(x), 8), 127, dtype=torch.uint8).view(torch.int32)


def narrower(x):
    return torch.ones(len(x), 8, dtype=torch.int32).view(torch.int16)


x = torch.zeros(4)
for code in (packed_scales, narrower):
    want = code(x)
    try:
        got = torch.compile(code)(x)
        print(code.__name__, "right" if torch.equal(got, want) else "wrong", got[0, :4].tolist(), want[0, :4].tolist())
    except Exception as error:
        print(code.__name__, "raises:", next(line for line in str(error).splitlines() if "divisible" in line))
EOF
run() { # VERSION
    "${PYTHON:-python3}" -m venv "venv$1"
    "venv$1/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$1" numpy==2.2.6 setuptools==80.9.0
    echo "torch $1"
    "venv$1/bin/python" -W ignore program.py 2> /dev/null | tee "said$1"
    rm -rf "venv$1"
}
run 2.11.0
run 2.15.0
grep -q "packed_scales raises: .*must be divisible by 4 to view Byte as Int.* but got 1" said2.11.0 &&
    grep -q "narrower wrong \[1, 1, 1, 1\] \[1, 0, 1, 0\]" said2.11.0 &&
    [ "$(grep -c " right " said2.15.0)" = 2 ] || { echo changed; exit 1; }
