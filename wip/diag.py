import torch, math
from safetensors.torch import load_file
import prescore, sys
from prescore.config import Routed
from prescore.routed.codes import *
torch.set_num_threads(2)
n=6144
t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/mixed.safetensors").items()}
q,k,v=t["query"],t["key"],t["value"]
ex=torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True)
out,aux=prescore.prescored_attention(q,k,v,Routed(tolerance=0.05),is_causal=True,return_aux=True)
err=((out-ex).norm(dim=-1)/ex.norm(dim=-1))[0,:,2048:]
by=(err>.05).float().mean(-1); print(by)
h=int(by.argmax()); bad=(err[h]>.05).nonzero().squeeze(1)+2048; print(h,len(bad),bad[:10].tolist(), err[h,bad[:10]-2048])
kv=h//7
qq=q[0,h]*64**-.5
codes=encode_keys(k[0,kv])
for p in bad[::max(1,len(bad)//6)][:6].tolist():
    x=qq[p]@k[0,kv,:p+1].T; c=coded_logits(qq[p:p+1],codes)[0,:p+1]
    lse=x.logsumexp(0); far=torch.arange(p+1)<((p-16)//512-1)*512+16
    w=(x-lse).exp(); wc=(c-lse).exp()
    top=w.masked_fill(~far,0).topk(6)
    print(p, "far mass",w[far].sum().item(),"near",w[~far].sum().item(),"code err std",(x-c)[far].std().item(), "top far w*1024",(top.values*1024).tolist(), "coded", (wc[top.indices]*1024).tolist(), "out norm", ex[0,h,p].norm().item(), "v norm", v[0,kv,top.indices].norm(dim=-1).tolist()[:3])
