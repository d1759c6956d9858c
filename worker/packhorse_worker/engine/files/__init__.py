"""What the files of a model folder declare. Nothing here needs torch."""
