import sys, math, torch, argparse
sys.path.insert(0,"/tmp/exp"); 
from var import *
def bar(query,key,value,o):
    S=16; n_keys,dim=key.shape; chunk,leaf=512,128
    position=torch.linspace(2100,n_keys-1,96).long(); q=query[:,position]*dim**-.5
    n_chunks=(n_keys-S)//chunk
    order=bisection_tree(key[S:S+n_chunks*chunk].view(n_chunks,chunk,dim),2)
    rows=(order+(torch.arange(n_chunks)*chunk+S)[:,None]).view(-1,leaf)
    fl=S+((position-S)//chunk-1)*chunk
    far=rows.amax(1)[None]<fl[:,None]
    logits=(q@key.T).masked_fill(torch.arange(n_keys)>position[:,None],-math.inf)
    exact=logits.softmax(-1)@value
    flat=rows.flatten(); behind=torch.zeros(len(position),n_keys,dtype=torch.bool); behind[:,flat]=far.repeat_interleave(leaf,-1)
    near=logits.masked_fill(behind,-math.inf)
    mk,mv=key[rows].mean(1),value[rows].mean(1)
    away,beside=key[rows]-mk[:,None],value[rows]-mv[:,None]
    share=far.to(q)/far.sum(-1,keepdim=True)
    cov=torch.einsum("pm,mde->pde",share,away.transpose(1,2)@away/leaf); tog=torch.einsum("pm,mde->pde",share,beside.transpose(1,2)@away/leaf)
    s=torch.einsum("gpd,pde,gpe->gp",q,cov,q).sqrt().clamp_min(1e-3)[...,None]; drift=torch.einsum("pde,gpe->gpd",tog,q)
    node=q@mk.T
    known=torch.logaddexp(near.logsumexp(-1),(node+math.log(leaf)+(0.5*s*s).clamp_max(4)).masked_fill(~far,-math.inf).logsumexp(-1))
    approx=(six_bits(q)@four_bits(key).T)[...,flat]
    tv=beside.square().sum(-1).mean(-1)  # [M]
    res=[]
    for sh in o:
        limit=(known-math.log(sh))[...,None]
        cand=far.repeat_interleave(leaf,-1)&(approx>=limit)
        left=leaf-cand.unflatten(-1,(-1,leaf)).sum(-1)
        beyond,slope=log_normal((limit-node)/s-s); within,_=log_normal((limit-node)/s)
        gain=(0.5*s**2+beyond-within).clamp(-2,2); move=(1-slope/s).clamp(-1,1)
        st=(node+gain+left.clamp_min(1e-9).log()).masked_fill(~far|(left==0),-math.inf)
        # node masses by codes
        un=approx.masked_fill(cand|~far.repeat_interleave(leaf,-1),-math.inf).unflatten(-1,(-1,leaf))
        cm=un.logsumexp(-1)
        for mode,stm in (("normal",st),("coded",cm)):
            w=torch.cat((near,logits[...,flat].masked_fill(~cand,-math.inf),stm),-1)
            Z=w.logsumexp(-1,keepdim=True); w=(w-Z).exp()
            lo,fo,so=w.split((n_keys,len(flat),len(rows)),-1)
            out=lo@value+fo@value[flat]+so@mv+(so*move).sum(-1)[...,None]*drift
            err=(out-exact).norm(dim=-1)/exact.norm(dim=-1)
            e2=(2*un).logsumexp(-1)-2*Z
            dv=(mv[None,None]-out[:,:,None]).square().sum(-1)+tv
            Q=((e2.exp()*dv).sum(-1)).sqrt()/out.norm(dim=-1)
            # subtract uniform part? (w-what)^2
            e1=so.square()/left.clamp_min(1)
            Q2=(((e2.exp()-e1).clamp_min(0)*dv).sum(-1)).sqrt()/out.norm(dim=-1)
            res.append((sh,mode,err,Q,Q2,cand.sum(-1).float()))
    return res
for name in ("smooth","mixed","retrieval"):
    t={n:x.float()[0] for n,x in load_file(H+name+".safetensors").items()}
    g=t["query"].unflatten(0,(2,-1))
    parts=[bar(g[i],t["key"][i],t["value"][i],(512.,1024.,4096.,16384.)) for i in range(2)]
    for a,b in zip(*parts):
        err=torch.cat((a[2],b[2])); Q=torch.cat((a[3],b[3])); Q2=torch.cat((a[4],b[4])); r=torch.cat((a[5],b[5]))
        ratio=(err/Q).flatten(); ratio2=(err/Q2).flatten()
        perhead=(err/Q).quantile(.95,dim=1)
        print(name,a[0],a[1],f"err mean {err.mean():.4f} p95 {err.flatten().quantile(.95):.4f} rel2 {(err**2).mean():.5f} | Q mean {Q.mean():.4f} ratio med {ratio.median():.2f} p95 {ratio.quantile(.95):.2f} p99 {ratio.quantile(.99):.2f} worst head p95 {perhead.max():.2f} | Q2 p95 {ratio2.quantile(.95):.2f} | rows {r.mean():.0f}")
