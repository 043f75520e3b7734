import torch, os
from prescore.config import Routed
import prescore
torch.manual_seed(0)
def grads(dtype, native, causal, **kw):
    os.environ["PRESCORE_NATIVE"]=native
    g=torch.Generator().manual_seed(1)
    q=torch.randn(2,4,700,32,generator=g,dtype=torch.float64)*2; k=torch.randn(2,2,700,32,generator=g,dtype=torch.float64); v=torch.randn(2,2,700,48,generator=g,dtype=torch.float64)
    co=torch.randn(2,4,700,48,generator=g,dtype=torch.float64); cl=torch.randn(2,4,700,generator=g,dtype=torch.float64)
    q,k,v=(t.to(dtype).requires_grad_() for t in (q,k,v))
    cfg=Routed(rows=16,leaf_size=32,chunk_size=64,sinks=5,exact_until=10)
    out,aux=prescore.prescored_attention(q,k,v,cfg,is_causal=causal,return_aux=True)
    ((out.double()*co).sum()+(aux.lse.double()*cl).sum()).backward()
    return [out.double(),aux.lse.double(),q.grad.double(),k.grad.double(),v.grad.double()], aux.stats
for causal in (True,False):
    ref,st=grads(torch.float64,"0",causal); print({x:st[x] for x in ("searched_keys","far_rows")})
    for dt,nat in ((torch.float32,"0"),(torch.float32,"avx512"),(torch.float32,"avx2"),(torch.bfloat16,"avx512"),(torch.float16,"avx512"),(torch.bfloat16,"0")):
        got,st2=grads(dt,nat,causal)
        print(causal,dt,nat,[f"{(a-b).norm()/b.norm():.1e}" for a,b in zip(got,ref)], st2["far_rows"])
