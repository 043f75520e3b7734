import sys, time, torch, json
import prescore.routed.lanes as lanes, prescore.routed.far as far, prescore.routed.stand_ins as si
from prescore.config import Routed
from prescore.evaluation.language.model import load_language_model
from prescore.evaluation.language.documents import load_documents
from prescore.evaluation.language.perplexity import make_windows, streamed_loss
import prescore
torch.set_num_threads(int(sys.argv[4]) if len(sys.argv)>4 else 1)
path, n, offset = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
m=load_language_model()
w=make_windows(m, load_documents([path]), n, offset=offset)[0]
base=None
for name,share,kw in (("exact",0,None),("x2",2,{}),("x4",4,{}),("x1",1,{})):
    lanes.SHARE_PER_ROW=share
    b=time.perf_counter()
    with m.extended(n), torch.no_grad():
        if kw is None:
            l=streamed_loss(m,w).mean().item(); rows=None
        else:
            with prescore.apply(m.model, Routed(sinks=16,exact_until=2048,**kw)) as a:
                l=streamed_loss(m,w).mean().item()
    base=base or l
    print(path[-20:],n,offset,name,f"{l:.5f} {l-base:+.5f} {time.perf_counter()-b:.0f} s",flush=True)
