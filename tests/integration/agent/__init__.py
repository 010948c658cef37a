"""The code that runs in the user's process."""
