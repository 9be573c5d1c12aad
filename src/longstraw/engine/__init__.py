"""Capture, score, sample, replay and sweep: one pullback over a chain of resident states."""
