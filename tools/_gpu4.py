import os, sys, json, time, tempfile
import torch, torch.multiprocessing as mp, torch.distributed as dist
os.environ.setdefault("NCCL_NVLS_ENABLE","0")
H,K,E=7168,8,256
def bench(fn, n, iters, align):
    g=torch.cuda.CUDAGraph()
    s=torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        fn()
    torch.cuda.current_stream().wait_stream(s)
    torch.cuda.synchronize()
    with torch.cuda.graph(g):
        for _ in range(n): fn()
    torch.cuda.synchronize(); dist.barrier()
    ts=[]
    for i in range(iters+3):
        torch.cuda._sleep(300000)
        align()
        e0=torch.cuda.Event(enable_timing=True); e1=torch.cuda.Event(enable_timing=True)
        e0.record(); g.replay(); e1.record()
        torch.cuda.synchronize()
        if i>=3: ts.append(e0.elapsed_time(e1)*1000/n)
    ts.sort()
    v=torch.tensor([ts[len(ts)//2]]); dist.all_reduce(v,op=dist.ReduceOp.MAX)
    return round(float(v),2)
def main(rank, R, path, spec):
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=R)
    import nccl_ep
    t0=time.time()
    def say(*a):
        if rank==0: print(*a, flush=True)
    out={}
    for T in spec["tokens"]:
        M=T
        free0=torch.cuda.mem_get_info()[0]
        b=nccl_ep.Buffer.for_shapes(dist.group.WORLD,max_tokens=M,hidden=H,topk=K,num_experts=E,device="cuda",timeout=10)
        if T==128: say("window", b.stats()["window_bytes"], "total", free0-torch.cuda.mem_get_info()[0], "made in", time.time()-t0)
        gen=torch.Generator().manual_seed(rank)
        x=torch.randn(T,H,generator=gen).bfloat16().cuda()
        idx=torch.stack([torch.randperm(E,generator=gen)[:K] for _ in range(T)]).cuda()
        w=torch.rand(T,K,generator=gen).cuda()
        o=nccl_ep.dispatch(x,idx,w,buffer=b,num_experts=E)
        y=nccl_ep.combine(o.x,o.handle)
        ref=x.float()*w.sum(1,keepdim=True)
        err=((y.float()-ref).abs().max()/ref.abs().max()).item()
        assert err<0.02,err
        rows=torch.randn_like(o.x.float()).bfloat16() if T<=128 else o.x
        ops=torch.ops.nccl_ep
        def outs(q):
            t=ops.ll_dispatch(b.name,b._seq,x,None,idx,w,E,M,0,R*M,1,q,False,0); return t
        ob=outs(0); of=outs(1)
        yo=torch.empty_like(y)
        hargs=o.handle.args()
        def D(q=0):
            t=of if q else ob
            ops.ll_dispatch_out(b.name,b._seq,x,None,idx,w,E,M,0,R*M,1,q,False,0,*t)
        def C():
            ops.ll_combine_out(b.name,b._seq,rows,ob[6],None,None,[],*hargs,1,torch.bfloat16,torch.bfloat16,0,yo)
        D(); C(); torch.cuda.synchronize(); b.check()
        n=40
        for pdl in spec["pdl"]:
            b.runtime.set_pdl(bool(pdl))
            for name,plans in spec["plans"].items():
                for pl in plans:
                    if pl and "T" in pl and T not in pl["T"]: continue
                    for k in ("EP_PLAN_D","EP_PLAN_C"): os.environ.pop(k,None)
                    if pl: os.environ["EP_PLAN_"+("C" if name=="C" else "D")]=pl["p"]
                    f={"D":lambda:D(0),"F":lambda:D(1),"C":C,"P":lambda:(D(0),C()),"PF":lambda:(D(1),C())}[name]
                    try: v=bench(f,n,spec["iters"],D)
                    except Exception as e:
                        say(T,name,pl,"ERR",str(e)[:300]); raise
                    say(f"T{T:4d} pdl{pdl} {name:2s} {v:8.2f}  {pl['p'] if pl else 'default'}")
                    out[f"{T},{pdl},{name},{pl['p'] if pl else ''}"]=v
        torch.cuda.synchronize(); b.check()
        # host cost and eager pair
        for k in ("EP_PLAN_D","EP_PLAN_C"): os.environ.pop(k,None)
        b.runtime.set_pdl(False)
        def pair():
            o=nccl_ep.dispatch(x,idx,w,buffer=b,num_experts=E); nccl_ep.combine(o.x,o.handle)
        for _ in range(10): pair()
        torch.cuda.synchronize(); dist.barrier()
        ts=[]
        for i in range(30):
            torch.cuda.synchronize(); dist.barrier()
            e0=torch.cuda.Event(enable_timing=True); e1=torch.cuda.Event(enable_timing=True)
            e0.record(); pair(); e1.record(); torch.cuda.synchronize(); ts.append(e0.elapsed_time(e1)*1000)
        ts.sort(); v=torch.tensor([ts[15]]); dist.all_reduce(v,op=dist.ReduceOp.MAX)
        torch.cuda._sleep(40000000); t=time.perf_counter()
        for _ in range(100): D()
        host_out=(time.perf_counter()-t)*1e4; torch.cuda.synchronize(); dist.barrier()
        torch.cuda._sleep(40000000); t=time.perf_counter()
        for _ in range(100): nccl_ep.dispatch(x,idx,w,buffer=b,num_experts=E)
        host_nat=(time.perf_counter()-t)*1e4; torch.cuda.synchronize(); dist.barrier()
        torch.cuda._sleep(40000000); t=time.perf_counter()
        for _ in range(100): nccl_ep.combine(o.x,o.handle)
        host_c=(time.perf_counter()-t)*1e4; torch.cuda.synchronize(); dist.barrier()
        say(f"T{T} eager pair event {float(v):.1f} us; host enqueue us: ops out {host_out:.1f} native D {host_nat:.1f} native C {host_c:.1f}")
        if spec.get("stamps"):
            for nm,f in (("D",lambda:D(0)),("F",lambda:D(1)),("C",C)):
                for _ in range(3):
                    torch.cuda.synchronize(); dist.barrier(); torch.cuda._sleep(300000); D(); f()
                torch.cuda.synchronize(); nccl_ep._C.time_line(nm=="C"); dist.barrier()
                torch.cuda._sleep(300000)
                for _ in range(6): D(); C()
                f()
                torch.cuda.synchronize(); dist.barrier()
                tl=nccl_ep._C.time_line(nm=="C")
                if rank==0 and tl:
                    names=["start","epoch","sent","routing","own","end"]
                    BIG=1<<60
                    print("stamps",T,nm," ".join(f"{n}:{t[0]}/{t[len(t)//2]}/{t[-1]}" for n,t in ((n,sorted(v for v in t if v<BIG)) for n,t in zip(names,tl)) if t),flush=True)
                    if T==1:
                        for bl in list(range(0,17))+[60,100,130,131]:
                            print("  block",bl," ".join(f"{n}:"+",".join(f"w{w}={tl[k][bl*32+w]}" for w in (0,1,7,8,9,15,16) if tl[k][bl*32+w]<BIG) for k,n in enumerate(names)),flush=True)
        b.destroy(); dist.barrier()
    if rank==0: json.dump(out,open(os.environ.get("OUT",".")+"/scan.json","w"))
    dist.destroy_process_group()
if __name__=="__main__":
    spec=json.load(open(sys.argv[1])) ; R=int(sys.argv[2])
    with tempfile.TemporaryDirectory() as d:
        mp.spawn(main, args=(R,d+"/store",spec), nprocs=R)
