"""What the agent does when an allocation fails: it diagnoses the failure and reports the verdict."""
