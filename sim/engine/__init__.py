"""Discrete-event simulation of whole peers, message by message, on one event heap."""
