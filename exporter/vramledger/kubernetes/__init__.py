"""Kubernetes: what the kubelet gives, whose pods they are, and how a node is marked."""
