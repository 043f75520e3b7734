"""A vision transformer of timm: the class token and 63 centroids instead of 197 keys; the default warns."""

import warnings

import torch

import prescore
from prescore.integrations.torchvision import import_timm

timm = import_timm()
torch.manual_seed(0)
model = timm.create_model("deit_tiny_patch16_224").eval()  # pretrained=True fetches the weights
images = torch.randn(2, 3, 224, 224)
with torch.no_grad():
    exact = model(images)

# centroids only: the class token, and one centroid for each of 63 clusters of patches
scorer = prescore.KMeans(n_clusters=63, rule="farthest", normalize=False)
with prescore.apply(model, prescore.Selected(scorer, top_k=1, sinks=1)) as applied, torch.no_grad():
    logits = model(images)
print(applied)
print(f"logits differ by {float((logits - exact).abs().max()):.3f} of {float(exact.abs().max()):.3f}")

# the default is exact up to exact_until tokens, and warns once that it changes nothing here
with warnings.catch_warnings(record=True) as caught, prescore.apply(model), torch.no_grad():
    warnings.simplefilter("always")
    model(images)
print("warned:", caught[0].message)

routed = prescore.Routed(exact_until=0, min_weight=1 / 64, cluster_size=8, chunk_size=128)
with prescore.apply(model, routed) as applied, torch.no_grad():
    model(images)
print(applied)
