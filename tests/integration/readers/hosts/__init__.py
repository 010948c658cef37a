"""The readers of processes: one file of tests for each module of hosts/."""
