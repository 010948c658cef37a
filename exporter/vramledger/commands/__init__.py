"""Hold one module for each command, which declares its arguments and runs it."""
