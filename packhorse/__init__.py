"""Packhorse: encoder models behind one OpenAI-compatible endpoint that uses every GPU of the machine."""
