"""Real engines answer the queries of the dashboards, from hours of many healthy and faulty nodes."""
