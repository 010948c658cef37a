"""The tests, what they stand on (``support``), and programs that are run by hand (``tools``)."""
