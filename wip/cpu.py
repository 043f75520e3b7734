import torch, sys, time
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
import prescore.routed.lanes as L, prescore.routed.softmax as S, prescore.routed.native as N
torch.set_num_threads(1)
T={}
def wrap(mod,name,label):
    f=getattr(mod,name)
    def g(*a,**k):
        b=time.thread_time(); r=f(*a,**k); T[label]=T.get(label,0)+time.thread_time()-b; return r
    setattr(mod,name,g)
wrap(L,"_sources","tables"); wrap(S,"attend_near","near"); wrap(N,"attend","native"); wrap(N,"make_tables","relayout"); wrap(N,"run","run"); wrap(L,"_beginning","beginning")
for name in sys.argv[2:]:
    n=int(sys.argv[1])
    t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/{name}.safetensors").items()}
    q,k,v=t["query"],t["key"],t["value"]
    for rep in range(2):
        T.clear()
        b=time.thread_time(); out,aux=prescore.prescored_attention(q,k,v,Routed(**eval(__import__("os").environ.get("KW","{}"))),is_causal=True,return_aux=True); t1=time.thread_time()-b
    b=time.thread_time(); ex=torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True); t2=time.thread_time()-b
    e=(out-ex).square().sum((-1,-2))/ex.square().sum((-1,-2))
    print(name,f"exact {t2:.2f} ours {t1:.2f} {t2/t1:.2f}x err {e.mean():.5f}",{a:round(b,2) for a,b in T.items()}, {x:round(aux.stats[x]) for x in ("searched_keys","far_rows","rows_per_query")},flush=True)
