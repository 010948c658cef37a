"""Define the types that flow from the readers to the pages: reading, snapshot, policy, agent report."""
