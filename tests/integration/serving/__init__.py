"""The parts of ``serve``, over real sockets."""
