"""Read raw facts, as the driver, the host and the schedulers give them; nothing here decides anything."""
