"""What a leaf's mean key and value leave out, and cheap or oracle ways to put it back.

A centroid's logit `q . mean + log(n)` is too low (exp is convex) by about half the variance of the leaf's logits;
its value is the plain mean although heavier members should count more. A correction may enter the *choice* of
leaves, the *logit* of the centroids that remain, or their *value*.
"""

from __future__ import annotations

import torch
from clusters import Clustering, Clusters, make_clusters
from scene import CHUNK, SINKS, Answer, View, even_positions
from torch import Tensor

from routed import ROWS, budget_of, choose, read, scores

N_CALIBRATION = 32
"""Past queries per head and tree that calibrate its leaves, evenly spaced in the chunk behind it."""

CHOICES = (
    "plain", "half variance", "deviation", "deviation, diagonal", "deviation, one direction", "static deviation",
    "calibrated", "true mass",
)  # fmt: skip
LOGITS = (
    "plain", "plus 0.5", "plus 1", "plus 1.5", "plus 2", "half variance", "half variance, clipped at 1",
    "half variance, diagonal", "half variance, diagonal, clipped at 1", "half variance, one direction",
    "calibrated", "true mass",
)  # fmt: skip
VALUES = ("plain", "first order", "first order, damped", "weighted", "true mean")


def attend_corrected(view: View, clustering: Clustering, choice: str, logit: str, value: str) -> Answer:
    """Routed attention with corrected parts."""
    clusters = make_clusters(view, clustering)
    plain = scores(view, clusters)
    chosen = choose(plain + _gain(choice, view, clusters), clusters, budget_of(clustering, ROWS))
    return read(
        view, clusters, chosen,
        stand_in_logits=plain + _gain(logit, view, clusters),
        stand_in_values=_values(value, view, clusters),
    )  # fmt: skip


def _gain(name: str, view: View, clusters: Clusters) -> Tensor:
    """`[Hkv, G, P, M]` (or broadcast to it), added to a centroid's logit."""
    if name == "plain":
        return torch.zeros(())
    if name.startswith("plus"):
        return torch.tensor(float(name.split()[1]))
    if name == "true mass":
        return _log_mass(view.logits[..., view.far], clusters) - scores(view, clusters)
    if name == "calibrated":
        return _calibration(view, clusters)[0]
    if name == "static deviation":
        past = view.layer.query[:, :, : view.far.stop]
        moment = (past.transpose(-1, -2) @ past / past.shape[2])[:, :, None]  # [Hkv, G, 1, D, D]
        return (_covariance(view, clusters)[:, None] * moment).sum((-1, -2)).sqrt()[:, :, None]
    variance = _variance(view, clusters, name)
    if name.startswith("deviation"):
        return variance.sqrt()
    return (variance / 2).clamp_max(1.0) if name.endswith("clipped at 1") else variance / 2


def _covariance(view: View, clusters: Clusters) -> Tensor:
    """`[Hkv, M, D, D]` of the keys of each cluster."""
    key = view.layer.key[:, view.far]
    away = (key - clusters.spread(clusters.key.transpose(1, 2), 0.0).transpose(1, 2)).masked_fill(
        clusters.labels[..., None] < 0, 0.0
    )
    n_clusters = clusters.count.shape[1]
    found = key.new_zeros(key.shape[0], n_clusters, key.shape[-1], key.shape[-1])
    for head in range(key.shape[0]):
        for cluster in range(n_clusters):
            members = away[head, clusters.labels[head] == cluster]
            found[head, cluster] = members.T @ members / max(1, len(members))
    return found


def _variance(view: View, clusters: Clusters, name: str) -> Tensor:
    """`[Hkv, G, P, M]`: variance of the logits inside a cluster, from its covariance or a part of it."""
    covariance = _covariance(view, clusters)
    if "diagonal" in name:
        return view.query.square() @ covariance.diagonal(dim1=-2, dim2=-1)[:, None].transpose(-1, -2)
    if "one direction" in name:
        values, vectors = torch.linalg.eigh(covariance)
        main = vectors[..., -1] * values[..., -1:].clamp_min(0).sqrt()
        return (view.query @ main[:, None].transpose(-1, -2)).square()
    return torch.einsum("hgpd,hmde,hgpe->hgpm", view.query, covariance, view.query).clamp_min(0)


