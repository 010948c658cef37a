"""What ``serve`` runs, over real sockets."""
