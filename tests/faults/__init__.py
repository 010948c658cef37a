"""The fault suite: labelled hours of GPU memory, healthy and faulty, and what the alerting rules make of them."""
