"""The worker: verifies routes, batches jobs per adapter, streams tokens, finishes each job exactly once."""
