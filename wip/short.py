import torch, time, sys
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
torch.set_num_threads(2)
def best(f,r=7):
    f(); ts=[]
    for _ in range(r):
        b=time.perf_counter(); f(); ts.append(time.perf_counter()-b)
    return sorted(ts)[len(ts)//2]
def case(name,q,k,v,eu):
    with torch.no_grad():
        e=best(lambda: torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True))
        r=best(lambda: prescore.prescored_attention(q,k,v,Routed(exact_until=eu),is_causal=True))
    print(f"{name} n={q.shape[2]} until={eu} exact {e*1e3:.1f} ms ours {r*1e3:.1f} ms {e/r:.2f}x",flush=True)
for eu in (1024,2048):
    for n in (1100,2100,2300,2560,3072,4096):
        if n<=eu: continue
        for h in ("smooth","retrieval"):
            t={a:b.float()[:, :, :n].contiguous() for a,b in load_file(f"/work/shared/data/heads/{h}.safetensors").items()}
            case(h,t["query"],t["key"],t["value"],eu)
        g=torch.Generator().manual_seed(0)
        q,k,v=(torch.randn(1,4,n,64,generator=g) for _ in range(3))
        case("random",q,k,v,eu)
