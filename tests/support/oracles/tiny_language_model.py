"""A language model small enough for tests: random weights, a byte-level tokenizer, saved like a real one."""

from pathlib import Path


def tiny_language_model(*, max_positions=512, n_layers=2, seed=0):
    """A Llama with 4 heads over 2 KV heads of 16 dimensions (native code runs no 8), and its tokenizer."""
    import torch

    from prescore.integrations.torchvision import mend_torchvision

    mend_torchvision()
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = {
        "vocab_size": len(alphabet),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": n_layers,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=max_positions, bos_token_id=None, eos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval()
    # larger than initial weights, so that attention is not uniform and methods can differ
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tiny_language_model(directory, **options):
    """Save it so that `--model DIRECTORY` finds it."""
    for part in tiny_language_model(**options):
        part.save_pretrained(directory)
    return Path(directory)
