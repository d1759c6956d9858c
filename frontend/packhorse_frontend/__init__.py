"""The HTTP side: requests in, answers out; tokenizing; no model."""
