"""What vectors are made of, and how they combine."""
