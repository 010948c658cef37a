"""What the agent says when an allocation fails: the report, the verdict and the leak detector."""
