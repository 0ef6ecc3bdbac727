"""The HTTP service: models behind a bounded queue that batches images of several requests."""
