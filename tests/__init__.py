"""The tests, what they share (``support``), and programs that are run by hand (``lab``)."""
