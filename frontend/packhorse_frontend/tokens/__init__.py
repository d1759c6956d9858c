"""Texts and pairs of texts to token ids, in threads."""
