"""Reports of simulations: figures, pictures and pages."""
