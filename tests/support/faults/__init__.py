"""The fault suite: labelled hours of GPU memory, healthy and faulty, and what the alerts make of them."""
