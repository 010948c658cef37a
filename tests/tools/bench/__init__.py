"""The budget, measured: what the exporter costs beside a peer, on a stand-in driver and real processes."""
