"""Peers on one heap of events."""