def _log_mass(logits: Tensor, clusters: Clusters) -> Tensor:
    """`[Hkv, G, P, F]` -> `[Hkv, G, P, M]`: log of the summed exponentials of each cluster's members."""
    peak = logits.amax(-1, keepdim=True)
    shape = (*logits.shape[:-1], clusters.count.shape[1] + 1)
    labels = clusters.labels.masked_fill(clusters.labels < 0, shape[-1] - 1)[:, None, None].expand(logits.shape)
    mass = logits.new_zeros(shape, dtype=torch.float64).scatter_add_(-1, labels, (logits - peak).double().exp())
    return (mass[..., :-1].clamp_min(1e-300).log() + peak).to(logits.dtype)


def _calibration(view: View, clusters: Clusters) -> tuple[Tensor, Tensor]:
    """Per query head: how far centroids were too low for past queries `[Hkv, G, 1, M]`, and weighted values.

    A tree is complete one chunk before anyone sees its leaves; the queries of that chunk read them exactly and are
    past for everyone who will not. So this is strictly causal, and done once per tree.
    """
    layer = view.layer
    gaps, values = [], []
    for run in clusters.run_of.unique().tolist():
        inside = (clusters.run_of == run).nonzero().flatten()
        members = (clusters.labels >= inside[0]) & (clusters.labels <= inside[-1])
        first, last = (int(place) for place in members.any(0).nonzero().flatten()[[0, -1]])
        begin = SINKS + -(-(last + 1) // CHUNK) * CHUNK
        past = layer.query[:, :, even_positions(begin, begin + CHUNK, N_CALIBRATION)]  # [Hkv, G, C, D]
        keys = layer.key[:, view.far][:, first : last + 1]
        logits = past @ keys[:, None].transpose(-1, -2)
        own = Clusters(
            torch.where(members, clusters.labels - inside[0], -1)[:, first : last + 1],
            clusters.count[:, inside], clusters.key[:, inside], clusters.value[:, inside], clusters.run_of[inside],
        )  # fmt: skip
        mass = _log_mass(logits, own)
        low = past @ own.key[:, None].transpose(-1, -2) + own.count.log()[:, None, None]
        gaps.append((mass - low).mean(2, keepdim=True))
        # share of a member in its own leaf, averaged over the past queries of all heads
        shares = (logits - own.spread(mass, torch.inf)).exp().mean((1, 2))
        weighted = shares[..., None] * layer.value[:, view.far][:, first : last + 1]
        values.append(own.sums(weighted))
    return torch.cat(gaps, dim=-1), torch.cat(values, dim=1)


def _values(name: str, view: View, clusters: Clusters) -> Tensor:
    """`[Hkv, M, D]` or `[Hkv, G, P, M, D]`."""
    if name == "plain":
        return clusters.value
    if name == "weighted":
        return _calibration(view, clusters)[1]
    if name == "true mean":
        logits = view.logits[..., view.far]
        shares = (logits - clusters.spread(_log_mass(logits, clusters), torch.inf)).exp()
        value = view.layer.value[:, view.far]
        labels = clusters.labels
        hot = (labels[..., None] == torch.arange(clusters.count.shape[1])).to(value.dtype)  # [Hkv, F, M]
        return torch.einsum("hgpf,hfm,hfd->hgpmd", shares, hot, value)
    key, value = view.layer.key[:, view.far], view.layer.value[:, view.far]
    away = key - clusters.spread(clusters.key.transpose(1, 2), 0.0).transpose(1, 2)
    n_clusters = clusters.count.shape[1]
    crossed = key.new_zeros(key.shape[0], n_clusters, key.shape[-1], value.shape[-1])
    for head in range(key.shape[0]):
        for cluster in range(n_clusters):
            inside = clusters.labels[head] == cluster
            crossed[head, cluster] = away[head, inside].T @ value[head, inside] / max(1, int(inside.sum()))
    shift = torch.einsum("hgpd,hmde->hgpme", view.query, crossed)
    if name == "first order, damped":
        shift = shift / (1 + _variance(view, clusters, "full"))[..., None]
    return clusters.value[:, None, None] + shift
