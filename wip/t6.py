import torch
from safetensors.torch import load_file
from prescore.config import Routed
from prescore.routed.layout import make_layout
from prescore.routed.tables import build_nodes
from prescore.routed.compiled.nodes import build_nodes_compiled
from prescore.routed.compiled.far import side_by_side,_scales_side_by_side
for name,dt in (("smooth",torch.float32),("mixed",torch.float32),("retrieval",torch.bfloat16)):
    t={k:v.to(dt)[0,:,:4000] for k,v in load_file(f"/work/shared/data/heads/{name}.safetensors").items()}
    for cfg in (Routed(),Routed(chunk_size=512,leaf_size=64)):
        lay=make_layout(4000,4000,causal=True,config=cfg)
        a=build_nodes(t["key"],t["value"],lay,16,lay.n_chunks); b=build_nodes_compiled(t["key"],t["value"],lay,16,lay.n_chunks)
        print(name,"rows equal",(a.rows==b.rows).float().mean().item(),"sets",(a.rows.sort(-1).values==b.rows.sort(-1).values).float().mean().item(),[ (x-y).abs().max().item() for x,y in ((a.key,b.key),(a.value,b.value),(a.spread,b.spread),(a.drift,b.drift))], (side_by_side(a.codes.packed)==b.codes.packed).float().mean().item(), (_scales_side_by_side(a.codes.scales)-b.codes.scales).abs().max().item())
