"""Continue a long prompt with the default and with selected keys, and print what each layer read.

python examples/03_generate.py [a folder of transformers, a GGUF file or a name on the hub]
"""

import inspect
import sys

import prescore
from prescore.integrations.offline import load_model

model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
# the default is exact up to 2048 tokens
inputs = tokenizer(inspect.getsource(inspect), return_tensors="pt", truncation=True, max_length=3000)
new = inputs["input_ids"].shape[1]

configs = {
    "exact": prescore.Exact(),
    "default": prescore.Routed(),
    # exact leaves of 512 tokens, 256 keys of every earlier block; steps read 256 keys, centroids and later tokens
    "selected": prescore.Selected(top_k=256, min_seq_len=512),
}
for name, config in configs.items():
    with prescore.apply(model, config) as applied:
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    print(applied)
    print(f"{name}: {tokenizer.decode(tokens[0, new:])!r}\n")
