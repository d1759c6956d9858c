"""One process, one device: runs the encode batches."""
