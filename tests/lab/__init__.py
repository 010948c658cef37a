"""Programs that are run by hand: they measure, break, record and take pictures."""
