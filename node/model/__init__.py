"""The training program's tensors, its optimizer's state, and files of them."""
