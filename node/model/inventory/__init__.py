"""The inventory of a model: each tensor's treatment, shared memory, bits of any type, and mixes that are undone."""
