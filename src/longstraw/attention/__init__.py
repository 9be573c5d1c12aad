"""Attention of a piece over itself and the pages before it: in parts, in windows, sparse; plain references."""
