"""Attention of a live piece over itself and the pages before it: plain reference, paged flash, sliding window."""
