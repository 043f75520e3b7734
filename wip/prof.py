import torch, sys
sys.argv=["x","smooth","6000"]
from safetensors.torch import load_file
import prescore
from prescore.config import Routed
torch.set_num_threads(2)
t={k:v.float()[:, :, :6000].contiguous() for k,v in load_file("/work/shared/data/heads/smooth.safetensors").items()}
q,k,v=t["query"],t["key"],t["value"]
cfg=Routed(sinks=16,exact_until=2048)
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU]) as p:
    prescore.prescored_attention(q,k,v,cfg,is_causal=True)
print(p.key_averages().table(sort_by="self_cpu_time_total",row_limit=14,max_name_column_width=40))
