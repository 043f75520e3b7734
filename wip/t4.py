import torch, sys, time, os
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
torch.set_num_threads(2)
n=int(sys.argv[1])
for name in ("smooth","mixed","retrieval"):
    t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/{name}.safetensors").items()}
    q,k,v=t["query"],t["key"],t["value"]
    b=time.perf_counter();ex=torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True); te=time.perf_counter()-b
    for tol in (0.02,0.05,0.1):
        b=time.perf_counter()
        out,aux=prescore.prescored_attention(q,k,v,Routed(tolerance=tol),is_causal=True,return_aux=True)
        tt=time.perf_counter()-b
        err=((out-ex).norm(dim=-1)/ex.norm(dim=-1))[:,:,2048:]
        byhead=(err>tol).float().mean(-1).flatten()
        print(name,tol,f"over {(err>tol).float().mean():.4f} worst head {byhead.max():.4f} err mean {err.mean():.4f}", {x:round(aux.stats[x],3) for x in ("searched_keys","far_rows","rows_per_query","error_limit_mean","read_further","read_everything")}, f"{te/tt:.2f}x",flush=True)
