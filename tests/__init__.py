"""Tests by topic, each with its helpers; tests/support has what many share."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Here, since torch reads them when it is imported. Inductor of each process would compile and load ten programs to find
# which vector instructions the CPU has (half a minute of a core), and start another process to compile in.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
