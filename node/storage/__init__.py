"""Checkpoints in stores that fsspec opens by URL, as s3://bucket/run."""
