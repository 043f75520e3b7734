import torch, sys, time, os
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
torch.set_num_threads(2)
name=sys.argv[1]; n=int(sys.argv[2]) if len(sys.argv)>2 else 16384
t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/{name}.safetensors").items()}
q,k,v=t["query"],t["key"],t["value"]
cfg=Routed(sinks=16,exact_until=2048)
def run(): return prescore.prescored_attention(q,k,v,cfg,is_causal=True,return_aux=True)
out,aux=run()
b=time.perf_counter(); out,aux=run(); t1=time.perf_counter()-b
b=time.perf_counter(); ex=torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True); t2=time.perf_counter()-b
e=(out-ex).square().sum((-1,-2))/ex.square().sum((-1,-2))
print(name, f"{t2:.2f} s exact, {t1:.2f} s, {t2/t1:.2f}x error {e.mean():.5f} worst {e.max():.4f}", {x:aux.stats[x] for x in ("searched_keys","far_rows","rows_per_query")})
