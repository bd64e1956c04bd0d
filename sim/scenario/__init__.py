"""What is simulated, as a person writes it down."""
