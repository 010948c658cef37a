"""Charge what is held, failed, limited and reserved to owners."""
