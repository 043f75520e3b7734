import torch, time, sys
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
from prescore.routed.decode import RoutedIndex
torch.set_num_threads(2)
name="mixed"; n=6000
t={k:v.float()[:, :, :n].contiguous() for k,v in load_file(f"/work/shared/data/heads/{name}.safetensors").items()}
q,k,v=t["query"],t["key"],t["value"]
cfg=Routed(sinks=16,exact_until=2048)
out,aux=prescore.prescored_attention(q,k,v,cfg,is_causal=True,return_aux=True)
idx=RoutedIndex(cfg,scale=64**-.5)
for p in (4000,4001,4623,4624,4625,5999):
    o=idx.attend(q[:,:,p:p+1],k[:,:,:p+1],v[:,:,:p+1])
    print(p, (o.output-out[:,:,p:p+1]).abs().max().item(), (o.lse-aux.lse[:,:,p:p+1]).abs().max().item(), idx.rows_read)
o=idx.attend(q[:,:,5000:5008],k[:,:,:5008],v[:,:,:5008]); print((o.output-out[:,:,5000:5008]).abs().max().item())
b=time.perf_counter()
for i in range(50): idx.attend(q[:,:,-1:],k,v)
print((time.perf_counter()-b)/50*1e3,"ms")
piece=prescore.prescored_attention(q[:,:,3000:],k,v,cfg,is_causal=True); print("piece",(piece-out[:,:,3000:]).abs().max().item())
