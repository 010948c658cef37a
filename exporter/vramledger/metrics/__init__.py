"""The metric contract: a module declares the families of one subject and gives their samples."""
