"""What tests stand on: the stand-in driver, simulated hosts, programs to play with, waiting."""
