"""Count from outside what a program hands to its GPUs: launches, copies and memsets."""
