"""Graft inside vLLM, which verifies chains: `chains` and `texts` decide and need no vLLM; `plugin`, `eagle` and
`retrieval` bring them into it."""
