"""What runs in the user's process."""
