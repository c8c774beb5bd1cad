"""Architectures that the tests compare, token for token, with transformers' own `generate`."""

TESTED_ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "phi3",
    "gemma3_text",
    "gpt_neox",
    "olmo2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "gemma2",
    "llama4_text",
    "gemma4_text",
    "nemotron",
    "stablelm",
    "granitemoehybrid",
)
