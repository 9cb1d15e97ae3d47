import torch, nccl_ep, sys
from nccl_ep.testing import run_ranks
H,K,E,T=7168,8,256,int(sys.argv[1])
def body(g):
    b=nccl_ep.Buffer.for_shapes(g,max_tokens=T,hidden=H,topk=K,num_experts=E,device="cuda",timeout=60)
    gen=torch.Generator().manual_seed(g.rank())
    x=torch.randn(T,H,generator=gen).bfloat16().cuda()
    idx=torch.stack([torch.randperm(E,generator=gen)[:K] for _ in range(T)]).cuda(); w=torch.rand(T,K,generator=gen).cuda()
    for _ in range(6):
        o=nccl_ep.dispatch(x,idx,w,buffer=b,num_experts=E); y=nccl_ep.combine(o.x,o.handle)
    torch.cuda.synchronize(); b.destroy()
run_ranks(4,body)
