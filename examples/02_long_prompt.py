"""The default on a long prompt of a Hugging Face model, and exact attention beside it.

python examples/02_long_prompt.py [a text file] [a folder of transformers, a GGUF file or a name on the hub]
"""

import inspect
import sys
from pathlib import Path

import torch

import prescore
from prescore.integrations.offline import load_model

N_TOKENS = 4096  # the default is exact up to 2048 tokens, and gains with the length
N_LAST = 512  # positions whose loss is compared

text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else inspect.getsource(inspect)
model, tokenizer = load_model(sys.argv[2] if len(sys.argv) > 2 else "smollm2")
prompt = tokenizer(text, return_tensors="pt", truncation=True, max_length=N_TOKENS).input_ids

seconds, losses = {}, {}
for config in (prescore.Exact(), prescore.Routed()):
    name = type(config).__name__
    with prescore.apply(model, config) as applied, torch.no_grad():
        logits = model(prompt, logits_to_keep=N_LAST).logits[0, :-1]
        print(applied, "\n")
    seconds[name] = applied.report().seconds("prefill")
    losses[name] = float(torch.nn.functional.cross_entropy(logits, prompt[0, 1 - N_LAST :]))

print(f"attention: {seconds['Exact']:.2f} s exact, {seconds['Routed']:.2f} s default")
print(f"loss of the last tokens: {losses['Exact']:.4f} exact, {losses['Routed']:.4f} default")
