"""A policy made in code for tests: a random transformers model and a byte tokenizer with ChatML."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and Qwen2's three special tokens: pad is <|endoftext|>, a turn ends with <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(
    tokenizer, kind=Qwen2ForCausalLM, config=Qwen2Config, *, seed=0, sharpness=8.0, stop_ids=(), **options
):
    """A random model, its weight matrices `sharpness` times as large as freshly initialized ones."""
    torch.manual_seed(seed)
    if config is not None and "num_key_value_heads" not in options and config.model_type != "gpt2":
        options["num_key_value_heads"] = 2
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, **SIZES, **options}
    model = kind(config(**options, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(sharpness)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stop_ids]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()
