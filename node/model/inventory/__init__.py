"""What travels how: every tensor with its treatment, shared memory, bits of any type, and mixes that are undone."""
