"""Checkpoints in stores that fsspec opens by URL, as s3://bucket/run.

A checkpoint for a URL is first written to a local file, as one for a path is. A thread then sends that file. So sending
takes no memory for the model, every attempt sends the same bytes, and a store that is slow, fails or hangs costs the
training loop nothing. fsspec is imported when the first URL is given.
"""
