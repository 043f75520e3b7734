"""The formulas of the paper's published GLM3 file, one head at a time, with draws of their own.

Written from a description of that file: the recursion over halves, the blockwise flag before anything is scored,
blocks over all keys with the unselected ones masked, queries aligned by rank, and residual samples of each head.
Shares nothing with the library, not even its streams.
"""

from dataclasses import dataclass

import torch


@dataclass
class Published:
    """Pre-scored HyperAttention with the squared key norm as score (the file's "lev")."""

    top_k: int
    min_seq_len: int
    inclusive: bool
    block_size: int
    sample_size: int
    n_projections: int
    seed: int

    def __call__(self, query, key, value):
        """`[H, N, D]` tensors of one causal sequence -> `[H, N, D]`."""
        self.generator = torch.Generator().manual_seed(self.seed)
        self.directions = self.normal(query.shape[-1], self.n_projections)
        return torch.stack([self.causal(*one)[0] for one in zip(query, key, value, strict=True)])

    def normal(self, *size):
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def causal(self, query, key, value):
        """Halves: each attends to itself, and the second one to the first."""
        n = len(key)
        if n <= self.min_seq_len:
            return weighted(query @ key.T, torch.ones(n, n, dtype=torch.float64).tril(), value)
        first, second = slice(0, n // 2), slice(n // 2, n)
        before = self.causal(query[first], key[first], value[first])
        inside = self.causal(query[second], key[second], value[second])
        across = self.full(query[second], key[first], value[first])
        total = torch.logaddexp(inside[1], across[1])
        merged = sum(part[0] * (part[1] - total).exp()[:, None] for part in (inside, across))
        return torch.cat((before[0], merged)), torch.cat((before[1], total))

    def full(self, query, key, value):
        """One block pair: exact where it has few queries, else one block of sorted keys and residual samples."""
        (n_query, n), logits = (len(query), len(key)), query @ key.T
        if self.min_seq_len >= n_query if self.inclusive else self.min_seq_len > n_query:
            return weighted(logits, torch.ones(n_query, n, dtype=torch.float64), value)
        selected = key.square().sum(1).topk(min(self.top_k, n)).indices
        is_selected = torch.zeros(n, dtype=torch.bool).index_fill_(0, selected, True)
        n_blocks = n // self.block_size
        block_of_key = place(self.buckets(key)) * n_blocks // n
        block_of_query = place(self.buckets(query)) * n_blocks // n_query
        same = block_of_query[:, None] == block_of_key
        counts = (same & is_selected).to(torch.float64)
        draws = torch.randint(len(selected), (self.sample_size,), generator=self.generator)
        residual = torch.bincount(selected[draws], minlength=n) * len(selected) / self.sample_size
        return weighted(logits, counts + torch.where(same, 0.0, residual), value)

    def buckets(self, vectors):
        """Places of the sign patterns in an order where neighbours differ in one sign."""
        order = ["0", "1"]
        for _ in range(self.n_projections - 1):
            order = ["0" + bits for bits in order] + ["1" + bits for bits in reversed(order)]
        number = {bits: place for place, bits in enumerate(order)}
        patterns = ["".join("01"[sign] for sign in row) for row in (vectors @ self.directions > 0).tolist()]
        return torch.tensor([number[bits] for bits in patterns])


def place(buckets):
    """Where each vector stands when they are sorted by bucket."""
    order = torch.argsort(buckets, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def weighted(logits, counts, value):
    """Softmax in which a key counts `counts` times: output and lse; logits are already scaled."""
    logits = logits + counts.log()
    lse = logits.logsumexp(1)
    shift = lse.masked_fill(torch.isneginf(lse), 0.0)
    return (logits - shift[:, None]).exp() @ value, lse
