import torch
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
from prescore.routed.decode import RoutedIndex
n=5000
t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/mixed.safetensors").items()}
q,k,v=t["query"],t["key"],t["value"]
cfg=Routed(tolerance=.05)
g=torch.Generator().manual_seed(3)
out,aux=prescore.prescored_attention(q,k,v,cfg,is_causal=True,return_aux=True,generator=None)
idx=RoutedIndex(cfg,scale=64**-.5)
for p in (3000,4001,4623,4999):
    o=idx.attend(q[:,:,p:p+1],k[:,:,:p+1],v[:,:,:p+1])
    print(p, (o.output-out[:,:,p:p+1]).abs().max().item(), (o.lse-aux.lse[:,:,p:p+1]).abs().max().item(), idx.rows_read)
piece=prescore.prescored_attention(q[:,:,3000:],k,v,cfg,is_causal=True); print("piece",(piece-out[:,:,3000:]).abs().max().item())
import os; os.environ["PRESCORE_NATIVE"]="0"
pl=prescore.prescored_attention(q[:,:,4000:],k,v,cfg,is_causal=True); print("plain",(pl-out[:,:,4000:]).abs().max().item(),((pl-out[:,:,4000:]).norm(dim=-1)>1e-4).float().mean())
