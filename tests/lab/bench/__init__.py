"""The cost of the exporter beside a peer's, measured on a stand-in driver and real processes."""
