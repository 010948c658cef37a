"""What ``serve`` runs: the exporter, its source of snapshots, and the control socket."""
