"""The tests, and the two programs that go with them: ``tests.bench`` and ``tests.recordings``."""
