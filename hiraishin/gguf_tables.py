"""What the pinned llama.cpp knows: ggml's tensor types and the architectures, as data."""

from __future__ import annotations

# fmt: off
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}
"""ggml's type numbers: name, weights a block, bytes a block (``ggml.h``, ``ggml-common.h``)."""

LANGUAGE_ARCHITECTURES = frozenset("""
    llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe
    qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe plamo plamo2
    plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 starcoder2 mamba mamba2
    maple jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer openelm arctic
    deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet jais jais2 nemotron
    nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 granite granitemoe
    granitehybrid graniteswitch granite_swa chameleon plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee
    afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss lfm2 lfm2moe
    smallthinker seed_oss grovemoe apertus minimax-01 hrm_text minimax-m2 minimax-m3 cogvlm pangu-embedded mistral3
    mistral4 paddleocr mimo2 step35 spark2_5 maincoder kimi-linear kimi-k3 glm5-next talkie mellum nanbeige
""".split())
"""Architectures that the pinned llama.cpp (``llama-arch.cpp``) can decode token by token."""

OTHER_ARCHITECTURES: dict[str, str] = {
    **dict.fromkeys(
        ("bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
         "llama-embed t5encoder").split(),
        "an embedding model: it gives vectors, no next token",
    ),
    **dict.fromkeys("dream llada llada-moe rnd1".split(), "a diffusion model: it does not decode token by token"),
    **dict.fromkeys("eagle3 dflash gemma4-assistant".split(), "a draft head: it works only inside its target model"),
    **dict.fromkeys("wavtokenizer-dec qwen3tts pockettts".split(), "a speech model"),
    "t5": "an encoder-decoder model: it has no plain decoding",
    "clip": "the image part of a model",
}
"""Architectures that the pinned llama.cpp knows and that this project cannot use, with the reason."""
# fmt: on
