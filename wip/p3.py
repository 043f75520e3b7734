import torch, cProfile, pstats, time
from prescore.config import Routed
from prescore.routed.decode import RoutedIndex
torch.set_num_threads(2)
n=8192
q=torch.randn(1,14,1,64); k=torch.randn(1,2,n,64); v=torch.randn(1,2,n,64)
idx=RoutedIndex(Routed(),scale=.125)
with torch.no_grad():
    for _ in range(10): idx.attend(q,k,v)
    b=time.thread_time()
    for _ in range(200): idx.attend(q,k,v)
    print("thread ms",(time.thread_time()-b)/200*1e3)
    p=cProfile.Profile(); p.enable()
    for _ in range(200): idx.attend(q,k,v)
    p.disable()
pstats.Stats(p).sort_stats("tottime").print_stats(16)
