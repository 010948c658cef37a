"""What tests share: the stand-in driver, simulated hosts, programs, waiting."""
