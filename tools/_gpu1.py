import sys, time, os
sys.path.insert(0, 'tests')
import torch, nccl_ep
from cases import generate
from harness import check_case
from nccl_ep.testing import run_ranks
t0=time.time()
ok=bad=skip=0
limit=float(sys.argv[1]); start=int(sys.argv[2]) if len(sys.argv)>2 else 0
seed=start
while time.time()-t0<limit:
    case=generate(seed); seed+=1
    if case.domain_size not in (None, case.num_ranks): 
        import dataclasses
        case=dataclasses.replace(case, domain_size=None)
    try:
        check_case(case, staged=seed%3==1, device="cuda"); ok+=1
    except Exception as e:
        bad+=1
        print(seed-1, type(e).__name__, str(e)[-700:], getattr(e,'__notes__',''), flush=True)
        if bad>5 or 'CUDA' in str(e): break
print("cases ok", ok, "bad", bad, "in", time.time()-t0, flush=True)
