"""The wire format: messages, frames and signed records."""
