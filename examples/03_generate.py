"""Generate with selected keys in a Hugging Face model, and print what each layer read.

python examples/03_generate.py [a folder of transformers, a GGUF file or a name on the hub]
"""

import sys

import prescore
from prescore.bench.offline import load_model

model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 15
inputs = tokenizer(text, return_tensors="pt")
exact = model.generate(**inputs, max_new_tokens=4, do_sample=False)

# exact leaves of 128 tokens, 64 keys of every earlier block; steps read 64 keys, centroids and all later tokens
with prescore.apply(model, prescore.Selected(top_k=64, min_seq_len=128)) as applied:
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    print(applied)

new = inputs["input_ids"].shape[1]
print("exact:   ", tokenizer.decode(exact[0, new:]))
print("selected:", tokenizer.decode(tokens[0, new:]))

# the default is exact on so short a text, and the report says so
with prescore.apply(model) as applied:
    model(**inputs, logits_to_keep=1)
print(applied)
