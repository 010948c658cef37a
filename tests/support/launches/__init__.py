"""A program that calls a stand-in for libcuda when it is ordered to."""
