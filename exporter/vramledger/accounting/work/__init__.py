"""Find out whether a device works, for whom, and what shows that it does not."""
