"""What came of it: numbers, pictures, pages."""
