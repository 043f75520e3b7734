"""Read a prompt once, save its cache, load it in any process, and ask questions about it."""

import tempfile
from pathlib import Path

import torch

import prescore
from prescore.integrations.offline import load_model
from prescore.integrations.transformers import PrescoredCache

model, tokenizer = load_model("smollm2")
text = "The ship sailed on a Monday with forty men and one cat. " * 30
prompt = tokenizer(text, return_tensors="pt").input_ids
config = prescore.Selected(top_k=64, min_seq_len=128)
file = Path(tempfile.mkdtemp()) / "prompt.safetensors"

with prescore.apply(model, config), torch.no_grad():
    cache = PrescoredCache(model.config, evict=True)  # free the unselected keys
    model(prompt, past_key_values=cache, logits_to_keep=1)
    cache.save(file)  # selects, and writes keys, values and selections

held, full = (cache.report()[name] / 2**20 for name in ("bytes", "exact_bytes"))
print(f"{file.stat().st_size / 2**20:.1f} MiB on disk; {held:.1f} MiB held of {full:.1f} MiB for an exact cache")

for text in ("\nHow many men? ", "\nWhich animal? "):
    cache = PrescoredCache.load(file)
    question = tokenizer(text, return_tensors="pt").input_ids
    with prescore.apply(model, config) as applied:
        tokens = model.generate(torch.cat([prompt, question], dim=1), past_key_values=cache, max_new_tokens=6)
    print(text.strip(), tokenizer.decode(tokens[0, prompt.shape[1] + question.shape[1] :]).strip())
print(applied)  # only steps: the prompt was not read again
