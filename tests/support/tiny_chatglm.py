"""A tiny model with the module tree and calling convention of ChatGLM2/3's remote code, written anew.

`transformer.encoder.layers[i].self_attention.core_attention`; hidden states are `[sequence, batch, channels]`, the
cache is a tuple of `(key, value)` per layer, keys of a multi-query group are repeated before the core attention.
"""

import types

import torch
from torch import nn
from torch.nn import functional


class CoreAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.kv_channels * config.num_attention_heads
        self.attention_dropout = nn.Dropout(config.attention_dropout)

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_layer, key_layer, value_layer))
        if attention_mask is None and query.shape[2] == key.shape[2]:
            context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = None if attention_mask is None else ~attention_mask
            context = functional.scaled_dot_product_attention(query, key, value, seen)
        return context.permute(2, 0, 1, 3).reshape(query.shape[2], query.shape[0], self.width)


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.multi_query_group_num
        self.dim = config.kv_channels
        self.query_key_value = nn.Linear(config.hidden_size, (self.heads + 2 * self.groups) * self.dim)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(self.heads * self.dim, config.hidden_size)

    def forward(self, hidden, attention_mask, kv_cache=None):
        sizes = [self.heads * self.dim, self.groups * self.dim, self.groups * self.dim]
        query, key, value = self.query_key_value(hidden).split(sizes, dim=-1)
        query = query.unflatten(-1, (self.heads, self.dim))
        key, value = (t.unflatten(-1, (self.groups, self.dim)) for t in (key, value))
        if kv_cache is not None:
            key, value = (torch.cat((old, new)) for old, new in zip(kv_cache, (key, value), strict=True))
        cache = (key, value)
        key, value = (t.repeat_interleave(self.heads // self.groups, dim=2) for t in (key, value))
        return self.dense(self.core_attention(query, key, value, attention_mask)), cache


class GLMBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, attention_mask, kv_cache):
        attended, cache = self.self_attention(hidden, attention_mask, kv_cache)
        hidden = hidden + attended
        return hidden + torch.tanh(self.mlp(hidden)), cache


class TinyChatGLM(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        sizes = {"hidden_size": 32, "kv_channels": 8, "num_attention_heads": 4, "multi_query_group_num": 2}
        self.config = types.SimpleNamespace(**sizes, multi_query_attention=True, attention_dropout=dropout)
        self.transformer = nn.Module()
        self.transformer.embedding = nn.Embedding(61, 32)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(GLMBlock(self.config) for _ in range(3))
        self.transformer.output_layer = nn.Linear(32, 61)

    def masks(self, ids, past, padding_mask):
        """True = hidden; padded queries see everything, as in the original."""
        batch, length = ids.shape
        full = torch.ones(batch, length, length).tril()
        if past:
            full = torch.cat((torch.ones(batch, length, past), full), dim=-1)
        if padding_mask is not None:
            full = full * padding_mask[:, None, :]
        if not past and padding_mask is not None:
            full -= padding_mask[:, :, None] - 1
        return (full < 0.5)[:, None]

    def forward(self, ids, attention_mask=None, past_key_values=None):
        past = 0 if past_key_values is None else past_key_values[0][0].shape[0]
        mask = None
        if (attention_mask is not None and not attention_mask.all()) or (past and ids.shape[1] != 1):
            mask = self.masks(ids, past, attention_mask)
        hidden = self.transformer.embedding(ids).transpose(0, 1)
        caches = []
        for number, layer in enumerate(self.transformer.encoder.layers):
            hidden, cache = layer(hidden, mask, past_key_values and past_key_values[number])
            caches.append(cache)
        return self.transformer.output_layer(hidden.transpose(0, 1)), tuple(caches)
