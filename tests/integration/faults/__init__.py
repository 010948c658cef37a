"""From planted faults and recordings to alerts and messages."""
