"""Train a small model through selected keys: gradients reach every key and value that was read."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import prescore

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, **sizes)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# text that repeats after 128 bytes: a model that attends that far back can learn to copy
bytes_ = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(1)).repeat(1, 2)

with prescore.apply(model, prescore.Selected("key-diff", top_k=32, min_seq_len=64)) as applied:
    for step in range(20):
        loss = model(bytes_, labels=bytes_, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1:3}  loss {loss.item():.3f}")
    print(applied)

model.eval()
with torch.no_grad():
    print(f"exact attention afterwards: loss {model(bytes_, labels=bytes_).loss.item():.3f}")
