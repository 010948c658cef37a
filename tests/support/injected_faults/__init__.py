"""What makes functions of a program fail."""
