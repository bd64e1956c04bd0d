"""With whom: rules that name partners, and who sits out."""
