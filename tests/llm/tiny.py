"""A tiny Llama, and a tokenizer of a few words."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "<end> <unk> <user> <model> the a cat dog sat ran on mat red blue ?"
WORDS = TEXT.split()
CHAT = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
PROMPTS = ["the cat", "a red dog ran on the mat", "the dog sat", "a blue cat ?", "the mat"]


def tokenizer(words=WORDS, chat: bool = False) -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unk>")
    found.add_special_tokens({"additional_special_tokens": ["<user>", "<model>"]})
    if chat:
        found.chat_template = CHAT
    return found


def llama(seed: int = 0, *, vocabulary: int = len(WORDS), width: int = 16, context: int = 32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=context,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
        return LlamaForCausalLM(config).eval()
