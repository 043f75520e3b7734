import argparse, math, sys, itertools, torch
from pathlib import Path
sys.path.insert(0, "/work/main/experiments/routed/search")
sys.path.insert(0, "/work/main/src")
from errors import *
torch.set_num_threads(2)
def one(query, key, value, o, cache={}):
    S=o.sinks
    n_keys, dim = key.shape
    position = torch.linspace(4200, n_keys - 1, 64).long() if n_keys>5000 else torch.linspace(2100,n_keys-1,64).long()
    q = query[:, position] * dim**-0.5
    ck=(key.data_ptr(),key.shape,o.chunk,o.leaf,S)
    n_chunks = (n_keys - S) // o.chunk
    if ck not in cache:
        levels = int(math.log2(o.chunk // o.leaf))
        order = bisection_tree(key[S : S + n_chunks * o.chunk].view(n_chunks, o.chunk, dim), levels)
        rows = (order + (torch.arange(n_chunks) * o.chunk + S)[:, None]).view(-1, o.leaf)
        cache[ck]=rows
    rows=cache[ck]
    fl = S + ((position - S) // o.chunk - 1) * o.chunk
    far = rows.amax(1)[None] < fl[:, None]
    logits = (q @ key.T).masked_fill(torch.arange(n_keys) > position[:, None], -math.inf)
    exact = logits.softmax(-1) @ value
    flat = rows.flatten()
    behind = torch.zeros(len(position), n_keys, dtype=torch.bool)
    behind[:, flat] = far.repeat_interleave(o.leaf, -1)
    near = logits.masked_fill(behind, -math.inf)
    mk, mv = key[rows].mean(1), value[rows].mean(1)
    away, beside = key[rows] - mk[:, None], value[rows] - mv[:, None]
    share = far.to(q) / far.sum(-1, keepdim=True)
    cov = torch.einsum("pm,mde->pde", share, away.transpose(1, 2) @ away / o.leaf)
    tog = torch.einsum("pm,mde->pde", share, beside.transpose(1, 2) @ away / o.leaf)
    s = torch.einsum("gpd,pde,gpe->gp", q, cov, q).sqrt().clamp_min(1e-3)[..., None]
    drift = torch.einsum("pde,gpe->gpd", tog, q)
    node = q @ mk.T
    ne = near.logsumexp(-1)
    def total(bonus):
        return torch.logaddexp(ne, (node + math.log(o.leaf)+bonus).masked_fill(~far, -math.inf).logsumexp(-1))
    lsh=math.log(o.share)
    approx = (six_bits(q) @ four_bits(key).T)[..., flat]
    if o.residual:
        res = (key[rows]-mk[:,None]).flatten(0,1)
        approx = six_bits(q) @ four_bits(res).T + node.repeat_interleave(o.leaf,-1)
        if o.margin:
            hs = res.unflatten(-1,(2,-1)).abs().amax(-1)/7.5
            qn = q.unflatten(-1,(2,-1)).norm(dim=-1)
            approx = approx + o.margin*(qn @ hs.T)/12**.5
    elif o.margin:
        hs = key.unflatten(-1,(2,-1)).abs().amax(-1)/7.5  # [N,2]
        qn = q.unflatten(-1,(2,-1)).norm(dim=-1)  # [g,p,2]
        approx = approx + o.margin*(qn @ hs.T)[..., flat]/12**.5
    if o.mode=="two":
        known=total(0.0); limit=(known-lsh)[...,None]
        searched=(node+o.reach*s>=limit)&far
        cand=searched.repeat_interleave(o.leaf,-1)&(approx>=limit)
        mass=approx.masked_fill(~cand,-math.inf).logsumexp(-1)
        limit=torch.maximum(limit,(torch.logaddexp(known,mass)-lsh)[...,None])
    elif o.mode=="gain":  # fixed limit from corrected stand-ins
        known=total((0.5*s*s).clamp_max(o.cap)); limit=(known-lsh)[...,None]
        searched=(node+o.reach*s>=limit)&far
        cand=searched.repeat_interleave(o.leaf,-1)&(approx>=limit)
    elif o.mode=="gains": # search limit as known plain, choice with gain
        limit0=(total(0.0)-lsh)[...,None]
        limit=(total((0.5*s*s).clamp_max(o.cap))-lsh)[...,None]
        searched=(node+o.reach*s>=limit0)&far
        cand=searched.repeat_interleave(o.leaf,-1)&(approx>=limit)
    read = cand & (approx >= limit)
    left = o.leaf - read.unflatten(-1, (-1, o.leaf)).sum(-1)
    beyond, slope = log_normal((limit - node) / s - s)
    within, _ = log_normal((limit - node) / s)
    gain = (0.5 * s**2 + beyond - within).clamp(-2, 2)
    move = (1 - slope / s).clamp(-1, 1)
    st = (node + gain + left.clamp_min(1e-9).log()).masked_fill(~far | (left == 0), -math.inf)
    w = torch.cat((near, logits[..., flat].masked_fill(~read, -math.inf), st), -1).softmax(-1)
    lo, fo, so = w.split((n_keys, len(flat), len(rows)), -1)
    out = lo @ value + fo @ value[flat] + so @ mv + (so * move).sum(-1)[..., None] * drift
    err = (out - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    return err, searched.sum(-1).float().mean(-1) / far.sum(-1).float().mean(), read.sum(-1).float().mean(-1), s.squeeze(-1).mean(-1)
def run(paths, settings):
    data={}
    for p in paths:
        t={n:x.float()[0] for n,x in load_file(p).items()}
        data[Path(p).stem]=(t["query"].unflatten(0,(t["key"].shape[0],-1)),t["key"],t["value"])
    for st in settings:
        o=argparse.Namespace(**{**dict(chunk=512,leaf=128,share=1024.,reach=3.,mode="gain",cap=4.0,sinks=16,margin=0.0,residual=False),**st})
        line=[]
        for name,(g,k,v) in data.items():
            parts=[one(g[i],k[i],v[i],o) for i in range(len(k))]
            e,sr,r,s=(torch.cat(f) for f in zip(*parts))
            line.append(f"{name[:5]} {e.mean():.5f} w{e.max():.4f} {sr.mean():.2f} {r.mean():.0f} s{s.mean():.1f}")
        print(st, "|", " | ".join(line), flush=True)
H="/work/shared/data/heads/"
if __name__=="__main__":
    run([H+"smooth.safetensors",H+"mixed.safetensors",H+"retrieval.safetensors"], eval(sys.argv[1]))
