"""Attention on tensors: the default, a selection, what each read, and its error against exact attention."""

import torch

import prescore

torch.manual_seed(0)
query = torch.randn(1, 4, 6000, 64)  # [batch, heads, sequence, dim]
key = torch.randn(1, 2, 6000, 64)  # two KV heads for four query heads
value = torch.randn(1, 2, 6000, 64)
exact = prescore.exact_attention(query, key, value, is_causal=True).output

configs = (prescore.Routed(min_weight=1 / 512), prescore.Selected(top_k=512, min_seq_len=1024), prescore.Exact())
for config in configs:
    output, aux = prescore.prescored_attention(query, key, value, config, is_causal=True, return_aux=True)
    error = float((output - exact).norm() / exact.norm())
    reads = f"{aux.stats.keys_per_query:5.0f} keys and {aux.stats.centroids_per_query:3.0f} centroids per query"
    print(f"{type(config).__name__:8}  {reads}  error {error:.3f}  {aux.stats.backend}")

# scores and selections alone: which keys would be kept?
kept = prescore.select(key, prescore.KMeans(n_clusters=16), top_k=8, sinks=2, generator=0)
print("kept by the first head:", kept.indices[0, 0].tolist())

# padding: True marks a real key; positions count from the first real key
mask = torch.ones(1, 6000, dtype=torch.bool)
mask[:, :100] = False
padded = prescore.prescored_attention(query, key, value, is_causal=True, key_padding_mask=mask)
print("padded:", tuple(padded.shape))
