"""Define the metric contract: each module declares the families of one subject and gives their samples."""
