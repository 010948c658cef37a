"""What the host says about processes, a file of tests a module of hosts/."""
