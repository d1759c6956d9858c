"""Who runs what, when: the queue, the batches, the limits, the retries."""
