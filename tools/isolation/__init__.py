"""The isolation that transactions had: histories, a checker of them, and what makes some."""
