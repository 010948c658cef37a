"""The commands: a module each, which declares its arguments and runs it."""
