import torch, time, cProfile, pstats
import prescore
from prescore.config import Routed
torch.set_num_threads(2)
n=2100
q,k,v=(torch.randn(1,4,n,64) for _ in range(3))
f=lambda: prescore.prescored_attention(q,k,v,Routed(exact_until=2048),is_causal=True)
with torch.no_grad():
    for _ in range(5): f()
    p=cProfile.Profile(); p.enable()
    for _ in range(30): f()
    p.disable()
s=pstats.Stats(p); s.sort_stats("tottime").print_stats(22)
