"""The endpoints at which a model is asked, and what they share."""
