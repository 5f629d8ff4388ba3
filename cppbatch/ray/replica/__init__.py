"""Replicas of an engine on a Ray cluster."""
