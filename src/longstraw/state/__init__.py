"""What tokens leave behind: one file a kind of layer state, chains of pieces, and the resident state over all layers."""
