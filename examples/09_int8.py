"""Read a long prompt with int8 weights, bfloat16 elsewhere, in chunks, and continue it.

python examples/09_int8.py [a folder of transformers, a GGUF file or a name on the hub]
"""

import inspect
import sys
import time

import torch

import prescore
from prescore.integrations.offline import load_model

model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model = prescore.use_int8_weights(model.to(torch.bfloat16))
inputs = tokenizer(inspect.getsource(inspect), return_tensors="pt", truncation=True, max_length=3000)
new = inputs["input_ids"].shape[1]

with prescore.apply(model) as applied:
    begin = time.perf_counter()
    # activations of 1024 tokens at a time; the key index is kept from chunk to chunk
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, prefill_chunk_size=1024)
print(applied)
print(f"{tokenizer.decode(tokens[0, new:])!r} after {time.perf_counter() - begin:.1f} s")
