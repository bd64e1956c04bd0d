"""A model whose tensors are sharded over the processes of one host: this process's parts, and the memory they share."""
