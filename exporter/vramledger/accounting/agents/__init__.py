"""Join what agents report to holders and devices."""
