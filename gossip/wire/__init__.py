"""What travels: messages, frames, and records that are signed."""
