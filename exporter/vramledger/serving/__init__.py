"""Run what ``serve`` needs: the exporter, its source of snapshots, and the control socket."""
