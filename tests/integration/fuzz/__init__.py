"""Any bytes from outside: short runs with the tests, long ones by ``make fuzz``."""
